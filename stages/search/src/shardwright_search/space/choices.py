"""What there is to choose in a configuration: the strategies of the layers, and where the pipeline stages can be."""

from math import gcd, lcm
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from shardwright_formats.semantics.layout import Layout, layout_of
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.strategy import LayerStrategy, SequenceParallel, Strategy
from shardwright_search.cost_model.communication import Nodes
from shardwright_search.cost_model.layer import CostModel, Link
from shardwright_search.solver.cached import cached_method
from shardwright_search.solver.problem import Cut
from shardwright_search.space.configurations import Configuration, shardings
from shardwright_search.space.placements import NodeTypes, Placements, placements
from shardwright_search.space.request import SearchRequest, StageWidths
from shardwright_search.space.stage_widths import Widths


class Choice(NamedTuple):
    """What the strategies to choose from depend on."""

    widths: tuple[int, ...]
    """Ranks that stages may have, ascending."""
    samples: int
    """Of a microbatch."""
    layers: LayerStrategy | None
    buffer_tokens: int | None


class Shardings(msgspec.Struct, frozen=True, eq=False):
    """The strategies of each type on stages of each width, and the layouts they use; equal only to itself."""

    strategies: dict[int, dict[str, tuple[Strategy, ...]]]
    """By width and type."""
    layouts: tuple[Layout, ...]
    """Of all widths."""

    def of(self, type_name: str, width: int) -> tuple[Strategy, ...]:
        """Of one type on stages of one width."""
        return self.strategies[width][type_name]


class Handover(NamedTuple):
    """What handing a microbatch from a stage to the next depends on, strategies aside."""

    widths: tuple[int, int]
    link: Link | None
    """Of stages of equal width, which send from rank to rank."""
    nodes: tuple[Nodes, ...]
    """Of the ranks of both, of other widths."""
    node_types: tuple[str, ...]


class Handovers(NamedTuple):
    """Between all stages of some placements: the few that there are, and which of them is at each cut."""

    every: tuple[Handover, ...]
    number: dict[Cut, int]


class _Stages(NamedTuple):
    """What placements depend on."""

    widths: tuple[tuple[int, ...], ...]
    """By pipeline stage, those that it may have."""
    by_nodes: bool
    ends: tuple[NodeTypes, NodeTypes] | None


class Choices(msgspec.Struct, frozen=True, dict=True, eq=False):
    """Of a narrowed request, with all that was listed so far."""

    request: SearchRequest
    costs: CostModel

    def has_plans(self, configuration: Configuration) -> bool:
        """Whether every layer of a configuration can be sharded in some way."""
        return self._placements(self._stages(configuration)) is not None

    def layer_strategies(self, configuration: Configuration) -> tuple[LayerStrategy, ...]:
        """What all layers can share: strategies that every type of layer has, told by the first type's."""
        choice = self.choice(configuration)
        of = self.shardings(choice).strategies[choice.widths[0]]
        first, *others = dict.fromkeys(self.costs.model.layers)
        layers = (s for s in of[first] if isinstance(s, LayerStrategy))
        return tuple(s for s in layers if all(replace(s, type=other) in of[other] for other in others))

    def buffer_tokens(self, configuration: Configuration) -> tuple[int, ...]:
        """The sizes that Megatron's gather buffer can have, in tokens; 0 without sequence parallelism."""
        choice = self.choice(configuration)
        every = (s for own in self.shardings(choice).strategies.values() for of_type in own.values() for s in of_type)
        return tuple(sorted({0, *(self._gathered_tokens(strategy, choice.samples) for strategy in every)}))

    def choice(self, configuration: Configuration) -> Choice:
        """What strategies depend on."""
        devices, widths = self.costs.cluster.num_devices, configuration.widths
        match widths:
            case StageWidths.EQUAL:
                sizes: tuple[int, ...] = (devices // configuration.pp_size,)
            case StageWidths.ANY:
                sizes = tuple(range(1, devices + 1))
            case listed:
                sizes = tuple(sorted(set(listed)))
        return Choice(sizes, configuration.microbatch_samples, configuration.layers, configuration.buffer_tokens)

    def placed(self, configuration: Configuration) -> Placements:
        """Where the stages can be; has_plans says whether they can at all."""
        found = self._placements(self._stages(configuration))
        if found is None:
            raise ValueError(f"no plan: {configuration}")
        return found

    def _stages(self, configuration: Configuration) -> _Stages:
        choice = self._alike(self.choice(configuration))
        return _Stages(
            self._able(choice, configuration.pp_size, configuration.widths),
            configuration.widths is StageWidths.ANY,
            configuration.ends,
        )

    @cached_method
    def _able(self, choice: Choice, pp_size: int, widths: Widths) -> tuple[tuple[int, ...], ...]:
        """Stages only as wide as all types of layers can be sharded, the first's and last's with embedding and head."""
        known = self.shardings(choice).strategies
        asked = [(width,) for width in widths] if isinstance(widths, tuple) else [choice.widths] * pp_size
        outermost = [(EMBEDDING,), *[()] * (pp_size - 2), (HEAD,)] if pp_size > 1 else [(EMBEDDING, HEAD)]
        return tuple(
            tuple(width for width in own if width in known and all(known[width][name] for name in outer))
            for own, outer in zip(asked, outermost, strict=True)
        )

    @cached_method
    def _placements(self, of: _Stages) -> Placements | None:
        spans = self.request.span_node_types
        return placements(self.costs.cluster, of.widths, by_nodes=of.by_nodes, ends=of.ends, spans=spans)

    def handovers(self, configuration: Configuration) -> Handovers:
        """What is handed over at every cut between its stages."""
        return self._handovers(self._stages(configuration))

    @cached_method
    def _handovers(self, of: _Stages) -> Handovers:
        number, every = dict[Cut, int](), dict[Handover, int]()
        if (placed := self._placements(of)) is not None:
            for cut in placed.cuts:
                stages = placed.ranks_before(cut.position, cut.before), placed.ranks_behind(cut.position, cut.behind)
                number[cut] = every.setdefault(self._handover(*stages), len(every))
        return Handovers(tuple(every), number)

    def _handover(self, before: tuple[int, ...], behind: tuple[int, ...]) -> Handover:
        widths = len(before), len(behind)
        if widths[0] == widths[1]:
            return Handover(widths, self.costs.link(before, behind), (), ())
        return Handover(widths, None, self.costs.nodes_of(before, behind), self.costs.node_types_of(before, behind))

    def shardings(self, choice: Choice) -> Shardings:
        """Of the widths over which every type of layer can be sharded, embedding and head aside."""
        return self._shardings(self._alike(choice))

    def _alike(self, choice: Choice) -> Choice:
        """The least microbatch with the same strategies: all degrees divide the width of a stage."""
        if choice.buffer_tokens is not None:
            return choice
        return choice._replace(samples=gcd(choice.samples, lcm(*choice.widths)))

    @cached_method
    def _shardings(self, choice: Choice) -> Shardings:
        found = {}
        for width in choice.widths:
            own = {
                name: tuple(s for s in self._all_shardings(name, width) if self._possible(s, choice, name))
                for name in dict.fromkeys((EMBEDDING, *self.costs.model.layers, HEAD))
            }
            if all(own[name] for name in self.costs.model.layers):
                found[width] = own
        used = {layout_of(s) for own in found.values() for of_type in own.values() for s in of_type}
        return Shardings(strategies=found, layouts=tuple(sorted(used)))

    @cached_method
    def _all_shardings(self, type_name: str, stage_size: int) -> tuple[Strategy, ...]:
        return shardings(self.request, self.costs.model, type_name, stage_size)

    def _possible(self, strategy: Strategy, choice: Choice, type_name: str) -> bool:
        """Whether it shares a microbatch's samples out evenly, and is what the configuration fixes."""
        if choice.samples % strategy.dp_size:
            return False
        tokens = self._gathered_tokens(strategy, choice.samples)
        if choice.buffer_tokens is not None and tokens > choice.buffer_tokens:
            return False
        if choice.layers is None or not isinstance(strategy, LayerStrategy):
            return True
        return strategy == replace(choice.layers, type=type_name)

    def _gathered_tokens(self, strategy: Strategy, samples: int) -> int:
        """Tokens that Megatron's sequence parallelism gathers whole."""
        if strategy.sequence_parallel is not SequenceParallel.MEGATRON:
            return 0
        return samples // strategy.dp_size * self.costs.model.sequence_length
