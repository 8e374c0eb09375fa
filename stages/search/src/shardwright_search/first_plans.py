"""Plans of one strategy for all layers, found first in every search, in case it is stopped early.

The bounds of such plans are nearly exact and take far less work than the plans. So after a first plan, local moves
follow the bounds down: more or fewer chunks, micro-batches and stages. When no move leads further down, the next plan
is found, and then the configurations that no move has reached are examined.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf, log2
from typing import TypeVar

from shardwright_search.solver.targets import GUESSED, WIDE, Best, Target, best_guess
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.request import StageWidths
from shardwright_search.space.search_space import SearchSpace

_RANKS = 4
"""Ranks that share a sample and a stage's layers in the configurations that are examined first."""
_MUCH = 0.8
"""Share of the best plan's score below which a bound is followed at once."""
_MAX_GUESSES = 32
"""The most plans that are guessed after all configurations have been bounded."""
_Case = tuple[float, int, Target[Configuration]]
"""The bound and the number of a configuration whose layers share a strategy, and the configuration."""
_Place = tuple[int, ...]
"""Chunks, micro-batches and stages of a configuration, and its batch size."""
T = TypeVar("T")


def first_plans(space: SearchSpace) -> Iterator[Best[Configuration]]:
    """Yield ever better plans, the first one soon; their communicators are not all counted.

    Configurations of one chunk are first, and among them those in which a rank has about one sample of a microbatch.
    """
    devices = space.instance.costs.cluster.num_devices
    shared, cases, score = _shared(space), list[_Case](), inf
    least: dict[Configuration, _Case | None] = {}

    def bound(whole: Configuration) -> float:
        if whole not in least:
            of_whole = _cases(space, shared[whole](), len(cases))
            cases.extend(of_whole)
            least[whole] = min(of_whole, default=None)
        case = least[whole]
        return inf if case is None else case[0]

    def guessed(whole: Configuration) -> Iterator[Best[Configuration]]:
        case = least[whole]
        return iter(()) if case is None else _guesses(space, case, score)

    order = sorted(shared, key=lambda whole: _distance(whole, devices))
    starts = _starts([whole for whole in order if _distance(whole, devices) == _distance(order[0], devices)])
    for whole in starts:
        if score == inf and bound(whole) < inf:
            for best in guessed(whole):
                score = best.score
                yield best
    for whole, is_lowest in descended((*starts, *order), _moves(order), bound):
        # Not every configuration with a bound has a plan that fits: until there is one, each on the way is tried.
        if is_lowest == (score < inf) and bound(whole) < score * _MUCH:
            for best in guessed(whole):
                score = best.score
                yield best
    for case in sorted(cases)[:_MAX_GUESSES]:
        if case[0] >= score:
            return
        for best in _guesses(space, case, score):
            score = best.score
            yield best


def _starts(nearest: Sequence[Configuration]) -> tuple[Configuration, ...]:
    """Return the configurations to try before all others, until one has a plan.

    Many stages take long to cut, and few have many strategies to price: a middle number is first. If that has no plan,
    the most stages follow, which have the fewest strategies.
    """
    by_stages = sorted(nearest, key=lambda whole: whole.pp_size)
    return (*by_stages[len(by_stages) // 2 :][:1], *by_stages[-1:])


def descended(
    order: Iterable[T], moves: Callable[[T], Iterable[T]], bound: Callable[[T], float]
) -> Iterator[tuple[T, bool]]:
    """Yield each place that is lower than all before it, and whether no move from it leads lower.

    A descent begins at each place in `order` that is lower than all before it, and follows the first move that leads
    further down. Each place is bounded once.
    """
    known: dict[T, float] = {}
    lowest = inf
    for start in order:
        if start in known:
            continue
        known[start] = bound(start)
        if known[start] >= lowest:
            continue
        here: T | None = start
        while here is not None:
            yield here, False
            lowest, last = known[here], here
            here = _further(here, moves, bound, known)
        yield last, True


def _further(
    here: T, moves: Callable[[T], Iterable[T]], bound: Callable[[T], float], known: dict[T, float]
) -> T | None:
    """Return the first place that a move leads to, lower than here and not bounded before; None if there is none."""
    for other in moves(here):
        if other not in known:
            known[other] = bound(other)
            if known[other] < known[here]:
                return other
    return None


def _moves(wholes: Sequence[Configuration]) -> Callable[[Configuration], Iterator[Configuration]]:
    """Return a function that yields the configurations that are one move away from one, the largest moves first."""
    at: dict[_Place, list[Configuration]] = {}
    for whole in wholes:
        at.setdefault(_place(whole), []).append(whole)
    values = [sorted(set(column)) for column in zip(*at, strict=True)]

    def moves(whole: Configuration) -> Iterator[Configuration]:
        place = _place(whole)
        changed = (
            (*place[:axis], value, *place[axis + 1 :])
            for steps in (_doubled, _next)
            for axis, of_axis in enumerate(values)
            for value in steps(of_axis, place[axis])
        )
        for other in dict.fromkeys(changed):
            yield from at.get(other, ())

    return moves


def _place(whole: Configuration) -> _Place:
    return whole.num_chunks, whole.num_microbatches, whole.pp_size, whole.global_batch_size


def _doubled(values: Sequence[int], value: int) -> Iterator[int]:
    """Yield the least value of at least the double, and the largest of at most the half."""
    yield from [other for other in values if other >= 2 * value][:1]
    yield from [other for other in values if 2 * other <= value][-1:]


def _next(values: Sequence[int], value: int) -> Iterator[int]:
    """Yield the next larger value and the next smaller one."""
    place = values.index(value)
    yield from values[place + 1 : place + 2]
    yield from values[max(0, place - 1) : place]


def _distance(configuration: Configuration, devices: int) -> tuple[bool, float]:
    """Return the key by which configurations are examined in ascending order."""
    samples = configuration.microbatch_samples * configuration.pp_size * _RANKS / devices
    return configuration.num_chunks > 1, abs(log2(samples))


def _shared(space: SearchSpace) -> dict[Configuration, Callable[[], Iterator[Target[Configuration]]]]:
    """Return the cases in which all layers share a strategy, of each configuration of stages of equal width."""
    listed: dict[Configuration, list[Target[Configuration]]] = {}
    for target in space.listed:
        if target.configuration.widths is StageWidths.EQUAL:
            listed.setdefault(target.configuration._replace(layers=None), []).append(target)
    return {whole: partial(_with_layers, space, whole, targets) for whole, targets in listed.items()}


def _with_layers(
    space: SearchSpace, whole: Configuration, targets: Sequence[Target[Configuration]]
) -> Iterator[Target[Configuration]]:
    for target in targets:
        if target.configuration.layers is not None:
            yield target
            continue
        each = (whole._replace(layers=layers) for layers in space.instance.choices.layer_strategies(whole))
        yield from (target._replace(configuration=case) for case in each if space.demands.allows(case))


def _cases(space: SearchSpace, targets: Iterator[Target[Configuration]], first: int) -> list[_Case]:
    """Return the cases that may have a plan."""
    scored = ((each.score(space.uniform_bounds.bound_ps(each.configuration)), each) for each in targets)
    return [(score, first + number, target) for number, (score, target) in enumerate(scored) if score < inf]


def _guesses(space: SearchSpace, case: _Case, below: float) -> Iterator[Best[Configuration]]:
    """Yield a plan of a configuration, if one is found below a score."""
    bound, _, target = case
    solvable, enough = space.whole(target.configuration), bound * (1 + GUESSED)
    # As long as there is no plan at all, a plan less near the bound is good enough.
    shares = WIDE if below < inf else [above for above in WIDE if above >= GUESSED]
    for limit in (min(below, bound * (1 + above)) for above in shares):
        if (plan := best_guess(solvable, target.time_ps(limit), target.time_ps(enough))) is not None:
            yield Best(target, plan, target.score(plan.objective_ps))
            return
        if limit == below:
            return
