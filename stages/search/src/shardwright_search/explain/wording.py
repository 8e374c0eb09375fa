"""Plans and strategies in words."""

from itertools import groupby

from shardwright_formats.types import MIB
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.prediction import Estimate, Prediction
from shardwright_formats.types.strategy import LayerStrategy, Recompute, SequenceParallel, Strategy


def strategy_words(strategy: Strategy) -> str:
    """A strategy in a few words, such as `tp1 x dp2 zero3 recompute full`."""
    words = [f"tp{strategy.tp_size}" + ("" if strategy.tp_consecutive else " strided")]
    words.append(f"x dp{strategy.dp_size}")
    ulysses = strategy.sequence_parallel is SequenceParallel.ULYSSES
    if strategy.dp_size > 1 or ulysses:
        words.append(strategy.data_parallel + (f" in groups of {strategy.shard_size}" if strategy.shard_size else ""))
    if strategy.sequence_parallel is not SequenceParallel.NONE:
        words.append(strategy.sequence_parallel)
    if isinstance(strategy, LayerStrategy) and strategy.recompute is not Recompute.NONE:
        words.append(f"recompute {strategy.recompute}")
    return " ".join(words)


def range_words(low: int, high: int) -> str:
    """Layers `low` to `high`, exclusive."""
    return f"layer {low}" if high - low == 1 else f"layers {low}-{high - 1}"


def layer_runs(plan: Plan, low: int, high: int) -> tuple[str, ...]:
    """The strategies of layers `low` to `high`, exclusive, with neighbours of one strategy told together."""
    found = []
    for strategy, run in groupby(range(low, high), key=lambda i: plan.layers[i]):
        numbers = list(run)
        found.append(f"{range_words(numbers[0], numbers[-1] + 1)}: {strategy_words(strategy)}")
    return tuple(found)


def shape_words(plan: Plan) -> str:
    """Pipeline degree, microbatches and schedule, such as `pp2, 4 microbatches, 1f1b`, and ranks where these differ."""
    widths = [len(stage.ranks) for stage in plan.stages]
    ranks = f" of {' + '.join(map(str, widths))} ranks" if len(set(widths)) > 1 else ""
    return f"pp{len(plan.stages)}{ranks}, {plan.num_microbatches} microbatch(es), {plan.schedule}"


def headline(plan: Plan) -> str:
    """The plan's name, model, cluster and shape."""
    return (
        f"plan {plan.name}: {plan.model.name} on {plan.cluster.name}, batch {plan.global_batch_size} in "
        f"{plan.num_microbatches} microbatches of {plan.microbatch_samples}, "
        f"{len(plan.stages)} pipeline stage(s), {plan.schedule}"
    )


def stage_lines(plan: Plan) -> list[str]:
    """The ranks of each pipeline stage and the strategies of what it holds."""
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


def runs_words(plan: Plan) -> list[str]:
    """A plan's shape, and the strategies of its layers."""
    return [
        shape_words(plan),
        *(run for stage in plan.stages for own in stage.layers for run in layer_runs(plan, *own)),
    ]


def plan_summary(plan: Plan, prediction: Prediction) -> str:
    """The plan, its predicted time and memory, and the proof in a few lines."""
    estimate, proof = prediction.estimate, prediction.proof
    lines = [
        headline(plan),
        *stage_lines(plan),
        f"predicted {estimate.simulated_step_time_s * 1e3:.3f} ms a step, {estimate.samples_per_s:.6g} samples/s",
        f"simulated gap {_gap(estimate):.2%}: no order of its passes takes less than "
        f"{estimate.simulated_lower_bound_s * 1e3:.3f} ms",
        _memory_line(estimate, prediction.memory_budget_bytes),
    ]
    if proof is not None:
        below = f"no plan of the space is below {proof.objective_bound_s * 1e3:.3f} ms (gap {proof.gap:.2%})"
        rest = "some others are open" if proof.gap else "the bounds ruled out the others"
        lines.append(
            f"proof: {proof.objective} {proof.objective_s * 1e3:.3f} ms, "
            f"{below if proof.objective_bound_s else 'no bound is known'}; "
            f"{proof.solved} of {proof.examined} cases were solved, {rest}"
        )
        lines += [] if proof.certificate is None else [f"certificate: {proof.certificate}"]
    if prediction.robust:
        own = max(prediction.robust, key=lambda one: one.regret)
        nominal = max(prediction.robust, key=lambda one: one.nominal_regret)
        lines.append(
            f"robust: over {len(prediction.robust)} scenarios never more than {own.regret:.2%} above the best plan "
            f"({own.scenario}); the plan for the profile as it is: {nominal.nominal_regret:.2%} ({nominal.scenario})"
        )
    return "\n".join([*lines, *(f"warning: {warning}" for warning in prediction.warnings)])


def sample_s(plan: Plan, estimate: Estimate) -> float:
    """Simulated time of a step for each of its samples."""
    return estimate.simulated_step_time_s / plan.global_batch_size


def _gap(estimate: Estimate) -> float:
    """By which share the simulated step is above what any order of the plan's passes takes."""
    bound_s = estimate.simulated_lower_bound_s
    return estimate.simulated_step_time_s / bound_s - 1 if bound_s else 0.0


def _memory_line(estimate: Estimate, budget_bytes: int | None) -> str:
    line = f"memory of the fullest rank {estimate.memory_bytes / MIB:.1f} MiB"
    if budget_bytes is None:
        return line
    return f"{line} of {budget_bytes / MIB:.1f} MiB ({estimate.memory_bytes / budget_bytes:.1%})"
