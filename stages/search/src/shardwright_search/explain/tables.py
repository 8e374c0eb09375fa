"""Tables of a plan's terms by pipeline stage, of other plans compared with it, and of two plans' differences."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace
from rich.console import Group, RenderableType

from shardwright.display.plan_words import (
    binding,
    headline,
    node_type_uses,
    range_words,
    shape_and_runs,
    stage_lines,
    strategy_words,
)
from shardwright.io import BadInput
from shardwright.plan.axes import effective
from shardwright.types import GIB, MIB, Estimate, Plan, RunnerUp
from shardwright.types.strategy import DataParallel, LayerStrategy, Offload, Recompute, Strategy
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.plan import Evaluation, evaluate
from shardwright_search.explain.printing import PLAN, Lines, SplitTable, table
from shardwright_search.explain.what_if import WhatIfAnswer
from shardwright_search.search import SearchAnswer
from shardwright_search.space.budget import Infeasible

# What each lever on memory frees, and what it costs: recomputation, sharding and offloading of a stage's layers.
#
# A lever is applied to, or taken from, as many layers of the stage as it takes to free or need a given amount, each
# time with the full price of the plan: no share of a layer, and no sum of two levers, is assumed to be linear.


TARGET_BYTES = GIB
"""Bytes that the layers of a lever free or need together, if there are enough layers."""


class Lever(NamedTuple):
    """A lever applied to, or taken from, some layers of a pipeline stage."""

    name: str
    layers: tuple[int, ...]
    """The layers that change."""
    possible: int
    """Number of layers of the stage that could."""
    more_bytes: int
    """Bytes that a rank of the stage holds in addition; negative: it holds fewer."""
    slower: float
    """The share by which a step takes longer; negative: less long."""
    left_bytes: int | None
    """Bytes of the budget that are then left on a rank of the stage; negative: they exceed it. None: no budget."""


class _Change(NamedTuple):
    """Another value of a field of strategies, for the layers that have one of some values."""

    name: str
    field: str
    old: tuple[object, ...]
    new: object

    def applies(self, layer: LayerStrategy) -> bool:
        """Return whether the layer has one of the old values, and may have the new one."""
        if getattr(layer, self.field) not in self.old:
            return False
        if self.field == "offload":
            return self.new not in (Offload.ACTIVATIONS, Offload.BOTH) or layer.moves_activations
        on_device = replace(layer, offload=UNSET)
        return not layer.offloads_activations or self.made(on_device).moves_activations

    def made(self, layer: LayerStrategy) -> LayerStrategy:
        """Return the layer with the new value; without sharding there is no size of shards."""
        whole = {"shard_size": 0} if self.new is DataParallel.DDP else {}
        return replace(layer, **{self.field: self.new, **whole})


_DDP, _ZERO2, _ZERO3 = DataParallel.DDP, DataParallel.ZERO2, DataParallel.ZERO3
_RECOMPUTED = tuple(kind for kind in Recompute if kind is not Recompute.NONE)
_CHANGES = (
    # The ways back from levers that layers use.
    *(_Change(f"without recompute {kind}", "recompute", (kind,), Recompute.NONE) for kind in _RECOMPUTED),
    *(_Change(f"without offload {kind}", "offload", (kind,), UNSET) for kind in Offload if kind is not Offload.NONE),
    _Change("zero2 for zero3", "data_parallel", (_ZERO3,), _ZERO2),
    _Change("ddp for zero2", "data_parallel", (_ZERO2,), _DDP),
    # Levers that layers may still use.
    _Change("recompute norms+activations", "recompute", (Recompute.NONE,), Recompute.NORMS_ACTIVATIONS),
    _Change("recompute selective", "recompute", (Recompute.NONE,), Recompute.SELECTIVE),
    _Change("recompute full", "recompute", (Recompute.NONE, Recompute.SELECTIVE), Recompute.FULL),
    _Change("zero2 for ddp", "data_parallel", (_DDP,), _ZERO2),
    _Change("zero3 for zero2", "data_parallel", (_ZERO2,), _ZERO3),
    _Change("offload optimizer", "offload", (UNSET,), Offload.OPTIMIZER),
    _Change("offload activations", "offload", (UNSET,), Offload.ACTIVATIONS),
    _Change("offload both", "offload", (Offload.OPTIMIZER, Offload.ACTIVATIONS), Offload.BOTH),
)


def levers(
    plan: Plan, before: Evaluation, costs: CostModel, stage: int, budgets_bytes: Sequence[int] | None
) -> Iterator[Lever]:
    """Yield the levers of a stage's layers that change its memory: those in use first, then those that are not.

    Levers that the profiles or the cluster have no price for are left out.
    """
    layers = [i for low, high in plan.stages[stage].layers for i in range(low, high)]
    for change in _CHANGES:
        places = [i for i in layers if change.applies(plan.layers[i])]
        if places and (lever := _enough(change, places, plan, before, costs, stage, budgets_bytes)) is not None:
            yield lever


def _enough(
    change: _Change,
    places: Sequence[int],
    plan: Plan,
    before: Evaluation,
    costs: CostModel,
    stage: int,
    budgets_bytes: Sequence[int] | None,
) -> Lever | None:
    """Return the lever on as few of the places as change memory by the target, or on all of them.

    None if it has no effect on memory, or no price.
    """

    def on(count: int) -> Lever:
        changed = {i: change.made(plan.layers[i]) for i in places[:count]}
        layers = tuple(changed.get(i, layer) for i, layer in enumerate(plan.layers))
        after = evaluate(replace(plan, layers=layers), costs.profiles, costs, timeline=False)
        held = after.estimate.stages[stage].memory_bytes
        left = None if budgets_bytes is None else budgets_bytes[stage] - held
        more = held - before.estimate.stages[stage].memory_bytes
        slower = after.objective_ps / before.objective_ps - 1
        return Lever(change.name, tuple(changed), len(places), more, slower, left)

    try:
        low, best = 0, on(len(places))
        if best.more_bytes == 0:
            return None
        while len(best.layers) - low > 1 and abs(best.more_bytes) >= TARGET_BYTES:
            tried = on((low + len(best.layers)) // 2)
            if abs(tried.more_bytes) >= TARGET_BYTES:
                best = tried
            else:
                low = len(tried.layers)
    except BadInput:
        return None
    return best


# The tables.


def node_types_table(plan: Plan, estimate: Estimate) -> SplitTable | None:
    """Return a table with a row for each node type; None if there is only one."""
    uses = node_type_uses(plan, estimate)
    if not uses:
        return None
    binds = binding(uses).name
    headings = ("node type", "stages", "ranks", "busiest stage", "idle share", "idle USD a step")
    rows = [
        [
            f"{use.name} (binds)" if use.name == binds else use.name,
            f"{use.stages}",
            f"{use.ranks}",
            f"{use.busiest_s * 1e3:.3f}",
            f"{use.idle_share:.1%}",
            "no price" if use.idle_usd is None else f"{use.idle_usd:.6f}",
        ]
        for use in uses
    ]
    return table("node types, times in ms", headings, rows)


_FIELDS = (
    "cluster", "global_batch_size", "num_microbatches", "schedule", "gradient_reduction", "precision", "optimizer",
    "attention", "fused", "compile", "loss_chunks", "expert_placement",
)  # fmt: skip
STEP_TERMS = ("gradient_sync", "optimizer")
"""Terms of time that come once a step, not with every microbatch."""


def explanation(
    plan: Plan,
    estimate: Estimate,
    budgets_bytes: Sequence[int] | None,
    lines: Sequence[str],
    further: Sequence[RenderableType],
    runners_up: Sequence[RunnerUp],
) -> RenderableType:
    """Return tables of time and memory by pipeline stage, `lines` on the limits, further tables, and runners-up."""
    parts: list[RenderableType] = [
        Lines([headline(plan), *stage_lines(plan)]),
        _time_table(estimate),
        _memory_table(estimate, budgets_bytes),
        Lines(lines),
        *further,
    ]
    if runners_up:
        headings = (PLAN, "ms a step", "time", "MiB", "memory")
        rows = [_runner_up(other, estimate) for other in runners_up]
        parts.append(table("runners-up, against this plan", headings, rows))
    return Group(*parts)


def levers_table(found: Sequence[Lever], stage: int, step_s: float) -> SplitTable:
    """Return a table of the levers of a stage's layers; `step_s`: the closed form of the plan's step."""
    rows = [
        (
            lever.name,
            f"{len(lever.layers)} of {lever.possible}",
            f"{lever.more_bytes / MIB:+,.2f}",
            f"{lever.slower:+.2%}",
            f"{lever.slower * step_s * 1e3:+.3f}",
            "" if lever.left_bytes is None else f"{lever.left_bytes / MIB:,.2f}",
        )
        for lever in found
    ]
    title = (
        f"levers on the memory of stage {stage}, each on as few layers as change it by {TARGET_BYTES // MIB:,} MiB, or "
        "on all of them; negative MiB left exceed the budget"
    )
    return table(title, ("lever", "layers", "MiB", "step", "ms a step", "MiB left"), rows)


def answers_shown(title: str, plan: Plan, estimate: Estimate, answers: Sequence[WhatIfAnswer]) -> RenderableType:
    """Return each answer, compared with the plan: simulated time of a sample, fullest rank's memory, and its plan."""
    headings = ("", "ms a step", "samples/s", "time a sample", "MiB", "memory")
    rows = [(kind, *_answer_figures(result, plan, estimate)) for kind, result in answers]
    groups: dict[str, list[str]] = {}
    for kind, result in answers:
        groups.setdefault(_words(result, plan), []).append(kind)
    lines = [f"{', '.join(names)}: {words}" for words, names in groups.items()]
    return Group(table(title, headings, rows), Lines(lines))


def _time_table(estimate: Estimate) -> SplitTable:
    """Return times, and their shares of the stage's micro-batch time; gradient sync and optimizer come once a step."""
    stages, rows = estimate.stages, []
    for name in stages[0].time_terms_s:
        terms = [(stage.time_terms_s[name], stage.time_s) for stage in stages]
        if name in STEP_TERMS:
            rows.append((f"{name} (once a step)", *(f"{time_s * 1e3:.3f}" for time_s, _ in terms)))
        else:
            rows.append((name, *(f"{time_s * 1e3:.3f} {_share(time_s, whole)}" for time_s, whole in terms)))
    last = [("microbatch", *(f"{stage.time_s * 1e3:.3f}  100%" for stage in stages))]
    return table("time in ms, and share of a microbatch", _stage_headings(estimate), rows, last)


def _memory_table(estimate: Estimate, budgets_bytes: Sequence[int] | None) -> SplitTable:
    stages, rows = estimate.stages, []
    for name in stages[0].memory_terms_bytes:
        terms = [(stage.memory_terms_bytes[name], stage.memory_bytes) for stage in stages]
        rows.append((name, *(f"{term / MIB:.2f} {_share(term, whole)}" for term, whole in terms)))
    last = [("peak", *(f"{stage.memory_bytes / MIB:.2f}  100%" for stage in stages))]
    if budgets_bytes is not None:
        left = (budget - stage.memory_bytes for budget, stage in zip(budgets_bytes, stages, strict=True))
        last.append(("budget", *(f"{budget / MIB:.2f}  {'':4}" for budget in budgets_bytes)))
        last.append(("left", *(f"{room / MIB:.2f}  {'':4}" for room in left)))
    return table("memory of a rank in MiB, and share", _stage_headings(estimate), rows, last)


def _stage_headings(estimate: Estimate) -> list[str]:
    return ["term", *(f"stage {index}" for index in range(len(estimate.stages)))]


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:5.0%}"


def sample_s(plan: Plan, estimate: Estimate) -> float:
    """Return the simulated seconds of a step for each of its samples."""
    return estimate.simulated_step_time_s / plan.global_batch_size


def _runner_up(other: RunnerUp, estimate: Estimate) -> tuple[str, ...]:
    step_s = other.estimate.simulated_step_time_s
    return (
        "\n  ".join(shape_and_runs(other.plan)),
        f"{step_s * 1e3:.3f}",
        f"{step_s / estimate.simulated_step_time_s - 1:+.1%}",
        *_memory_figures(other.estimate, estimate),
    )


def _answer_figures(result: SearchAnswer | Infeasible | BadInput, plan: Plan, estimate: Estimate) -> Sequence[str]:
    """Return time and memory, absolute and relative to the plan's; dashes if there is no plan."""
    if not isinstance(result, SearchAnswer):
        return ["-"] * 5
    other = result.chosen.evaluation.estimate
    return (
        f"{other.simulated_step_time_s * 1e3:.3f}",
        f"{other.samples_per_s:.6g}",
        f"{sample_s(result.chosen.plan, other) / sample_s(plan, estimate) - 1:+.1%}",
        *_memory_figures(other, estimate),
    )


def _memory_figures(other: Estimate, estimate: Estimate) -> tuple[str, str]:
    return f"{other.memory_bytes / MIB:.1f}", f"{other.memory_bytes / estimate.memory_bytes - 1:+.1%}"


def _words(result: SearchAnswer | Infeasible | BadInput, plan: Plan) -> str:
    """Return a result in one line."""
    if isinstance(result, BadInput):
        return f"no plan: {result}"
    if isinstance(result, Infeasible):
        more = "" if result.exact else "more than "
        return f"no plan fits, the leanest exceeds the budget by {more}{result.missing_bytes} bytes a rank"
    chosen = result.chosen.plan
    words = "this plan" if _decision(chosen) == _decision(plan) else "; ".join(shape_and_runs(chosen))
    return f"(the best so far) {words}" if result.stopped else words


def _decision(plan: Plan) -> tuple[object, ...]:
    """Return a plan's decisions, whatever its cluster and name."""
    shape = plan.global_batch_size, plan.num_microbatches, plan.schedule
    return plan.stages, plan.embedding, plan.layers, plan.head, shape


class Pair(NamedTuple):
    """One number for each of two plans."""

    here: float
    there: float

    @property
    def gain(self) -> float:
        """Return the second number minus the first."""
        return self.there - self.here


class TermChange(NamedTuple):
    """A term of both plans, summed over the pipeline stages, and on each plan's slowest or fullest stage."""

    term: str
    together: Pair
    binding: Pair


def time_changes(plan: Plan, estimate: Estimate, other: Plan, there: Estimate) -> tuple[TermChange, ...]:
    """Return changes in seconds of a step, all microbatches together."""
    slowest = ([stage.time_s for stage in each.stages] for each in (estimate, there))
    return _changes(_seconds(plan, estimate), _seconds(other, there), *(times.index(max(times)) for times in slowest))


def memory_changes(estimate: Estimate, there: Estimate) -> tuple[TermChange, ...]:
    """Return changes in bytes of one rank of a stage."""
    terms, others = ([stage.memory_terms_bytes for stage in each.stages] for each in (estimate, there))
    peaks = ([stage.memory_bytes for stage in each.stages] for each in (estimate, there))
    return _changes(terms, others, *(sizes.index(max(sizes)) for sizes in peaks))


def plan_differences(plan: Plan, other: Plan) -> tuple[str, ...]:
    """Return the decisions in which two plans differ, one per line; strategies with the same effect count as equal.

    Raises ValueError for plans of different models.
    """
    if plan.model != other.model:
        raise ValueError(f"models {plan.model.name} and {other.model.name} differ")
    lines = [
        f"{field}: {_value(plan, field)} → {_value(other, field)}"
        for field in _FIELDS
        if getattr(plan, field) != getattr(other, field)
    ]
    lines += _cut_differences(plan, other)
    ranks, others = ([len(stage.ranks) for stage in each.stages] for each in (plan, other))
    if ranks != others and len(set(ranks)) + len(set(others)) > 2:
        lines.append(f"ranks of the pipeline stages: {' + '.join(map(str, ranks))} → {' + '.join(map(str, others))}")
    for name, here, there in (("embedding", plan.embedding, other.embedding), ("head", plan.head, other.head)):
        if _effect(here) != _effect(there):
            lines.append(f"{name}: {strategy_words(here)} → {strategy_words(there)}")
    return (*lines, *_layer_differences(plan, other))


def difference(plan: Plan, estimate: Estimate, other: Plan, there: Estimate) -> RenderableType:
    """Return the differences of two plans: both step times, and tables of what each term gains or loses."""
    lines = plan_differences(plan, other) or ("nothing that is done",)
    times = [
        f"{name}: {each.simulated_step_time_s * 1e3:.3f} ms a step, {each.samples_per_s:.6g} samples/s, "
        f"closed form {each.objective_s * 1e3:.3f} ms, {each.memory_bytes / MIB:.2f} MiB"
        for name, each in (("this plan", estimate), ("the other", there))
    ]
    gain = sample_s(other, there) / sample_s(plan, estimate) - 1
    return Group(
        Lines([f"plan {other.name} against this one differs in", *(f"  {line}" for line in lines)]),
        Lines([*times, f"the other takes {gain:+.1%} time a sample"]),
        _table("ms a step", "slowest", time_changes(plan, estimate, other, there), 1e-3, 3),
        _table("MiB of a rank", "fullest", memory_changes(estimate, there), MIB, 2),
    )


def _seconds(plan: Plan, estimate: Estimate) -> list[dict[str, float]]:
    """Return the seconds of a whole step by pipeline stage and term."""
    return [
        {
            name: time_s * (1 if name in STEP_TERMS else plan.num_microbatches)
            for name, time_s in stage.time_terms_s.items()
        }
        for stage in estimate.stages
    ]


def _changes(
    stages: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]], here: int, there: int
) -> tuple[TermChange, ...]:
    return tuple(
        TermChange(
            name,
            Pair(sum(stage[name] for stage in stages), sum(stage[name] for stage in others)),
            Pair(stages[here][name], others[there][name]),
        )
        for name in stages[0]
    )


def _table(unit: str, binding: str, changes: Sequence[TermChange], scale: float, digits: int) -> SplitTable:
    """Return a table of this plan's terms, and the other plan's gains or losses."""

    def row(change: TermChange) -> list[str]:
        pairs = change.together, change.binding
        cells = [(f"{p.here / scale:.{digits}f}", f"{p.gain / scale:+.{digits}f}") for p in pairs]
        return [change.term, *cells[0], *cells[1]]

    columns = zip(*((change.together, change.binding) for change in changes), strict=True)
    total = TermChange("together", *(Pair(*map(sum, zip(*pairs, strict=True))) for pairs in columns))
    headings = ("term", "all stages", "other", f"{binding} stage", "other")
    return table(f"{unit}, of this plan, and what the other adds", headings, map(row, changes), [row(total)])


def _value(plan: Plan, field: str) -> object:
    if field == "cluster":
        return f"{plan.cluster.name} of {plan.cluster.num_devices} devices"
    if field == "precision":
        return plan.precision.text
    if field == "expert_placement":
        return f"{sum(map(bool, plan.expert_placement or ()))} layers"
    return getattr(plan, field)


def _effect(strategy: Strategy) -> tuple[object, ...]:
    """Return the effect of a strategy, equal for all equivalent strategies."""
    return effective(strategy), strategy.recompute if isinstance(strategy, LayerStrategy) else None


def _cut_differences(plan: Plan, other: Plan) -> Iterator[str]:
    """Yield a line for the number of pipeline stages, and one for their layers."""
    if len(plan.stages) != len(other.stages):
        yield f"pipeline stages: {len(plan.stages)} → {len(other.stages)}"
    if [stage.layers for stage in plan.stages] != [stage.layers for stage in other.stages]:
        yield f"layers of a pipeline stage: {_cut_words(plan)} → {_cut_words(other)}"


def _cut_words(plan: Plan) -> str:
    """Return the numbers of layers of each stage, or of each chunk if stages are interleaved: 2, 1 + 1, 2."""
    counts = [", ".join(str(high - low) for low, high in stage.layers) for stage in plan.stages]
    return counts[0] if len(set(counts)) == 1 else " + ".join(counts)


def _layer_differences(plan: Plan, other: Plan) -> Iterator[str]:
    """Yield a line for each run of neighbouring layers with the same difference of strategies."""
    effects = [(_effect(here), _effect(there)) for here, there in zip(plan.layers, other.layers, strict=True)]
    for (here, there), run in groupby(range(len(plan.layers)), key=effects.__getitem__):
        low, *others = run
        if here != there:
            words = f"{strategy_words(plan.layers[low])} → {strategy_words(other.layers[low])}"
            yield f"{range_words(low, low + len(others) + 1)}: {words}"
