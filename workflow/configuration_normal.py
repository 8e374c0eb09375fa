"""The canonical form of a configuration: equal meaning gives equal files and commands, so that nothing reruns.

Keys at their defaults are left out, keys stand in the order of their type, and lists without an order are sorted.
"""

from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from configuration_types import Configuration

UNORDERED = frozenset(
    "blend chunks_per_stage context cp_sizes data_parallel disable ep_sizes etp_sizes expert_data_parallel frozen "
    "global_batch_size log_to memory_gib micro_batch_sizes num_microbatches offload optimizer pp_sizes recompute "
    "schedules sequence_lengths sequence_parallel shard_sizes stage_widths tp_consecutive tp_sizes".split()
)
"""Keys of lists and mappings whose order does not matter; the order of others does, such as pictures on a page."""
_EXACT = 2**53
"""Bound below which a whole number is the same as an integer and as a float."""


def normal(config: Mapping[str, Any], settings: Configuration) -> dict[str, Any]:
    """A configuration in a canonical spelling, except a model's overrides of its preset, which stay as written."""
    overrides = {
        name: {key: value for key, value in config["models"][name].items() if key not in model.__struct_fields__}
        for name, model in settings.models.items()
    }
    models = {name: said(model) | overrides[name] for name, model in settings.models.items()}
    return said(settings) | {"models": models}


def said(value: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a value that differ from their defaults, in canonical form."""
    defaults = _defaults(type(value))
    spelled = {name: _spelled(name, getattr(value, name)) for name in defaults}
    return {name: inside for name, inside in spelled.items() if inside != defaults[name]}


# msgspec looks at a type's annotations anew at each call, which took half of the start of Snakemake.
@cache
def _defaults(kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the defaults of a type's fields, in canonical form."""
    return {each.name: _spelled(each.name, _default(each)) for each in msgspec.structs.fields(kind)}


def _default(field: msgspec.structs.FieldInfo) -> Any:  # noqa: ANN401 (of whatever type the field is)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _spelled(key: str, value: Any) -> Any:  # noqa: ANN401 (whatever a configuration may hold)
    if isinstance(value, msgspec.Struct):
        return said(value)
    if isinstance(value, Mapping):
        keys = sorted(value) if key in UNORDERED else value
        return {name: _spelled(name, value[name]) for name in keys}
    if isinstance(value, tuple | list):
        return [_spelled("", each) for each in (sorted(value, key=_rank) if key in UNORDERED else value)]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value


def _rank(value: Any) -> tuple[bool, Any]:  # noqa: ANN401 (a number, a text, a list of numbers, or none)
    """Return a sort key: numbers by size, texts alphabetically, enumeration members in order, null last."""
    return value is None, list(type(value)).index(value) if isinstance(value, Enum) else value
