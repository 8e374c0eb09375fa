"""OLMo 2 (OLMo team 2024): norms behind attention and feed-forward, and of queries and keys across all heads."""

from msgspec.structs import replace

from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_models.facts import BLOCK, Config, Norm
from shardwright_models.families.llama import LLAMA
from shardwright_models.parameters import Parameters, norm


def _parameters(layer: str, config: Config) -> Parameters:
    parameters = tuple(LLAMA.parameters(layer, config))
    if layer in (EMBEDDING, HEAD):
        yield from parameters
        return
    yield from (p for p in parameters if p.name.startswith("self_attn"))
    for name, heads in (("q_norm", "num_attention_heads"), ("k_norm", "num_key_value_heads")):
        yield from norm(f"self_attn.{name}", config[heads] * config["head_dim"], bias=False)
    yield from (p for p in parameters if p.name.startswith("mlp"))
    for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
        yield from norm(name, config["hidden_size"], bias=False)


OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    stock="Olmo2ForCausalLM",
    runtime="olmo2:Olmo2",
    parameters=_parameters,
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    norm=Norm("RMSNorm", "rms_norm_eps", in_float32=True),
    ends_in_norm=("full",),
    undivided={BLOCK: "norms_across_heads"},
    megatron=None,
    torchtitan=None,
)
