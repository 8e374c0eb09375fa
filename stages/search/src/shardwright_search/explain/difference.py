"""The differences of two plans for one model, and the terms of time and memory that gain or lose by them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright_formats.display.plan_words import range_words, strategy_words
from shardwright_formats.semantics.canonical import effective
from shardwright_formats.types import MIB, Estimate, LayerStrategy, Plan, Strategy
from shardwright_search.explain.tables import STEP_TERMS, sample_s, table

_FIELDS = (
    "cluster", "global_batch_size", "num_microbatches", "schedule", "gradient_reduction", "precision", "attention",
    "fused", "compile",
)  # fmt: skip


class Pair(NamedTuple):
    """A number for each of two plans."""

    here: float
    there: float

    @property
    def gain(self) -> float:
        """Return the second less the first."""
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
    """Return the differing decisions of two plans, a line each; spellings that do the same are no difference.

    Raises ValueError for plans of different models.
    """
    if plan.model != other.model:
        raise ValueError(f"models {plan.model.name} and {other.model.name} differ")
    lines = [
        f"{field}: {_value(plan, field)} → {_value(other, field)}"
        for field in _FIELDS
        if getattr(plan, field) != getattr(other, field)
    ]
    if len(plan.stages) != len(other.stages):
        lines.append(f"pipeline stages: {len(plan.stages)} → {len(other.stages)}")
    ranks, others = ([len(stage.ranks) for stage in each.stages] for each in (plan, other))
    if ranks != others and len(set(ranks)) + len(set(others)) > 2:
        lines.append(f"ranks of the pipeline stages: {' + '.join(map(str, ranks))} → {' + '.join(map(str, others))}")
    for name, here, there in (("embedding", plan.embedding, other.embedding), ("head", plan.head, other.head)):
        if _effect(here) != _effect(there):
            lines.append(f"{name}: {strategy_words(here)} → {strategy_words(there)}")
    return (*lines, *_layer_differences(plan, other))


def difference(plan: Plan, estimate: Estimate, other: Plan, there: Estimate) -> RenderableType:
    """Return the differences of two plans, both step times, and tables of what each term gains or loses."""
    lines = plan_differences(plan, other) or ("nothing that is done",)
    times = [
        f"{name}: {each.simulated_step_time_s * 1e3:.3f} ms a step, {each.samples_per_s:.6g} samples/s, "
        f"closed form {each.objective_s * 1e3:.3f} ms, {each.memory_bytes / MIB:.2f} MiB"
        for name, each in (("this plan", estimate), ("the other", there))
    ]
    gain = sample_s(other, there) / sample_s(plan, estimate) - 1
    return Group(
        Text("\n".join([f"plan {other.name} against this one differs in", *(f"  {line}" for line in lines)])),
        Text("\n".join([*times, f"the other takes {gain:+.1%} time a sample"])),
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


def _table(unit: str, binding: str, changes: Sequence[TermChange], scale: float, digits: int) -> Table:
    """Return a table of this plan's terms, and what the other gains or loses."""

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
    return getattr(plan, field)


def _effect(strategy: Strategy) -> tuple[object, ...]:
    """Return the effect of a strategy, however it is spelled."""
    return effective(strategy), strategy.recompute if isinstance(strategy, LayerStrategy) else None


def _stage_of_layers(plan: Plan) -> list[int]:
    return [
        number
        for layer in range(len(plan.layers))
        for number, stage in enumerate(plan.stages)
        if any(low <= layer < high for low, high in stage.layers)
    ]


def _layer_differences(plan: Plan, other: Plan) -> Iterator[str]:
    """Yield a line for neighbouring layers that differ alike; it names the pipeline stage where that changes."""
    stages = list(zip(_stage_of_layers(plan), _stage_of_layers(other), strict=True))
    effects = [(_effect(here), _effect(there)) for here, there in zip(plan.layers, other.layers, strict=True)]
    for (effect, moves), run in groupby(range(len(plan.layers)), key=lambda i: (effects[i], stages[i])):
        low, *others = run
        if effect[0] == effect[1] and moves[0] == moves[1]:
            continue
        sides = [
            strategy_words(each.layers[low]) + (f" in stage {stage}" if moves[0] != moves[1] else "")
            for each, stage in zip((plan, other), moves, strict=True)
        ]
        yield f"{range_words(low, low + len(others) + 1)}: {' → '.join(sides)}"
