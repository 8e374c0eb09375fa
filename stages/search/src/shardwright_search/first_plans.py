"""Plans of one strategy for all layers, found first in every search, in case it is stopped early."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import log2

import numpy as np

from shardwright_search.solver.guesses import WIDE, best_guess
from shardwright_search.solver.targets import Best, Target
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.request import StageWidths
from shardwright_search.space.search_space import SearchSpace

_RANKS = 4
"""Ranks that share a sample and a stage's layers in the configurations that are looked at first."""
_MUCH = 0.8
"""Share of the best plan's score below which a bound is followed at once."""
_MAX_GUESSES = 32
"""The most plans that are guessed, when all is bounded."""
_Case = tuple[float, int, Target[Configuration]]
"""A configuration whose layers share a strategy, behind its bound and its number."""


def first_plans(space: SearchSpace) -> Iterator[Best[Configuration]]:
    """Yield ever better plans, the first one soon; their communicators are not all counted.

    Configurations of one chunk are first, and among them those in which a rank has about one sample of a microbatch.
    """
    devices = space.instance.costs.cluster.num_devices
    shared = _shared(space)
    cases, score = list[_Case](), np.inf
    order = sorted(shared, key=lambda whole: _distance(whole, devices))
    # The most stages have the fewest strategies to price.
    soonest = min(order, key=lambda whole: (*_distance(whole, devices), -whole.pp_size), default=None)
    for whole in dict.fromkeys((soonest, *order) if soonest is not None else ()):
        of_whole = _cases(space, shared[whole](), len(cases))
        cases += of_whole
        if of_whole and (least := min(of_whole))[0] < score * _MUCH:
            for best in _guesses(space, least, score):
                score = best.score
                yield best
    for case in sorted(cases)[:_MAX_GUESSES]:
        if case[0] >= score:
            return
        for best in _guesses(space, case, score):
            score = best.score
            yield best


def _distance(configuration: Configuration, devices: int) -> tuple[bool, float]:
    """Return how late a configuration is looked at."""
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
    return [(score, first + number, target) for number, (score, target) in enumerate(scored) if score < np.inf]


def _guesses(space: SearchSpace, case: _Case, below: float) -> Iterator[Best[Configuration]]:
    """Yield a plan of a configuration, if one is found below a score."""
    bound, _, target = case
    solvable = space.whole(target.configuration)
    for limit in (min(below, bound * (1 + above)) for above in WIDE):
        if (plan := best_guess(solvable, target.time_ps(limit))) is not None:
            yield Best(target, plan, target.score(plan.objective_ps))
            return
        if limit == below:
            return
