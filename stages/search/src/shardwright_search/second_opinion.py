"""The second opinion: HiGHS is handed the search's own configurations and asked for a better plan."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic

import numpy as np

from shardwright_formats.io import RunFailed
from shardwright_formats.types import Cluster, Model
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.search import SearchAnswer
from shardwright_search.solver.milp import HighsAnswer, highs_version, solve
from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.problem import Problem, price
from shardwright_search.solver.stopping import ended, latest
from shardwright_search.solver.targets import Best, Target
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.room_parts import parts_of
from shardwright_search.space.search_space import SearchSpace, space_of

TOLERANCE = 1e-6
"""Objectives that differ by a smaller share are equal."""


def prove(
    answer: SearchAnswer,
    request: SearchRequest,
    model: Model,
    cluster: Cluster,
    profiles: Profiles,
    file: Path,
    time_limit_s: float,
    report: Callable[[str], None],
) -> str:
    """Return the second opinion on a search's answer, from all that the search was given."""
    if answer.stopped:
        return "none: the search was stopped before it was done"
    line = verdict(space_of(request, model, cluster, profiles, file), answer.best, time_limit_s, report)
    return line if answer.unlisted is None else f"{line}; what has too many places was not asked"


def verdict(space: SearchSpace, best: Best[Configuration], time_limit_s: float, report: Callable[[str], None]) -> str:
    """Return what HiGHS says of the plan with the least closed form, in one line.

    The best plan's configuration is solved to the end. For every other one HiGHS looks for a plan that is better by
    more than `TOLERANCE`. What takes longer than the time limit, all configurations together, is reported as undecided;
    so are interleaved schedules, which have another programme. Raises RunFailed where HiGHS finds a better plan,
    or none as good.
    """
    version, deadline, verdicts = highs_version(), monotonic() + time_limit_s, list[str]()
    if not ended(lambda: verdicts.append(_own_configuration(space.instance, best, deadline)), deadline):
        verdicts, deadline = ["the best plan's configuration was not decided in time"], 0.0
    first = f"{version}: {verdicts[0]}"
    others = [target for target in space.targets if target.configuration != best.target.configuration]
    ruled_out, undecided, interleaved = _other_configurations(space, others, best, deadline, report)
    left = [f"{undecided} not decided within {time_limit_s:g} s"] if undecided else []
    left += [f"{interleaved} interleaved ones not asked"] if interleaved else []
    return "; ".join([first, f"{ruled_out} of {len(others)} other configurations have no better plan", *left])


def _own_configuration(instance: Instance, best: Best[Configuration], deadline: float) -> str:
    if best.target.configuration.num_chunks > 1:
        return "the best plan's configuration is interleaved and was not asked"
    problem = instance.problem(best.target.configuration)
    answer = solve(problem, deadline - monotonic())
    offset_ps = best.target.offset_ps
    ours_ps, theirs_ps = best.priced.objective_ps + offset_ps, answer.objective_ps + offset_ps
    worse = answer.done and theirs_ps > ours_ps * (1 + TOLERANCE)
    better = _is_better(problem, answer, best.priced.objective_ps, offset_ps)
    if worse or (better and _communicators_fit(instance, best.target, answer)):
        raise RunFailed(_difference(best.target.configuration, ours_ps, theirs_ps))
    if not answer.done:
        return "the best plan's configuration was not decided in time"
    return f"optimum of the best plan's configuration {theirs_ps * 1e-9:.6f} ms, equal"


def _other_configurations(
    space: SearchSpace,
    others: Sequence[Target[Configuration]],
    best: Best[Configuration],
    deadline: float,
    report: Callable[[str], None],
) -> tuple[int, int, int]:
    """Return how many other configurations are ruled out, undecided, and interleaved."""
    single = [target for target in others if target.configuration.num_chunks == 1]
    ruled_out, _ = latest(_ruled_out(space, single, best, deadline, report), deadline)
    return ruled_out or 0, len(single) - (ruled_out or 0), len(others) - len(single)


def _ruled_out(
    space: SearchSpace,
    single: list[Target[Configuration]],
    best: Best[Configuration],
    deadline: float,
    report: Callable[[str], None],
) -> Iterator[int]:
    """Yield the number of configurations that are ruled out so far.

    They are solved in rounds. Each open one gets an even share of the time that is left, the least promising first:
    these take the least time, and what they leave goes to the others.
    """
    waiting = sorted(single, key=lambda t: -t.score(space.solvable(t.configuration).relaxed_bound_ps))
    instance, ruled_out = space.instance, 0
    while waiting and monotonic() < deadline:
        following = []
        for number, target in enumerate(waiting):
            report(f"HiGHS: configuration {number + 1} of {len(waiting)}")
            answer = _other_configuration(instance, target, best, (deadline - monotonic()) / (len(waiting) - number))
            ruled_out += answer.done and answer.solution is None
            yield ruled_out
            following += [] if answer.done else [target]
        waiting = following


def _other_configuration(
    instance: Instance, target: Target[Configuration], best: Best[Configuration], time_limit_s: float
) -> HighsAnswer:
    """Return HiGHS's answer to whether the configuration has a better plan."""
    problem, limit_ps = instance.problem(target.configuration), target.time_ps(best.score)
    below_ps = limit_ps - TOLERANCE * (limit_ps + target.offset_ps)
    answer = solve(problem, time_limit_s, below_ps)
    if _is_better(problem, answer, limit_ps, target.offset_ps) and _communicators_fit(instance, target, answer):
        ours_ps, theirs_ps = limit_ps + target.offset_ps, answer.objective_ps + target.offset_ps
        raise RunFailed(_difference(target.configuration, ours_ps, theirs_ps))
    return answer


def _is_better(problem: Problem, answer: HighsAnswer, limit_ps: float, offset_ps: float) -> bool:
    """Return whether HiGHS has a plan below a limit that fits by whole bytes: its own tolerances are wider."""
    if answer.solution is None or answer.objective_ps + offset_ps > (limit_ps + offset_ps) * (1 - TOLERANCE / 2):
        return False
    memory_bytes = price(problem, answer.solution).memory_bytes
    budgets = [problem.device_groups[place].budget_bytes for place in answer.solution.device_groups]
    return all(used <= budget for used, budget in zip(memory_bytes, budgets, strict=True))


def _communicators_fit(instance: Instance, target: Target[Configuration], answer: HighsAnswer) -> bool:
    """Return whether HiGHS's plan fits with the communicators that it makes."""
    assert answer.solution is not None
    priced = PricedSolution(answer.objective_ps, answer.solution)
    return parts_of(instance, Best(target, priced, target.score(priced.objective_ps))) is None


def _difference(configuration: Configuration, ours_ps: float, theirs_ps: float) -> str:
    theirs = f"its best plan takes {theirs_ps * 1e-9:.9g} ms" if np.isfinite(theirs_ps) else "it finds no plan"
    ours = f"the search's takes {ours_ps * 1e-9:.9g} ms as a step of it"
    return f"HiGHS disagrees: {configuration}: {theirs}, {ours}"
