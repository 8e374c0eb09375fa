"""Why a plan: its terms by pipeline stage, what binds, and what the runners-up would cost."""

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright_formats.plan import Plan
from shardwright_formats.prediction import Estimate, Prediction, RunnerUp
from shardwright_formats.strategy import LayerStrategy, Recompute, SequenceParallel, Strategy

__all__ = ["explanation", "layer_runs", "plan_summary", "show", "strategy_words"]

_MIB = 2**20
_STEP_TERMS = ("gradient_sync", "optimizer")


def show(what: RenderableType) -> None:
    """Print on standard output."""
    Console(highlight=False, soft_wrap=True).print(what)


def strategy_words(strategy: Strategy) -> str:
    """A strategy in a few words, such as `tp1 x dp2 zero3 recompute full`."""
    words = [f"tp{strategy.tp_size}" + ("" if strategy.tp_consecutive else " strided")]
    words.append(f"x dp{strategy.dp_size}")
    if strategy.dp_size > 1:
        words.append(strategy.data_parallel)
    if strategy.sequence_parallel is not SequenceParallel.NONE:
        words.append(strategy.sequence_parallel)
    if isinstance(strategy, LayerStrategy) and strategy.recompute is not Recompute.NONE:
        words.append(f"recompute {strategy.recompute}")
    return " ".join(words)


def layer_runs(plan: Plan, low: int, high: int) -> tuple[str, ...]:
    """The strategies of layers `low` to `high`, exclusive, with neighbours of one strategy told together."""
    found = []
    for strategy, run in groupby(range(low, high), key=lambda i: plan.layers[i]):
        numbers = list(run)
        which = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}"
        found.append(f"{which}: {strategy_words(strategy)}")
    return tuple(found)


def plan_summary(plan: Plan, prediction: Prediction) -> RenderableType:
    """The plan, its predicted time and memory, and the proof in a few lines."""
    estimate, proof = prediction.estimate, prediction.proof
    lines = [
        _headline(plan),
        *_stage_lines(plan),
        f"predicted {estimate.simulated_step_time_s * 1e3:.3f} ms a step, {estimate.samples_per_s:.6g} samples/s",
        _memory_line(estimate, prediction.memory_budget_bytes),
    ]
    if proof is not None:
        lines.append(
            f"proof: {proof.objective} {proof.objective_s * 1e3:.3f} ms, no plan of the space is below "
            f"{proof.objective_bound_s * 1e3:.3f} ms (gap {proof.gap:.2%}); {proof.solved} of {proof.examined} cases "
            "were solved, the bounds ruled out the others"
        )
    return Text("\n".join([*lines, *(f"warning: {warning}" for warning in prediction.warnings)]))


def explanation(
    plan: Plan,
    estimate: Estimate,
    warnings: Sequence[str],
    budget_bytes: int | None,
    runners_up: Sequence[RunnerUp],
) -> RenderableType:
    """Tables of time and memory by pipeline stage, what binds, and the runners-up."""
    parts: list[RenderableType] = [
        Text("\n".join([_headline(plan), *_stage_lines(plan)])),
        _time_table(estimate),
        _memory_table(estimate, budget_bytes),
        Text("\n".join([*_binding(plan, estimate, budget_bytes), *(f"warning: {w}" for w in warnings)])),
    ]
    if runners_up:
        parts.append(_runners_up_table(estimate, runners_up))
    return Group(*parts)


def _headline(plan: Plan) -> str:
    return (
        f"plan {plan.name}: {plan.model.name} on {plan.cluster.name}, batch {plan.global_batch_size} in "
        f"{plan.num_microbatches} microbatches of {plan.microbatch_samples}, "
        f"{len(plan.stages)} pipeline stage(s), {plan.schedule}"
    )


def _stage_lines(plan: Plan) -> list[str]:
    lines = []
    for index, stage in enumerate(plan.stages):
        parts = [f"embedding: {strategy_words(plan.embedding)}"] if index == 0 else []
        for low, high in stage.layers:
            parts += layer_runs(plan, low, high)
        if index == len(plan.stages) - 1:
            parts.append(f"head: {strategy_words(plan.head)}")
        ranks = f"ranks {stage.ranks[0]}-{stage.ranks[-1]}" if len(stage.ranks) > 1 else f"rank {stage.ranks[0]}"
        lines += [f"  stage {index} ({ranks})", *(f"    {part}" for part in parts)]
    return lines


def _memory_line(estimate: Estimate, budget_bytes: int | None) -> str:
    line = f"memory of the fullest rank {estimate.memory_bytes / _MIB:.1f} MiB"
    if budget_bytes is None:
        return line
    return f"{line} of {budget_bytes / _MIB:.1f} MiB ({estimate.memory_bytes / budget_bytes:.1%})"


def _stage_table(title: str, stages: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("term")
    for index in range(stages):
        table.add_column(f"stage {index}", justify="right")
    return table


def _time_table(estimate: Estimate) -> Table:
    """Shares are of the stage's time of a microbatch; gradient sync and optimizer come once a step."""
    table = _stage_table("time in ms, and share of a microbatch", len(estimate.stages))
    for name in estimate.stages[0].time_terms_s:
        once = name in _STEP_TERMS
        cells = []
        for stage in estimate.stages:
            time_s = stage.time_terms_s[name]
            cells.append(f"{time_s * 1e3:.3f}" + ("" if once else f" {_share(time_s, stage.time_s)}"))
        table.add_row(f"{name} (once a step)" if once else name, *cells)
    table.add_section()
    table.add_row("microbatch", *(f"{stage.time_s * 1e3:.3f}  100%" for stage in estimate.stages))
    return table


def _memory_table(estimate: Estimate, budget_bytes: int | None) -> Table:
    table = _stage_table("memory of a rank in MiB, and share", len(estimate.stages))
    for name in estimate.stages[0].memory_terms_bytes:
        cells = [(s.memory_terms_bytes[name], s.memory_bytes) for s in estimate.stages]
        table.add_row(name, *(f"{held / _MIB:.2f} {_share(held, whole)}" for held, whole in cells))
    table.add_section()
    table.add_row("peak", *(f"{stage.memory_bytes / _MIB:.2f}  100%" for stage in estimate.stages))
    if budget_bytes is not None:
        table.add_row("budget", *(f"{budget_bytes / _MIB:.2f}  {'':4}" for _ in estimate.stages))
        table.add_row("left", *(f"{(budget_bytes - s.memory_bytes) / _MIB:.2f}  {'':4}" for s in estimate.stages))
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:5.0%}"


def _binding(plan: Plan, estimate: Estimate, budget_bytes: int | None) -> list[str]:
    times = [stage.time_s for stage in estimate.stages]
    slowest = times.index(max(times))
    held = [stage.memory_bytes for stage in estimate.stages]
    fullest = held.index(max(held))
    fill_s = sum(times) - max(times)
    lines = [
        f"step: simulated {estimate.simulated_step_time_s * 1e3:.3f} ms, at least "
        f"{estimate.simulated_lower_bound_s * 1e3:.3f}, closed form {estimate.objective_s * 1e3:.3f}",
        f"time: stage {slowest} is the slowest, {plan.num_microbatches} x {max(times) * 1e3:.3f} ms; "
        f"filling and draining the pipeline takes {fill_s * 1e3:.3f} ms ({fill_s / estimate.objective_s:.1%})",
    ]
    full = f"memory: stage {fullest} is the fullest, {held[fullest] / _MIB:.2f} MiB"
    if budget_bytes is not None:
        full += f", {held[fullest] / budget_bytes:.1%} of the budget"
    return [*lines, full]


def _runners_up_table(estimate: Estimate, runners_up: Sequence[RunnerUp]) -> Table:
    """The plans the chosen one was preferred to, against it."""
    table = Table(title="runners-up, against this plan", title_justify="left")
    for heading in ("plan", "ms a step", "time", "MiB", "memory"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for runner_up in runners_up:
        plan, other = runner_up.plan, runner_up.estimate
        runs = [run for stage in plan.stages for low, high in stage.layers for run in layer_runs(plan, low, high)]
        words = f"pp{len(plan.stages)}, {plan.num_microbatches} microbatches, {plan.schedule}"
        table.add_row(
            "\n".join([words, *(f"  {run}" for run in runs)]),
            f"{other.simulated_step_time_s * 1e3:.3f}",
            f"{other.simulated_step_time_s / estimate.simulated_step_time_s - 1:+.1%}",
            f"{other.memory_bytes / _MIB:.1f}",
            f"{other.memory_bytes / estimate.memory_bytes - 1:+.1%}",
        )
    return table
