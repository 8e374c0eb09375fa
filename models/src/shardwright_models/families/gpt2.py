"""GPT-2 (Radford et al. 2019)."""

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import Config, Dropouts, Family, FeedForward, Mask, Norm, Only, Stack
from shardwright_models.parameters import Parameters, conv1d, norm, vocabulary


def _parameters(layer: str, config: Config) -> Parameters:
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
        yield from conv1d("attn.c_proj", hidden, hidden, "rows")
        yield from norm("ln_2", hidden)
        yield from conv1d("mlp.c_fc", inner, hidden, "columns")
        yield from conv1d("mlp.c_proj", hidden, inner, "rows")


GPT2 = Family(
    model_type="gpt2",
    stock="GPT2LMHeadModel",
    runtime="gpt2:GPT2",
    parameters=_parameters,
    stacks=(Stack("n_layer"),),
    aliases={
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    },
    defaults={
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    implied=lambda config: {"n_inner": config.get("n_inner") or 4 * config["hidden_size"]},
    lengths=("vocab_size", "max_position_embeddings"),
    divided=("n_head", "n_inner"),
    tied=(("transformer.wte.weight", "lm_head.weight"),),
    mask=Mask.CAUSAL,
    norm=Norm("LayerNorm", "layer_norm_epsilon"),
    positions="learned_absolute",
    feed_forward=lambda config: FeedForward(config["activation_function"], gated=False),
    dropouts=Dropouts(
        attention="attn_pdrop", hidden="resid_pdrop", embedding="embd_pdrop", ends=("full", "attention", "mlp")
    ),
    ends_in_norm=(),
    megatron="alone",
    ignored=("n_ctx",),
    only={
        "add_cross_attention": Only(False, "there is one stack"),
        "reorder_and_upcast_attn": Only(False, "the kernels have an order of operations of their own"),
    },
)
