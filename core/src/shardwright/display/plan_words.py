"""Plans and strategies in words, for printed output and reports."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from msgspec import UNSET

from shardwright.display.timeline import idle_s
from shardwright.optimizers.registry import ADAMW
from shardwright.plan.axes import axes_of
from shardwright.types import HEAD, Estimate, LayerStrategy, Plan, Recompute, SequenceParallel, Strategy


def strategy_words(strategy: Strategy) -> str:
    """Return a strategy in a few words, such as `tp1 x dp2 zero3 recompute full`."""
    return " ".join(_strategy_parts(strategy))


def range_words(low: int, high: int) -> str:
    """Return the name of the layers from `low` to `high`, exclusive."""
    return _layers_words(range(low, high))


def layer_runs(plan: Plan, low: int, high: int) -> tuple[str, ...]:
    """Return the strategies of the layers from `low` to `high`, exclusive, each with the layers that have it.

    If block types alternate, layers with the same strategy are shown together, whatever their types.
    """
    types = [kind for kind, _ in groupby(plan.model.layers)]
    shown = plan.layers if len(types) == len(set(types)) else [strategy_words(layer) for layer in plan.layers]
    alike: dict[object, list[int]] = {}
    for i in range(low, high):
        alike.setdefault(shown[i], []).append(i)
    return tuple(f"{_layers_words(layers)}: {strategy_words(plan.layers[layers[0]])}" for layers in alike.values())


def _layers_words(layers: Sequence[int]) -> str:
    """Return the name of layers with ascending numbers, such as `layers 0-2, 5`."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"layer {named}" if len(layers) == 1 else f"layers {named}"


def shape_words(plan: Plan) -> str:
    """Return pipeline degree, micro-batches and schedule, such as `pp2, 4 microbatch(es), 1f1b`.

    Includes the stages' numbers of ranks if these differ.
    """
    widths = [len(stage.ranks) for stage in plan.stages]
    ranks = f" of {' + '.join(map(str, widths))} ranks" if len(set(widths)) > 1 else ""
    return (
        f"pp{len(plan.stages)}{ranks}, {plan.num_microbatches} microbatch(es), {plan.schedule}{optimizer_words(plan)}"
    )


def headline(plan: Plan) -> str:
    """Return the plan's name, model, cluster and shape."""
    return (
        f"plan {plan.name}: {plan.model.name} on {plan.cluster.name}, batch {plan.global_batch_size} in "
        f"{plan.num_microbatches} microbatches of {plan.microbatch_samples}, "
        f"{len(plan.stages)} pipeline stage(s), {plan.schedule}{optimizer_words(plan)}{_placement_words(plan)}"
    )


def optimizer_words(plan: Plan) -> str:
    """Return the words about a plan's optimizer; empty for AdamW, the default."""
    return "" if plan.optimizer == ADAMW.name else f", optimizer {plan.optimizer}"


def _placement_words(plan: Plan) -> str:
    placed = sum(map(bool, plan.expert_placement or ()))
    return f", experts of {placed} layer(s) placed" if placed else ""


def stage_lines(plan: Plan) -> list[str]:
    """Return the ranks of each pipeline stage and the strategies of its layers, embedding and head, one per line."""
    lines = []
    for index, stage in enumerate(plan.stages):
        parts = [f"embedding: {strategy_words(plan.embedding)}"] if index == 0 else []
        for low, high in stage.layers:
            parts += layer_runs(plan, low, high)
        if index == plan.stage_of(HEAD):
            parts.append(f"head: {strategy_words(plan.head)}")
        ranks = f"ranks {stage.ranks[0]}-{stage.ranks[-1]}" if len(stage.ranks) > 1 else f"rank {stage.ranks[0]}"
        lines += [f"  stage {index} ({ranks})", *(f"    {part}" for part in parts)]
    return lines


def shape_and_runs(plan: Plan) -> list[str]:
    """Return a plan's shape and the strategies of its layers, one per line."""
    return [
        shape_words(plan),
        *(run for stage in plan.stages for low, high in stage.layers for run in layer_runs(plan, low, high)),
    ]


def layers_summary(plan: Plan) -> str:
    """Return how many layers have which strategy, in order and by stage, after what is common to all layers."""
    parts = [tuple(_strategy_parts(layer)) for layer in plan.layers]
    shared = [part for part in parts[0] if len(set(parts)) > 1 and all(part in others for others in parts)]
    stages = []
    for stage in plan.stages:
        layers = [parts[i] for low, high in stage.layers for i in range(low, high)]
        texts = [" ".join(part for part in layer if part not in shared) or "as is" for layer in layers]
        stages.append(" + ".join(f"{len(list(equal))} {text}" for text, equal in groupby(texts)))
    counts = ((len(list(equal)), text) for text, equal in groupby(stages))
    words = " | ".join(text if count == 1 else f"{count} stages of {text}" for count, text in counts)
    return f"all {' '.join(shared)}; {words}" if shared else words


def _strategy_parts(strategy: Strategy) -> Iterator[str]:
    """Yield the parts of a strategy's words; parts that do not apply are left out."""
    axes = axes_of(strategy)
    context = f" x cp{strategy.cp_size}" if axes.shares_context else ""
    yield f"tp{strategy.tp_size}{'' if strategy.tp_consecutive else ' strided'}{context} x dp{strategy.dp_size}"
    if axes.dense.states.size > 1:
        yield strategy.data_parallel + (f" in groups of {strategy.shard_size}" if strategy.shard_size else "")
    if strategy.sequence_parallel is not SequenceParallel.NONE:
        yield strategy.sequence_parallel
    if isinstance(strategy, LayerStrategy) and axes.shares_context:
        yield f"context {strategy.context}"
    if isinstance(strategy, LayerStrategy) and (grid := strategy.expert_grid) is not None:
        held = axes_of(grid).dense
        kind = f" {grid.data_parallel}" if held.states.size > 1 else ""
        features = f" etp{held.tensor.size}" if held.tensor.size > 1 else ""
        groups = f" in groups of {grid.shard_size}" if grid.shard_size else ""
        yield f"experts ep{held.experts.size}{features}{kind}{groups}"
    if isinstance(strategy, LayerStrategy) and strategy.recompute is not Recompute.NONE:
        yield f"recompute {strategy.recompute}"
    if isinstance(strategy, LayerStrategy) and strategy.offload is not UNSET:
        yield f"offload {strategy.offload}"


# Utilization of each node type of a mixed cluster in a step: which type is the bottleneck, how long each idles, and
# what that costs.


class NodeTypeUse(NamedTuple):
    """Use of one node type by its stages; a stage that spans several types counts for each."""

    name: str
    stages: int
    ranks: int
    busiest_s: float
    """The longest time in which one of the type's stages computes or reduces."""
    idle_share: float
    """Idle time of the type's ranks, as a share of their time until the last stage is done."""
    idle_usd: float | None
    """Price of the idle time in a step; None if the type has no price."""


def node_type_uses(plan: Plan, estimate: Estimate) -> tuple[NodeTypeUse, ...]:
    """Return the use of each node type with a stage, in the order of the ranks; empty for one type or no timeline."""
    types = plan.cluster.node_type_of_rank
    if len(set(types)) == 1 or not estimate.timeline:
        return ()
    end_s = max(event.end_s for event in estimate.timeline)
    idle_times = dict[str, list[tuple[int, float]]]()
    for number, stage in enumerate(plan.stages):
        idle = idle_s((event for event in estimate.timeline if event.stage == number), number, end_s)
        for name, ranks in Counter(types[rank] for rank in stage.ranks).items():
            idle_times.setdefault(name, []).append((ranks, idle))
    order = [name for name in dict.fromkeys(types) if name in idle_times]
    return tuple(_use(plan, name, idle_times[name], end_s) for name in order)


def _use(plan: Plan, name: str, stages: list[tuple[int, float]], end_s: float) -> NodeTypeUse:
    """Return the use of a node type; `stages`: the number of ranks and the idle time of each stage on it."""
    ranks, idle_rank_s = sum(width for width, _ in stages), sum(width * idle for width, idle in stages)
    node = plan.cluster.node_types[name]
    usd = None if node.usd_per_hour is None else idle_rank_s / 3600 * node.usd_per_hour / node.devices_per_node
    busiest_s = end_s - min(idle for _, idle in stages)
    return NodeTypeUse(name, len(stages), ranks, busiest_s, idle_rank_s / (ranks * end_s), usd)


def binding(uses: Sequence[NodeTypeUse]) -> NodeTypeUse:
    """Return the use of the bottleneck: the node type whose busiest stage takes the longest."""
    return max(uses, key=lambda use: use.busiest_s)
