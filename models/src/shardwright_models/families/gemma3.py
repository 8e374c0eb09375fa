"""Gemma 3 (Gemma team 2025), its language model: Gemma 2 with normed heads, no bounds, and two bases of angles."""

from msgspec.structs import replace

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import FULL, SLIDING, Config, Only, Stack
from shardwright_models.families.gemma2 import GEMMA2
from shardwright_models.parameters import Parameters

_PATTERN = "sliding_window_pattern"


def _parameters(layer: str, config: Config) -> Parameters:
    for parameter in GEMMA2.parameters(layer, config):
        yield parameter
        if layer not in (EMBEDDING, HEAD) and parameter.name == _LAST_OF_ATTENTION[config["attention_bias"]]:
            for name in ("q_norm", "k_norm"):
                yield Parameter(name=f"self_attn.{name}.weight", shape=(config["head_dim"],), inside=True)


_LAST_OF_ATTENTION = {False: "self_attn.o_proj.weight", True: "self_attn.o_proj.bias"}


def _type_at(config: Config, index: int) -> str:
    return SLIDING if (index + 1) % config[_PATTERN] else FULL


_BOUNDS = ("attn_logit_softcapping", "final_logit_softcapping")
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    modeling="gemma3",
    stock="Gemma3ForCausalLM",
    runtime="gemma3:Gemma3",
    parameters=_parameters,
    # Angles differ, too: blocks are never alike.
    stacks=(Stack(types=(SLIDING, FULL), type_at=_type_at, typed_by="layer_types"),),
    defaults={
        **{key: value for key, value in GEMMA2.defaults.items() if key not in _BOUNDS},
        **{"vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072, _PATTERN: 6},
    },
    lengths=(*GEMMA2.lengths, _PATTERN),
    soft_caps=False,
    above_zero=(),
    ignored=(*GEMMA2.ignored, _PATTERN, "rope_local_base_freq"),
    only={**GEMMA2.only, **dict.fromkeys(_BOUNDS, Only(None, "no model of the family bounds scores or logits"))},
)
