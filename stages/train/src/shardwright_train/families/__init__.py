"""The model families the runtime can train, by their Hugging Face `model_type`."""

from shardwright_formats.errors import BadInput
from shardwright_train.families.base import Family
from shardwright_train.families.llama import Llama

__all__ = ["Family", "family_named"]

_FAMILIES: dict[str, Family] = {"llama": Llama()}


def family_named(name: str, file: object) -> Family:
    """The family of a name that stands in `file`; BadInput when there is none."""
    if name not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise BadInput(file, f"model family {name!r} cannot be trained", f"use one of: {known}")
    return _FAMILIES[name]
