"""The process that searches for the page: settings on its standard input, a line of JSON for each event on its output.

Limits of a search are timers of a process's main thread, which a server's threads are not; and a process can be ended
at any moment, when the settings change.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec import Meta, field
from msgspec.structs import replace

from shardwright.display.units import seconds_text, usd_text
from shardwright.io import BadInput, ShardwrightError, has_controls
from shardwright.types import GIB
from shardwright.types.limits import Gib, Samples, Tokens
from shardwright_search.advise.page import (
    Axis,
    Point,
    answer_part,
    budgets_part,
    first_line,
    front_part,
    memory_part,
    plan_part,
)
from shardwright_search.advise.question import Question, question_of
from shardwright_search.advise.report import plan_words, usd_per_billion_tokens
from shardwright_search.advise.sizes import Outcome, Sized, outcomes_by_budget, outcomes_by_cluster
from shardwright_search.advise.targeted import started
from shardwright_search.commands.advise import nothing_fits, searched, side_search, simple_plan
from shardwright_search.options import AdviseOptions, System
from shardwright_search.search import SearchAnswer, StoppedEarly
from shardwright_search.solver.stopping import CpuSeconds, until
from shardwright_search.space.budget import Infeasible
from shardwright_search.systems.launch import own_launch
from shardwright_search.systems.registry import SYSTEMS

# The settings of the page's form, as its URL's query has them.


_Text = Annotated[str, Meta(min_length=1, max_length=1000)]
_MOST_SETTINGS = 200


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of the page; those left out have the defaults of `advise`."""

    model: _Text
    gpus: _Text
    batch: Samples | None = None
    seq: Tokens | None = None
    target: System | None = field(default=None, name="for")
    budget_gib: Gib | None = None

    def options(self, time_limit_s: float) -> AdviseOptions:
        """Return the settings as options of `advise`."""
        return AdviseOptions(
            model=self.model,
            gpus=self.gpus,
            batch=self.batch,
            seq=self.seq,
            target=self.target,
            budget_gib=self.budget_gib,
            time_limit=time_limit_s,
        )


def asked_of(settings: Mapping[str, str]) -> Asked:
    """Return the settings that are not empty; raise BadInput naming the one at fault."""
    given = {name: value for name, value in settings.items() if value}
    if (odd := next((name for name, value in given.items() if has_controls(value)), None)) is not None:
        raise BadInput(odd, "contains control characters", "give another")
    lacking = next((name for name in ("model", "gpus") if name not in given), None)
    if lacking is not None:
        raise BadInput(lacking, "is not given", "choose one")
    try:
        return msgspec.convert(given, Asked, strict=False)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        raise BadInput(where.rstrip("`") or "settings", reason, "correct it") from None


def settings_of(query: str) -> dict[str, str]:
    """Return the settings of a query; of repeated settings the last one."""
    return dict(parse_qsl(query, max_num_fields=_MOST_SETTINGS))


def query_of(link: str) -> str:
    """Return the query of a URL, or of the part after its question mark, without the token."""
    query = urlsplit(link).query if "://" in link else link.removeprefix("?")
    return "&".join(part for part in query.split("&") if part and not part.startswith("token="))


# The answers.


LIMITS_S = (1.0, 4.0, 20.0)
"""CPU seconds of a search; one that was stopped begins again with more, while its plan is shown."""
_FRONT_S, _CLUSTER_S = 12.0, 4.0
"""CPU seconds for other budgets, and for each other number of GPUs."""

Tell = Callable[[str, Mapping[str, Any]], None]
"""A function that sends an event: its kind and its content."""


def tell_all(asked: Asked, brief: bool, tell: Tell) -> None:
    """Send the best plan so far, and then the answer; unless `brief`, also its files and further parts of the page."""
    options = asked.options(LIMITS_S[-1])
    found: tuple[Question, SearchAnswer] | str = ""
    for found in _answers(asked, question_of(options), lambda line: tell("progress", {"words": line})):
        if isinstance(found, str):
            tell("none", {"words": found})
            return
        sized = Sized.of_answer(*found)
        tell("answer", {**_parts(sized), "row": _row(asked, sized), "so_far": sized.stopped})
    if brief or isinstance(found, str):
        return
    tell("launch", _files(options, found[1]))
    search, sized = side_search(options), Sized.of_answer(*found)
    budgets = outcomes_by_budget(sized, search, until(CpuSeconds(_FRONT_S)))
    tell("memory_front", {"html": budgets_part(budgets)})
    clusters = dict[str, Outcome]()
    for gpus, outcome in outcomes_by_cluster(options, sized, search, _CLUSTER_S):
        clusters[gpus] = outcome
        if options.gpus in clusters:
            tell("price_front", {"html": _price_front(clusters, options.gpus)})


def _answers(
    asked: Asked, question: Question, line: Callable[[str], None]
) -> Iterator[tuple[Question, SearchAnswer] | str]:
    """Yield the answer of each search that improves on the one before; if nothing fits, text that says so."""
    for limit_s in LIMITS_S:
        options = asked.options(limit_s)
        try:
            answer = searched(options, question, line, until(CpuSeconds(limit_s)))
            if isinstance(answer, Infeasible) and asked.budget_gib is None:
                question = question.whole
                answer = searched(options, question, line, until(CpuSeconds(limit_s)))
        except StoppedEarly:
            if limit_s == LIMITS_S[-1]:
                raise
            continue
        if isinstance(answer, Infeasible):
            line("no plan fits: looking for what would")
            yield nothing_fits(asked.options(LIMITS_S[-1]), question, answer)
            return
        simple = simple_plan(options, question, answer)
        yield question, replace(answer, chosen=simple.plan, tolerance=simple.tolerance)
        if not answer.stopped:
            return


def _parts(sized: Sized) -> dict[str, str]:
    """Return the parts of the page that show an answer, as HTML, and its first sentence as plain text."""
    parts = {"answer": answer_part(sized), "plan": plan_part(sized), "memory": memory_part(sized)}
    return {**parts, "sentence": first_line(sized)}


def _row(asked: Asked, sized: Sized) -> list[tuple[str, str]]:
    """Return the names and values by which answers are compared side by side."""
    question, plan, estimate = sized.question, sized.plan, sized.estimate
    price = usd_per_billion_tokens(plan, estimate)
    return [
        ("GPUs", asked.gpus),
        ("system", "this runtime" if asked.target is None else SYSTEMS[asked.target].title),
        ("batch", f"{plan.global_batch_size:,} x {question.model.sequence_length:,} tokens"),
        ("step", seconds_text(estimate.simulated_step_time_s)),
        ("tokens a second", f"{estimate.samples_per_s * question.model.sequence_length:,.0f}"),
        ("fullest GPU", f"{estimate.memory_bytes / GIB:.1f} GiB"),
        ("a billion tokens", "no price is known" if price is None else usd_text(price)),
        ("plan", plan_words(plan)),
    ]


def _files(options: AdviseOptions, answer: SearchAnswer) -> dict[str, Any]:
    """Return the files that start the plan, and what they cannot express; or why there are none."""
    plan = answer.chosen.plan
    try:
        if options.target is not None:
            start = started(options.target, plan)
            return {"files": start.files, "notes": start.notes}
        launch = own_launch(plan, "launch")
    except BadInput as refused:
        return {"files": {}, "notes": [str(refused)]}
    return {"files": launch.files, "notes": launch.notes}


def _price_front(clusters: Mapping[str, Outcome], asked: str) -> str:
    points = [_priced_point(gpus, outcome) for gpus, outcome in clusters.items()]
    return front_part(points, list(clusters).index(asked), Axis.PRICE)


def _priced_point(gpus: str, outcome: Outcome) -> Point | None:
    """Return the point of a plan by its price; None if there is no plan, or no price is known."""
    if not isinstance(outcome, Sized):
        return None
    price = usd_per_billion_tokens(outcome.plan, outcome.estimate)
    words = f"{gpus}, {plan_words(outcome.plan)}"
    if price is None:
        return None
    return Point(price, outcome.estimate.simulated_step_time_s, words, not outcome.stopped)


def main() -> int:
    """Read settings, and print events until the answer is complete."""

    def tell(kind: str, content: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps({"kind": kind, **content}) + "\n")
        sys.stdout.flush()

    given = json.loads(sys.stdin.readline())
    try:
        tell_all(asked_of(given["settings"]), given["brief"], tell)
    except BrokenPipeError:
        return 0
    except ShardwrightError as error:
        tell("error", {"words": str(error)})
    tell("end", {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
