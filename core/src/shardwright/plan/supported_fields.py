"""The refusal of plan fields that a command does not support: a new field is dropped nowhere in silence."""

from collections.abc import Collection, Iterator

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from shardwright.io import BadInput
from shardwright.types import Plan

# Written out, not read from the types: a field that is added there is refused until each command supports it.
_SUPPORTED = {
    *("name", "model", "cluster", "global_batch_size", "num_microbatches", "schedule", "gradient_reduction"),
    *("precision", "attention", "fused", "compile", "stages", "embedding", "head", "layers"),
    *("stages.ranks", "stages.layers"),
    *("precision.parameters", "precision.compute", "precision.reduce", "precision.tf32"),
}
_OF_STRATEGY = {
    *("tp_size", "tp_consecutive", "cp_size", "dp_size", "data_parallel", "shard_size", "sequence_parallel"),
    *("type", "recompute", "context", "experts"),
    *("experts.ep_size", "experts.etp_size", "experts.data_parallel", "experts.shard_size"),
}
_SUPPORTED |= {f"{holder}.{name}" for holder in ("embedding", "head", "layers") for name in _OF_STRATEGY}
"""Fields of plans that every command supports or refuses in words of its own."""
_SEPARATE = ("model", "cluster")
"""Parts of a plan that are documents of their own."""


def check_fields(plan: Plan, file: object, command: str, others: Collection[str] = ()) -> None:
    """Raise BadInput for the first field of a plan that is set and that a command does not support.

    `others` are fields that only some commands support, this one among them: `layers.offload`.
    """
    for where, field in _set_fields(plan):
        if field not in _SUPPORTED and field not in others:
            raise BadInput(file, f"{where}: {command} does not support it", "remove it from the plan")


def _set_fields(value: Struct, where: str = "", name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field that is not at its default: its place, such as `layers[3].recompute`, and `layers.recompute`.

    Structs that occur in a plan many times, as equal layers do, are looked at once.
    """
    for field in fields(value):
        content = getattr(value, field.name)
        default = field.default_factory() if field.default_factory is not NODEFAULT else field.default
        if default is not NODEFAULT and content == default:
            continue
        here, path = f"{where}{field.name}", f"{name}{field.name}"
        yield here, path
        if path in _SEPARATE:
            continue
        if isinstance(content, Struct):
            yield from _set_fields(content, f"{here}.", f"{path}.")
        elif isinstance(content, tuple):
            places = {each: i for i, each in reversed([*enumerate(content)]) if isinstance(each, Struct)}
            for each, i in reversed(places.items()):
                yield from _set_fields(each, f"{here}[{i}].", f"{path}.")
