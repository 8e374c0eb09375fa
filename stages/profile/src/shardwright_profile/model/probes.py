"""Probes: plans of models with few layers; the difference of two probes is the cost of one layer."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import asdict, replace

from shardwright.estimate.expert_profile import expert_keys, sparse_types
from shardwright.estimate.settings import ProfileSettings, block_types, formatted, misfit_of
from shardwright.io import BadInput
from shardwright.key import LayerKey
from shardwright.models.context import context_obstacle, gpu_format, recompute_kinds, ring_obstacle
from shardwright.models.mtp import mtp_layers
from shardwright.plan.axes import axes_of, layout_of, strategy_on
from shardwright.plan.communication import shares_experts
from shardwright.types.cluster import Cluster, NodeGroup
from shardwright.types.model import EMBEDDING, HEAD, Model
from shardwright.types.plan import (
    ContextProbe,
    ExpertProbe,
    GradientReduction,
    PipelineStage,
    Plan,
    Plans,
    Schedule,
    misfit,
)
from shardwright.types.strategy import (
    ContextParallel,
    DataParallel,
    ExpertStrategy,
    LayerStrategy,
    Recompute,
    RecomputedPart,
    SequenceParallel,
    Strategy,
)

NUM_MICROBATCHES = 3
"""Number of microbatches: the least with a middle one, which gathers no parameters and adds to existing gradients."""

_EXPERT_KINDS = (Recompute.NONE, Recompute.FULL, Recompute.SELECTIVE)
"""Kinds of recomputation between which experts' costs differ."""
_LEVELS = 3
"""How many numbers of rows experts are measured at: two for a line, and one for the floor at few rows per expert."""


class Probes(NamedTuple):
    """The plans to measure, and one sentence for each strategy or size that was left out."""

    plans: tuple[Plan, ...]
    in_turns: tuple[tuple[int, ...], ...]
    """Groups of indices of plans that differ only in the number of layers or in ZeRO, the fewest layers first."""
    left_out: tuple[str, ...]
    experts: tuple[ExpertProbe, ...] = ()
    """Probes of experts in isolation; empty for a model without experts."""
    context: tuple[ContextProbe, ...] = ()
    """Plans whose samples represent one rank's share of longer samples under context parallelism."""

    @property
    def document(self) -> Plans:
        """Return the document that lists the plans to measure."""
        experts, context = self.experts or UNSET, self.context or UNSET
        return Plans(plans=self.plans, in_turns=self.in_turns, experts=experts, context=context)


def make_probes(models: Sequence[Model], cluster: Cluster, node_type: str, settings: ProfileSettings) -> Probes:
    """Return the probes of a model on one node of `node_type`, which use all its devices.

    `models`: descriptions of one model at each length of the settings, its own length first.

    For each strategy, length and micro-batch size there is one plan with `settings.layers[0]` layers of every block
    type, and for each block type one with `settings.layers[1]` layers of it. Every plan has one layer of each type
    whose output has another shape than its input. One plan under ZeRO-2 and one under ZeRO-3 have
    `settings.layers[1]` layers of every type. For each of `cp_sizes` there are as many plans as for one strategy, size
    and length. If a strategy does not fit embedding and head, each rank has both whole.

    Raises BadInput if the lengths are not those of the settings, if no strategy fits model and node, or if layers
    predict further tokens.
    """
    model = models[0]
    if mtp_layers(model.layers):
        further = "layers that predict further tokens (mtp) are not measured"
        raise BadInput(f"model {model.name}", further, "estimate it: shardwright advise --mtp")
    _check_lengths(models, settings)
    node = _node_of(cluster, node_type)
    fitting: list[Strategy] = []
    left_out: list[str] = []
    for strategy, problem in _strategies(model, node.num_devices, settings):
        if problem is None:
            fitting.append(strategy)
        else:
            left_out.append(f"{formatted(strategy)}: {problem}")
    if not fitting:
        raise BadInput("--settings", f"no strategy fits ({'; '.join(left_out)})", "choose other tp_sizes")
    length = model.sequence_length
    plans = tuple(
        _probe(truncated, node, settings, strategy, recompute, size)
        for strategy, recompute in product(fitting, recompute_kinds(settings.recompute, model))
        for described in models
        if _misfit(described, strategy, settings) is None
        for size in _sizes(described, strategy, settings, length)
        for truncated in _truncations(described, settings.layers)
    )
    plans += tuple(_apart(models, node, settings, fitting))
    plans += _zero_probes(model, node, settings, fitting)
    shares, unshared = _share_probes(models, node, settings, fitting)
    context = tuple(ContextProbe(plan=len(plans) + place, cp_size=cp_size) for place, (cp_size, _) in enumerate(shares))
    plans += tuple(plan for _, plan in shares)
    left_out += unshared
    left_out += [
        f"{formatted(strategy)} sequence_length={described.sequence_length}: {problem}"
        for strategy in fitting
        for described in models
        if (problem := _misfit(described, strategy, settings)) is not None
    ]
    left_out += [
        f"{formatted(strategy)} micro_batch_size={size}: embedding and head, which are on each rank as a whole, "
        "cannot have an equal number of samples"
        for strategy in fitting
        for size in sorted({*settings.sizes(length, length)}.difference(_sizes(model, strategy, settings, length)))
    ]
    experts = tuple(_expert_probes(models, settings, fitting))
    return Probes(plans, tuple(_in_turns(plans, context)), tuple(left_out), experts, context)


def _node_of(cluster: Cluster, node_type: str) -> Cluster:
    """Return a cluster of one node of a type; raise BadInput if the type is unknown."""
    if node_type not in cluster.node_types:
        known = ", ".join(sorted(cluster.node_types))
        raise BadInput("--node-type", f"{node_type!r} is not one of the cluster's node types", f"choose from {known}")
    group, described = NodeGroup(node_type=node_type, count=1), cluster.node_types[node_type]
    return Cluster(name=node_type, nodes=(group,), node_types={node_type: described})


def _share_probes(
    models: Sequence[Model], node: Cluster, settings: ProfileSettings, fitting: Sequence[Strategy]
) -> tuple[list[tuple[int, Plan]], list[str]]:
    """Return the probes of one rank's share of positions, each with its cp_size, and why some cp_sizes have none."""
    length, shares, left_out = models[0].sequence_length, list[tuple[int, Plan]](), list[str]()
    for cp_size, share in settings.share_lengths(length).items():
        if (problem := _context_obstacle(models[0], node, settings, fitting, cp_size)) is not None:
            left_out.append(f"cp_size {cp_size}: {problem}")
            continue
        (described,) = (each for each in models if each.sequence_length == share)
        shares += [(cp_size, plan) for plan in _context_probes(described, node, settings, cp_size, length)]
    return shares, left_out


def _context_obstacle(
    model: Model, node: Cluster, settings: ProfileSettings, fitting: Sequence[Strategy], cp_size: int
) -> str | None:
    """Return why no probe can check the derived costs of a cp_size, or None; such probes need ring attention."""
    if all(strategy.tp_size > 1 for strategy in fitting):
        return "no strategy of tp_size 1 is measured"
    attention, ring = settings.attention, ContextParallel.RING
    on_gpu = gpu_format(settings.precision, node)
    obstacle = context_obstacle(model, attention, settings.compile, on_gpu) or ring_obstacle(model, attention)
    if obstacle is not None:
        return obstacle.problem
    shared = (
        LayerStrategy(type=name, tp_size=1, cp_size=cp_size, dp_size=1, context=ring) for name in block_types(model)
    )
    return next((problem for layer in shared if (problem := misfit(model, layer.type, layer)) is not None), None)


def _context_probes(
    described: Model, node: Cluster, settings: ProfileSettings, cp_size: int, length: int
) -> Iterator[Plan]:
    """Yield the probes of one of `cp_size` ranks over which samples of `length` are split, without recomputation.

    `described`: the model at the length of one share. Only the smallest micro-batch size is measured.
    """
    strategy, size = Strategy(tp_size=1, dp_size=node.num_devices), min(settings.sizes(length // cp_size, length))
    for truncated in _truncations(described, settings.layers):
        plan = _probe(truncated, node, settings, strategy, Recompute.NONE, size)
        yield replace(plan, name=f"{plan.name} keys of {cp_size} ranks")


def _apart(
    models: Sequence[Model], node: Cluster, settings: ProfileSettings, fitting: Sequence[Strategy]
) -> Iterator[Plan]:
    """Yield probes of layers in which each rank has all experts, and positions of its own.

    Minus the cost of their experts, these layers cost as much as a layer costs in addition to sharded experts. They are
    needed only for strategies that split positions over ranks: otherwise the other probes already are of this kind.
    """
    model = models[0]
    split = [strategy for strategy in fitting if layout_of(strategy).sequence.size > 1 and sparse_types(model)]
    for strategy, recompute in product(split, recompute_kinds(settings.recompute, model)):
        for size in settings.sizes(model.sequence_length, model.sequence_length):
            for truncated in _truncations(model, settings.layers):
                plan = _probe(truncated, node, settings, strategy, recompute, size)
                layers = (_with_all_experts(layer, truncated) for layer in plan.layers)
                yield replace(plan, name=f"{plan.name} experts apart", layers=tuple(layers))


def _with_all_experts(layer: LayerStrategy, model: Model) -> LayerStrategy:
    sparse = model.types[layer.type].experts is not UNSET
    return replace(layer, experts=ExpertStrategy(ep_size=1)) if sparse else layer


def _expert_probes(
    models: Sequence[Model], settings: ProfileSettings, fitting: Sequence[Strategy]
) -> Iterator[ExpertProbe]:
    """Yield the probes of experts in isolation: without recomputation, and under each kind that recomputes experts."""
    asked = recompute_kinds(settings.recompute, models[0])
    kinds = [kind for kind in _EXPERT_KINDS if kind in asked or kind is Recompute.NONE]
    if any(kind.half is Recompute.MLP for kind in asked) and Recompute.FULL not in kinds:
        kinds.append(Recompute.FULL)
    if any(RecomputedPart.EXPERT_ACTIVATIONS in kind.parts for kind in asked):
        kinds.append(Recompute.ACTIVATIONS)
    for key in expert_keys(models, fitting, settings, kinds, _LEVELS):
        yield ExpertProbe(**key.columns)


def probe_key(plan: Plan) -> LayerKey:
    """Return the key that probes have in common if their difference is one layer: a layer's key without the type."""
    strategy = plan.layers[0]
    size = axes_of(strategy).rank_samples(plan.microbatch_samples)
    key = LayerKey.from_fields(strategy, micro_batch_size=size, sequence_length=plan.model.sequence_length)
    return key.without("type")


def is_apart(plan: Plan) -> bool:
    """Return whether, in a probe's layers, each rank has all experts, and positions of its own."""
    return any(map(shares_experts, plan.layers))


def no_probe(plan: Plan) -> str | None:
    """Return why a measured plan is not a probe, or None if it is one."""
    if len(plan.stages) != 1:
        return f"it has {len(plan.stages)} pipeline stages"
    if len(plan.cluster.nodes) != 1:
        return "it runs on several kinds of nodes"
    if len({_sharding(layer) for layer in plan.layers}) != 1:
        return "its layers have different strategies"
    plain = Strategy(**{name: getattr(plan.layers[0], name) for name in Strategy.__struct_fields__})
    ends = _strategy_of_ends(plan.model, plain)
    if {(ends.tp_size, ends.tp_consecutive, ends.sequence_parallel)} != {
        (s.tp_size, s.tp_consecutive, s.sequence_parallel) for s in (plan.embedding, plan.head)
    }:
        return "embedding and head have another strategy than its layers, which fits them"
    if len({(s.data_parallel, s.shard_size) for s in (*plan.layers, plan.embedding, plan.head)}) != 1:
        return "its layers are of several kinds of data parallelism"
    if plan.num_microbatches < NUM_MICROBATCHES:
        return f"it has {plan.num_microbatches} microbatches, so each of them gathers or reduces"
    if plan.gradient_reduction is not GradientReduction.DEFERRED:
        return "every microbatch reduces gradients"
    return None


def _sharding(layer: LayerStrategy) -> tuple[int, bool, SequenceParallel, Recompute]:
    return layer.tp_size, layer.tp_consecutive, layer.sequence_parallel, layer.recompute


def layer_counts(model: Model) -> dict[str, int]:
    """Return the number of layers of each block type of a model."""
    return {name: model.layers.count(name) for name in block_types(model)}


def with_layers(model: Model, counts: Mapping[str, int]) -> Model:
    """Return the model with `counts` layers of each block type, in the model's order.

    If the model has fewer layers of a type, the additional ones follow its last layer of that type.
    """
    places = {name: [i for i, other in enumerate(model.layers) if other == name] for name in counts}
    order = sorted(
        (places[name][min(number, len(places[name]) - 1)], number, name)
        for name, count in counts.items()
        for number in range(count)
    )
    return replace(model, layers=tuple(name for _, _, name in order))


def _in_turns(plans: Sequence[Plan], context: Sequence[ContextProbe]) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the probes of each key, in their order: the one with the fewest layers comes first."""
    by_key: dict[tuple[LayerKey, bool, int], list[int]] = {}
    cp_sizes = {probe.plan: probe.cp_size for probe in context}
    for place, plan in enumerate(plans):
        by_key.setdefault((probe_key(plan), is_apart(plan), cp_sizes.get(place, 1)), []).append(place)
    yield from map(tuple, by_key.values())


def _zero_probes(
    model: Model, node: Cluster, settings: ProfileSettings, fitting: Sequence[Strategy]
) -> tuple[Plan, ...]:
    """Return the probes under ZeRO: with the most data-parallel ranks, the model's length, the smallest micro-batch."""
    widest = max(fitting, key=lambda strategy: layout_of(strategy).samples.size)
    if layout_of(widest).samples.size == 1:
        return ()
    longer = with_layers(model, _repeated(model, settings.layers[1]))
    size = min(settings.sizes(model.sequence_length, model.sequence_length))
    kinds = (DataParallel.ZERO2, DataParallel.ZERO3)
    strategies = (replace(widest, data_parallel=kind) for kind in kinds)
    return tuple(_probe(longer, node, settings, strategy, Recompute.NONE, size) for strategy in strategies)


def _truncations(model: Model, layers: tuple[int, int]) -> Iterator[Model]:
    fewest, most = (_repeated(model, number) for number in layers)
    yield with_layers(model, fewest)
    for name in fewest:
        if name not in model.reshaping:
            yield with_layers(model, fewest | {name: most[name]})


def _repeated(model: Model, number: int) -> dict[str, int]:
    """Return `number` for each block type, but 1 for a type whose output has another shape than its input."""
    return {name: 1 if name in model.reshaping else number for name in block_types(model)}


def _strategies(model: Model, devices: int, settings: ProfileSettings) -> Iterator[tuple[Strategy, str | None]]:
    """Yield every strategy of the settings, with the reason why it does not fit model or node, or None."""
    for tp_size, kind in settings.strategies:
        if (plain := strategy_on(devices, tp_size)) is None:
            problem = f"tp_size {tp_size} does not divide the {devices} devices of the node"
            yield Strategy(tp_size=tp_size, dp_size=1, sequence_parallel=kind), problem
        else:
            strategy = replace(plain, sequence_parallel=kind)
            yield strategy, _misfit(model, strategy, settings)


def _misfit(model: Model, strategy: Strategy, settings: ProfileSettings) -> str | None:
    """Return why a model cannot be measured under a strategy; None if it can.

    If the strategy fits all blocks but not embedding and head, these are measured by the probes of tp_size 1.
    """
    problem = misfit_of(model, strategy)
    blocks = (misfit(model, name, strategy) for name in block_types(model))
    apart = strategy.sequence_parallel is SequenceParallel.NONE and not model.reshaping and 1 in settings.tp_sizes
    return None if apart and not any(blocks) else problem


def _strategy_of_ends(model: Model, strategy: Strategy) -> Strategy:
    """Return the strategy of embedding and head in a probe: `strategy`, or tp_size 1 if it does not fit both."""
    if all(misfit(model, name, strategy) is None for name in (EMBEDDING, HEAD)):
        return strategy
    return Strategy(tp_size=1, dp_size=layout_of(strategy).stage_size, data_parallel=strategy.data_parallel)


def _sizes(model: Model, strategy: Strategy, settings: ProfileSettings, length: int) -> tuple[int, ...]:
    """Return the micro-batch sizes to measure: those that give embedding and head as many samples on each rank.

    `length`: the model's own length. Other lengths are measured only at the smallest size, unless `grid` is full.
    """
    ranks, ends = layout_of(strategy).samples.size, layout_of(_strategy_of_ends(model, strategy)).samples.size
    possible = tuple(size for size in settings.sizes(length, length) if size * ranks % ends == 0)
    every = len(settings.sizes(model.sequence_length, length)) > 1
    return possible if every or not possible else (min(possible),)


def _check_lengths(models: Sequence[Model], settings: ProfileSettings) -> None:
    lengths = tuple(model.sequence_length for model in models)
    wanted = settings.lengths(lengths[0])
    if sorted(lengths) != sorted(wanted):
        problem = f"they describe sequence_length {list(lengths)}, the settings ask for {list(wanted)}"
        raise BadInput("--model", problem, "describe the model at each of these lengths, its own first")
    if len({model.architecture_sha256 for model in models}) > 1:
        raise BadInput("--model", "they describe different models", "describe one model at each length")


def _probe(
    model: Model,
    node: Cluster,
    settings: ProfileSettings,
    strategy: Strategy,
    recompute: Recompute,
    micro_batch_size: int,
) -> Plan:
    counts = " ".join(f"{name}={count}" for name, count in layer_counts(model).items())
    layers = tuple(LayerStrategy(**asdict(strategy), type=name, recompute=recompute) for name in model.layers)
    ends = _strategy_of_ends(model, strategy)
    return Plan(
        name=f"{model.name}@{node.name} {formatted(strategy)} recompute={recompute} "
        f"micro_batch_size={micro_batch_size} sequence_length={model.sequence_length} layers {counts}",
        model=model,
        cluster=node,
        global_batch_size=NUM_MICROBATCHES * layout_of(strategy).samples.size * micro_batch_size,
        num_microbatches=NUM_MICROBATCHES,
        schedule=Schedule.ONE_F_ONE_B,
        precision=settings.precision,
        attention=settings.attention,
        compile=settings.compile,
        stages=(PipelineStage(ranks=tuple(range(node.num_devices)), layers=((0, len(layers)),)),),
        embedding=ends,
        head=ends,
        layers=layers,
    )
