"""GLM 4 (GLM team 2024): norms before and behind each part, rotary positions for a share of the features."""

from msgspec.structs import replace

from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_models.facts import Config
from shardwright_models.families.llama import LLAMA
from shardwright_models.parameters import Parameters, linear, norm


def _parameters(layer: str, config: Config) -> Parameters:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if layer in (EMBEDDING, HEAD):
        yield from LLAMA.parameters(layer, config)
        return
    # Queries, keys and values alone have biases.
    attention = (p for p in LLAMA.parameters(layer, {**config, "mlp_bias": False}) if p.name.startswith("self_attn."))
    yield from (p for p in attention if p.name != "self_attn.o_proj.bias")
    # Files hold both in one matrix, gate_up_proj.
    for name in ("gate_proj", "up_proj"):
        yield from linear(f"mlp.gate_up_proj.{name}", inner, hidden, "columns")
    yield from linear("mlp.down_proj", hidden, inner, "rows")
    for name in ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"):
        yield from norm(name, hidden, bias=False)


GLM4 = replace(
    LLAMA,
    model_type="glm4",
    stock="Glm4ForCausalLM",
    runtime="glm4:Glm4",
    parameters=_parameters,
    defaults={
        **{"attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu"},
        **{"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "tie_word_embeddings": False},
    },
    norms=2,
    joins_features=True,
    ends_in_norm=("full",),
    megatron=None,
    torchtitan=None,
)
