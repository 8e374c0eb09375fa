"""Plans beside the near ones: further ones that the simulator may prefer, and the best of other configurations."""

from collections.abc import Callable, Iterator, Sequence

from shardwright_search.least_simulated import Simulated
from shardwright_search.solver.branch_and_bound import guess, optimize, plans_below
from shardwright_search.solver.targets import Best, Optimum, Target
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.search_space import SearchSpace

NEAR = 0.01
"""Among plans whose closed form is within this share of the optimum, the least simulated time decides."""
MAX_NEAR = 64
_MAX_WIDER_LABELS = 10_000
"""Work on plans further from the optimum than `NEAR`."""
_MAX_DEGREES = 3
"""Other pipeline degrees, the most promising ones, whose best plan is looked for."""
_MAX_GUESSES = 2
"""Configurations of one degree of which a plan is guessed until there is one."""
_MAX_LABELS = 3_000
"""Work on the best plan of another configuration, after which it is left out."""


def further(
    space: SearchSpace, optimum: Optimum[Configuration], ranked: Sequence[Simulated], deadline: float | None
) -> tuple[Best[Configuration], ...]:
    """Plans beyond the near ones, up to where the simulator may still put one before all that it has seen.

    That is as far above the best simulated time as the closed form of a simulated plan is above its own.
    """
    limit = ranked[0].score * max(one.best.score / one.score for one in ranked)
    if optimum.stopped or optimum.best is None or limit <= optimum.best.score * (1 + NEAR):
        return ()
    targets = [target for bound, target in optimum.bounds if bound < limit]
    return plans_below(targets, space.solvable, limit, MAX_NEAR, deadline, _MAX_WIDER_LABELS)


def other_configurations(
    space: SearchSpace, optimum: Optimum[Configuration], chosen: Best[Configuration], deadline: float | None
) -> Iterator[Best[Configuration]]:
    """The best plans of the most promising configurations of other pipeline degrees, and of other microbatch counts."""
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
            found = optimize(alike[:1], space.solvable, deadline=deadline, max_labels=_MAX_LABELS)
            if found.best is not None and not found.stopped:
                yield found.best


def _alike(
    optimum: Optimum[Configuration], shape: Callable[[Configuration], int], own: int
) -> list[list[Target[Configuration]]]:
    """The configurations of each shape but one's own, those with the least bound first."""
    found: dict[int, list[Target[Configuration]]] = {}
    for _, target in optimum.bounds:
        if shape(target.configuration) != own:
            found.setdefault(shape(target.configuration), []).append(target)
    return list(found.values())
