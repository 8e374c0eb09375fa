"""The parameters of every family's layers by their shapes, as the stock models of transformers name and order them.

What tensor parallelism shards is as Megatron-LM does it (Shoeybi et al. 2019): columns of what a part begins with, rows
of what it ends with, and the vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from shardwright_formats.types.model import EMBEDDING, HEAD, Parameter

Config = Mapping[str, Any]
Parameters = Iterator[Parameter]
Cut = Literal["columns", "rows", "whole"]

BLOCK = "block"
EACH_PART = ("full", "attention", "mlp")


class Family(NamedTuple):
    """What a family is beside its parameters; keys are those of its config.json."""

    layers: Callable[[str, Config], Parameters]
    """The parameters of a layer type, by its name."""
    counts: Mapping[str, str]
    """Each type of block, and the key that says how many there are."""
    defaults: Config
    """What a key that is absent means to transformers, for those that published files leave out."""
    divided: tuple[str, ...] = ("num_attention_heads", "intermediate_size")
    """What tensor parallelism must divide: first the heads, which Ulysses divides, too."""
    names: Mapping[str, str] = {}
    """The family's own words for keys, by the usual ones."""
    tied: tuple[tuple[str, str], ...] = ()
    """Parameters that are one where the configuration says tie_word_embeddings."""
    always_tied: bool = False
    """Whether they are one whatever it says, as in transformers' T5."""
    dropout: str | None = None
    """A rate above 0 leaves masks behind the sums of `replays`."""
    replays: tuple[Any, ...] = ()
    """Recomputations that repeat the sum at their end, because something behind it is kept."""
    states: tuple[str, ...] = ("hidden_states",)
    """What crosses from layer to layer, for each type of block in order."""
    positions_without_input: int = 0
    """Positions that the embedding multiplies nothing for: a class of an image has no patch."""
    labels: int | None = None
    """Labels of a sample; None: one of each position."""
    whole_pool: bool = False
    """Whether the head reads one position, which Ulysses gives to one rank alone."""


def linear(name: str, outputs: int, inputs: int, cut: Cut = "whole", bias: bool = False) -> Parameters:
    """A torch Linear: weight [outputs, inputs], bias [outputs]."""
    dim = {"columns": 0, "rows": 1, "whole": None}[cut]
    yield Parameter(name=f"{name}.weight", shape=(outputs, inputs), tp_dim=dim)
    if bias:
        yield Parameter(
            name=f"{name}.bias", shape=(outputs,), tp_dim=0 if cut == "columns" else None, inside=cut == "rows"
        )


def norm(name: str, features: int, bias: bool = True) -> Parameters:
    """A LayerNorm, or an RMSNorm, which has no bias."""
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Parameter(name=f"{name}.{kind}", shape=(features,))


def vocabulary(name: str, config: Config) -> Parameters:
    """A matrix of a row a token, sharded by tokens."""
    yield Parameter(name=name, shape=(config["vocab_size"], config["hidden_size"]), tp_dim=0)


def _llama(layer: str, config: Config) -> Parameters:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if layer == EMBEDDING:
        yield from vocabulary("model.embed_tokens.weight", config)
    elif layer == HEAD:
        yield from norm("model.norm", hidden, bias=False)
        yield from vocabulary("lm_head.weight", config)
    else:
        yield from _grouped_attention(config)
        for name in ("gate_proj", "up_proj"):
            yield from linear(f"mlp.{name}", inner, hidden, "columns", config["mlp_bias"])
        yield from linear("mlp.down_proj", hidden, inner, "rows", config["mlp_bias"])
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield from norm(name, hidden, bias=False)


def _grouped_attention(config: Config) -> Parameters:
    hidden, size, bias = config["hidden_size"], config["head_dim"], config["attention_bias"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for name, count in heads.items():
        yield from linear(f"self_attn.{name}_proj", count * size, hidden, "columns", bool(bias))
    yield from linear("self_attn.o_proj", hidden, heads["q"] * size, "rows", bias is True)
    if config["model_type"] == "qwen3":
        for name in ("q_norm", "k_norm"):
            yield Parameter(name=f"self_attn.{name}.weight", shape=(size,), inside=True)


def _gpt2(layer: str, config: Config) -> Parameters:
    hidden, inner = config["hidden_size"], config["n_inner"]
    if layer == EMBEDDING:
        yield from vocabulary("transformer.wte.weight", config)
        yield Parameter(name="transformer.wpe.weight", shape=(config["max_position_embeddings"], hidden))
    elif layer == HEAD:
        yield from norm("transformer.ln_f", hidden)
        yield from vocabulary("lm_head.weight", config)
    else:
        yield from norm("ln_1", hidden)
        yield Parameter(name="attn.c_attn.weight", shape=(hidden, 3, hidden), tp_dim=2)
        yield Parameter(name="attn.c_attn.bias", shape=(3, hidden), tp_dim=1)
        yield from _conv1d("attn.c_proj", hidden, hidden, "rows")
        yield from norm("ln_2", hidden)
        yield from _conv1d("mlp.c_fc", inner, hidden, "columns")
        yield from _conv1d("mlp.c_proj", hidden, inner, "rows")


def _conv1d(name: str, outputs: int, inputs: int, cut: Cut) -> Parameters:
    """GPT-2's linear layer, whose weight is [inputs, outputs]."""
    columns = cut == "columns"
    yield Parameter(name=f"{name}.weight", shape=(inputs, outputs), tp_dim=1 if columns else 0)
    yield Parameter(name=f"{name}.bias", shape=(outputs,), tp_dim=0 if columns else None, inside=not columns)


def _bert(layer: str, config: Config) -> Parameters:
    hidden, inner, top = config["hidden_size"], config["intermediate_size"], "cls.predictions"
    if layer == EMBEDDING:
        yield from vocabulary("bert.embeddings.word_embeddings.weight", config)
        for name, rows in (("position", "max_position_embeddings"), ("token_type", "type_vocab_size")):
            yield Parameter(name=f"bert.embeddings.{name}_embeddings.weight", shape=(config[rows], hidden))
        yield from norm("bert.embeddings.LayerNorm", hidden)
    elif layer == HEAD:
        yield from linear(f"{top}.transform.dense", hidden, hidden, bias=True)
        yield from norm(f"{top}.transform.LayerNorm", hidden)
        yield from vocabulary(f"{top}.decoder.weight", config)
        yield Parameter(name=f"{top}.bias", shape=(config["vocab_size"],), tp_dim=0)
    else:
        for name in ("query", "key", "value"):
            yield from linear(f"attention.self.{name}", hidden, hidden, "columns", bias=True)
        yield from linear("attention.output.dense", hidden, hidden, "rows", bias=True)
        yield from norm("attention.output.LayerNorm", hidden)
        yield from linear("intermediate.dense", inner, hidden, "columns", bias=True)
        yield from linear("output.dense", hidden, inner, "rows", bias=True)
        yield from norm("output.LayerNorm", hidden)


def _t5(layer: str, config: Config) -> Parameters:
    hidden = config["hidden_size"]
    if layer == EMBEDDING:
        yield from vocabulary("shared.weight", config)
    elif layer == HEAD:
        yield from norm("decoder.final_layer_norm", hidden, bias=False)
        yield from vocabulary("lm_head.weight", config)
    else:
        yield from _t5_attention("layer.0.SelfAttention", config)
        shape = (config["relative_attention_num_buckets"], config["num_attention_heads"])
        bias = "layer.0.SelfAttention.relative_attention_bias.weight"
        yield Parameter(name=bias, shape=shape, tp_dim=1, shared=True)
        yield from norm("layer.0.layer_norm", hidden, bias=False)
        if layer == "decoder":
            yield from _t5_attention("layer.1.EncDecAttention", config)
            yield from norm("layer.1.layer_norm", hidden, bias=False)
        last = "layer.2" if layer == "decoder" else "layer.1"
        gated = config["feed_forward_proj"].startswith("gated-")
        for name in ("wi_0", "wi_1") if gated else ("wi",):
            yield from linear(f"{last}.DenseReluDense.{name}", config["d_ff"], hidden, "columns")
        yield from linear(f"{last}.DenseReluDense.wo", hidden, config["d_ff"], "rows")
        yield from norm(f"{last}.layer_norm", hidden, bias=False)
        if layer == "encoder":
            yield Parameter(name="final_layer_norm.weight", shape=(hidden,), shared=True)


def _t5_attention(name: str, config: Config) -> Parameters:
    hidden, inner = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    for part in ("q", "k", "v"):
        yield from linear(f"{name}.{part}", inner, hidden, "columns")
    yield from linear(f"{name}.o", hidden, inner, "rows")


def _vit(layer: str, config: Config) -> Parameters:
    hidden, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    if layer == EMBEDDING:
        positions = (config["image_size"] // patch) ** 2 + 1
        yield Parameter(name="vit.embeddings.cls_token", shape=(1, 1, hidden))
        yield Parameter(name="vit.embeddings.position_embeddings", shape=(1, positions, hidden))
        projection = "vit.embeddings.patch_embeddings.projection"
        yield Parameter(name=f"{projection}.weight", shape=(hidden, config["num_channels"], patch, patch))
        yield Parameter(name=f"{projection}.bias", shape=(hidden,))
    elif layer == HEAD:
        yield from norm("vit.layernorm", hidden)
        yield from linear("classifier", config["num_labels"], hidden, "columns", bias=True)
    else:
        for name in ("q", "k", "v"):
            yield from linear(f"attention.{name}_proj", hidden, hidden, "columns", config["qkv_bias"])
        yield from linear("attention.o_proj", hidden, hidden, "rows", bias=True)
        for name in ("layernorm_before", "layernorm_after"):
            yield from norm(name, hidden)
        yield from linear("mlp.fc1", inner, hidden, "columns", bias=True)
        yield from linear("mlp.fc2", hidden, inner, "rows", bias=True)


_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
_T5_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
_LLAMA = Family(
    _llama,
    {BLOCK: "num_hidden_layers"},
    {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
    ("num_attention_heads", "num_key_value_heads", "intermediate_size"),
    tied=(("model.embed_tokens.weight", "lm_head.weight"),),
)


def _like_llama(**defaults: object) -> Family:
    return _LLAMA._replace(defaults={**_LLAMA.defaults, **defaults})


FAMILIES = {
    "bert": Family(
        _bert,
        {BLOCK: "num_hidden_layers"},
        {"type_vocab_size": 2, "tie_word_embeddings": True},
        tied=(("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),),
        replays=EACH_PART,
    ),
    "gpt2": Family(
        _gpt2,
        {BLOCK: "num_hidden_layers"},
        {"tie_word_embeddings": True, "resid_pdrop": 0.1},
        ("n_head", "n_inner"),
        _GPT2_NAMES,
        tied=(("transformer.wte.weight", "lm_head.weight"),),
        dropout="resid_pdrop",
        replays=EACH_PART,
    ),
    "llama": _LLAMA,
    "mistral": _like_llama(sliding_window=4096, num_key_value_heads=8),
    # Biases of queries, keys and values alone, whatever the configuration says.
    "qwen2": _like_llama(attention_bias="inputs", num_key_value_heads=32),
    "qwen3": _like_llama(head_dim=128, num_key_value_heads=32),
    "t5": Family(
        _t5,
        {"encoder": "num_hidden_layers", "decoder": "num_decoder_layers"},
        {"head_dim": 64, "relative_attention_num_buckets": 32, "feed_forward_proj": "relu", "dropout_rate": 0.1},
        ("num_heads", "d_ff"),
        _T5_NAMES,
        tied=(("shared.weight", "lm_head.weight"),),
        always_tied=True,
        dropout="dropout_rate",
        replays=("full",),
        states=("encoder_states", "decoder_states"),
    ),
    "vit": Family(
        _vit,
        {BLOCK: "num_hidden_layers"},
        {"num_channels": 3, "num_labels": 2, "qkv_bias": True, "hidden_dropout_prob": 0.0},
        dropout="hidden_dropout_prob",
        replays=("full",),
        positions_without_input=1,
        labels=1,
        whole_pool=True,
    ),
}
"""By the `model_type` of a config.json."""
