"""Phi 3, 3.5 and 4 (Abdin et al. 2024): Llama's blocks, whose files hold several matrices as one, and dropouts."""

from msgspec.structs import replace

from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_models.facts import Config, Dropouts, Only
from shardwright_models.families.llama import LLAMA
from shardwright_models.parameters import Parameters, linear, norm


def _parameters(layer: str, config: Config) -> Parameters:
    if layer in (EMBEDDING, HEAD):
        yield from LLAMA.parameters(layer, config)
        return
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    yield from linear("self_attn.o_proj", hidden, heads["q"] * size, "rows")
    for name, count in heads.items():
        yield from linear(f"self_attn.qkv_proj.{name}_proj", count * size, hidden, "columns")
    for name in ("gate_proj", "up_proj"):
        yield from linear(f"mlp.gate_up_proj.{name}", inner, hidden, "columns")
    yield from linear("mlp.down_proj", hidden, inner, "rows")
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from norm(name, hidden, bias=False)


PHI3 = replace(
    LLAMA,
    model_type="phi3",
    stock="Phi3ForCausalLM",
    runtime="phi3:Phi3",
    parameters=_parameters,
    defaults={
        **{"attention_dropout": 0.0, "hidden_act": "silu", "resid_pdrop": 0.0, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 4096, "sliding_window": None, "tie_word_embeddings": False},
    },
    dropouts=Dropouts(attention="attention_dropout", hidden="resid_pdrop", ends=("full",)),
    joins_features=True,
    keeps_unrotated=True,
    window=lambda _layer, config: config["sliding_window"],
    megatron=None,
    torchtitan=None,
    # Keys of Phi 4's files, which the class does not read.
    ignored=("attention_bias", "full_attn_mod", "interpolate_factor", "lm_head_bias", "mlp_bias"),
    only={
        **dict.fromkeys(("attention_bias", "lm_head_bias", "mlp_bias"), Only(False, "matrices have no biases")),
        **dict.fromkeys(("full_attn_mod", "interpolate_factor"), Only(1, "transformers has no others")),
    },
)
