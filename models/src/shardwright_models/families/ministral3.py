"""Ministral 3 (Mistral AI 2025), its language model: Mistral's blocks, whose queries grow with their positions."""

from collections.abc import Mapping

from msgspec.structs import replace

from shardwright_formats.types import Attention
from shardwright_models.facts import Config
from shardwright_models.families.llama import MISTRAL

_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"


def _wrong(config: Config) -> str | None:
    """Return which number is missing that queries are scaled by; transformers' default rope_parameters have both."""
    rotary = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rotary, Mapping):
        return None
    for key in (_BETA, _ORIGINAL):
        value = rotary.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value < (key == _ORIGINAL):
            return f"rope_parameters: {key} {value!r} is no number that queries can be scaled by"
    return None


MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    stock="Ministral3ForCausalLM",
    runtime="ministral3:Ministral3",
    defaults={
        **MISTRAL.defaults,
        **{"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34},
        **{"num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
        "sliding_window": None,
    },
    rotary_keys=(_BETA, "max_position_embeddings"),
    wrong=_wrong,
    # It would take positions that begin again in a sample, which blocks hand on to it, for those of other samples.
    without=(Attention.FLASH_ATTENTION_2,),
    megatron=None,
)
"""Ministral 3 (Mistral AI 2025), its language model."""
