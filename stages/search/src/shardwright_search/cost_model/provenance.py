"""What a prediction must say of numbers that nobody measured: one line for each kind of them and each profile."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from shardwright_formats.semantics.differences import MAX_RELATIVE_ERROR
from shardwright_formats.semantics.layout import parameter_layout
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import LayerStrategy, Recompute, Strategy
from shardwright_search.cost_model.profiles import LayerKey, LayerPoints, Profiles, Sources, sources_of

_TOLD = ("analytic", "assumed")


def provenance_warnings(plan: Plan, profiles: Profiles) -> tuple[str, ...]:
    """Lines headed `analytic`, `assumed`, `absent` or `uncertain` about the numbers that a plan's prediction leans on.

    Before them `plan_only` says why this project's runtime cannot run the plan. The first two repeat what the profile's
    own notes say of such numbers, such as the error that was seen.
    """
    own = profiles.used(plan.cluster)
    told = [] if plan.cluster.obstacle is None else [f"plan_only: {plan.cluster.obstacle}"]
    return (*told, *dict.fromkeys(line for one in own for line in _of_device(plan, one)))


def _of_device(plan: Plan, profiles: Profiles) -> Iterator[str]:
    """Of the nodes with that device."""
    layers, points = _used(plan, profiles), dict(_points(plan, profiles))
    messages = frozenset(("messages", str(point.source)) for point in profiles.hardware.points.rows)
    yield from _lines(layers, profiles.model_file, profiles.notes)
    yield from _lines(messages, profiles.hardware_file, profiles.hardware.provenance.notes)
    yield from _overlap_lines(plan, profiles)
    yield from _uncertain_lines(points, profiles.model_file)
    for name in sorted({name for name, source in layers | messages if source == "absent"}):
        yield f"absent: {name}: counted as 0"


def _overlap_lines(plan: Plan, profiles: Profiles) -> Iterator[str]:
    """What the times of overlapped messages lean on: what was told, or what was timed over one kind of link alone."""
    overlap, notes = profiles.hardware.overlap, profiles.hardware.provenance.notes
    sources = frozenset(("overlap", str(row.source)) for row in overlap.rows)
    yield from _lines(sources, profiles.hardware_file, notes)
    if not sources and any(strategy.dp_size > 1 for _, strategy in _layers_on(plan, profiles.origin.device)):
        what = "collectives of data parallelism are counted as if nothing were computed beside them"
        yield f"absent: overlap of {profiles.hardware_file.name}: {what}"
    known = set((overlap["ranks_per_node"] < overlap["group_size"]).tolist())
    if len(known) == 1 and len(set(plan.cluster.node_of_rank)) > 1:
        there, here = ("across nodes", "inside a node") if known == {True} else ("inside a node", "across nodes")
        yield f"assumed: slowdowns of overlapped messages {here} of {profiles.hardware_file.name}: those {there}"


def _used(plan: Plan, profiles: Profiles) -> Sources:
    """The numbers of the model profile that price the plan, with where they come from."""
    found = set(profiles.sources).union(*(points.sources for _, points in _points(plan, profiles)))
    for name, strategy in dict.fromkeys(_layers_on(plan, profiles.origin.device)):
        # A reduction that was not measured is counted by its messages.
        states = profiles.states[name, _profiled(profiles, name, parameter_layout(strategy).tp_size)]
        found |= sources_of(states, "optimizer_s")
    return frozenset(found)


def _points(plan: Plan, profiles: Profiles) -> Iterator[tuple[LayerKey, LayerPoints]]:
    """The curves that price the plan's layers."""
    for name, strategy in dict.fromkeys(_layers_on(plan, profiles.origin.device)):
        recompute = strategy.recompute if isinstance(strategy, LayerStrategy) else Recompute.NONE
        tp_size = _profiled(profiles, name, strategy.tp_size)
        key = LayerKey(name, tp_size, strategy.sequence_parallel, recompute, plan.model.sequence_length)
        if (exact := profiles.layers.get(key)) is not None:
            yield key, exact
        else:  # A length that was never profiled leans on the lengths that were.
            yield from ((other, of) for other, of in profiles.layers.items() if other[:4] == key[:4])


def _uncertain_lines(points: Mapping[LayerKey, LayerPoints], file: Path) -> Iterator[str]:
    """Where a block's time has an error of more than a fifth of it: the curve's largest."""
    for key, of in points.items():
        if key.type not in (EMBEDDING, HEAD) and (worst := float(of.errors.max())) > MAX_RELATIVE_ERROR:
            what = f"{key.type} tp_size {key.tp_size} sequence_parallel {key.sequence_parallel}"
            told = f"{what} recompute {key.recompute} of {file.name}: a standard error of {worst:.0%}"
            yield f"uncertain: time of {told}: measure it on a quieter machine or with a larger min_time_s"


def _profiled(profiles: Profiles, type_name: str, tp_size: int) -> int:
    """The degree whose numbers priced a plan: where no node could measure it, the largest below it."""
    return max(size for name, size in profiles.states if name == type_name and size <= tp_size)


def _layers_on(plan: Plan, device: str) -> Iterator[tuple[str, Strategy]]:
    """The layers of the stages on that device, with embedding and head."""
    cluster, last = plan.cluster, len(plan.stages) - 1
    for number, stage in enumerate(plan.stages):
        if all(cluster.of_rank(rank).device != device for rank in stage.ranks):
            continue
        yield from ((EMBEDDING, plan.embedding),) if number == 0 else ()
        yield from ((HEAD, plan.head),) if number == last else ()
        for low, high in stage.layers:
            yield from ((layer.type, layer) for layer in plan.layers[low:high])


def _lines(sources: Sources, file: Path, notes: str) -> Iterator[str]:
    for kind in _TOLD:
        names = sorted(name for name, source in sources if source == kind)
        if names:
            said = next((line for line in notes.splitlines() if line.startswith(kind)), kind)
            what = said.removeprefix(kind).strip(" ,:.")
            yield f"{kind}: {', '.join(names)} of {file.name}" + (f": {what}" if what else "")
