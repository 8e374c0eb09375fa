"""Tiny models of which parts are frozen, and random plans for them."""

from msgspec.structs import replace
from random_plans import random_plan
from tiny_models import tiny

from shardwright_formats.types import Model, Plan
from shardwright_models.frozen import FrozenPart, freeze

FROZEN = {
    "all but the last two": ("llama", ("embedding", "layers[:2]")),
    "all but the head": ("gpt2", ("embedding.*wpe*", "layers", "head.transformer.*")),
    "the head alone": ("llama", ("embedding", "layers")),
    "feed-forward": ("bert", ("layers.*output.dense.*", "layers.intermediate.*")),
    "the encoder": ("t5", ("embedding", "layers[0:2]", "head.lm_head.weight")),
    "matrices between": ("qwen3", ("layers[1:3].*proj*",)),
    "a stretch": ("vit", ("layers[1:3]",)),
    "norms": ("olmo2", ("layers.*norm*",)),
}
"""What is frozen, by the family and the options that say so."""


def frozen_model(name: str) -> Model:
    """The tiny model with what a name says frozen."""
    family, parts = FROZEN[name]
    return freeze(tiny(family), tuple(map(FrozenPart.parse, parts)))


def frozen_plan(name: str, number: int, world_size: int, **fixed: object) -> Plan:
    """A random plan for such a model."""
    plan = random_plan(frozen_model(name), number, world_size, **fixed)  # type: ignore[arg-type]
    return replace(plan, name=f"{name} frozen, {plan.name}")
