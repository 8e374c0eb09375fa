"""Plans near the optimum that may have a smaller simulated time, and the best plans of other configurations."""

from collections.abc import Callable, Iterator, Sequence
from math import inf

from shardwright_search.least_simulated import Simulated, of_placements
from shardwright_search.solver.branch_and_bound import optimize, plans_below
from shardwright_search.solver.targets import Best, Optimum, Target, guess
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


def further(
    space: SearchSpace, optimum: Optimum[Configuration], ranked: Sequence[Simulated]
) -> tuple[Best[Configuration], ...]:
    """Return further plans that may still have a smaller simulated time than all plans simulated so far.

    That is as far above the best simulated time as the closed form of a simulated plan is above its own. If the
    simulator may hide much, plans of every placement are among them. If it hides much of a near plan, the best of
    other configurations are. Plans of a single stage do not tell it of pipelines: they are where sends may be hidden.
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
    """Return the most of a pipeline's score that the simulator may find hidden: all sends; of chunks any part."""
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
