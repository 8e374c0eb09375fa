"""Warnings of a prediction about numbers that were not measured: one line for each kind and profile."""

from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from shardwright.key import LayerKey
from shardwright.models.context import plan_obstacle
from shardwright.optimizers.registry import ADAMW, OPTIMIZERS
from shardwright.plan.axes import axes_of, layout_of
from shardwright.plan.communication import shares_experts
from shardwright.plan.differences import MAX_RELATIVE_ERROR
from shardwright.types import EMBEDDING, HEAD, ContextParallel, Plan, Strategy
from shardwright.types.hardware_profile import Collective
from shardwright_search.cost_model.expert_load import StatedLoad
from shardwright_search.cost_model.profiles import LayerPoints, Profiles, Sources, sources_of

_QUOTED = ("analytic", "assumed")
"""Sources for which the profile's notes are repeated."""


def provenance_warnings(plan: Plan, profiles: Profiles) -> tuple[str, ...]:
    """Return lines headed `analytic`, `assumed`, `absent`, `uncertain` or `launch-bound` about a plan's prediction.

    Before them `plan_only` says why this project's runtime cannot run the plan. The first two repeat what the profile's
    own notes say of such numbers, such as the error that was seen.
    """
    context = plan_obstacle(plan)
    obstacles = (plan.cluster.obstacle, None if context is None else context.problem)
    unrun = (f"plan_only: {obstacle}" for obstacle in obstacles if obstacle is not None)
    lines = (line for one in profiles.used(plan.cluster) for line in _device_lines(plan, one))
    return (
        *unrun,
        *dict.fromkeys(lines),
        *_optimizer_lines(plan),
        *_load_lines(plan, profiles),
        *_document_lines(plan),
    )


def _optimizer_lines(plan: Plan) -> Iterator[str]:
    """Yield the warning for an optimizer whose time no profile has."""
    if plan.optimizer != ADAMW.name:
        yield f"assumed: the step of {plan.optimizer} takes as long as AdamW's by the bytes that both move"
    if OPTIMIZERS[plan.optimizer].whole_matrices:
        yield (
            f"assumed: the products of {plan.optimizer} are as fast as the layer's forward pass, and no rank of a "
            "stage has more of them than the mean and a largest matrix"
        )


def _document_lines(plan: Plan) -> Iterator[str]:
    """Yield a warning that context parallelism balances whole samples, not separate documents.

    Masked attention in this project's runtime takes equal time on all ranks, about twice that of causal attention.
    """
    if any(axes_of(layer).shares_context for layer in plan.layers):
        unlike = (
            "where documents keep to themselves, masks skip no pair of positions, and kernels that do leave ranks "
            "unequal work (shardwright train check --reset-attention-mask --data says how unequal)"
        )
        yield f"assumed: samples of one document each: {unlike}"


def _load_lines(plan: Plan, profiles: Profiles) -> Iterator[str]:
    """Yield the warning for experts whose load no run has logged."""
    grids = (layer.expert_grid for layer in plan.layers)
    if not any(grid and axes_of(grid).dense.experts.size > 1 for grid in grids):
        return
    if profiles.load is None:
        yield "assumed: all experts get as many positions: imbalance takes the load of a run"
    elif isinstance(profiles.load, StatedLoad):
        yield f"assumed: the fullest rank's experts get up to {profiles.load.ratio:g} times the mean rank's positions"
    elif plan.expert_placement:
        yield "assumed: placed experts get their mean shares of the load: peaks of single steps are not known of them"


def _device_lines(plan: Plan, profiles: Profiles) -> Iterator[str]:
    """Yield the warnings about the nodes with the device of these profiles."""
    layers, points = _used(plan, profiles), dict(_points(plan, profiles))
    messages = frozenset(("messages", str(point.source)) for point in profiles.hardware.points.rows)
    yield from _lines(layers, profiles.model_file, profiles.notes)
    yield from _lines(messages, profiles.hardware_file, profiles.hardware.provenance.notes)
    yield from _overlap_lines(plan, profiles)
    yield from _uncertain_lines(points, profiles.model_file)
    yield from _launch_lines({key.type for key in points}, profiles)
    for name in sorted({name for name, source in layers | messages if source == "absent"}):
        yield f"absent: {name}: counted as 0"


def _overlap_lines(plan: Plan, profiles: Profiles) -> Iterator[str]:
    """Yield the warnings for slowdowns that were stated, or measured over only one kind of link."""
    overlap, notes = profiles.hardware.overlap, profiles.hardware.provenance.notes
    sources = frozenset(("overlap", str(row.source)) for row in overlap.rows)
    yield from _lines(sources, profiles.hardware_file, notes)
    if not sources and any(
        layout_of(strategy).samples.size > 1 for _, strategy in _layers_on(plan, profiles.origin.device)
    ):
        effect = "collectives of data parallelism are counted as if nothing were computed beside them"
        yield f"absent: overlap of {profiles.hardware_file.name}: {effect}"
    known = set((overlap["ranks_per_node"] < overlap["group_size"]).tolist())
    if len(known) == 1 and len(set(plan.cluster.domain_of_rank)) > 1:
        there, here = ("across nodes", "inside a node") if known == {True} else ("inside a node", "across nodes")
        yield f"assumed: slowdowns of overlapped messages {here} of {profiles.hardware_file.name}: those {there}"
    if has_ring(plan) and not (overlap["collective"] == Collective.P2P.encode()).any():
        assumed = "slow computation as other collectives do" if sources else "overlap with nothing"
        yield f"assumed: sends of a ring {assumed}: {profiles.hardware_file.name} has no overlap of sends"


def has_ring(plan: Plan) -> bool:
    """Return whether keys and values of some layer go round its ranks."""
    return any(axes_of(layer).shares_context and layer.context is ContextParallel.RING for layer in plan.layers)


def _used(plan: Plan, profiles: Profiles) -> Sources:
    """Return the numbers of the model profile that price the plan, with their sources."""
    sources = set(profiles.sources).union(*(points.sources for _, points in _points(plan, profiles)))
    for name, strategy in dict.fromkeys(_layers_on(plan, profiles.origin.device)):
        # A reduction that was not measured is counted by its messages.
        tp_size = _profiled(profiles, name, axes_of(strategy).dense.tensor.size)
        sources |= sources_of(profiles.states[LayerKey(type=name, tp_size=tp_size)], "optimizer_s")
    return frozenset(sources)


def _points(plan: Plan, profiles: Profiles) -> Iterator[tuple[LayerKey, LayerPoints]]:
    """Yield the curves that price the plan's layers."""
    length = plan.model.sequence_length
    for name, strategy in dict.fromkeys(_layers_on(plan, profiles.origin.device)):
        tp_size = _profiled(profiles, name, strategy.tp_size)
        key = LayerKey.from_strategy(name, strategy, tp_size=tp_size, sequence_length=length)
        points = profiles.beside_experts if shares_experts(strategy) else profiles
        if (exact := points.layers.get(key)) is not None:
            yield key, exact
        else:  # A length that was never profiled leans on the lengths that were.
            yield from points.of_any_length(key).items()


def _uncertain_lines(points: Mapping[LayerKey, LayerPoints], file: Path) -> Iterator[str]:
    """Yield a warning if the standard error of a block's time is over a fifth."""
    for key, measured in points.items():
        if key.type not in (EMBEDDING, HEAD) and (worst := float(measured.errors.max())) > MAX_RELATIVE_ERROR:
            error = f"{key.without('sequence_length')} of {file.name}: a standard error of {worst:.0%}"
            yield f"uncertain: time of {error}: measure it on a quieter machine or with a larger min_time_s"


def _launch_lines(types: Set[str], profiles: Profiles) -> Iterator[str]:
    """Yield the profile's notes on launch-bound layers that were scaled in proportion."""
    for line in profiles.notes.splitlines():
        if line.startswith(tuple(f"launch-bound: {name} " for name in types)):
            yield f"{line.rstrip('.')}: {profiles.model_file.name}"


def _profiled(profiles: Profiles, type_name: str, degree: int) -> int:
    """Return the degree whose numbers priced a plan: if no node could measure it, the next smaller one."""
    profiled = (key.tp_size for key in profiles.states if key.type == type_name)
    return max(size for size in profiled if size <= degree)


def _layers_on(plan: Plan, device: str) -> Iterator[tuple[str, Strategy]]:
    """Yield the layers of the stages on that device, with embedding and head."""
    cluster, last = plan.cluster, plan.stage_of(HEAD)
    for number, stage in enumerate(plan.stages):
        if all(cluster.of_rank(rank).device != device for rank in stage.ranks):
            continue
        yield from ((EMBEDDING, plan.embedding),) if number == 0 else ()
        yield from ((HEAD, plan.head),) if number == last else ()
        for low, high in stage.layers:
            yield from ((layer.type, layer) for layer in plan.layers[low:high])


def _lines(sources: Sources, file: Path, notes: str) -> Iterator[str]:
    """Yield a line for each kind of numbers that were not measured, with the profile's note on it."""
    for kind in _QUOTED:
        names = sorted(name for name, source in sources if source == kind)
        if names:
            said = next((line for line in notes.splitlines() if line.startswith(kind)), kind)
            note = said.removeprefix(kind).strip(" ,:.")
            yield f"{kind}: {', '.join(names)} of {file.name}" + (f": {note}" if note else "")
