"""The model families that the runtime can train; of this package and of transformers, what is asked for is imported."""

from functools import cache
from pkgutil import resolve_name

from shardwright_formats.io import BadInput
from shardwright_models.registry import FAMILIES, refusal
from shardwright_train.models.base import Family


def family_named(name: str, file: object) -> Family:
    """Return the family of a name that stands in `file`; raise BadInput when there is none."""
    if name not in FAMILIES:
        problem = refusal(name, f"model family {name!r} cannot be trained")
        raise BadInput(file, problem, f"use one of: {', '.join(sorted(FAMILIES))}")
    return _family(name)


@cache
def _family(name: str) -> Family:
    facts = FAMILIES[name]
    runtime: type[Family] = resolve_name(f"{__package__}.{facts.runtime}")
    module = facts.modeling or name.replace("-", "_")
    return runtime(facts, resolve_name(f"transformers.models.{module}.modeling_{module}:{facts.stock}"))
