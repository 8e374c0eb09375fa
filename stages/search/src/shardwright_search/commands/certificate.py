"""The certificate that a search writes, and what it shares with its check: the configurations and their arrays."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shardwright_formats.io import BadInput, RunFailed, sha256_of_file
from shardwright_formats.types import Certificate, Plan
from shardwright_search.certificate.make import certified
from shardwright_search.search import Found
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.request import Objective, SearchRequest
from shardwright_search.space.search_space import SearchSpace

_TOLD_BY_PLAN = ("cluster", "model")
"""Files, by role, that a plan has in itself: of all others a certificate knows which they were."""


def check_certifiable(request: SearchRequest, file: Path) -> None:
    """Raise BadInput for a request whose space no certificate covers."""
    if any(schedule.interleaves for schedule in request.schedules):
        what = "schedules: certificates do not cover interleaved_1f1b"
        raise BadInput(file, what, "leave it out, or search without --certificate")


def certificate_of(
    found: Found, space: SearchSpace, files: Mapping[str, Path], report: Callable[[str], None]
) -> Certificate:
    """The certificate of a search's answer.

    Raises RunFailed where nothing could be confirmed.
    """
    best = found.best
    problems = ((name, problem, of(best.score)) for name, problem, of in problems_of(space))
    if (made := certified(problems, report)) is None:
        raise RunFailed("no certificate: nothing near the search's bound could be confirmed")
    gap, proofs = made
    return Certificate(
        plan_sha256=found.chosen.plan.sha256,
        inputs_sha256={role: sha256_of_file(files[role]) for role in files if role not in _TOLD_BY_PLAN},
        bound_ps=best.score * (1 - gap) / scale_of(space.instance.request, found.chosen.plan),
        configurations=proofs,
    )


def problems_of(space: SearchSpace) -> Iterator[tuple[str, Any, Callable[[float], float]]]:
    """Name and arrays of every configuration, and the time that a score is in it."""
    space.check_listed("no certificate")
    for target in space.targets:
        yield _name(target.configuration), space.instance.problem(target.configuration), target.time_ps


def _name(configuration: Configuration) -> str:
    """With what a configuration fixes beside what its text tells."""
    fixed = configuration.layers, configuration.buffer_tokens
    return str(configuration) + ("" if fixed == (None, None) else f", {msgspec.json.encode(fixed).decode()}")


def scale_of(request: SearchRequest, plan: Plan) -> float:
    """From the time of a step of a plan to what is minimised."""
    return 1.0 if request.objective is Objective.STEP_TIME else 1.0 / plan.global_batch_size
