"""Everything with a name: families by the `model_type` of their config.json, and published models."""

import tomllib
from importlib import import_module
from importlib.resources import files
from pkgutil import iter_modules
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from shardwright.io import BadInput, Value
from shardwright.models import families
from shardwright.models.facts import Family
from shardwright.models.traits import Config, OtherName
from shardwright.types import Model, Tokens, base_type

Found = TypeVar("Found")


def _public(kind: type[Found]) -> list[Found]:
    """Return the public values of a type in the modules of `families`, which are found by import."""
    modules = (import_module(f"{families.__name__}.{module.name}") for module in iter_modules(families.__path__))
    public = (value for module in modules for name, value in vars(module).items() if not name.startswith("_"))
    return [value for value in public if isinstance(value, kind)]


def read_families() -> dict[str, Family]:
    """Return each family by its model_type."""
    return dict(sorted({each.model_type: each for each in _public(Family)}.items()))


FAMILIES = read_families()
OTHER_NAMES = {each.model_type: each for each in _public(OtherName)}
"""The types that are read as a family, by their model_type."""
USUAL = ("deepseek_v3", "mixtral", "llama", "gpt2")
"""Families that most other types resemble, the most special one first."""
_UNFIT = {
    "qwen2_5_vl": "mrope_section and window_size follow the size of each image, which its configuration does not hold",
}
"""Reasons why models of a type cannot be trained, for types that users are likely to try."""
TRACED_TOWERS = {"gemma3n": "its tower is a network of the package timm, and its blocks take more than hidden states"}
"""The types with a vision tower that a trace describes, and why models of each can be planned but not trained."""


def refusal(model_type: object, usual: str) -> str:
    """Return why a model_type has no family: `usual`, unless there is a specific reason."""
    reason = _UNFIT.get(model_type) if isinstance(model_type, str) else None
    return usual if reason is None else f"model_type {model_type!r} cannot be trained: {reason}"


def check_trained(name: str, file: object) -> None:
    """Raise BadInput for a family whose models are only described and planned."""
    untrained = FAMILIES[name].untrained if name in FAMILIES else TRACED_TOWERS.get(name)
    if untrained is not None:
        remedy = "plan it, or train its language model by itself"
        raise BadInput(file, f"models of the family {name} are planned, not trained: {untrained}", remedy)


def facts_of(model: Model) -> Family:
    """Return the facts of a described model's family.

    Raises BadInput for an unknown family, as in descriptions made from imported profiles.
    """
    if model.family not in FAMILIES:
        problem = f"unknown model family {model.family!r}"
        raise BadInput(f"model {model.name}", problem, f"use a model of {', '.join(FAMILIES)}")
    return FAMILIES[model.family]


def facts_of_type(model: Model, type_name: str) -> tuple[Family, Config]:
    """Return the facts of a layer type of a described model, and its configuration.

    Raises BadInput as `facts_of` does.
    """
    family, layer = facts_of(model), base_type(type_name)
    config = family.configured(model.config)
    return family.of_type(layer, config), family.of_layer(layer, config)


class Preset(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a published config.json that determine shapes."""

    source: Annotated[str, Meta(min_length=1)]
    """The paper, and the owner of the config.json with these numbers."""
    sequence_length: Tokens
    """Tokens of a sample in the training of the published model."""
    config: dict[str, Any]
    """Keys and values, as in the config.json."""
    nulls: tuple[str, ...] = ()
    """Keys whose value is null, which TOML cannot express."""


def read_presets() -> dict[str, Preset]:
    """Return every preset by its name."""
    text = (files("shardwright.models") / "presets.toml").read_text(encoding="utf-8")
    presets = msgspec.convert(tomllib.loads(text), dict[str, Preset])
    return {name: replace(each, config=each.config | dict.fromkeys(each.nulls)) for name, each in presets.items()}
