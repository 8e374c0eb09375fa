"""Published models by name: the shapes that their authors chose, and where they say so."""

import tomllib
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from shardwright_formats.io import Value
from shardwright_formats.types import Tokens


class Preset(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a published config.json that decide shapes."""

    source: Annotated[str, Meta(min_length=1)]
    """The paper, and whose config.json has these numbers."""
    sequence_length: Tokens
    """Tokens of a sample, as it was trained."""
    config: dict[str, Any]
    """Named as in its config.json."""
    nulls: tuple[str, ...] = ()
    """Further keys, whose value is null, which TOML cannot say."""


def read_presets() -> dict[str, Preset]:
    """Every preset by its name."""
    text = (files("shardwright_models") / "presets.toml").read_text(encoding="utf-8")
    presets = msgspec.convert(tomllib.loads(text), dict[str, Preset])
    return {name: replace(each, config=each.config | dict.fromkeys(each.nulls)) for name, each in presets.items()}
