"""Command R (Cohere 2024): attention and feed-forward beside each other, behind one norm."""

from msgspec.structs import replace

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import Config, Norm
from shardwright_models.families.llama import LLAMA
from shardwright_models.parameters import Parameters, norm


def _parameters(layer: str, config: Config) -> Parameters:
    parameters = tuple(LLAMA.parameters(layer, {**config, "mlp_bias": False}))
    if layer in (EMBEDDING, HEAD):
        yield from parameters
        return
    yield from (p for p in parameters if p.name.startswith("self_attn"))
    heads = {"q_norm": config["num_attention_heads"], "k_norm": config["num_key_value_heads"]}
    for name, count in heads.items() if config.get("use_qk_norm") else ():
        yield Parameter(name=f"self_attn.{name}.weight", shape=(count, config["head_dim"]), tp_dim=0)
    yield from (p for p in parameters if p.name.startswith("mlp"))
    yield from norm("input_layernorm", config["hidden_size"], bias=False)


COHERE = replace(
    LLAMA,
    model_type="cohere",
    stock="CohereForCausalLM",
    runtime="cohere:Cohere",
    parameters=_parameters,
    defaults={
        **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "layer_norm_eps": 1e-5},
        **{"logit_scale": 0.0625, "tie_word_embeddings": True, "max_position_embeddings": 8192, "use_qk_norm": False},
    },
    norm=Norm("LayerNorm", "layer_norm_eps", in_float32=True),
    parallel_parts=True,
    megatron=None,
    torchtitan=None,
    ignored=("model_max_length",),
)
