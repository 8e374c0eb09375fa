"""The model that torchtitan has of a family, and which of its registered sizes are a model's."""

from shardwright_formats.types import Model
from shardwright_models.registry import FAMILIES
from shardwright_models.torchtitan import Torchtitan


def registered(model: Model) -> Torchtitan | None:
    """Return what torchtitan has of a model's family; None: it has no such blocks."""
    return FAMILIES[model.family].torchtitan if model.family in FAMILIES else None


def flavor_of(model: Model) -> str | None:
    """Return the name of the registered sizes that are a model's; None: it has no such model."""
    if (blocks := registered(model)) is None:
        return None
    family = FAMILIES[model.family]
    config = family.configured(model.config)
    keys = None if "num_key_value_heads" not in family.divided else config.get("num_key_value_heads")
    experts = None if family.experts is None else config.get(family.experts.number)
    width, heads, inner = map(config.get, ("hidden_size", "num_attention_heads", "intermediate_size"))
    return blocks.flavors.get((width, len(model.layers), heads, keys, inner, config.get("vocab_size"), experts))


def layer_types(model: Model) -> tuple[str, ...]:
    """Return the types of layer that a model may have beside one another: those of a family that torchtitan has."""
    return () if registered(model) is None else tuple(n for stack in FAMILIES[model.family].stacks for n in stack.types)
