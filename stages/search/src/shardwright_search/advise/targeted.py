"""The best plan that another system can run, with its proof, and the best of all plans for comparison."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwright.io import BadInput
from shardwright.types import Cluster, Model, Plan, Precision
from shardwright_search.advise.question import Question
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.options import System
from shardwright_search.search import SearchAnswer, best_of_requests
from shardwright_search.solver.stopping import CpuSeconds
from shardwright_search.space.budget import Infeasible
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.search_space import NothingListed
from shardwright_search.systems.entry import Entry, Limits
from shardwright_search.systems.launch import in_pipeline_order
from shardwright_search.systems.registry import SYSTEMS, TUNED


class Started(NamedTuple):
    """The files and the command that start a plan in another system."""

    command: str
    """Command of each node."""
    files: dict[str, str]
    """Texts by name in a folder."""
    notes: tuple[str, ...]
    """Points that the files cannot express, one per line."""


class Within(NamedTuple):
    """Another system's best plan, the files that start it there, and the best plan without that system's limits."""

    target: Entry
    started: Started
    unlimited: SearchAnswer | None
    """None if it was not found in time."""


def started(system: System, plan: Plan, tuned: bool = False) -> Started:
    """Return the files and the command that start a plan; raise BadInput for what the system cannot express.

    `tuned`: experts run as its recipes for speed run them.
    """
    target = TUNED.get(system, SYSTEMS[system]) if tuned else SYSTEMS[system]
    name = f"--for {system}"
    exported, launch = target.launched(plan, name)
    command = target.command(in_pipeline_order(plan, name), target.file_name)
    notes = (*exported.notes, *launch.notes)
    return Started(command, {target.file_name: exported.text, **launch.files}, notes)


def best_for(
    system: System, question: Question, tell: Callable[[str], None], limit_s: float
) -> SearchAnswer | Infeasible:
    """Return the best plan that a system runs in any of its ways; the proof covers all ways.

    Each way has an equal share of the time that is left. Raises StoppedEarly if no plan was found in time, and BadInput
    if the system runs no plan of the model on these devices.
    """
    model, devices = question.model, question.cluster.num_devices
    ways = _ways(system, question.model, question.request.precision)
    requests = [(way, way.narrowed(question.request, model, devices)) for way in ways]
    given = model, question.cluster, question.profiles, Path(f"--for {system}")
    return _best_of_ways(system, requests, given, tell, CpuSeconds(limit_s))


def planned_for(
    system: System,
    request: SearchRequest,
    given: tuple[Model, Cluster, Profiles, Path],
    tell: Callable[[str], None],
    limit_s: float | None,
) -> SearchAnswer | Infeasible:
    """Return the best plan of a request's space that a system can run; `given` as for `find_best`.

    Raises as `best_for`, and BadInput naming the request's file for settings that the system decides itself.
    """
    model, cluster, _, file = given
    ways = _ways(system, model, request.precision)
    try:
        requests = [(way, way.restricted(request, model, cluster.num_devices)) for way in ways]
    except ValueError as error:
        raise BadInput(file, str(error), "leave them out with --for") from None
    return _best_of_ways(system, requests, given, tell, limit_s)


def _best_of_ways(
    system: System,
    requests: Sequence[tuple[Limits, SearchRequest | None]],
    given: tuple[Model, Cluster, Profiles, Path],
    tell: Callable[[str], None],
    limit_s: float | None,
) -> SearchAnswer | Infeasible:
    """Return the best plan of all ways of a system with a request, which share the time that is left."""
    target, (model, cluster, profiles, file) = SYSTEMS[system], given
    asked = [
        (f"{target.title}: {way.words}", request, way.demands._replace(elsewhere=True))
        for way, request in requests
        if request is not None
    ]
    try:
        if asked:
            return best_of_requests(asked, (model, cluster, profiles), file, tell, limit_s)
    except NothingListed:
        pass
    problem = f"{target.title} runs no plan of {model.name} on {cluster.name}, or none that is searched"
    raise BadInput(f"--for {system}", problem, "choose another system, or leave --for out")


def _ways(system: System, model: Model, precision: Precision) -> Sequence[Limits]:
    """Return the ways in which a system runs a model; raise BadInput if no way supports all its types of layers."""
    target = SYSTEMS[system]
    ways = target.limits(model, precision)
    possible = [way for way in ways if way.runs(model)]
    if ways and not possible:
        types = ", ".join(dict.fromkeys(model.layers))
        problem = f"{target.title} needs layers of one type, as it runs one strategy for all; {model.name} has {types}"
        raise BadInput(f"--for {system}", problem, "choose another system, or leave --for out")
    return possible
