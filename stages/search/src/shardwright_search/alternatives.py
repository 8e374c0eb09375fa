"""Plans beside the optimum: near ones, of which the simulator picks, and the best of other configurations.

The closed form orders plans almost as the simulator does, but not quite: it counts sends that are hidden, and does not
tell forward from backward passes. So plans that it puts near its optimum are simulated, and the quickest of them are
changed in one place after the other, for as long as that makes the simulated step shorter.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from shardwright_search.cost_model.plan import simulated_step_ps
from shardwright_search.solver.branch_and_bound import guess, optimize, plans_below
from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.problem import Problem, Solution, price
from shardwright_search.solver.targets import Best, Optimum, Target
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.search_space import SearchSpace

NEAR = 0.01
"""Among plans whose closed form is within this share of the optimum, the least simulated time decides."""
MAX_NEAR = 64
_MAX_WIDER_LABELS = 10_000
"""The most work on plans further from the optimum than `NEAR`."""
_MAX_DEGREES = 3
"""The most other pipeline degrees, the promising ones, whose best plan is looked for."""
_MAX_GUESSES = 2
"""The most configurations of one degree of which a plan is guessed until there is one."""
_MAX_LABELS = 3_000
"""The most work on the best plan of another configuration, after which it is left out."""
_MAX_ACTIONS = 100_000
"""The most passes that are simulated to tell near plans apart."""
_MAX_WORK = 12_000
"""The most passes that are simulated to change them, with what their layers take to price."""
_ACTIONS_OF_LAYER = 10
"""Pricing a layer takes as long as simulating so many passes."""
_EXACT = 1e-3
"""Where the closed form of a single stage is above the simulated time by no more than this share, it is not changed."""
_STARTS = 3
"""Number of plans that are changed."""


class Simulated(NamedTuple):
    """A plan and its score by simulation."""

    score: float
    best: Best[Configuration]


def simulated(instance: Instance, plans: Sequence[Best[Configuration]]) -> tuple[Simulated, ...]:
    """Return plans by ascending simulated score; of many the last ones are left out, never the first."""
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
    for start in ranked[:_STARTS]:
        for improved, work in _improved(instance, start):
            left -= work
            if _by_score(improved) < _by_score(best):
                best = improved
                yield best.best
            if left <= 0:
                return


def _improved(instance: Instance, here: Simulated) -> Iterator[tuple[Simulated, int]]:
    """Yield a plan with each change that makes its step shorter, after each that was tried, and what trying it took.

    Interleaved plans stay as they are, and so does a single stage whose closed form is its simulated time.
    """
    target = here.best.target
    single = target.configuration.pp_size == 1 and here.best.score <= here.score * (1 + _EXACT)
    if single or target.configuration.num_chunks > 1:
        return
    problem = instance.problem(target.configuration)
    work = _actions(target.configuration) + _ACTIONS_OF_LAYER * len(problem.layers)
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
    """Return the score by simulation, in the units of the closed form's."""
    return simulated_step_ps(instance.plan(target.configuration, solution), instance.costs) * target.scale


def _actions(configuration: Configuration) -> int:
    return 2 * configuration.num_microbatches * configuration.pp_size * configuration.num_chunks


def _by_score(ranked: Simulated) -> tuple[float, float]:
    return ranked.score, ranked.best.score


def _fitting(problem: Problem, solution: Solution) -> float | None:
    """Return T of a plan that fits; None where it does not."""
    objective_ps, memory_bytes = price(problem, solution)
    budgets = (problem.device_groups[group].budget_bytes for group in solution.device_groups)
    fits = all(used <= budget for used, budget in zip(memory_bytes, budgets, strict=True))
    return float(objective_ps) if fits else None


def _within_two(problem: Problem, solution: Solution) -> Iterator[Solution]:
    """Yield what is one change away, then what is two."""
    yield from _moves(problem, solution)
    for other in _moves(problem, solution):
        yield from _moves(problem, other)


def _moves(problem: Problem, solution: Solution) -> Iterator[Solution]:
    """Yield what is one change away: a cut moved by a layer; another option for a run of equal layers, or its end."""
    ends, options, groups = solution
    for number, end in enumerate(ends[:-1]):
        for moved in (end - 1, end + 1):
            cuts = (*ends[:number], moved, *ends[number + 1 :])
            alike = len({problem.device_groups[group].width for group in groups[number : number + 2]}) == 1
            if alike and all(low < high for low, high in pairwise((0, *cuts))):
                yield Solution(cuts, options, groups)
    stages = [stage for stage, (low, high) in enumerate(pairwise((0, *ends))) for _ in range(low, high)]
    treated = list(zip(stages, problem.layers, options, strict=True))
    for (stage, kind, current), run in groupby(range(len(treated)), key=treated.__getitem__):
        numbers = list(run)
        for option in range(len(problem.device_groups[groups[stage]].options[kind].time_ps)):
            for part in dict.fromkeys((tuple(numbers), (numbers[0],), (numbers[-1],))) if option != current else ():
                yield Solution(ends, tuple(option if i in part else o for i, o in enumerate(options)), groups)


def further(
    space: SearchSpace, optimum: Optimum[Configuration], ranked: Sequence[Simulated]
) -> tuple[Best[Configuration], ...]:
    """Return plans beyond the near ones, up to where the simulator may still put one before all that it has seen.

    That is as far above the best simulated time as the closed form of a simulated plan is above its own.
    """
    limit = ranked[0].score * max(each.best.score / each.score for each in ranked)
    if optimum.stopped or optimum.best is None or limit <= optimum.best.score * (1 + NEAR):
        return ()
    targets = [target for bound, target in optimum.bounds if bound < limit]
    plans = plans_below(targets, space.solvable, limit, MAX_NEAR, _MAX_WIDER_LABELS)
    return tuple(sorted(plans, key=lambda best: best.score))


def other_configurations(
    space: SearchSpace, optimum: Optimum[Configuration], chosen: Best[Configuration]
) -> Iterator[Best[Configuration]]:
    """Yield the best plans of the most promising other pipeline degrees, and of other microbatch counts."""
    configuration = chosen.target.configuration
    sizes = _alike(optimum, lambda other: other.pp_size, configuration.pp_size)
    counts = _alike(optimum, lambda other: other.num_microbatches, configuration.num_microbatches)
    bounds, known = {target: bound for bound, target in optimum.bounds}, dict[Target[Configuration], bool]()
    for alike in (*(same[:_MAX_GUESSES] for same in sizes[:_MAX_DEGREES]), *(same[:1] for same in counts[:2])):
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
    """Return the configurations of each shape but the chosen plan's, those with the least bound first."""
    by_shape: dict[int, list[Target[Configuration]]] = {}
    for _, target in optimum.bounds:
        if shape(target.configuration) != chosen:
            by_shape.setdefault(shape(target.configuration), []).append(target)
    return list(by_shape.values())
