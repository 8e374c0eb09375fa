"""The one set of degrees of a plan that spreads all its layers alike, as Megatron-LM and torchtitan want it."""

from typing import NamedTuple

from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import DataParallel, Recompute, SequenceParallel
from shardwright_search.interop.stages import Target, check_stages, elements, layer_ranges

__all__ = ["Degrees", "uniform_degrees"]


class Degrees(NamedTuple):
    """What is the same for all layers, embedding and head, and what the pipeline makes of it."""

    tp_size: int
    dp_size: int
    pp_size: int
    data_parallel: DataParallel
    sequence_parallel: SequenceParallel
    ranges: tuple[tuple[int, int], ...]
    """Layers of every pipeline stage and chunk, in order: `pp_size * chunks` of them."""
    micro_batch_size: int
    """Samples of a microbatch on a data-parallel rank."""

    @property
    def chunks(self) -> int:
        """Layer ranges of a pipeline stage."""
        return len(self.ranges) // self.pp_size

    @property
    def range_sizes(self) -> tuple[int, ...]:
        """Number of layers of each range."""
        return tuple(high - low for low, high in self.ranges)


def uniform_degrees(plan: Plan, target: Target) -> Degrees:
    """The degrees of a plan.

    Raises BadInput naming the first element that has others than the first layer, and for what neither Megatron-LM nor
    torchtitan has: strided tensor-parallel groups, Ulysses, layers of several types, recomputation of a layer's part,
    interleaved microbatches in unequal groups.
    """
    check_stages(plan, target)
    _check_layers(plan, target)
    pp_size, chunks = len(plan.stages), len(plan.stages[0].layers)
    if chunks > 1 and plan.num_microbatches % pp_size:
        what = f"{plan.num_microbatches} interleaved microbatches, which {pp_size} pipeline stages do not divide"
        raise target.refusal(what, "choose a multiple of the pipeline stages")
    every = list(elements(plan))
    first_where, first = every[1]
    for where, own in every:
        if not own.tp_consecutive:
            raise target.refusal(f"{where}: strided tensor-parallel groups", "make them consecutive")
        if own.sequence_parallel is SequenceParallel.ULYSSES:
            raise target.refusal(f"{where}: sequence_parallel ulysses", "choose none or megatron")
        for field in ("tp_size", "dp_size", "data_parallel", "sequence_parallel"):
            mine, its = getattr(own, field), getattr(first, field)
            if mine != its:
                what = f"{where}: {field} {mine}, where {first_where} has {its}"
                raise target.refusal(what, "spread embedding, layers and head alike")
    return Degrees(
        tp_size=first.tp_size,
        dp_size=first.dp_size,
        pp_size=pp_size,
        data_parallel=first.data_parallel,
        sequence_parallel=first.sequence_parallel,
        ranges=layer_ranges(plan),
        micro_batch_size=plan.microbatch_samples // first.dp_size,
    )


def _check_layers(plan: Plan, target: Target) -> None:
    for i, layer in enumerate(plan.layers):
        if layer.type != plan.layers[0].type:
            what = f"layers[{i}]: type {layer.type}, where layers[0] has {plan.layers[0].type}"
            raise target.refusal(what, "export plans of models with layers of one type")
        if layer.recompute not in (Recompute.NONE, Recompute.FULL):
            raise target.refusal(f"layers[{i}]: recompute {layer.recompute}", "recompute all of it or nothing")
