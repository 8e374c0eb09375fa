"""Why a plan is no faster: the parts of its step, and whether memory keeps a faster choice out."""

from collections.abc import Iterator, Sequence
from itertools import product
from operator import sub, truediv
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.display.plan_words import range_words, strategy_words
from shardwright.io import BadInput
from shardwright.plan.axes import effective
from shardwright.plan.schedules.passes import Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.plan.schedules.schedule import step_time
from shardwright.types import MIB, RECOMPUTE_WHOLE, DataParallel, Estimate, LayerStrategy, Plan, Recompute
from shardwright_search.cost_model.layer import CostModel, picoseconds
from shardwright_search.cost_model.plan import Evaluation, evaluate
from shardwright_search.explain.tables import STEP_TERMS

_PER_SECOND = 1e12


class StepParts(NamedTuple):
    """The parts of the closed form of a step, in seconds."""

    slowest: int
    """The slowest pipeline stage."""
    bottleneck_s: float
    """Forward and backward of all microbatches on it."""
    fill_s: float
    """Time until the first microbatch has come there and the last one is back: the other stages' share."""
    end_s: float
    """Time after the last backward pass: the rest of the gradients' reduction, and the optimizer."""
    always_s: float
    """Time that no layer's strategy changes: the step's overhead, and gradients that layers share."""


class LayerAlternatives(NamedTuple):
    """Strategies that a layer may have instead, at its degrees."""

    data_parallel: Sequence[DataParallel] = tuple(DataParallel)
    recompute: Sequence[Recompute] = RECOMPUTE_WHOLE
    together: bool = False
    """True if all layers share one strategy, and change together."""


class Change(NamedTuple):
    """Another strategy for a layer, or for all, with the time that it saves and the memory by which it does not fit."""

    low: int
    high: int
    strategy: LayerStrategy
    saved_ps: int
    """Picoseconds of the closed form."""
    stage: int
    """The pipeline stage that would be fullest."""
    lacks_bytes: int
    """Bytes by which a rank of that stage exceeds its budget; 0 or less if it fits."""


def step_parts(plan: Plan, estimate: Estimate) -> StepParts:
    """Return the parts of the closed form, which add up to it exactly."""
    times = [picoseconds(stage.time_s) for stage in estimate.stages]
    end = max(picoseconds(sum(stage.time_terms_s[name] for name in STEP_TERMS)) for stage in estimate.stages)
    forms = schedule_of(plan.schedule).closed_forms(plan.num_microbatches, len(plan.stages[0].layers))
    hidden = [2 * picoseconds(stage.time_terms_s.get(str(Pass.WEIGHT), 0.0)) for stage in estimate.stages]
    hidden = list(map(min, hidden, times))
    total, bottleneck = sum(times) - sum(hidden), plan.num_microbatches * max(times)
    passes = step_time(forms, total, max(times), 0, max(hidden))
    always = picoseconds(estimate.objective_s) - passes - end
    parts = (bottleneck, passes - bottleneck, end, always)
    return StepParts(times.index(max(times)), *(part / _PER_SECOND for part in parts))


def faster_changes(
    plan: Plan, before: Evaluation, costs: CostModel, budgets_bytes: Sequence[int], choices: LayerAlternatives
) -> tuple[Change, ...]:
    """Return changes of one layer, or of all if they have one strategy, that reduce the closed form.

    Only data parallelism and recomputation change: the layer's degrees and the messages between layers stay. Strategies
    that the profile has no times for are left out. `budgets_bytes`: the budget of a rank of each stage.
    """
    total = len(plan.layers)
    groups = [(0, total)] if choices.together else [(i, i + 1) for i in range(total)]
    changes = []
    for low, high in groups:
        for other in _others(plan.layers[low], choices):
            layers = (replace(other, type=o.type) if low <= i < high else o for i, o in enumerate(plan.layers))
            try:
                after = evaluate(replace(plan, layers=tuple(layers)), costs.profiles, costs, timeline=False)
            except BadInput:
                continue
            if (saved := before.objective_ps - after.objective_ps) > 0:
                lacks = list(map(sub, (stage.memory_bytes for stage in after.estimate.stages), budgets_bytes))
                changes.append(Change(low, high, other, saved, lacks.index(max(lacks)), max(lacks)))
    return tuple(changes)


def fullest_stage(estimate: Estimate, budgets_bytes: Sequence[int] | None) -> int:
    """Return the pipeline stage that holds the largest share of its budget, or the most bytes without a budget."""
    held = [stage.memory_bytes for stage in estimate.stages]
    shares = list(map(truediv, held, budgets_bytes or (1,) * len(held)))
    return shares.index(max(shares))


def binding_lines(
    plan: Plan, estimate: Estimate, budgets_bytes: Sequence[int] | None, changes: Sequence[Change]
) -> list[str]:
    """Return lines on the slowest and the fullest pipeline stage, and on whether memory keeps the plan slow."""
    parts, held = step_parts(plan, estimate), [stage.memory_bytes for stage in estimate.stages]
    step_s, fullest = estimate.objective_s, fullest_stage(estimate, budgets_bytes)
    slowest_ms = estimate.stages[parts.slowest].time_s * 1e3
    named = (
        (f"stage {parts.slowest} is the slowest, {plan.num_microbatches} x {slowest_ms:.3f} ms", parts.bottleneck_s),
        ("filling and draining the pipeline", parts.fill_s),
        ("the end of the step (gradient_sync, optimizer)", parts.end_s),
        ("what every step takes", parts.always_s),
    )
    lines = [
        f"step: simulated {estimate.simulated_step_time_s * 1e3:.3f} ms, at least "
        f"{estimate.simulated_lower_bound_s * 1e3:.3f}, closed form {step_s * 1e3:.3f}, which is made of",
        *(f"  {name}: {time_s * 1e3:.3f} ms ({time_s / step_s:.1%})" for name, time_s in named),
    ]
    full = f"memory: stage {fullest} is the fullest, {held[fullest] / MIB:.2f} MiB"
    if budgets_bytes is None:
        return [*lines, full]
    return [*lines, f"{full}, {held[fullest] / budgets_bytes[fullest]:.1%} of the budget", *_memory_lines(changes)]


def _memory_lines(changes: Sequence[Change]) -> list[str]:
    """Return whether memory is the limit: the change that misses by the least, and one that could be made at once."""
    kept_out = [change for change in changes if change.lacks_bytes > 0]
    possible = [change for change in changes if change.lacks_bytes <= 0]
    if not kept_out:
        lines = ["memory does not bind: no faster data parallelism or recomputation of a layer is kept out by it"]
    else:
        least = min(kept_out, key=lambda change: (change.lacks_bytes, -change.saved_ps))
        lines = [
            f"memory binds: {_change_words(least)}, but exceeds the budget by {least.lacks_bytes} bytes a rank in "
            f"stage {least.stage}"
        ]
    if possible:
        most = max(possible, key=lambda change: change.saved_ps)
        lines.append(f"faster by the closed form, and fits: {_change_words(most)}")
    return lines


def _change_words(change: Change) -> str:
    layers = f"{range_words(change.low, change.high)} with {strategy_words(change.strategy)}"
    return f"{layers} would save {change.saved_ps / _PER_SECOND * 1e3:.3f} ms a step"


def _others(layer: LayerStrategy, choices: LayerAlternatives) -> Iterator[LayerStrategy]:
    """Yield the other strategies that the layer could have; strategies with the same effect only once."""
    for data_parallel, recompute in product(choices.data_parallel, choices.recompute):
        shard_size = 0 if data_parallel is DataParallel.DDP else layer.shard_size
        other = replace(layer, data_parallel=data_parallel, shard_size=shard_size, recompute=recompute)
        spelled = effective(other)
        if spelled.data_parallel is data_parallel and (spelled, recompute) != (effective(layer), layer.recompute):
            yield other
