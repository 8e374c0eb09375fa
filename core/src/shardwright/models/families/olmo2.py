"""OLMo 2 (OLMo team 2024): norms after attention and feed-forward, and of queries and keys across all heads."""

from msgspec.structs import replace

from shardwright.models.families.llama import LLAMA, grouped_attention, with_blocks
from shardwright.models.parameters import Parameters, gated, norm
from shardwright.models.traits import BLOCK, Config, Norm, Systems


def _block(_layer: str, config: Config) -> Parameters:
    hidden = config["hidden_size"]
    yield from grouped_attention(config)
    for name, heads in (("q_norm", "num_attention_heads"), ("k_norm", "num_key_value_heads")):
        yield from norm(f"self_attn.{name}", config[heads] * config["head_dim"], bias=False)
    yield from gated("mlp", hidden, config["intermediate_size"], config["mlp_bias"])
    for name in ("post_attention_layernorm", "post_feedforward_layernorm"):
        yield from norm(name, hidden, bias=False)


OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    stock=LLAMA.stock._replace(name="Olmo2ForCausalLM"),
    runtime="olmo2:Olmo2",
    keys=LLAMA.keys._replace(defaults={**LLAMA.keys.defaults, "rms_norm_eps": 1e-5}),
    parameters=with_blocks(_block),
    norm=Norm("RMSNorm", "rms_norm_eps", ends=("full",), in_float32=True),
    divided=LLAMA.divided._replace(tensor={BLOCK: "norms_across_heads"}),
    systems=Systems(),
)
