"""Ministral (Mistral AI 2024): Mistral's blocks, some of which have a window."""

from msgspec.structs import replace

from shardwright_models.facts import FULL, SLIDING, Config, Stack
from shardwright_models.families.llama import MISTRAL


def _type_at(config: Config, _index: int) -> str:
    return FULL if config["sliding_window"] is None else SLIDING


MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    stock="MinistralForCausalLM",
    runtime="ministral:Ministral",
    stacks=(Stack(types=(SLIDING, FULL), type_at=_type_at, typed_by="layer_types", alike_within_window=True),),
    window=lambda layer, config: config["sliding_window"] if layer == SLIDING else None,
    megatron=None,
)
