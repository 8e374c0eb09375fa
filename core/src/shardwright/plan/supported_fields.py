"""The refusal of plan fields that a command does not support, so that no command ignores a new field silently."""

from collections.abc import Collection, Iterator

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from shardwright.io import BadInput
from shardwright.types import Plan

# Listed here, not derived from the types: a field that is added there is refused until each command supports it.
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
"""Fields of plans that every command supports, or refuses with its own message."""
_SEPARATE = ("model", "cluster")
"""Parts of a plan that are documents themselves."""


def check_fields(plan: Plan, file: object, command: str, others: Collection[str] = ()) -> None:
    """Raise BadInput for the first field of a plan that is set but not supported by a command.

    `others`: fields that only some commands support, including this one, such as `layers.offload`.
    """
    for where, field in _set_fields(plan):
        if field not in _SUPPORTED and field not in others:
            raise BadInput(file, f"{where}: {command} does not support it", "remove it from the plan")


def _set_fields(value: Struct, where: str = "", name: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field that is not at its default, as `layers[3].recompute` and as `layers.recompute`.

    Equal structs in one list, such as equal layers, are examined only once.
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
