"""Tiny random problems of the solver, and every plan of them priced with formulas written a second time."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, combinations, pairwise, product
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from stage_moves import counted, cuts_of, handed_as_given, moves_of

from shardwright.plan.schedules.schedule import ClosedForm
from shardwright_search.solver.problem import Cut, DeviceGroup, Moves, Options, Position, Problem, Solution


class Enumerated(NamedTuple):
    """T and memory of plans that are cut and placed alike, one entry per choice of options."""

    ends: tuple[int, ...]
    device_groups: tuple[int, ...]
    shape: tuple[int, ...]
    times: np.ndarray
    memory: np.ndarray
    host: np.ndarray

    def solution(self, plan: int) -> Solution:
        """One of the plans."""
        return Solution(self.ends, tuple(int(i) for i in np.unravel_index(plan, self.shape)), self.device_groups)


class _Scale(NamedTuple):
    """How many layouts and classes there are, how large costs are, and whether sums of gradients are kept."""

    layouts: int
    classes: int
    costs: int
    sums: bool


def _scale(rng: np.random.Generator, layouts: int) -> _Scale:
    (apart,) = rng.spawn(1)
    return _Scale(layouts, int(rng.integers(1, 3)), int(rng.choice([4, 40, 1000])), bool(apart.random() < 0.5))


def _options(rng: np.random.Generator, kind: int, scale: _Scale, layouts: np.ndarray) -> Options:
    n = int(rng.integers(1, 4))
    times, ends, states, activations, transients = rng.integers(0, scale.costs, (5, n)).astype(float)
    late = rng.integers(0, scale.costs, n).astype(float)
    (apart,) = rng.spawn(1)
    sums = scale.sums * apart.integers(0, 2, n) * apart.integers(0, scale.costs, n).astype(float)
    input_layout, output_layout = (layouts[rng.integers(0, len(layouts), n)] for _ in range(2))
    output_layout = input_layout if kind in (1, 2) else output_layout
    if kind == 0:
        input_layout = rng.integers(0, scale.classes, n)
    if kind == 3:
        output_layout = rng.integers(0, scale.classes, n)
    held = late, sums, activations, transients, *np.zeros((2, n))
    return Options(times + 1, ends, states, *held, input_layout, output_layout)


def _group(rng: np.random.Generator, scale: _Scale, layouts: np.ndarray, width: int = 1) -> DeviceGroup:
    most = 1 + scale.costs // int(rng.choice([1, 4]))
    moves = rng.integers(0, most, (4, scale.layouts, scale.layouts)).astype(float)
    moves[:, np.arange(scale.layouts), np.arange(scale.layouts)] = 0
    if rng.random() < 0.5:  # no detour is cheaper: what lets labels of several layouts be compared
        for between in range(scale.layouts):
            moves = np.minimum(moves, moves[:, :, between, None] + moves[:, None, between, :])
    return DeviceGroup(tuple(_options(rng, kind, scale, layouts) for kind in range(4)), moves, 1 << 40, width)


def _chain(rng: np.random.Generator, pp_size: int) -> tuple[int, ...]:
    layers = int(rng.integers(max(1, pp_size - 2), 5 if pp_size < 3 else 4))  # the ends may be alone
    return (0, *(int(kind) for kind in rng.integers(1, 2 + int(rng.integers(0, 2)), layers)), 3)


def _in_flight(rng: np.random.Generator, count: int, pp_size: int) -> tuple[int, ...]:
    return tuple(count if rng.random() < 0.3 else min(count, pp_size - i) for i in range(pp_size))


def with_tight_budgets(rng: np.random.Generator, problem: Problem) -> Problem:
    needs = np.sort(np.concatenate([found.memory.max(0) for found in every_plan(problem)]))
    share = float(rng.choice([0, 0.02, 0.2, 0.6, 0.999]))
    budgets = [
        int(needs[int(len(needs) * share)] * (1 if i == 0 else rng.choice([0.8, 1.2])))
        for i in range(len(problem.device_groups))
    ]
    return with_budgets(problem, budgets)


@lru_cache(maxsize=2_000)
def random_problem(seed: int) -> Problem:
    """1 to 4 layers of 1 or 2 types, up to 3 stages on 1 or 2 places, and costs of all kinds that matter."""
    rng = np.random.default_rng(seed)
    pp_size = int(rng.integers(1, 4))
    layers = _chain(rng, pp_size)
    scale = _scale(rng, int(rng.integers(1, 4)))
    count = int(rng.choice([1, 2, 3, 8]))
    device_groups = int(rng.integers(1, 3)) if pp_size > 1 else 1
    positions = rng.random() < 0.3
    available = [int(n) for n in rng.integers(1, pp_size + 1, device_groups)]
    available[0] = max(available[0], pp_size - sum(available[1:]))
    groups = tuple(_group(rng, scale, np.arange(scale.layouts)) for _ in range(device_groups))
    allowed = [[int(rng.integers(device_groups))] if positions else range(device_groups) for _ in range(pp_size)]
    moves = counted(allowed, [pp_size] * device_groups if positions else available)
    shape = (pp_size - 1, device_groups, device_groups, 4, scale.layouts)
    sends = rng.integers(0, 1 + scale.costs // 4, shape).astype(float)
    problem = Problem(
        layers=layers,
        device_groups=groups,
        placements=moves,
        sends_ps=handed_as_given(moves, sends),
        in_flight=_in_flight(rng, count, pp_size),
        num_microbatches=count,
        closed_form=ClosedForm(1, count - 1),
        boundary_bytes=rng.integers(0, 1 + scale.costs // 3, (4, scale.layouts)).astype(float),
        tied_ps=rng.integers(0, 1 + scale.costs // 2, (scale.classes, scale.classes)).astype(float),
    )
    return with_tight_budgets(rng, problem)


@lru_cache(maxsize=2_000)
def random_unequal(seed: int) -> Problem:
    """2 or 3 stages that share out 3 to 5 ranks in any way, of widths with layouts of their own."""
    rng = np.random.default_rng(seed)
    pp_size = int(rng.integers(2, 4))
    layers = _chain(rng, pp_size)
    devices, per_width = int(rng.integers(pp_size + 1, 6)), int(rng.integers(1, 3))
    widths = range(1, devices - pp_size + 2)
    scale = _scale(rng, per_width * len(widths))
    layouts = {width: np.arange(i * per_width, (i + 1) * per_width) for i, width in enumerate(widths)}
    count, lies = int(rng.choice([1, 2, 3, 8])), int(rng.integers(1, 3))
    groups = tuple(_group(rng, scale, layouts[width], width) for width in widths for _ in range(lies))
    ways = []
    for own in product(widths, repeat=pp_size):
        ranks = list(accumulate(own, initial=0))
        if ranks[-1] == devices:
            on = [(width - 1) * lies + start % lies for width, start in zip(own, ranks, strict=False)]
            ways.append((on, [(rank,) for rank in ranks]))
    moves = moves_of(pp_size, ways)
    return _with_sends(rng, scale, layers, groups, moves, layouts, count)


@lru_cache(maxsize=2_000)
def random_mixed(seed: int) -> Problem:
    """2 to 4 stages on 2 or 3 node types in any order, each of 1 to 3 ranks that their stages share out in any way."""
    rng = np.random.default_rng(seed)
    ranks = _node_types(rng)
    pp_size = int(rng.integers(len(ranks), min(4, sum(ranks)) + 1))
    return _on_node_types(rng, ranks, pp_size, [])


@lru_cache(maxsize=2_000)
def random_spanning(seed: int) -> Problem:
    """The same with 1 to 4 stages, of which some may, or must, have ranks of several types."""
    rng = np.random.default_rng(seed)
    ranks = _node_types(rng)
    pp_size = int(rng.integers(1, min(4, sum(ranks)) + 1))
    stages = rng.permutation([*range(pp_size), *rng.integers(0, pp_size, sum(ranks) - pp_size)])
    of = np.repeat(np.arange(len(ranks)), ranks)
    some = [np.bincount(of[stages == stage], minlength=len(ranks)) for stage in range(pp_size)]
    some += [np.array([int(rng.integers(0, most + 1)) for most in ranks]) for _ in range(2)]
    spanning = dict.fromkeys(tuple(own.tolist()) for own in some if (own > 0).sum() > 1)
    return _on_node_types(rng, ranks, pp_size, list(spanning))


def _node_types(rng: np.random.Generator) -> list[int]:
    """The ranks of each."""
    types = int(rng.integers(2, 4))
    return [int(n) for n in rng.integers(1, 4 if types == 2 else 3, types)]


def _on_node_types(rng: np.random.Generator, ranks: list[int], pp_size: int, spanning: list[Position]) -> Problem:
    """Stages have any ranks of one type, or as many of each as is listed."""
    layers, per_width = _chain(rng, pp_size), int(rng.integers(1, 3))
    widths = sorted({*range(1, max(ranks) + 1), *map(sum, spanning)})
    scale = _scale(rng, per_width * len(widths))
    layouts = {width: np.arange(i * per_width, (i + 1) * per_width) for i, width in enumerate(widths)}
    of_one = [
        tuple(n * (of == i) for i in range(len(ranks))) for of, most in enumerate(ranks) for n in range(1, most + 1)
    ]
    kinds, weights = [*of_one, *spanning], rng.choice([1, 2, 7], len(ranks))
    groups = tuple(_group(rng, scale, layouts[sum(own)], sum(own)) for own in kinds)
    ways = []
    for on in product(range(len(kinds)), repeat=pp_size):
        each = zip(*(kinds[group] for group in on), strict=True)
        used = list(zip(*(accumulate(own, initial=0) for own in each), strict=True))
        if list(used[-1]) == ranks:
            ways.append((on, used))
    moves = moves_of(pp_size, ways)
    problem = _with_sends(rng, scale, layers, groups, moves, layouts, int(rng.choice([1, 2, 3, 8])))
    return replace(problem, weights=tuple(int(weights @ np.array(own)) for own in kinds))


def _with_sends(
    rng: np.random.Generator,
    scale: _Scale,
    layers: tuple[int, ...],
    groups: tuple[DeviceGroup, ...],
    moves: tuple[Moves, ...],
    layouts: dict[int, np.ndarray],
    count: int,
) -> Problem:
    """The rest of a problem in which each cut has sends of its own; `layouts` are those of each width."""
    sends = {}
    for _, cut in cuts_of(moves):
        before, behind = groups[cut.before].width, groups[cut.behind].width
        times = rng.integers(0, 1 + scale.costs // 4, (4, scale.layouts, scale.layouts)).astype(float)
        meet = np.zeros((scale.layouts, scale.layouts), bool)
        own = np.eye(len(layouts[before]), dtype=bool)
        meet[np.ix_(layouts[before], layouts[behind])] = before != behind or own
        sends[cut] = np.where(meet, times, np.inf)
    problem = Problem(
        layers=layers,
        device_groups=groups,
        placements=moves,
        sends_ps=sends,
        in_flight=_in_flight(rng, count, len(moves)),
        num_microbatches=count,
        closed_form=ClosedForm(1, count - 1),
        boundary_bytes=rng.integers(0, 1 + scale.costs // 3, (4, scale.layouts)).astype(float),
        tied_ps=rng.integers(0, 1 + scale.costs // 2, (scale.classes, scale.classes)).astype(float),
    )
    return with_tight_budgets(rng, problem)


def with_budgets(problem: Problem, budgets: list[int]) -> Problem:
    """The same case with other budgets."""
    fields = {name: getattr(problem, name) for name in Problem.__struct_fields__}
    device_groups = tuple(replace(p, budget_bytes=b) for p, b in zip(problem.device_groups, budgets, strict=True))
    return Problem(**fields | {"device_groups": device_groups})


def placements(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every way to put the stages on places."""
    ways: list[tuple[tuple[int, ...], Position]] = [((), problem.start_position)]
    for moves in problem.placements:
        ways = [((*groups, group), after) for groups, at in ways for group, after in moves[at]]
    yield from (groups for groups, _ in ways)


def every_plan(problem: Problem) -> Iterator[Enumerated]:
    """All plans, cut by cut."""
    total = len(problem.layers)
    for cuts in combinations(range(1, total), problem.pp_size - 1):
        for device_groups in placements(problem):
            yield _priced(problem, (*cuts, total), device_groups)


@lru_cache(maxsize=2_000)
def best_of(problem: Problem) -> float:
    """The least T of all plans that fit, or infinity."""
    return min(
        (float(found.times[fits].min()) for found in every_plan(problem) if (fits := fitting(problem, found)).any()),
        default=np.inf,
    )


def fitting(problem: Problem, found: Enumerated) -> np.ndarray:
    """Which of the plans stay within the budgets."""
    budgets = np.array([problem.device_groups[group].budget_bytes for group in found.device_groups])
    hosts = np.array([problem.device_groups[group].host_budget_bytes for group in found.device_groups])
    return (found.memory <= budgets[:, None]).all(0) & (found.host <= hosts[:, None]).all(0)


def _moments(in_flight: int, num_microbatches: int) -> set[tuple[int, bool, int]]:
    """Every pass of a stage: microbatches in flight, whether it goes backward, and how many went so before (0, 1, 2).

    All but one of those that are ever in flight go forward first, then one goes forward and one backward in turn.
    """
    found, forward, done = set(), 0, 0
    while done < num_microbatches:
        if forward < num_microbatches and forward - done < in_flight:
            forward += 1
            found.add((forward - done, False, min(done, 2)))
        else:
            found.add((forward - done, True, min(done, 2)))
            done += 1
    return found


def _gradients(own: Options, backward: bool, done: int, at_work: bool) -> np.ndarray:
    """What a layer holds of gradients; `at_work`: a backward pass is at the layer or has been there.

    A backward pass begins by adding up what the one before has made, unless that is done in place.
    """
    if not backward:
        return (done > 0) * own.late_bytes + (done > 1) * own.sum_bytes
    in_place = (done > 0) & (own.sum_bytes == 0)
    return (at_work | in_place) * own.late_bytes + (done > 0) * own.sum_bytes


def _priced(problem: Problem, ends: tuple[int, ...], device_groups: tuple[int, ...]) -> Enumerated:
    stage_of = [stage for stage, (a, b) in enumerate(pairwise((0, *ends))) for _ in range(a, b)]
    own = [
        problem.device_groups[device_groups[s]].options[kind] for s, kind in zip(stage_of, problem.layers, strict=True)
    ]
    shape = tuple(len(o.input_layout) for o in own)
    chosen = [index.ravel() for index in np.indices(shape)]
    size = len(chosen[0])
    times, ends_ps = np.zeros((problem.pp_size, size)), np.zeros((problem.pp_size, size))
    received = [np.zeros(size)]
    at = problem.start_position
    for e, (stage, o, rows) in enumerate(zip(stage_of, own, chosen, strict=True)):
        times[stage] += o.time_ps[rows]
        ends_ps[stage] += o.exposed_ps[rows]
        if e:
            kind, gave = problem.layers[e - 1], own[e - 1].output_layout[chosen[e - 1]]
            here, got = problem.device_groups[device_groups[stage]], gave
            if stage_of[e - 1] != stage:
                before = device_groups[stage - 1]
                at = dict(problem.placements[stage - 1][at])[before]
                if problem.device_groups[before].width != here.width:  # straight to where it is wanted
                    got = o.input_layout[rows]
                send = problem.sends_ps[Cut(at, before, device_groups[stage])][kind, gave, got]
                times[stage] += send
                times[stage - 1] += send
                received.append(problem.boundary_bytes[kind, got])
            times[stage] += here.redistribution_ps[kind, got, o.input_layout[rows]]
    memory, host = np.zeros((2, problem.pp_size, size))
    for stage, o, rows in zip(stage_of, own, chosen, strict=True):
        host[stage] += o.host_bytes[rows] + problem.in_flight[stage] * o.host_activation_bytes[rows]
    for stage, k in enumerate(problem.in_flight):
        inside = [e for e, s in enumerate(stage_of) if s == stage]
        for flight, backward, done in _moments(k, problem.num_microbatches):
            for j in inside:  # the peak while element j works on the last microbatch in flight
                need = own[j].workspace_bytes[chosen[j]]
                for e in inside:
                    o, rows = own[e], chosen[e]
                    need = need + o.state_bytes[rows] + (flight - 1 + (e <= j)) * o.activation_bytes[rows]
                    need = need + _gradients(o.take(rows), backward, done, e >= j)
                # Of every microbatch in flight, one gradient of it, and what comes for the next pass.
                need = need + (flight + 2) * received[stage]
                if stage < problem.pp_size - 1:  # one gradient of what is given out
                    e = inside[-1]
                    need = need + problem.boundary_bytes[problem.layers[e], own[e].output_layout[chosen[e]]]
                memory[stage] = np.maximum(memory[stage], need)
    tie = problem.tied_ps[own[0].input_layout[chosen[0]], own[-1].output_layout[chosen[-1]]]
    form = problem.closed_form
    objective = form.fill * times.sum(0) + form.steady * times.max(0) + form.once * ends_ps.max(0) + tie
    return Enumerated(ends, device_groups, shape, objective, memory, host)
