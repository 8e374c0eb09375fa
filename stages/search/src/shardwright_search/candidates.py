"""The plan that is taken among those near the optimum, by simulated time, and the choice of runners-up."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, groupby, islice, pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from shardwright.plan.axes import Axis
from shardwright.plan.process_groups import Purpose, communicator_bytes, strategy_axes
from shardwright.types import DataParallel, Plan
from shardwright_search.cost_model.plan import Evaluation, evaluate, simulated_step_ps
from shardwright_search.cost_model.stage_costs import types_with_replicas
from shardwright_search.simulation.simulator import has_timeline
from shardwright_search.solver.branch_and_bound import optimize, plans_below
from shardwright_search.solver.interleaved import Interleaved
from shardwright_search.solver.partition import Pipeline, PricedSolution
from shardwright_search.solver.problem import DeviceGroup, Problem, Solution, price
from shardwright_search.solver.quick_bounds import Relaxed
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.solver.stopping import latest, soon
from shardwright_search.solver.targets import WIDE, Best, Optimum, Solvable, Target, best_guess, guess
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import StageWidths
from shardwright_search.space.search_space import SearchSpace

# The plan with the shortest simulated step: near-optimal plans are simulated, then improved by local changes.
#
# The closed form orders plans almost as the simulator does, but not quite: it counts sends that are hidden, and does
# not distinguish forward from backward passes. So plans near its optimum are simulated, and the quickest of them are
# changed in one place after the other, as long as that makes the simulated step shorter.


_MAX_ACTIONS = 100_000
"""The most passes that are simulated to compare near plans."""
_MAX_WORK = 12_000
"""The most passes that are simulated to change plans; pricing their layers counts as passes, too."""
_ACTIONS_OF_LAYER = 10
"""Pricing a layer takes as long as simulating this number of passes."""
_EXACT = 1e-3
"""A plan of one stage is not changed if its closed form differs from its simulated time by at most this share."""
_STARTS = 3
"""Number of plans that are always changed."""
_MAX_STARTS = 16
"""The most plans that are changed if the simulator may hide much."""
_HIDDEN = 0.02
"""If the simulator may hide more than this share of a step, it may order plans differently from the closed form."""
_SMALL = 150
"""The most work of a trial, in passes, with which all placements are examined: for larger plans it takes too long."""
_MAX_OPEN = 24
"""The most configurations, the promising ones, whose best plan on each placement is searched."""
_MAX_PLACEMENTS = 12
"""The most placements of one configuration."""
_MAX_PLACEMENT_LABELS = 3_000
"""The most work on the best plan of one placement."""
_MAX_RUNS = 12_000
"""The most pairs of layers on all placements except the first one: work on a placement grows with them."""


class Simulated(NamedTuple):
    """A plan, and its score by simulation."""

    score: float
    best: Best[Configuration]


def simulated(instance: Instance, plans: Sequence[Best[Configuration]]) -> tuple[Simulated, ...]:
    """Return plans by ascending simulated score; if they are too many, the last ones given are left out."""
    ranked: list[Simulated] = []
    left = _MAX_ACTIONS
    for best in plans:
        left -= _actions(best.target.configuration)
        if ranked and left < 0:
            break
        ranked.append(Simulated(_score(instance, best.target, best.priced.solution), best))
    return tuple(sorted(ranked, key=_by_score))


def changed(instance: Instance, ranked: Sequence[Simulated]) -> Iterator[Best[Configuration]]:
    """Yield the first plan, and each better one by the simulator that changes of the first few plans lead to."""
    best, left = ranked[0], _MAX_WORK
    yield best.best
    for start in _starts(instance, ranked):
        left = _MAX_WORK if _hides(instance, start.best.target, ranked[0].score) else left
        for improved, work in _improved(instance, start):
            left -= work
            if _by_score(improved) < _by_score(best):
                best = improved
                yield best.best
            if left <= 0:
                break


def _starts(instance: Instance, ranked: Sequence[Simulated]) -> Iterator[Simulated]:
    """Yield the first few plans, and the first of each configuration and placement if the simulator hides much."""
    yield from ranked[:_STARTS]
    known = {_place(start.best) for start in ranked[:_STARTS]}
    for each in ranked[_STARTS:]:
        if len(known) < _MAX_STARTS and (place := _place(each.best)) not in known:
            if _hides(instance, each.best.target, ranked[0].score):
                known.add(place)
                yield each


def _place(best: Best[Configuration]) -> tuple[Configuration, tuple[int, ...]]:
    return best.target.configuration, best.priced.solution.device_groups


def _improved(instance: Instance, here: Simulated) -> Iterator[tuple[Simulated, int]]:
    """Yield the plan, and each change that shortens its step, with the number of passes simulated for it.

    Interleaved plans are not changed. Plans of a single stage are not changed if their closed form is their simulated
    time, unless layers may be gathered while others work (ZeRO-3).
    """
    target = here.best.target
    single = target.configuration.pp_size == 1 and DataParallel.ZERO3 not in instance.request.data_parallel
    exact = single and abs(here.best.score - here.score) <= here.score * _EXACT
    if exact or target.configuration.num_chunks > 1:
        return
    problem = instance.problem(target.configuration)
    work = _work(instance, target.configuration)
    known = {here.best.priced.solution}
    moves = _within_two(problem, here.best.priced.solution)
    while (solution := next(moves, None)) is not None:
        if solution in known:
            continue
        known.add(solution)
        score = _score(instance, target, solution)
        if score < here.score and (objective_ps := _fitting(problem, solution)) is not None:
            here = Simulated(score, Best(target, PricedSolution(objective_ps, solution), target.score(objective_ps)))
            moves = _within_two(problem, solution)
        yield here, work


def _score(instance: Instance, target: Target[Configuration], solution: Solution) -> float:
    """Return the score by simulation, in the units of scores by the closed form."""
    return simulated_step_ps(instance.plan(target.configuration, solution), instance.costs) * target.scale


def _actions(configuration: Configuration) -> int:
    return 2 * configuration.num_microbatches * configuration.pp_size * configuration.num_chunks


def _work(instance: Instance, configuration: Configuration) -> int:
    """Return the work of a trial, in simulated passes."""
    return _actions(configuration) + _ACTIONS_OF_LAYER * len(instance.types_of_layers)


def _by_score(ranked: Simulated) -> tuple[float, float]:
    return ranked.score, ranked.best.score


def _fitting(problem: Problem, solution: Solution) -> float | None:
    """Return the closed form of a plan that fits; None if it does not."""
    cost = price(problem, solution)
    fits = cost.fits([problem.device_groups[group] for group in solution.device_groups])
    return float(cost.objective_ps) if fits else None


def _within_two(problem: Problem, solution: Solution) -> Iterator[Solution]:
    """Yield the plans one change away, then those two changes away."""
    yield from _moves(problem, solution)
    for other in _moves(problem, solution):
        yield from _moves(problem, other)


def _moves(problem: Problem, solution: Solution) -> Iterator[Solution]:
    """Yield plans one change away: a cut moved by a layer; another option for a run of equal layers, or its end."""
    yield from _moved_cuts(problem, solution)
    ends, options, groups = solution
    stages = [stage for stage, (low, high) in enumerate(pairwise((0, *ends))) for _ in range(low, high)]
    treated = list(zip(stages, problem.layers, options, strict=True))
    for (stage, kind, current), run in groupby(range(len(treated)), key=treated.__getitem__):
        numbers = list(run)
        for option in range(len(problem.device_groups[groups[stage]].options[kind].time_ps)):
            for part in dict.fromkeys((tuple(numbers), (numbers[0],), (numbers[-1],))) if option != current else ():
                yield Solution(ends, tuple(option if i in part else o for i, o in enumerate(options)), groups)


def _moved_cuts(problem: Problem, solution: Solution) -> Iterator[Solution]:
    """Yield plans in which a layer moves to the neighbouring stage, with each option there if widths differ."""
    ends, options, groups = solution
    for number, end in enumerate(ends[:-1]):
        here, there = (problem.device_groups[group] for group in groups[number : number + 2])
        for moved, layer, group in ((end - 1, end - 1, there), (end + 1, end, here)):
            cuts = (*ends[:number], moved, *ends[number + 1 :])
            if problem.can_cut(cuts):
                count = len(group.options[problem.layers[layer]].time_ps)
                for option in (options[layer],) if here.width == there.width else range(count):
                    yield Solution(cuts, (*options[:layer], option, *options[layer + 1 :]), groups)


def of_placements(
    instance: Instance, bounds: Sequence[tuple[float, Target[Configuration]]], best: float
) -> Iterator[Best[Configuration]]:
    """Yield the best plan on each placement of configurations whose simulated score may be below `best`.

    `bounds`: the least closed form of each configuration, as a score, by ascending score.
    """
    known = instance.prices.bounds
    single = ((bound, target) for bound, target in bounds if target.configuration.num_chunks == 1)
    hiding = ((bound, target) for bound, target in single if _hides(instance, target, best))
    promising = (target for bound, target in hiding if bound - _hidden(instance, target) < best)
    left = max(1, _MAX_RUNS // len(instance.types_of_layers) ** 2)
    for target in islice(promising, min(_MAX_OPEN, left)):
        placed = instance.problem(target.configuration).on_each_placement()
        for problem in islice(placed, min(_MAX_PLACEMENTS, left)):
            left -= 1
            pipelines = {target.configuration: Pipeline(problem, known.costs_of, known.relaxed)}
            solved = optimize([target], pipelines.__getitem__, max_labels=_MAX_PLACEMENT_LABELS)
            yield from () if solved.best is None else (solved.best,)


def _hides(instance: Instance, target: Target[Configuration], score: float) -> bool:
    """Return whether plans are small, and the simulator may hide so much that the order of plans changes."""
    return _work(instance, target.configuration) <= _SMALL and _hidden(instance, target) > _HIDDEN * score


def _hidden(instance: Instance, target: Target[Configuration]) -> float:
    """Return an estimate of how far simulated times may be below a configuration's closed form, as a score.

    The simulator may hide sends, behind the computation of stages, and the ends of later stages, behind the last passes
    of others. They count twice, because the closed form does not know which part of a stage's time is forward, either.
    """
    asked, prices = target.configuration, instance.prices
    if asked.pp_size == 1 or asked.num_chunks > 1:
        return 0.0
    choice, placed = instance.choices.choice(asked), instance.choices.placed(asked)
    sends = (prices.handed_over(choice, each)[:-1] for each in instance.choices.handovers(asked).different)
    send_ps = max(float(times[np.isfinite(times)].max()) for times in sends)
    groups = (prices.device_group(choice, on, asked.num_microbatches == 1) for on in placed.topologies)
    layers = instance.types_of_layers
    end_ps = max(sum(float(group.options[kind].exposed_ps.max()) for kind in layers) for group in groups)
    passes = asked.pp_size - 1 + asked.num_microbatches - 1
    return 2 * (2 * passes * send_ps + end_ps / asked.pp_size) * target.scale


# Plans near the optimum that may have a smaller simulated time, and the best plans of other configurations.


NEAR = 0.01
"""Among plans whose closed form is within this share of the optimum, the least simulated time decides."""
MAX_NEAR = 64
_MAX_WIDER_LABELS = 10_000
"""The most work on plans further from the optimum than `NEAR`."""
_MAX_DEGREES = 3
"""The most other pipeline degrees, the promising ones, whose best plan is searched."""
_MAX_GUESSES = 2
"""The most configurations of one degree for which a plan is guessed, until one is found."""
_MAX_LABELS = 3_000
"""The most work on the best plan of another configuration, after which it is left out."""


def further(
    space: SearchSpace, optimum: Optimum[Configuration], ranked: Sequence[Simulated]
) -> tuple[Best[Configuration], ...]:
    """Return further plans that may still have a smaller simulated time than all plans simulated so far.

    Their closed form may exceed the best simulated time by the largest ratio of closed form to simulated time of a plan
    simulated so far. If the simulator may hide much, plans on every placement are included. If it hides much of a near
    plan, the best plans of other configurations are included. If all near plans have a single stage, they do not show
    how much a pipeline hides: pipelines are then included if hidden sends may make them the fastest.
    """
    if optimum.stopped or optimum.best is None:
        return ()
    score, limit = ranked[0].score, ranked[0].score * max(each.best.score / each.score for each in ranked)
    plans = list(of_placements(space.instance, optimum.bounds, score))
    if limit > score * (1 + NEAR):
        plans += other_configurations(space, optimum, ranked[0].best)
    elif all(each.best.target.configuration.pp_size == 1 for each in ranked):
        bounds = {target: bound for bound, target in optimum.bounds}

        def may_be_first(target: Target[Configuration]) -> bool:
            return bounds[target] - _most_hidden(space.instance, target) < score

        plans += other_configurations(space, optimum, ranked[0].best, may_be_first)
    if limit > optimum.best.score * (1 + NEAR):
        targets = [target for bound, target in optimum.bounds if bound < limit]
        plans += plans_below(targets, space.solvable, limit, MAX_NEAR, _MAX_WIDER_LABELS)
    return tuple(sorted(plans, key=lambda best: best.score))


def _most_hidden(instance: Instance, target: Target[Configuration]) -> float:
    """Return the most of a pipeline's score that the simulator may hide: all sends; with several chunks, any part."""
    configuration = target.configuration
    if configuration.num_chunks > 1:
        return inf
    problem = instance.problem(configuration)
    longest_ps = max(
        (float(each.max(where=each < inf, initial=0.0)) for each in problem.sends_ps.values()), default=0.0
    )
    ends = 2 * (configuration.pp_size - 1)
    return target.scale * problem.closed_form.time(ends * longest_ps, 2 * longest_ps, 0.0)


def other_configurations(
    space: SearchSpace,
    optimum: Optimum[Configuration],
    chosen: Best[Configuration],
    wanted: Callable[[Target[Configuration]], bool] = lambda target: True,
) -> Iterator[Best[Configuration]]:
    """Yield the best plans of the most promising other pipeline degrees, and of other microbatch counts, if wanted."""
    configuration = chosen.target.configuration
    sizes = _alike(optimum, lambda other: other.pp_size, configuration.pp_size)
    counts = _alike(optimum, lambda other: other.num_microbatches, configuration.num_microbatches)
    bounds, known = {target: bound for bound, target in optimum.bounds}, dict[Target[Configuration], bool]()
    promising = (*(same[:_MAX_GUESSES] for same in sizes[:_MAX_DEGREES]), *(same[:1] for same in counts[:2]))
    for alike in filter(None, ([target for target in same if wanted(target)] for same in promising)):
        for target in alike:
            if target not in known:
                guessed = guess(target, bounds[target], space.solvable)
                known[target] = guessed is not None
                yield from () if guessed is None else (guessed,)
            if known[target]:
                break
        else:
            solved = optimize(alike[:1], space.solvable, max_labels=_MAX_LABELS)
            if solved.best is not None and not solved.stopped:
                yield solved.best


def _alike(
    optimum: Optimum[Configuration], shape: Callable[[Configuration], int], chosen: int
) -> list[list[Target[Configuration]]]:
    """Return the configurations of each shape except the chosen plan's, by ascending bound."""
    by_shape: dict[int, list[Target[Configuration]]] = {}
    for _, target in optimum.bounds:
        if shape(target.configuration) != chosen:
            by_shape.setdefault(shape(target.configuration), []).append(target)
    return list(by_shape.values())


# Plans with their predictions, and runners-up.


_MAX_RUNNERS_UP = 5


class Candidate(NamedTuple):
    """A plan and its prediction."""

    plan: Plan
    evaluation: Evaluation

    @property
    def sample_s(self) -> float:
        """Return the simulated time of a sample."""
        return self.evaluation.estimate.simulated_step_time_s / self.plan.global_batch_size


def candidate_of(instance: Instance, best: Best[Configuration], timeline: bool = False) -> Candidate:
    """Return a plan of the search with its prediction; events only with `timeline`."""
    plan = instance.plan(best.target.configuration, best.priced.solution)
    return Candidate(plan, evaluate(plan, instance.costs.profiles, instance.costs, timeline=timeline))


def is_short(configuration: Configuration) -> bool:
    """Return whether a step has so few passes that a timeline holds them all."""
    num_stages = configuration.pp_size
    return has_timeline(num_stages * configuration.num_chunks, num_stages, configuration.num_microbatches)


def best_elsewhere(
    space: SearchSpace, optimum: Optimum[Configuration], first: Best[Configuration], deadline: float
) -> tuple[Best[Configuration], ...]:
    """Return the best plans of other configurations than the first plan's, as many as time and Ctrl-C allow."""
    if optimum.stopped:
        return ()
    plans, _ = latest(accumulate((best,) for best in other_configurations(space, optimum, first)), soon(deadline))
    return plans or ()


def runners_up(instance: Instance, chosen: Plan, others: Sequence[Best[Configuration]]) -> tuple[Candidate, ...]:
    """Return a few plans that differ from the chosen one and from one another in effect, by ascending closed form."""
    decisions = {_decision(chosen)}
    taken: list[Candidate] = []
    for other in others:
        plan = instance.plan(other.target.configuration, other.priced.solution)
        if len(taken) < _MAX_RUNNERS_UP and (decision := _decision(plan)) not in decisions:
            decisions.add(decision)
            taken.append(candidate_of(instance, other))
    return tuple(sorted(taken, key=lambda c: c.evaluation.objective_ps / c.plan.global_batch_size))


def kind_of(plan: Plan) -> tuple[object, ...]:
    """Return a plan's pipeline degree, and the degrees and recomputation of its layers."""
    splits = {(each.tp_size, each.cp_size, each.recompute) for each in plan.layers}
    return len(plan.stages), plan.schedule.interleaves, frozenset(splits)


def _decision(plan: Plan) -> tuple[object, ...]:
    """Return all that affects how a plan runs: not its name, and not the schedule if there is one micro-batch."""
    schedule = plan.schedule if plan.num_microbatches > 1 else None
    return plan.stages, plan.embedding, plan.head, plan.layers, plan.global_batch_size, plan.num_microbatches, schedule


# The best plan whose stages have the same process groups, so that all of its communicators are counted.
#
# The solver counts, for a stage, the most groups that any one of its layers makes. If all groups of all layers are in
# one set, and no layout changes inside a stage, all groups of a stage are in that set.


Groups = frozenset[tuple[Purpose, Axis]]
_NEVER_FITS = 2.0**52
"""Bytes: more than any device has."""
_NEVER_PS = 2.0**50
"""Picoseconds: 19 minutes."""


def best_alike(
    instance: Instance, bounds: Sequence[tuple[float, Target[Configuration]]], below: float
) -> Iterator[Best[Configuration]]:
    """Yield ever better plans with a score below a limit, from configurations with stages of equal width."""
    waiting: list[tuple[float, int, Target[Configuration], Solvable | None]]
    waiting = [(bound, number, target, None) for number, (bound, target) in enumerate(bounds)]
    heapify(waiting)
    number = len(waiting)
    while waiting and waiting[0][0] < below:
        bound, _, target, solvable = heappop(waiting)
        if solvable is None:
            for each in _limited(instance, target.configuration):
                heappush(waiting, (max(bound, target.score(each.relaxed_bound_ps)), number, target, each))
                number += 1
            continue
        for limit in (min(below, bound * (1 + above)) for above in WIDE):
            if (plan := best_guess(solvable, target.time_ps(limit))) is not None:
                below = target.score(plan.objective_ps)
                yield Best(target, plan, below)
            if plan is not None or limit == below:
                break
        for plan in solvable.solve_below(target.time_ps(below), 1, lambda _: None):
            below = target.score(plan.objective_ps)
            yield Best(target, plan, below)


def _limited(instance: Instance, configuration: Configuration) -> Iterator[Solvable]:
    """Yield a configuration limited to each set of process groups that some strategy of blocks makes."""
    if configuration.pp_size > 1 and configuration.widths is not StageWidths.EQUAL:
        return
    choice = instance.choices.choice(configuration)
    shardings, width = instance.choices.layers.shardings(choice), choice.widths[0]
    own = [[strategy_axes(s) for s in shardings.of_type(n, width)] for n in instance.prices.types]
    blocks = {instance.prices.types.index(name) for name in instance.costs.model.layers}
    kinds = dict.fromkeys(groups for number in blocks for groups in own[number])
    for kind in sorted(kinds, key=len):
        if not all(any(groups <= kind for groups in each) for each in own):
            continue
        if configuration.num_chunks > 1:
            chunks = instance.interleaved_problem(configuration)
            yield Interleaved(replace(chunks, group=_counted(instance, configuration, chunks.group, own, kind)))
        else:
            problem = instance.problem(configuration)
            groups = tuple(_counted(instance, configuration, each, own, kind) for each in problem.device_groups)
            yield Pipeline(replace(problem, device_groups=groups), cache(GroupCosts), Relaxed())


def _counted(
    instance: Instance, configuration: Configuration, group: DeviceGroup, own: Sequence[Sequence[Groups]], kind: Groups
) -> DeviceGroup:
    """Return a device group in which every layer whose process groups are in a set counts all groups of the set."""
    size = max(profiles.communicator_bytes for profiles in instance.costs.profiles.used(instance.costs.cluster))
    replicas = types_with_replicas(instance.costs.model)
    options = []
    for name, each, groups in zip(instance.prices.types, group.options, own, strict=True):
        counted = [size * (len(kind) + bool(replicas) - len(one) - (name in replicas)) for one in groups]
        more = [bytes_ if one <= kind else _NEVER_FITS for bytes_, one in zip(counted, groups, strict=True)]
        options.append(each._replace(workspace_bytes=each.workspace_bytes + np.array(more)))
    further = 2 if configuration.pp_size > 2 and configuration.num_chunks == 1 else 0
    same = np.eye(group.redistribution_ps.shape[1], dtype=bool)
    return replace(
        group,
        options=tuple(options),
        redistribution_ps=np.where(same, group.redistribution_ps, _NEVER_PS),
        budget_bytes=group.budget_bytes - communicator_bytes({Purpose.EDGE: further}, size),
    )
