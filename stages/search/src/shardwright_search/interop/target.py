"""What other systems take for granted of a plan, and how a plan is refused that one of them cannot express."""

from collections.abc import Iterator
from typing import NamedTuple

from shardwright_formats.io import BadInput
from shardwright_formats.semantics.canonical import effective
from shardwright_formats.semantics.schedules.registry import schedule_of
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.plan import Attention, Plan
from shardwright_formats.types.strategy import DataParallel, Recompute, SequenceParallel, Strategy


class Exported(NamedTuple):
    """What another system is told of a plan."""

    text: str
    """The file."""
    notes: tuple[str, ...]
    """What the file cannot hold and the user has to see to, a line each."""
    environment: tuple[str, ...] = ()
    """What the system's processes need of their environment, lines of a shell."""


class Target(NamedTuple):
    """Whom a plan is exported for, and the file it comes from: what a refusal names."""

    name: str
    plan_file: object

    def demand(self, holds: bool, what: str, remedy: str) -> None:
        """Raise BadInput unless something holds; `what` says what the system cannot express."""
        if not holds:
            raise BadInput(self.plan_file, f"{self.name} cannot express {what}", remedy)

    def demand_precision(self, plan: Plan, holds: bool, remedy: str, where: str = "") -> None:
        """The same of a plan's precision."""
        self.demand(holds, f"precision {plan.precision.text}{where}", remedy)


class Degrees(NamedTuple):
    """What is the same for all layers, embedding and head, and what the pipeline makes of it."""

    tp_size: int
    dp_size: int
    pp_size: int
    data_parallel: DataParallel
    shard_size: int
    sequence_parallel: SequenceParallel
    ranges: tuple[tuple[int, int], ...]
    """Layers of every pipeline stage and chunk, in the order of the layers: `pp_size * chunks` of them."""
    micro_batch_size: int
    """Samples of a microbatch on a data-parallel rank."""

    @property
    def shard_groups(self) -> int:
        """Groups of data-parallel ranks that hold replicas of each other's shards."""
        return self.dp_size // self.shard_size if self.shard_size else 1

    @property
    def chunks(self) -> int:
        """Layer ranges of a pipeline stage."""
        return len(self.ranges) // self.pp_size

    @property
    def range_sizes(self) -> tuple[int, ...]:
        """Number of layers of each range."""
        return tuple(high - low for low, high in self.ranges)

    @classmethod
    def of(cls, plan: Plan, target: Target) -> "Degrees":
        """The one set of degrees of a plan that shards all its layers alike, as Megatron-LM and torchtitan want it.

        Raises BadInput naming the first layer, embedding and head included, that has others than the first layer, and
        for what neither system has: strided tensor-parallel groups, Ulysses, layers of several types, recomputation of
        a layer's part, interleaved microbatches in unequal groups.
        """
        check_stages(plan, target)
        for i, layer in enumerate(plan.layers):
            what = f"layers[{i}]: type {layer.type}, where layers[0] has {plan.layers[0].type}"
            target.demand(layer.type == plan.layers[0].type, what, "export plans of models with layers of one type")
            check_recompute(plan, i, target)
        count, pp_size, chunks = plan.num_microbatches, len(plan.stages), len(plan.stages[0].layers)
        what = f"{count} interleaved microbatches, which {pp_size} pipeline stages do not divide"
        target.demand(chunks == 1 or count % pp_size == 0, what, "choose a multiple of the pipeline stages")
        first = _check_alike(plan, target)
        return cls(
            tp_size=first.tp_size,
            dp_size=first.dp_size,
            pp_size=pp_size,
            data_parallel=first.data_parallel,
            shard_size=first.shard_size,
            sequence_parallel=first.sequence_parallel,
            ranges=tuple(stage.layers[chunk] for chunk in range(chunks) for stage in plan.stages),
            micro_batch_size=plan.microbatch_samples // first.dp_size,
        )


def strategies(plan: Plan) -> Iterator[tuple[str, Strategy]]:
    """Embedding, layers and head in order: the name and what its strategy does."""
    yield EMBEDDING, effective(plan.embedding)
    for i, layer in enumerate(plan.layers):
        yield f"layers[{i}]", effective(layer)
    yield HEAD, effective(plan.head)


def check_stages(plan: Plan, target: Target) -> None:
    """Raise BadInput unless the pipeline stages are equal blocks of ranks and the schedule is one of their number.

    Without a pipeline every system works through the microbatches one after the other: that is 1F1B, and not GPipe,
    which holds them all.
    """
    width = len(plan.stages[0].ranks)
    for i, stage in enumerate(plan.stages):
        what = f"stages[{i}]: {len(stage.ranks)} ranks, stages[0] has {width}"
        target.demand(len(stage.ranks) == width, what, "plan stages of equal width")
        block = range(i * width, (i + 1) * width)
        what = f"stages[{i}]: its ranks are not {block[0]} to {block[-1]}"
        target.demand(stage.ranks == tuple(block), what, "number by stage")
    holds = len(plan.stages) > 1 or schedule_of(plan.schedule).in_flight(1, plan.num_microbatches, 0) == 1
    target.demand(holds, f"{plan.schedule} in a single pipeline stage", "choose the schedule 1f1b")


def check_recompute(plan: Plan, index: int, target: Target) -> None:
    """Raise BadInput where a part of a layer is recomputed."""
    recompute = plan.layers[index].recompute
    holds = recompute in (Recompute.NONE, Recompute.FULL)
    target.demand(holds, f"layers[{index}]: recompute {recompute}", "recompute all of it or nothing")


def kernel_notes(plan: Plan) -> Iterator[str]:
    """The kernels that a plan names: another system chooses its own, and nothing else depends on them."""
    if plan.attention is not Attention.AUTO:
        yield f"the attention kernel {plan.attention} is not in the file"
    if plan.fused:
        yield f"kernels that compute {', '.join(plan.fused)} are not in the file"
    if plan.precision.tf32:
        yield "that factors may be rounded to TF32 is not in the file"
    if plan.compile:
        yield "that layers are compiled is not in the file"


def _check_alike(plan: Plan, target: Target) -> Strategy:
    """The first layer's strategy, which all share."""
    named = list(strategies(plan))
    first_where, first = named[1]
    for where, own in named:
        target.demand(own.tp_consecutive, f"{where}: strided tensor-parallel groups", "make them consecutive")
        ulysses = own.sequence_parallel is SequenceParallel.ULYSSES
        target.demand(not ulysses, f"{where}: sequence_parallel ulysses", "choose none or megatron")
        for field in ("tp_size", "dp_size", "data_parallel", "shard_size", "sequence_parallel"):
            mine, its = getattr(own, field), getattr(first, field)
            what = f"{where}: {field} {mine}, where {first_where} has {its}"
            target.demand(mine == its, what, "shard embedding, layers and head alike")
    return first
