"""What a search answers when something is asked differently, and how that compares with a plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright_formats.io.errors import BadInput
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.prediction import Estimate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.explain.wording import MIB, runs_words
from shardwright_search.search import Found, find_best
from shardwright_search.space.budget import Infeasible
from shardwright_search.space.request import SearchRequest

__all__ = ["Answer", "Question", "answer", "answers_shown", "sample_s"]


class Question(NamedTuple):
    """A search that differs from the one that made a plan."""

    what: str
    """How it differs, in a few words."""
    request: SearchRequest
    model: Model
    cluster: Cluster
    profiles: Profiles
    file: Path
    """Of the request, named in errors."""


class Answer(NamedTuple):
    """The best plan; or how much every plan lacks; or why there is no such plan, or nothing to price it with."""

    what: str
    found: Found | Infeasible | BadInput


def answer(question: Question, time_limit_s: float | None = None) -> Answer:
    """Search; what cannot be asked is an answer too."""
    what, request, model, cluster, profiles, file = question
    try:
        return Answer(what, find_best(request, model, cluster, profiles, file, _quiet, time_limit_s))
    except BadInput as error:
        return Answer(what, error)


def answers_shown(title: str, plan: Plan, estimate: Estimate, answers: Sequence[Answer]) -> RenderableType:
    """Each answer against the plan: simulated time of a sample, memory of the fullest rank, and what it is."""
    table = Table(title=title, title_justify="left")
    for heading in ("", "ms a step", "samples/s", "time a sample", "MiB", "memory"):
        table.add_column(heading, justify="left" if heading == "" else "right", no_wrap=heading == "")
    told: dict[str, list[str]] = {}
    for what, found in answers:
        table.add_row(what, *_figures(found, plan, estimate))
        told.setdefault(_words(found, plan), []).append(what)
    return Group(table, Text("\n".join(f"{', '.join(names)}: {words}" for words, names in told.items())))


def sample_s(plan: Plan, estimate: Estimate) -> float:
    """Simulated time of a step for each of its samples."""
    return estimate.simulated_step_time_s / plan.global_batch_size


def _figures(found: Found | Infeasible | BadInput, plan: Plan, estimate: Estimate) -> Sequence[str]:
    """Time and memory, absolute and against the plan's; dashes where there is no plan."""
    if not isinstance(found, Found):
        return ["-"] * 5
    other = found.chosen.evaluation.estimate
    return (
        f"{other.simulated_step_time_s * 1e3:.3f}",
        f"{other.samples_per_s:.6g}",
        f"{sample_s(found.chosen.plan, other) / sample_s(plan, estimate) - 1:+.1%}",
        f"{other.memory_bytes / MIB:.1f}",
        f"{other.memory_bytes / estimate.memory_bytes - 1:+.1%}",
    )


def _words(found: Found | Infeasible | BadInput, plan: Plan) -> str:
    """What the answer is, in one line."""
    if isinstance(found, BadInput):
        return f"no plan: {found}"
    if isinstance(found, Infeasible):
        more = "" if found.exact else "more than "
        return f"no plan fits, the leanest lacks {more}{found.missing_bytes} bytes a rank"
    chosen = found.chosen.plan
    words = "this plan" if _decision(chosen) == _decision(plan) else "; ".join(runs_words(chosen))
    return f"(the best so far) {words}" if found.stopped else words


def _decision(plan: Plan) -> tuple[object, ...]:
    """What a plan decides, on whatever cluster."""
    shape = plan.global_batch_size, plan.num_microbatches, plan.schedule
    return plan.stages, plan.embedding, plan.layers, plan.head, shape


def _quiet(_: str) -> None:
    """Each question is one line of progress; how its search goes is not told."""
