"""Lower bounds on the step time T if all layers have one strategy, for every such strategy of a configuration at once.

The costs of the layers are then known, except for the embedding and the head. It is also known how many layers a
pipeline stage can hold, and so how many some stage must hold at least; with interleaved chunks, which layers each stage
holds.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright.types import EMBEDDING, HEAD, LayerStrategy, Strategy
from shardwright_search.solver.interleaved_problem import InterleavedProblem, Place
from shardwright_search.solver.problem import Cut, DeviceGroup, Options, Problem
from shardwright_search.solver.stage_options import rounded_down
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.memory import LayerMemory, StageMemory, no_layers
from shardwright_search.step.pareto import Ints, Numbers


class _Load(NamedTuple):
    """Lower bounds on A and U [strategies], without the embedding and the head."""

    time_ps: Numbers
    exposed_ps: Numbers


class _Stages(NamedTuple):
    """Lower bounds for every common strategy; a stage that may hold no layer adds nothing."""

    together: _Load
    fullest: _Load
    """The load of the stage with the largest A or U, if it is neither the first nor the last."""
    first: _Load
    last: _Load
    fits: Numbers
    """True for strategies with which the layers may fit."""


class _Ends(NamedTuple):
    """Costs of each embedding or head under every common strategy of the layers."""

    time_ps: Numbers
    """[embeddings or heads, strategies]: A, the redistribution to or from the layers included."""
    exposed_ps: Numbers
    """[embeddings or heads, 1]."""
    alone_ps: Numbers
    """[embeddings or heads, 1]: A without the redistribution."""

    def of(self, number: int | None) -> "_Ends":
        """Return the costs of one embedding or head by its number; None: of all."""
        return self if number is None else _Ends._make(column[[number]] for column in self)


class UniformBounds(msgspec.Struct, frozen=True, dict=True, eq=False):
    """The bounds of the configurations of a request on a cluster."""

    instance: Instance

    def bound_ps(self, configuration: Configuration) -> float:
        """Return the bound of a configuration whose layers share a strategy; infinity: no plan fits."""
        whole = configuration._replace(layers=None, outer=None, buffer_tokens=None)
        assert configuration.layers is not None
        return float(self.bounds_ps(whole, configuration.outer)[self._numbers(whole)[configuration.layers]])

    @cached_method
    def _numbers(self, whole: Configuration) -> dict[LayerStrategy, int]:
        return {shared: number for number, shared in enumerate(self.instance.choices.layer_strategies(whole))}

    @cached_method
    def bounds_ps(self, whole: Configuration, outer: Strategy | None) -> Numbers:
        """Return the bound of every common strategy of the layers, with one or any strategy of embedding and head."""
        stages, tied_ps, (embedding, head) = self._stages_and_ends(whole)
        embedding, head = (
            ends.of(self._number_of(whole, name, outer)) for name, ends in ((EMBEDDING, embedding), (HEAD, head))
        )
        p, bounds = whole.pp_size, np.zeros(len(stages.fits))
        for form in whole.closed_forms:
            weights = form.fill + form.steady / p, form.once / p
            mean = weights[0] * stages.together.time_ps + weights[1] * stages.together.exposed_ps
            total = form.fill * stages.together.time_ps
            for ends in (embedding, head):
                mean = mean + (weights[0] * ends.time_ps + weights[1] * ends.exposed_ps).min(0)
                total = total + form.fill * ends.time_ps.min(0)
            slowest, exposed = stages.fullest
            for ends, load in ((embedding, stages.first), (head, stages.last)):
                slowest = np.maximum(slowest, load.time_ps + ends.alone_ps.min())
                exposed = np.maximum(exposed, load.exposed_ps + ends.exposed_ps.min())
            largest = total + form.steady * slowest + form.once * exposed
            bounds = np.maximum(bounds, np.maximum(mean, largest) / form.parts)
        return np.where(stages.fits, rounded_down(bounds + tied_ps), np.inf)

    def _number_of(self, whole: Configuration, name: str, outer: Strategy | None) -> int | None:
        choice = self.instance.choices.choice(whole)
        of_type = self.instance.choices.layers.shardings(choice).of_type(name, choice.widths[0])
        return None if outer is None else of_type.index(outer)

    @cached_method
    def _stages_and_ends(self, whole: Configuration) -> tuple[_Stages, float, tuple[_Ends, _Ends]]:
        if whole.num_chunks > 1:
            chunks = self.instance.interleaved_problem(whole)
            rows = self._rows(whole, chunks.positions)
            kinds = chunks.embedding, chunks.positions[-1], chunks.head
            return _of_chunks(chunks, rows), float(chunks.tied_ps.min()), _ends([chunks.group], kinds, rows)
        problem = self.instance.problem(whole)
        rows = self._rows(whole, problem.layers[1:-1])
        kinds = problem.layers[0], problem.layers[-2], problem.layers[-1]
        return _of_cuts(problem, rows), float(problem.tied_ps.min()), _ends(problem.device_groups, kinds, rows)

    def _rows(self, whole: Configuration, kinds: Sequence[int]) -> dict[int, Ints]:
        """Return the option numbers of the common strategies, by the number of a layer type."""
        choice, layers, types = (
            self.instance.choices.choice(whole),
            self.instance.choices.layers,
            self.instance.prices.types,
        )
        rows = {}
        for kind in dict.fromkeys(kinds):
            number = {
                each: row for row, each in enumerate(layers.shardings(choice).of_type(types[kind], *choice.widths))
            }
            rows[kind] = np.array([number[layers.as_type(shared, types[kind])] for shared in self._numbers(whole)])
        return rows


def _ends(groups: Sequence[DeviceGroup], kinds: tuple[int, int, int], rows: dict[int, Ints]) -> tuple[_Ends, _Ends]:
    """Return the costs of embeddings and heads; `kinds`: the types of the embedding, the last layer and the head."""
    embedding, last, head = kinds
    into, out_of = [], []
    for group in groups:
        moves, (first, behind) = group.redistribution_ps, (group.options[embedding], group.options[head])
        layouts = group.options[last].output_layout[rows[last]]
        into.append((first, moves[embedding][np.ix_(first.output_layout, layouts)]))
        out_of.append((behind, moves[last][np.ix_(layouts, behind.input_layout)].T))
    return _least_of(into), _least_of(out_of)


def _least_of(on_groups: Sequence[tuple[Options, Numbers]]) -> _Ends:
    alone = np.min([options.time_ps for options, _ in on_groups], 0)[:, None]
    exposed = np.min([options.exposed_ps for options, _ in on_groups], 0)[:, None]
    return _Ends(np.min([options.time_ps[:, None] + moved for options, moved in on_groups], 0), exposed, alone)


def _of_cuts(problem: Problem, rows: dict[int, Ints]) -> _Stages:
    """Return the bounds of layers that may be cut into stages anywhere."""
    layers, p = problem.layers[1:-1], problem.pp_size
    each = {
        kind: [group.options[kind].take(of_kind) for group in problem.device_groups] for kind, of_kind in rows.items()
    }
    costs = {
        kind: _Load(*(np.min([getattr(o, name) for o in options], 0) for name in ("time_ps", "exposed_ps")))
        for kind, options in each.items()
    }
    most = np.stack([_most_layers(problem, stage, each) for stage in range(p)])
    inner = most[1:-1] if not problem.block_in_each_stage else most
    fits = (most.sum(0) >= len(layers)) & (inner >= 1).all(0)
    if len(rows) > 1:  # with one type, `most` says the same
        fits &= _reached(problem, each) == len(layers)
    fullest = _some_stage_holds(most, len(layers))
    sends = _sends_ps(problem, each)
    counts = np.array([np.cumsum([0, *(kind == layer for layer in layers)]) for kind in rows]).T
    times, exposed = (np.stack([costs[kind][column] for kind in rows]) for column in range(2))
    some = [np.zeros(len(fits)), np.zeros(len(fits))]
    for number in np.unique(fullest[fits]):
        held = np.unique(counts[number:] - counts[: len(counts) - number], axis=0)
        of_number = np.flatnonzero(fullest == number)
        for column, per_layer in enumerate((times, exposed)):
            some[column][of_number] = (held @ per_layer[:, of_number]).min(0)
    nothing = _Load(np.zeros(len(fits)), np.zeros(len(fits)))
    return _Stages(_Load(counts[-1] @ times + sends, counts[-1] @ exposed), _Load(*some), nothing, nothing, fits)


def _most_layers(problem: Problem, stage: int, each: dict[int, list[Options]]) -> Numbers:
    """Return how many layers a pipeline stage may hold under each strategy: the most on any of its device groups."""
    most = [
        _most_on(problem, stage, group, [options[group] for options in each.values()])
        for group in problem.groups_of(stage)
    ]
    return np.asarray(np.max(most, 0))


def _most_on(problem: Problem, stage: int, number: int, each: Sequence[Options]) -> Numbers:
    """Return how many layers a stage may hold on one device group if all have the type that takes the least memory.

    The peak is no lower than the memory while the first layer works, while the last one does, or while the head does.
    """
    group, parts, p = problem.device_groups[number], problem.phases(stage), problem.pp_size
    memory = [options.memory(parts) for options in each]
    late, activation = (np.min([m.static + m[column] for m in memory], 0) for column in (1, 2))
    alone = np.min([m.static + m.late + m.activation + m.workspace for m in memory], 0)
    kinds = sorted(set(problem.layers[1:-1]))
    boundary = problem.boundary_bytes[kinds][:, each[0].output_layout].min(0)[:, None]
    left = group.budget_bytes - boundary * (stage < p - 1)
    if stage > 1:
        left = left - boundary * np.array([phase.in_flight + 2.0 for phase in parts])
    if stage == 0:
        embedding = group.options[problem.layers[0]].memory(parts)
        left = left - (embedding.static + embedding.activation).min(0)
    room = left
    if stage == p - 1:
        head = group.options[problem.layers[-1]].memory(parts)
        room = left - (head.static + head.late).min(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(room >= alone, 1 + np.floor((room - alone) / np.maximum(late, activation)), 0)
        if stage == p - 1:
            working = (head.static + head.late + head.activation + head.workspace).min(0)
            most = np.minimum(most, np.where(left >= working, np.floor((left - working) / activation), 0))
    return np.asarray(np.minimum(np.nan_to_num(most, nan=np.inf), len(problem.layers)).min(1))


def _reached(problem: Problem, each: dict[int, list[Options]]) -> Ints:
    """Return how many layers of several types the stages can hold under each strategy, in the order of the layers.

    Each stage takes as many of the next layers as fit, which leaves the fewest for the stages after it: fewer layers
    never need more memory. It is the solver's memory, with the least of embedding, head and received tensors.
    """
    kinds, layers = list(each), problem.layers[1:-1]
    kind_of = np.array([kinds.index(kind) for kind in layers])
    reached = np.zeros(len(next(iter(each.values()))[0].time_ps), np.int64)
    for stage in range(problem.pp_size):
        on_groups = [
            _reached_on(problem, stage, group, [each[kind][group] for kind in kinds], kind_of, reached)
            for group in problem.groups_of(stage)
        ]
        reached = np.max(on_groups, 0)
    return reached


def _reached_on(
    problem: Problem, stage: int, number: int, each: Sequence[Options], kind_of: Ints, reached: Ints
) -> Ints:
    """Return how many layers stages hold up to the end of one on a device group; `each`: the options of each type."""
    group, parts, (embedding, *inner, head) = problem.device_groups[number], problem.phases(stage), problem.layers
    memory = [options.memory(parts) for options in each]
    stacked = LayerMemory._make(np.stack(np.broadcast_arrays(*column)) for column in zip(*memory, strict=True))
    boundary = problem.boundary_bytes[sorted(set(inner))][:, each[0].output_layout].min(0)
    room = group.budget_bytes - boundary * (stage < problem.pp_size - 1)
    held = no_layers(parts, boundary * (stage > 1))
    if stage == 0:
        held = held.then(_least(group.options[embedding].memory(parts)))
    behind = _least(group.options[head].memory(parts)) if stage == problem.pp_size - 1 else None
    reached, held = reached.copy(), StageMemory(*np.broadcast_arrays(*held))
    rows = np.flatnonzero(reached < len(kind_of))
    held = held.take(rows)
    while len(rows):
        kinds = kind_of[reached[rows]]
        held = held.then(LayerMemory._make(column[kinds, rows] for column in stacked))
        whole = held if behind is None else held.then(behind)
        fits = (whole.peak <= room[rows, None]).all(1)
        reached[rows[fits]] += 1
        fits &= reached[rows] < len(kind_of)
        rows, held = rows[fits], held.take(np.flatnonzero(fits))
    return reached


def _least(memory: LayerMemory) -> LayerMemory:
    """Return the least of each kind of bytes over all options [1, phases]."""
    return LayerMemory._make(column.min(0, keepdims=True) for column in memory)


def _some_stage_holds(most: Numbers, layers: int) -> Ints:
    """Return the least number of layers that some stage must hold, given each stage's capacity [stages, strategies]."""
    low = np.full(most.shape[1], -(-layers // len(most)))
    high = np.full(most.shape[1], layers)
    while (low < high).any():
        middle = (low + high) // 2
        enough = np.minimum(most, middle).sum(0) >= layers
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
        low = np.minimum(low, high)
    return low


def _sends_ps(problem: Problem, each: dict[int, list[Options]]) -> Numbers:
    """Return a lower bound of the time of all sends; the first stage may hold and send only the embedding."""
    (options, *_), *_ = each.values()
    total, embedding = np.zeros(len(options.time_ps)), problem.layers[0]
    for stage in range(1, problem.pp_size):
        arrays = {
            id(times): times
            for position, moves in problem.placements[stage].items()
            for before in problem.positions[stage][position]
            for behind, _ in moves
            for times in (problem.sends_ps[Cut(position, before, behind)],)
        }
        least = np.min([times.diagonal(axis1=1, axis2=2) for times in arrays.values()], 0)
        sent = least[list(each)][:, options.output_layout].min(0)
        total += 2 * (np.minimum(sent, least[embedding].min()) if stage == 1 else sent)
    return total


def _of_chunks(problem: InterleavedProblem, rows: dict[int, Ints]) -> _Stages:
    """Return the bounds of layers in interleaved chunks."""
    options = {kind: problem.group.options[kind].take(of_kind) for kind, of_kind in rows.items()}
    v, p, spans, last = problem.num_chunks, problem.pp_size, problem.spans, options[problem.positions[-1]]

    def chunk(span: int, name: str) -> Numbers:
        held = [problem.positions[i] for i in spans.ranges[span]]
        return np.asarray(sum(held.count(kind) * getattr(own, name) for kind, own in options.items()))

    def stage(name: str) -> tuple[Numbers, Numbers, Numbers]:
        whole = chunk(0, name)
        return v * whole, (v - 1) * whole + chunk(spans.first, name), (v - 1) * whole + chunk(spans.last, name)

    sends = problem.sends_ps[:, problem.positions[-1]][:, last.output_layout]
    usual, at_first, at_last = stage("time_ps")
    times = np.stack([at_first, *[usual] * (p - 2), at_last])
    times[:-1] += v * sends[:-1]
    times[1:] += v * sends[:-1]
    times[[0, -1]] += (v - 1) * sends[-1]
    inner, first, last_exposed = stage("exposed_ps")
    nothing = np.zeros_like(inner)
    fullest = _Load(times[1:-1].max(0, initial=0.0), inner if p > 2 else nothing)
    together = _Load(times.sum(0), (p - 2) * inner + first + last_exposed)
    fits = _chunks_fit(problem, chunk, problem.boundary_bytes[problem.positions[-1]][last.output_layout])
    return _Stages(together, fullest, _Load(times[0], first), _Load(times[-1], last_exposed), fits)


def _chunks_fit(problem: InterleavedProblem, chunk: Callable[[int, str], Numbers], received: Numbers) -> Numbers:
    """Return whether the layers of all stages may fit; each chunk but the first receives this many bytes."""

    def numbers(span: int, is_first: bool) -> tuple[Numbers, Numbers, Numbers]:
        held = chunk(span, "activation_bytes") + received * (not is_first)
        return held, chunk(span, "late_bytes") + chunk(span, "sum_bytes"), chunk(span, "state_bytes")

    most = []
    for place, moments in zip(Place, problem.moments_in_flight, strict=True):
        if place not in problem.places:
            continue
        usual, outer = numbers(0, False), numbers(problem.span_at(place), place is Place.FIRST)
        held = [
            (at.chunks - at.outer + (not at.at_outer)) * usual[0]
            + (at.outer + at.at_outer) * outer[0]
            + (at.made - at.outer_made) * usual[1]
            + at.outer_made * outer[1]
            - at.freed * received
            for at in moments
        ]
        others = problem.num_chunks - (place is not Place.MIDDLE)
        most.append(np.max(held, 0) + others * usual[2] + (place is not Place.MIDDLE) * outer[2] + 3 * received)
    return np.asarray(np.max(most, 0) <= problem.group.budget_bytes)
