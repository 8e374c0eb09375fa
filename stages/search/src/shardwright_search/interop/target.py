"""Demands of other systems on a plan, and refusals of plans that one of them cannot express."""

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from msgspec import UNSET

from shardwright_formats.io import BadInput
from shardwright_formats.semantics.axes import axes_of, effective
from shardwright_formats.semantics.expert_messages import shares_experts
from shardwright_formats.semantics.schedules.registry import schedule_of
from shardwright_formats.types import (
    EMBEDDING,
    HEAD,
    Attention,
    ContextParallel,
    ExpertStrategy,
    LayerStrategy,
    Plan,
    Recompute,
    SequenceParallel,
    Strategy,
)
from shardwright_search.space.uniform import UniformStrategy

WHOLE_LAYERS = (Recompute.NONE, Recompute.FULL)
"""Recomputation that each system has."""


class Exported(NamedTuple):
    """A plan as another system reads it."""

    text: str
    """Content of the file."""
    notes: tuple[str, ...]
    """Points that the file cannot hold and the user has to see to, a line each."""
    environment: tuple[str, ...] = ()
    """Lines of a shell that set up the environment of the system's processes."""
    beside: tuple[tuple[str, str], ...] = ()
    """Names and contents of files that a folder of what starts the plan has, too."""


class ExportTarget(NamedTuple):
    """A system that a plan is exported for, and the file of the plan: both are named where the plan is refused."""

    name: str
    plan_file: object

    def demand(self, holds: bool, feature: str, remedy: str) -> None:
        """Raise BadInput unless the condition holds; `feature` names what the system cannot express."""
        if not holds:
            raise BadInput(self.plan_file, f"{self.name} cannot express {feature}", remedy)

    def demand_precision(self, plan: Plan, holds: bool, remedy: str, where: str = "") -> None:
        """Raise BadInput that names the plan's precision unless the condition holds."""
        self.demand(holds, f"precision {plan.precision.text}{where}", remedy)


def uniform_of(
    plan: Plan,
    target: ExportTarget,
    kinds: Sequence[Recompute] = WHOLE_LAYERS,
    has_expert_grids: bool = False,
    has_context: bool = False,
    types: Container[str] = (),
) -> UniformStrategy:
    """Return the one strategy of a plan that shards all its layers alike, as all systems but Galvatron want it.

    Recomputation is left out: layers may differ in it. Raises BadInput naming the first layer, embedding and head
    included, that is sharded otherwise than the first layer, and for what none of them has: strided tensor-parallel
    groups, Ulysses, layers of several types, recomputation but of these kinds, interleaved microbatches in unequal
    groups. Experts that ranks share out are refused unless the system has grids for them, and so are positions; layers
    of unlike types unless it has both of them beside one another in its models (`types`).
    """
    check_trained(plan, target)
    if not has_context:
        check_whole_positions(plan, target)
    if not has_expert_grids:
        check_whole_experts(plan, target)
    check_stages(plan, target)
    for i, layer in enumerate(plan.layers):
        first_type, feature = plan.layers[0].type, f"layers[{i}]: type {layer.type}, where layers[0] has"
        holds = layer.type == first_type or (layer.type in types and first_type in types)
        target.demand(holds, f"{feature} {first_type}", "export plans of models with layers of one type")
    check_recompute(plan, target, kinds)
    count, pp_size, chunks = plan.num_microbatches, len(plan.stages), len(plan.stages[0].layers)
    feature = f"{count} interleaved microbatches, which {pp_size} pipeline stages do not divide"
    target.demand(chunks == 1 or count % pp_size == 0, feature, "choose a multiple of the pipeline stages")
    first = _shared_strategy(plan, target)
    return UniformStrategy(
        tp_size=first.tp_size,
        dp_size=first.dp_size,
        cp_size=first.cp_size,
        context=_shared_context(plan, target),
        pp_size=pp_size,
        micro_batch_size=plan.microbatch_samples // first.dp_size,
        data_parallel=first.data_parallel,
        shard_size=first.shard_size,
        sequence_parallel=first.sequence_parallel,
        experts=_shared_experts(plan, target),
        gradient_reduction=plan.gradient_reduction,
        chunks=chunks,
        ranges=tuple(stage.layers[chunk] for chunk in range(chunks) for stage in plan.stages),
    )


def check_trained(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput where some parameters are frozen: no file for another system says which."""
    target.demand(not plan.model.is_frozen, "frozen parameters", "export a plan of the model that is trained whole")


def strategies(plan: Plan) -> Iterator[tuple[str, Strategy]]:
    """Yield embedding, layers and head in order: the name and what its strategy does."""
    yield EMBEDDING, effective(plan.embedding)
    for i, layer in enumerate(plan.layers):
        yield f"layers[{i}]", effective(layer)
    yield HEAD, effective(plan.head)


def check_stages(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput unless the pipeline stages are equal blocks of ranks and the schedule is one of their number.

    Without a pipeline every system works through the microbatches one after the other: that is 1F1B, and not GPipe,
    which holds them all.
    """
    width = len(plan.stages[0].ranks)
    for i, stage in enumerate(plan.stages):
        widths = f"stages[{i}]: {len(stage.ranks)} ranks, stages[0] has {width}"
        target.demand(len(stage.ranks) == width, widths, "plan stages of equal width")
        block = range(i * width, (i + 1) * width)
        order = f"stages[{i}]: its ranks are not {block[0]} to {block[-1]}"
        target.demand(stage.ranks == tuple(block), order, "number by stage")
    holds = len(plan.stages) > 1 or schedule_of(plan.schedule).in_flight(1, plan.num_microbatches, 0) == 1
    target.demand(holds, f"{plan.schedule} in a single pipeline stage", "choose the schedule 1f1b")


def check_whole_positions(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput naming the first layer whose ranks share out positions in attention, too."""
    contexts = (where for where, strategy in strategies(plan) if strategy.cp_size > 1)
    where = next(contexts, None)
    target.demand(where is None, f"{where}: cp_size above 1", "share positions out by sequence_parallel")


def check_whole_experts(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput naming the first layer whose ranks share experts out."""
    shared = (f"layers[{i}]" for i, layer in enumerate(plan.layers) if shares_experts(layer))
    layer = next(shared, None)
    target.demand(layer is None, f"{layer}, whose ranks share experts out", "leave out its experts")


def check_expert_states(where: str, layer: LayerStrategy, target: ExportTarget) -> None:
    """Raise BadInput where a layer's experts are not of its kind of data parallelism, or in groups of ranks."""
    if (apart := experts_apart(layer)) is not None:
        feature, remedy = apart
        target.demand(False, f"{where}: {feature}", remedy)


def experts_apart(layer: LayerStrategy) -> tuple[str, str] | None:
    """Return how states of a layer's experts are shared otherwise than the rest, and what to do; None if they are not.

    Other systems have one kind of data parallelism for both, and groups of shards for neither beside expert grids.
    """
    grid = layer.expert_grid
    if grid is None or axes_of(grid).dense.states.size == 1:
        return None
    kind = effective(layer).data_parallel
    if grid.data_parallel is not kind:
        feature = f"experts {grid.data_parallel}, where the rest has {kind}"
        return feature, "give experts the data_parallel of their layer"
    grouped = layer.shard_size or grid.shard_size
    return ("experts beside states shared out in groups", "leave out shard_size") if grouped else None


def _shared_context(plan: Plan, target: ExportTarget) -> ContextParallel:
    """Return the way in which positions of all layers attend to those of other ranks."""
    first = plan.layers[0].context
    for i, layer in enumerate(plan.layers):
        feature = f"layers[{i}]: context {layer.context}, where layers[0] has {first}"
        target.demand(layer.context is first, feature, "choose one way for all layers")
    return first


def _shared_experts(plan: Plan, target: ExportTarget) -> ExpertStrategy | None:
    """Return how all layers that have experts share them out; None where each rank has its part of each."""
    layers = [(i, layer) for i, layer in enumerate(plan.layers) if plan.model.types[layer.type].experts is not UNSET]
    number, first = (layers[0][0], layers[0][1].experts) if layers else (0, UNSET)
    for i, layer in layers:
        feature = f"layers[{i}]: experts shared out otherwise than in layers[{number}]"
        target.demand(layer.experts == first, feature, "share them out alike in all layers")
        check_expert_states(f"layers[{i}]", layer, target)
    return None if first is UNSET else first


def check_recompute(plan: Plan, target: ExportTarget, kinds: Sequence[Recompute] = WHOLE_LAYERS) -> None:
    """Raise BadInput where a layer is recomputed in a way that is none of these kinds."""
    remedy = "recompute all of it or nothing" if kinds == WHOLE_LAYERS else f"choose {', '.join(kinds)}"
    for i, layer in enumerate(plan.layers):
        target.demand(layer.recompute in kinds, f"layers[{i}]: recompute {layer.recompute}", remedy)


def kernel_notes(plan: Plan) -> Iterator[str]:
    """Yield the kernels that a plan names: another system chooses its own, and nothing else depends on them."""
    if plan.attention is not Attention.AUTO:
        yield f"the attention kernel {plan.attention} is not in the file"
    if plan.fused:
        yield f"kernels that compute {', '.join(plan.fused)} are not in the file"
    if plan.precision.tf32:
        yield "that factors may be rounded to TF32 is not in the file"
    if plan.compile:
        yield "that layers are compiled is not in the file"


def _shared_strategy(plan: Plan, target: ExportTarget) -> Strategy:
    """Return the first layer's strategy, which all share."""
    named = list(strategies(plan))
    first_where, first = named[1]
    for where, strategy in named:
        target.demand(strategy.tp_consecutive, f"{where}: strided tensor-parallel groups", "make them consecutive")
        ulysses = strategy.sequence_parallel is SequenceParallel.ULYSSES
        target.demand(not ulysses, f"{where}: sequence_parallel ulysses", "choose none or megatron")
        for field in ("tp_size", "cp_size", "dp_size", "data_parallel", "shard_size", "sequence_parallel"):
            value, shared = getattr(strategy, field), getattr(first, field)
            feature = f"{where}: {field} {value}, where {first_where} has {shared}"
            target.demand(value == shared, feature, "shard embedding, layers and head alike")
    return first
