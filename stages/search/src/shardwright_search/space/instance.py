"""From a case of the search to the solver's numbers, and from the solver's answer to a plan."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace

from shardwright_formats.semantics.layout import Layout, layout_of
from shardwright_formats.semantics.schedule import in_flight
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.plan import PipelineStage, Plan
from shardwright_formats.types.strategy import LayerStrategy, SequenceParallel, Strategy
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.tied_weights import tie_class, tie_cost_ps
from shardwright_search.cost_model.topology import Lie, lie_of
from shardwright_search.solver.branch_and_bound import Solvable
from shardwright_search.solver.case_bounds import CostsOf
from shardwright_search.solver.interleaved import Interleaved, InterleavedProblem
from shardwright_search.solver.partition import Pipeline
from shardwright_search.solver.problem import Options, Place, Problem, Solution
from shardwright_search.solver.relaxed_bound import Glances
from shardwright_search.space.configurations import Case, spreads
from shardwright_search.space.in_flight import flights_of
from shardwright_search.space.request import SearchRequest

__all__ = ["Nothing", "Pricing"]

_MOST_RECENT = 6


class Nothing:
    """A case without any plan: some layer cannot be spread evenly."""

    glance_ps = lower_ps = np.inf

    def solve_below(self, *_: object) -> tuple[()]:
        """There is none."""
        return ()


class _Spread(msgspec.Struct, frozen=True, eq=False):
    """The strategies of each type in a case, and the layouts they use."""

    strategies: tuple[tuple[Strategy, ...], ...]
    layouts: tuple[Layout, ...]


class Pricing(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A request with the cost model that prices it, and all that was priced so far."""

    request: SearchRequest
    """Narrowed."""
    costs: CostModel
    budgets: dict[str, int]
    """Bytes of a rank by node type, without the process's own memory."""

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The model's layer types; the solver knows them by number."""
        return tuple(dict.fromkeys((EMBEDDING, *self.costs.model.layers, HEAD)))

    def has_plans(self, case: Case) -> bool:
        """Whether every layer of a case can be spread in some way."""
        return all(self._spread(case).strategies)

    def stage_ranks(self, pp_size: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline stage."""
        width = self.costs.cluster.num_devices // pp_size
        return tuple(tuple(range(i * width, (i + 1) * width)) for i in range(pp_size))

    def solvable(self, case: Case) -> Solvable:
        """The case, ready to be bounded and solved; the last few are kept."""
        if case not in self._recent:
            while len(self._recent) >= _MOST_RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[case] = self._solvable(case)
        return self._recent[case]

    def _solvable(self, case: Case) -> Solvable:
        spread = self._spread(case)
        if not all(spread.strategies):
            return Nothing()
        if case.num_chunks > 1:
            problem = self._interleaved(case, spread)
            return Nothing() if problem is None else Interleaved(problem)
        return Pipeline(self.problem(case), self._costs_of, self._glances)

    def problem(self, case: Case) -> Problem:
        """The numbers of a case of GPipe or 1F1B."""
        spread, stages = self._spread(case), self.stage_ranks(case.pp_size)
        lies = tuple(dict.fromkeys(self._lies(case.pp_size)))
        sends = np.array([self._sends(case, spread, here, there) for here, there in pairwise(stages)], float)
        return Problem(
            elements=tuple(self.types.index(name) for name in (EMBEDDING, *self.costs.model.layers, HEAD)),
            places=tuple(self._place(case, spread, lie) for lie in lies),
            available=tuple(self._lies(case.pp_size).count(lie) for lie in lies),
            allowed=tuple((lies.index(lie),) for lie in self._lies(case.pp_size)),
            sends_ps=np.broadcast_to(
                sends.reshape(len(stages) - 1, 1, 1, len(self.types), len(spread.layouts)),
                (len(stages) - 1, len(lies), len(lies), len(self.types), len(spread.layouts)),
            ),
            in_flight=tuple(
                in_flight(case.schedule, case.pp_size, case.num_microbatches, i) for i in range(case.pp_size)
            ),
            num_microbatches=case.num_microbatches,
            boundary_bytes=self._boundary(case, spread),
            tie_ps=self._ties(case, spread),
        )

    def plan(self, case: Case, solution: Solution) -> Plan:
        """The plan that a solution of a case stands for."""
        model, request = self.costs.model, self.request
        names = (EMBEDDING, *model.layers, HEAD)
        strategies = self._spread(case).strategies
        embedding, *layers, head = (
            strategies[self.types.index(name)][option] for name, option in zip(names, solution.options, strict=True)
        )
        return Plan(
            name=request.name,
            model=model,
            cluster=self.costs.cluster,
            global_batch_size=case.global_batch_size,
            num_microbatches=case.num_microbatches,
            schedule=case.schedule,
            gradient_reduction=request.gradient_reduction,
            precision=request.precision,
            attention=request.attention,
            stages=_stages(case, solution, self.stage_ranks(case.pp_size), len(model.layers)),
            embedding=embedding,
            head=head,
            layers=tuple(layer for layer in layers if isinstance(layer, LayerStrategy)),
        )

    def layer_strategies(self, case: Case) -> tuple[LayerStrategy, ...]:
        """What all layers of a case can share: strategies that every type of layer has, told by the first type's."""
        spread = dict(zip(self.types, self._spread(case).strategies, strict=True))
        first, *others = dict.fromkeys(self.costs.model.layers)
        return tuple(
            s
            for s in spread[first]
            if isinstance(s, LayerStrategy) and all(replace(s, type=other) in spread[other] for other in others)
        )

    def buffer_tokens(self, case: Case) -> tuple[int, ...]:
        """The sizes that Megatron's gather buffer can have, in tokens; 0 without sequence parallelism."""
        spread = self._spread(case).strategies
        return tuple(sorted({0} | {_gathered(s, case.microbatch_samples) * self._length for f in spread for s in f}))

    @property
    def _length(self) -> int:
        return self.costs.model.sequence_length

    @cached_property
    def _costs_of(self) -> CostsOf:
        return CostsOf()

    @cached_property
    def _recent(self) -> dict[Case, Solvable]:
        return {}

    @cached_property
    def _glances(self) -> Glances:
        return Glances()

    @cached_property
    def _known_ties(self) -> dict[tuple[object, ...], int]:
        return {}

    @cached_property
    def _known_lies(self) -> dict[int, tuple[Lie, ...]]:
        return {}

    @cached_property
    def _known_spreads(self) -> dict[tuple[object, ...], _Spread]:
        return {}

    @cached_property
    def _known_places(self) -> dict[tuple[object, ...], Place]:
        return {}

    @cached_property
    def _known_sends(self) -> dict[tuple[object, ...], list[list[float]]]:
        return {}

    def _lies(self, pp_size: int) -> tuple[Lie, ...]:
        """By pipeline stage."""
        if pp_size not in self._known_lies:
            self._known_lies[pp_size] = tuple(lie_of(self.costs.cluster, ranks) for ranks in self.stage_ranks(pp_size))
        return self._known_lies[pp_size]

    def _spread(self, case: Case) -> _Spread:
        width, samples = self.costs.cluster.num_devices // case.pp_size, case.microbatch_samples
        key = width, samples, case.layers, case.buffer_tokens
        if key not in self._known_spreads:
            found = tuple(
                tuple(s for s in self._spreads(name, width) if self._possible(s, case, name)) for name in self.types
            )
            layouts = tuple(sorted({layout_of(strategy) for strategies in found for strategy in strategies}))
            self._known_spreads[key] = _Spread(found, layouts)
        return self._known_spreads[key]

    def _spreads(self, type_name: str, width: int) -> tuple[Strategy, ...]:
        if (type_name, width) not in self._all_spreads:
            self._all_spreads[type_name, width] = spreads(self.request, self.costs.model, type_name, width)
        return self._all_spreads[type_name, width]

    @cached_property
    def _all_spreads(self) -> dict[tuple[str, int], tuple[Strategy, ...]]:
        return {}

    def _possible(self, strategy: Strategy, case: Case, type_name: str) -> bool:
        """Whether it shares a microbatch's samples out evenly, and is what the case fixes."""
        if case.microbatch_samples % strategy.dp_size:
            return False
        if case.buffer_tokens is not None and (
            _gathered(strategy, case.microbatch_samples) * self._length > case.buffer_tokens
        ):
            return False
        if case.layers is None or not isinstance(strategy, LayerStrategy):
            return True
        return strategy == replace(case.layers, type=type_name)

    def _place(self, case: Case, spread: _Spread, lie: Lie) -> Place:
        one = case.num_microbatches == 1
        key = lie, case.microbatch_samples, one, case.layers, case.buffer_tokens
        if key not in self._known_places:
            options = tuple(
                self._options(name, found, spread, case, lie)
                for name, found in zip(self.types, spread.strategies, strict=True)
            )
            moves = np.array([self._moves(name, spread, case.microbatch_samples, lie) for name in self.types])
            budget = self.budgets[lie.node_type] - self._buffer_bytes(case)
            self._known_places[key] = Place(options, moves, budget)
        return self._known_places[key]

    def _buffer_bytes(self, case: Case) -> int:
        features = max(tensor.features for tensor in self.costs.model.boundary)
        return (case.buffer_tokens or 0) * features * self.costs.compute_bytes

    def _options(self, name: str, found: Sequence[Strategy], spread: _Spread, case: Case, lie: Lie) -> Options:
        costs = [
            self.costs.element(name, strategy, lie, case.microbatch_samples, case.num_microbatches)
            for strategy in found
        ]
        layouts = np.array([spread.layouts.index(layout_of(strategy)) for strategy in found])
        known = list(self._tie_classes(found))
        classes = np.array([known.index(tie_class(strategy)) for strategy in found] if known else [0] * len(found))
        return Options(
            np.array([cost.microbatch_ps for cost in costs], float),
            np.array([cost.sync_ps + cost.optimizer_ps for cost in costs], float),
            np.array([cost.state_bytes for cost in costs], float),
            np.array([cost.gradients_bytes for cost in costs], float),
            np.array([cost.activation_bytes for cost in costs], float),
            np.array([cost.workspace_bytes for cost in costs], float),
            takes=classes if name == EMBEDDING else layouts,
            gives=classes if name == HEAD else layouts,
        )

    def _moves(self, name: str, spread: _Spread, samples: int, lie: Lie) -> list[list[float]]:
        """[layouts, layouts]: there in forward and back in backward."""
        one_way = {
            (a, b): self.costs.redistribution(name, a, b, lie, samples).time_ps
            for a in spread.layouts
            for b in spread.layouts
        }
        return [[float(one_way[a, b] + one_way[b, a]) for b in spread.layouts] for a in spread.layouts]

    def _sends(self, case: Case, spread: _Spread, here: Sequence[int], there: Sequence[int]) -> list[list[float]]:
        """[types, layouts]."""
        samples = case.microbatch_samples
        key = self.costs.link(here, there), spread.layouts, samples
        if key not in self._known_sends:
            self._known_sends[key] = [
                [float(self.costs.send(name, layout, key[0], samples).time_ps) for layout in spread.layouts]
                for name in self.types
            ]
        return self._known_sends[key]

    def _boundary(self, case: Case, spread: _Spread) -> np.ndarray:
        """[types, layouts]."""
        samples = case.microbatch_samples
        held = [[self.costs.boundary_bytes(n, layout, samples) for layout in spread.layouts] for n in self.types]
        return np.array(held, float)

    def _ties(self, case: Case, spread: _Spread) -> np.ndarray:
        """[classes of the embedding, of the head]."""
        if not self.costs.model.tied:
            return np.zeros((1, 1))
        first, last = (self._tie_classes(spread.strategies[self.types.index(name)]) for name in (EMBEDDING, HEAD))
        return np.array([[self._tie(case.pp_size, *a, *b) for b in last.items()] for a in first.items()], float)

    def _tie(self, pp_size: int, here: object, embedding: Strategy, there: object, head: Strategy) -> int:
        if (key := (pp_size, here, there)) not in self._known_ties:
            stages = self.stage_ranks(pp_size)
            self._known_ties[key] = tie_cost_ps(self.costs, embedding, head, stages[0], stages[-1])
        return self._known_ties[key]

    def _tie_classes(self, found: Sequence[Strategy]) -> dict[object, Strategy]:
        """A strategy of each class that ties tell apart; none where nothing is tied."""
        return {tie_class(strategy): strategy for strategy in found} if self.costs.model.tied else {}

    def _interleaved(self, case: Case, spread: _Spread) -> InterleavedProblem | None:
        """None where stages lie differently on the nodes, or chunks hold different types of layers."""
        layers, stages = self.costs.model.layers, self.stage_ranks(case.pp_size)
        share = len(layers) // (case.pp_size * case.num_chunks)
        lies = set(self._lies(case.pp_size))
        if len(lies) > 1 or any(layers[i : i + share] != layers[:share] for i in range(0, len(layers), share)):
            return None
        around = (*pairwise(stages), (stages[-1], stages[0]))
        moments = [flights_of(case, stage) for stage in (0, min(1, case.pp_size - 1), case.pp_size - 1)]
        middle = moments[1] if case.pp_size > 2 else (*moments[0], *moments[2])
        return InterleavedProblem(
            embedding=self.types.index(EMBEDDING),
            positions=tuple(self.types.index(name) for name in layers[:share]),
            head=self.types.index(HEAD),
            place=self._place(case, spread, next(iter(lies))),
            pp_size=case.pp_size,
            num_chunks=case.num_chunks,
            num_microbatches=case.num_microbatches,
            sends_ps=np.array([self._sends(case, spread, *pair) for pair in around], float),
            flights=(moments[0], middle, moments[2]),
            boundary_bytes=self._boundary(case, spread),
            tie_ps=self._ties(case, spread),
        )


def _gathered(strategy: Strategy, samples: int) -> int:
    """Samples that Megatron's sequence parallelism gathers whole."""
    return samples // strategy.dp_size if strategy.sequence_parallel is SequenceParallel.MEGATRON else 0


def _stages(
    case: Case, solution: Solution, ranks: Sequence[tuple[int, ...]], num_layers: int
) -> tuple[PipelineStage, ...]:
    """The layer ranges of every pipeline stage: even chunks, or as the solution cuts."""
    if case.num_chunks > 1:
        share = num_layers // (case.pp_size * case.num_chunks)
        starts = range(0, num_layers, share)
        return tuple(
            PipelineStage(ranks=own, layers=tuple((s, s + share) for s in starts[i :: case.pp_size]))
            for i, own in enumerate(ranks)
        )
    cuts = (0, *(end - 1 for end in solution.ends[:-1]), num_layers)
    return tuple(PipelineStage(ranks=own, layers=((cuts[i], cuts[i + 1]),)) for i, own in enumerate(ranks))
