"""Plans and strategies in words."""

from itertools import groupby

from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import LayerStrategy, Recompute, SequenceParallel, Strategy

__all__ = ["MIB", "headline", "layer_runs", "range_words", "shape_words", "stage_lines", "strategy_words"]

MIB = 2**20


def strategy_words(strategy: Strategy) -> str:
    """A strategy in a few words, such as `tp1 x dp2 zero3 recompute full`."""
    words = [f"tp{strategy.tp_size}" + ("" if strategy.tp_consecutive else " strided")]
    words.append(f"x dp{strategy.dp_size}")
    ulysses = strategy.sequence_parallel is SequenceParallel.ULYSSES
    if strategy.dp_size > 1 or ulysses:
        words.append(strategy.data_parallel)
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
    """Pipeline degree, microbatches and schedule, such as `pp2, 4 microbatches, 1f1b`."""
    return f"pp{len(plan.stages)}, {plan.num_microbatches} microbatch(es), {plan.schedule}"


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
