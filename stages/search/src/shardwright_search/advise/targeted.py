"""The best plan of those that another system runs, proven among them, beside the best of all plans."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwright.io import BadInput
from shardwright.types import Plan
from shardwright_search.advise.question import Question
from shardwright_search.options import System
from shardwright_search.search import SearchAnswer, StoppedEarly, best_of, find_best
from shardwright_search.solver.stopping import CpuSeconds, left, until
from shardwright_search.space.budget import Infeasible
from shardwright_search.space.search_space import NothingListed
from shardwright_search.systems.entry import Entry, Limits
from shardwright_search.systems.launch import in_pipeline_order
from shardwright_search.systems.registry import SYSTEMS, TUNED


class Started(NamedTuple):
    """What starts a plan in another system."""

    command: str
    """Command of each node."""
    files: dict[str, str]
    """Texts by name in a folder."""
    notes: tuple[str, ...]
    """Points that the files cannot hold, a line each."""


class Within(NamedTuple):
    """A system that an answer is for, what starts the answer's plan there, and the best plan without its limits."""

    target: Entry
    started: Started
    unlimited: SearchAnswer | None
    """None where it was not found in time."""


def started(system: System, plan: Plan, tuned: bool = False) -> Started:
    """Return what starts a plan; BadInput names the first thing of the plan that the system cannot express.

    `tuned`: experts run as its recipes for speed run them.
    """
    target = TUNED.get(system, SYSTEMS[system]) if tuned else SYSTEMS[system]
    name = f"--for {system}"
    ordered = in_pipeline_order(plan, name)
    if target.launch is not None:
        exported, launch = target.launch(plan, name, None)
        files, notes = launch.files, (*exported.notes, *launch.notes)
    else:
        exported = target.export(ordered, name)
        files, notes = dict(exported.beside), exported.notes
    return Started(target.command(ordered, target.file_name), {target.file_name: exported.text, **files}, notes)


def best_for(
    system: System, question: Question, tell: Callable[[str], None], limit_s: float
) -> SearchAnswer | Infeasible:
    """Return the best plan of those that a system runs in any of its ways; what is proven is proven of all of them.

    Each way has an equal share of the time that is left. Raises StoppedEarly where no plan was found in time, and
    BadInput where the system runs no plan of the model on these devices.
    """
    target, deadline = SYSTEMS[system], until(CpuSeconds(limit_s))
    ways = _ways(target, system, question)
    answers, lacking, late = list[SearchAnswer](), list[Infeasible](), list[StoppedEarly]()
    given = question.model, question.cluster, question.profiles, Path(f"--for {system}")
    for number, way in enumerate(ways):
        request = way.narrowed(question.request, question.model, question.cluster.num_devices)
        if request is None:
            continue
        tell(f"{target.title}: {way.words}")
        share = CpuSeconds((left(deadline) or 0.0) / (len(ways) - number))
        try:
            answer = find_best(request, *given, tell, share, way.demands._replace(elsewhere=True))
        except NothingListed:
            continue
        except StoppedEarly as error:
            late.append(error)
        else:
            (lacking if isinstance(answer, Infeasible) else answers).append(answer)  # type: ignore[arg-type]
    if answers:
        return best_of(answers, late)
    if late:
        raise late[0]
    if not lacking:
        problem = f"{target.title} runs no plan of {question.model.name} on {question.cluster.name}"
        raise BadInput(f"--for {system}", problem, "choose another system, or leave --for out")
    return min(lacking, key=lambda each: each.missing_bytes)


def _ways(target: Entry, system: System, question: Question) -> Sequence[Limits]:
    """Return the ways in which a system runs a model; raises BadInput where none has layers of all its types."""
    model, ways = question.model, target.limits(question.model, question.request.precision)
    possible = [way for way in ways if way.runs(model)]
    if ways and not possible:
        types = ", ".join(dict.fromkeys(model.layers))
        problem = f"{target.title} is given one strategy for layers of one type, and {model.name} has {types}"
        raise BadInput(f"--for {system}", problem, "choose another system, or leave --for out")
    return possible
