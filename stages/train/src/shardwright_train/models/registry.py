"""The model families the runtime can train: every file beside this one that lists its FAMILIES by `model_type`."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from shardwright_formats.io.errors import BadInput
from shardwright_train import models
from shardwright_train.models.base import Family

__all__ = ["Family", "family_named"]


def family_named(name: str, file: object) -> Family:
    """The family of a name that stands in `file`; BadInput when there is none."""
    known: dict[str, Family] = {}
    for families in _files():
        if name in families:
            return families[name]
        known |= families
    raise BadInput(file, f"model family {name!r} cannot be trained", f"use one of: {', '.join(sorted(known))}")


def _files() -> Iterator[dict[str, Family]]:
    for module in iter_modules(models.__path__):
        if module.name != "registry":
            yield getattr(import_module(f"{models.__name__}.{module.name}"), "FAMILIES", {})
