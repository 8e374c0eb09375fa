"""The choices within a configuration: the strategies of the layers, and the placements of the pipeline stages.

Strategies with the same effect are written in one way. They depend on the widths of the stages, not on the cluster.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import gcd, lcm, prod
from typing import NamedTuple

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from shardwright.models.context import recompute_kinds
from shardwright.plan.axes import Layout, axes_of, expert_strategies_on, layout_of, strategy_on
from shardwright.plan.communication import shares_experts
from shardwright.types.model import EMBEDDING, HEAD, Model
from shardwright.types.plan import misfit
from shardwright.types.strategy import (
    ContextParallel,
    DataParallel,
    LayerStrategy,
    Offload,
    Recompute,
    SequenceParallel,
    Strategy,
)
from shardwright_search.cost_model.collectives import Nodes
from shardwright_search.cost_model.layer import PLAIN_TURNS, CostModel, Link, Turns
from shardwright_search.solver.problem import Cut
from shardwright_search.space.configurations import Configuration, Widths, divisors
from shardwright_search.space.placements import NodeTypes, Placements, StageWays, pools_of
from shardwright_search.space.request import OuterSpace, SearchRequest, StageWidths
from shardwright_search.step.cached_method import cached_method


class Choice(NamedTuple):
    """The part of a configuration that the strategies to choose from depend on."""

    widths: tuple[int, ...]
    """Ranks that stages may have, ascending."""
    samples: int
    """Samples of a microbatch."""
    layers: LayerStrategy | None
    outer: Strategy | None
    buffer_tokens: int | None
    tp_sizes: tuple[int, ...] | None
    """The requested tensor-parallel sizes that divide a width; None: all."""
    shard_sizes: tuple[int, ...] | None
    """The requested shard sizes that divide a width; None: only whole groups."""
    turns: Turns = PLAIN_TURNS

    @property
    def free(self) -> "Choice":
        """The choice without the strategies that layers, or embedding and head, share."""
        return self._replace(layers=None, outer=None)

    def of_type(self, name: str) -> "Choice":
        """Return the choice without the fields that concern other types only."""
        return self._replace(layers=None) if name in (EMBEDDING, HEAD) else self._replace(outer=None)


class Shardings(msgspec.Struct, frozen=True, eq=False):
    """The strategies of each type on stages of each width, and the layouts they use; equal only to itself."""

    strategies: dict[int, dict[str, tuple[Strategy, ...]]]
    """The strategies by width and type."""
    layouts: tuple[Layout, ...]
    """The layouts of all widths, even if layers share one strategy."""

    def of_type(self, type_name: str, width: int) -> tuple[Strategy, ...]:
        """Return the strategies of one type on stages of one width."""
        return self.strategies[width][type_name]


class LayerChoices(msgspec.Struct, frozen=True, dict=True, eq=False):
    """The strategies that a narrowed request allows, cached by choice."""

    request: SearchRequest
    model: Model

    def shardings(self, choice: Choice) -> Shardings:
        """Return the strategies on widths over which all types of layers can be sharded, except embedding and head."""
        return self._shardings(alike(choice))

    @cached_method
    def _shardings(self, choice: Choice) -> Shardings:
        if choice != choice.free:
            return self._shared(choice)
        by_width, degrees = {}, (choice.tp_sizes, choice.shard_sizes)
        for width in choice.widths:
            by_type = {
                name: tuple(s for s in self._listed(name, width, *degrees) if self._possible(s, choice))
                for name in dict.fromkeys((EMBEDDING, *self.model.layers, HEAD))
            }
            if all(by_type[name] for name in self.model.layers):
                by_width[width] = by_type
        used = {layout_of(s) for by_type in by_width.values() for strategies in by_type.values() for s in strategies}
        return Shardings(strategies=by_width, layouts=tuple(sorted(used)))

    @cached_method
    def _listed(
        self, type_name: str, width: int, tp_sizes: tuple[int, ...] | None, shard_sizes: tuple[int, ...] | None
    ) -> tuple[Strategy, ...]:
        if tp_sizes == ():
            return ()
        request = replace(self.request, tp_sizes=tp_sizes, shard_sizes=shard_sizes)
        return shardings(request, self.model, type_name, width)

    def _shared(self, choice: Choice) -> Shardings:
        """Return the one strategy that all layers, or embedding and head, must have, on the widths that have it."""
        free = self._shardings(choice.free)
        shared = {name: self._shared_by(name, choice) for name in (EMBEDDING, *self.model.layers, HEAD)}
        by_width = {
            width: {
                name: all_ if (one := shared[name]) is None else (one,) * (one in all_) for name, all_ in each.items()
            }
            for width, each in free.strategies.items()
        }
        able = {width: each for width, each in by_width.items() if all(each[name] for name in self.model.layers)}
        return Shardings(strategies=able, layouts=free.layouts)

    def _shared_by(self, name: str, choice: Choice) -> Strategy | None:
        """Return the one strategy that layers of a type have in a choice; None: any."""
        if name in (EMBEDDING, HEAD):
            return choice.outer
        return None if choice.layers is None else self.as_type(choice.layers, name)

    def shared_row(self, name: str, choice: Choice, width: int) -> int:
        """Return the index of the common strategy among the strategies that layers of a type could have."""
        assert choice.layers is not None
        return self.shardings(choice.free).of_type(name, width).index(self.as_type(choice.layers, name))

    def _possible(self, strategy: Strategy, choice: Choice) -> bool:
        """Return whether the strategy divides a micro-batch's samples evenly, within the limit for gathered tokens."""
        if choice.samples % layout_of(strategy).samples.size:
            return False
        tokens = self.gathered_tokens(strategy, choice.samples)
        return choice.buffer_tokens is None or tokens <= choice.buffer_tokens

    def as_type(self, strategy: LayerStrategy, type_name: str) -> LayerStrategy:
        """Return the equivalent strategy for another layer type, which may have no experts."""
        if strategy.type == type_name:
            return strategy
        kind, offload = self.model.types[type_name], strategy.offload
        experts = UNSET if kind.experts is UNSET else strategy.experts
        if strategy.offloads_optimizer and not kind.trained_parameters:
            offload = Offload.ACTIVATIONS if strategy.offloads_activations else UNSET
        return replace(strategy, type=type_name, experts=experts, offload=offload)

    def gathered_tokens(self, strategy: Strategy, samples: int) -> int:
        """Return the tokens that a rank gathers under Megatron's sequence parallelism; 0 without it."""
        axes = axes_of(strategy)
        tokens = axes.rank_samples(samples) * self.model.sequence_length // axes.context.size
        return tokens if axes.gathers_sequence else 0


def alike(choice: Choice) -> Choice:
    """Return the choice with the smallest microbatch that has the same strategies: degrees divide a stage's width."""
    if choice.buffer_tokens is not None:
        return choice
    return choice._replace(samples=gcd(choice.samples, lcm(*choice.widths)))


def shardings(request: SearchRequest, model: Model, type_name: str, stage_size: int) -> tuple[Strategy, ...]:
    """Return the strategies of a layer type on the ranks of a pipeline stage; strategies with one effect only once.

    Without tensor parallelism the sequence cannot be split, and groups cannot be strided; without data parallelism
    states cannot be sharded. Ulysses shards parameters over all ranks.
    """
    outer = {EMBEDDING: request.embedding, HEAD: request.head}.get(type_name)
    kinds = recompute_kinds(request.recompute, model) if outer is None else (Recompute.NONE,)
    strategies: set[Strategy] = set()
    for sharding in _grids(request, outer or OuterSpace(), stage_size):
        if misfit(model, type_name, sharding) is not None:
            continue
        if outer is not None:
            strategies.add(sharding)
            continue
        fields = {name: getattr(sharding, name) for name in Strategy.__struct_fields__}
        contexts = request.context if axes_of(sharding).shares_context else (ContextParallel.GATHER,)
        layers = (LayerStrategy(**fields, type=type_name, context=context) for context in contexts)
        shared = (each for layer in layers for each in (layer, *_with_experts(request, model, layer, stage_size)))
        fitting = [layer for layer in shared if misfit(model, type_name, layer) is None]
        repeated = [replace(layer, recompute=recompute) for layer, recompute in product(fitting, kinds)]
        strategies.update(repeated)
        for layer, offload in product(repeated, _offloads(request, model, type_name)):
            if layer.moves_activations or offload in (Offload.OPTIMIZER, Offload.UPDATE):
                strategies.add(replace(layer, offload=offload))
    return tuple(sorted(strategies, key=_order))


def _order(strategy: Strategy) -> tuple[bool, bool, Strategy]:
    """Return a key that sorts strategies; those with expert parallelism, and then those with offload, come last."""
    return shares_experts(strategy), isinstance(strategy, LayerStrategy) and strategy.offload is not UNSET, strategy


def _offloads(request: SearchRequest, model: Model, type_name: str) -> Iterator[Offload]:
    """Yield what layers of a type may offload; without trained parameters they have no optimizer states."""
    kind = model.types[type_name]
    # Compiled layers keep their activations on the device, as do those without a backward pass.
    able = {
        Offload.OPTIMIZER: bool(kind.trained_parameters),
        Offload.UPDATE: bool(kind.trained_parameters),
        Offload.ACTIVATIONS: kind.has_backward and not request.compile,
        Offload.BOTH: bool(kind.trained_parameters) and not request.compile,
    }
    yield from (offload for offload, fits in able.items() if fits and offload in request.offload)


def _grids(request: SearchRequest, outer: OuterSpace, stage_size: int) -> Iterator[Strategy]:
    kinds = outer.data_parallel or request.data_parallel
    splits = outer.sequence_parallel or request.sequence_parallel
    tp_sizes = outer.tp_sizes or request.tp_sizes or divisors(stage_size)
    for tp_size, cp_size in product(tp_sizes, outer.cp_sizes or request.cp_sizes):
        if (plain := strategy_on(stage_size, tp_size, cp_size)) is None:
            continue
        ranks, samples = axes_of(plain).region.size, layout_of(plain).samples.size
        if ranks > (request.max_tp_size or ranks) or samples > (request.max_dp_size or samples):
            continue
        grid = 1 < ranks < stage_size and not axes_of(plain).shares_context
        for sequence_parallel in splits if ranks > 1 else (SequenceParallel.NONE,):
            split = replace(plain, sequence_parallel=sequence_parallel)
            shards = axes_of(split).dense.states.size
            for data_parallel, shard_size in _sharings(request, kinds if shards > 1 else (DataParallel.DDP,), shards):
                for consecutive in sorted(set(request.tp_consecutive)) if grid else (True,):
                    sharing = {"data_parallel": data_parallel, "shard_size": shard_size}
                    yield replace(split, tp_consecutive=consecutive, **sharing)


def _with_experts(
    request: SearchRequest, model: Model, layer: LayerStrategy, stage_size: int
) -> Iterator[LayerStrategy]:
    """Yield a layer's sharding with each separate sharding of its experts."""
    axes = axes_of(layer)
    if model.types[layer.type].experts is UNSET or (axes.dense.tensor.size > 1 and not axes.gathers_sequence):
        return
    kinds = request.expert_data_parallel or request.data_parallel
    for plain in expert_strategies_on(stage_size, request.ep_sizes, request.etp_sizes):
        grid = replace(layer, experts=plain).expert_grid
        assert grid is not None
        ranks = axes_of(grid).dense.states.size
        whole = axes.dense.tensor.size == 1 and ranks == stage_size
        for kind, size in _sharings(request, kinds if ranks > 1 else (DataParallel.DDP,), ranks):
            shared = replace(layer, experts=replace(plain, data_parallel=kind, shard_size=size))
            shards = axes_of(shared.expert_grid or layer).dense.shards
            if not whole or (kind, shards) != (layer.data_parallel, axes.dense.shards):
                yield shared


def _sharings(request: SearchRequest, kinds: Sequence[DataParallel], ranks: int) -> Iterator[tuple[DataParallel, int]]:
    """Yield kinds of data parallelism, each with the possible sizes of shard groups for this number of ranks."""
    for kind in kinds:
        yield kind, 0
        for size in sorted(set(request.shard_sizes or ())) if kind is not DataParallel.DDP else ():
            if 1 < size < ranks and ranks % size == 0:
                yield kind, size


MAX_MOVES = 500_000
"""The most stages of any widths, over all positions, that are listed: about 10 CPU seconds for a bound."""


class Handover(NamedTuple):
    """How two neighbouring stages are placed, independently of strategies."""

    widths: tuple[int, int]
    link: Link | None
    """The link of stages of equal width, which send from rank to rank."""
    nodes: tuple[Nodes, ...]
    """The nodes of the ranks of both, if widths differ."""
    node_types: tuple[str, ...]


class Handovers(NamedTuple):
    """The distinct handovers between the stages of some placements, and the index of the handover at each cut."""

    different: tuple[Handover, ...]
    number: dict[Cut, int]


class Choices(msgspec.Struct, frozen=True, dict=True, eq=False):
    """The choices of a narrowed request, with all that was listed so far."""

    request: SearchRequest
    costs: CostModel
    layers: LayerChoices

    def has_plans(self, configuration: Configuration) -> bool:
        """Return whether a configuration's layers can be sharded, and its stages placed, in some way."""
        return self.ways(configuration).exist

    def is_listed(self, configuration: Configuration) -> bool:
        """Return whether a configuration has few enough placements to be listed; always, unless widths may be any."""
        return configuration.widths is not StageWidths.ANY or self.ways(configuration).max_moves <= MAX_MOVES

    def layer_strategies(self, configuration: Configuration) -> tuple[LayerStrategy, ...]:
        """Return the strategies that all layers of a configuration can share, as strategies of a layer with experts."""
        choice, types = self.choice(configuration), self.costs.model.types
        by_type = self.layers.shardings(choice).strategies[choice.widths[0]]
        names = dict.fromkeys(self.costs.model.layers)
        first, *others = sorted(names, key=lambda name: types[name].experts is UNSET)
        layers = (s for s in by_type[first] if isinstance(s, LayerStrategy))
        possible = {other: set(by_type[other]) for other in others}
        return tuple(s for s in layers if all(self.layers.as_type(s, other) in possible[other] for other in others))

    def outer_strategies(self, configuration: Configuration) -> tuple[Strategy, ...]:
        """Return the strategies that embedding and head can both have, on stages of any possible width."""
        by_width = self.layers.shardings(self.choice(configuration)).strategies.values()
        return tuple(dict.fromkeys(s for by_type in by_width for s in by_type[EMBEDDING] if s in by_type[HEAD]))

    def buffer_tokens(self, configuration: Configuration) -> tuple[int, ...]:
        """Return the sizes that Megatron's gather buffer can have, in tokens; 0 without sequence parallelism."""
        choice = self.choice(configuration)
        by_width = self.layers.shardings(choice).strategies.values()
        strategies = (s for by_type in by_width for of_type in by_type.values() for s in of_type)
        return tuple(sorted({0, *(self.layers.gathered_tokens(s, choice.samples) for s in strategies)}))

    def choice(self, configuration: Configuration) -> Choice:
        """Return the properties of a configuration that determine its strategies."""
        devices, widths = self.costs.cluster.num_devices, configuration.widths
        match widths:
            case StageWidths.EQUAL:
                sizes: tuple[int, ...] = (devices // configuration.pp_size,)
            case StageWidths.ANY:
                sizes = tuple(range(1, devices + 1))
            case listed:
                sizes = tuple(sorted(set(listed)))
        tp_sizes, shard_sizes = (_dividing(each, sizes) for each in (self.request.tp_sizes, self.request.shard_sizes))
        return Choice(
            sizes,
            configuration.microbatch_samples,
            configuration.layers,
            configuration.outer,
            configuration.buffer_tokens,
            tp_sizes,
            shard_sizes,
            self.costs.turns(configuration.pp_size, configuration.num_microbatches, configuration.num_chunks),
        )

    def placed(self, configuration: Configuration) -> Placements:
        """Return the possible placements of the stages; `has_plans` must be true."""
        if (placed := self.ways(configuration).placements) is None:
            raise ValueError(f"no plan: {configuration}")
        return placed

    def num_positions(self, configuration: Configuration) -> int:
        """Return the number of positions of all stages, whether a stage can be there or not."""
        return configuration.pp_size * prod(len(pool) + 1 for pool in pools_of(self.costs.cluster))

    def ways(self, configuration: Configuration) -> StageWays:
        """Return the ways in which the stages of a configuration can be placed."""
        widths = self._able(alike(self.choice(configuration)), configuration.pp_size, configuration.widths)
        return self._ways(widths, configuration.widths is StageWidths.ANY, configuration.ends)

    @cached_method
    def _ways(
        self, widths: tuple[tuple[int, ...], ...], by_nodes: bool, ends: tuple[NodeTypes, NodeTypes] | None
    ) -> StageWays:
        return StageWays(self.costs.cluster, widths, by_nodes, ends, self.request.span_node_types)

    @cached_method
    def _able(self, choice: Choice, pp_size: int, widths: Widths) -> tuple[tuple[int, ...], ...]:
        """Return the widths over which all types of a stage's layers can be sharded, embedding and head included."""
        known = self.layers.shardings(choice).strategies
        asked = [(width,) for width in widths] if isinstance(widths, tuple) else [choice.widths] * pp_size
        outermost = [(EMBEDDING,), *[()] * (pp_size - 2), (HEAD,)] if pp_size > 1 else [(EMBEDDING, HEAD)]
        return tuple(
            tuple(width for width in each if width in known and all(known[width][name] for name in outer))
            for each, outer in zip(asked, outermost, strict=True)
        )

    def handovers(self, configuration: Configuration) -> Handovers:
        """Return the handovers at all cuts between the stages."""
        return self._handovers(self.ways(configuration))

    @cached_method
    def _handovers(self, ways: StageWays) -> Handovers:
        number, different = dict[Cut, int](), dict[Handover, int]()
        if (placed := ways.placements) is not None:
            for cut in placed.cuts:
                ranks = placed.ranks_before(cut.position, cut.before), placed.ranks_behind(cut.position, cut.behind)
                number[cut] = different.setdefault(self._handover(*ranks), len(different))
        return Handovers(tuple(different), number)

    def _handover(self, before: tuple[int, ...], behind: tuple[int, ...]) -> Handover:
        widths = len(before), len(behind)
        if widths[0] == widths[1]:
            return Handover(widths, self.costs.link(before, behind), (), ())
        return Handover(widths, None, self.costs.nodes_of(before, behind), self.costs.node_types_of(before, behind))


def _dividing(asked: Sequence[int] | None, widths: Sequence[int]) -> tuple[int, ...] | None:
    """Return the requested degrees that divide one of the widths."""
    return None if not asked else tuple(n for n in asked if any(width % n == 0 for width in widths))
