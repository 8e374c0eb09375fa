"""`shardwright-search advise`: whether a model fits a cluster, the best plan and what it yields, from shapes alone."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import process_time

from msgspec.structs import replace

from shardwright_formats.io import BadInput, NothingFits, check_writable, write_document
from shardwright_formats.types import GIB, Estimate, Plan
from shardwright_search.advise.choices import RULES, choice_of, plan_of_choice, plan_of_rule
from shardwright_search.advise.question import Question, question_of
from shardwright_search.advise.report import PricedChoice, report
from shardwright_search.candidates import Candidate
from shardwright_search.commands.prediction import progress
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.explain.tables import show_rich
from shardwright_search.explain.what_if import WhatIf, better_batches
from shardwright_search.options import AdviseOptions
from shardwright_search.search import SearchAnswer, StoppedEarly, find_best
from shardwright_search.solver.stopping import CpuSeconds, latest, left, soon, until
from shardwright_search.space.budget import Infeasible

_RULE = "rule:"
_SELDOM_S = 5.0
"""CPU seconds between two lines of progress in a file: a quick answer has none."""


def advise(options: AdviseOptions) -> None:
    """Show the answer, and write the plan where it is asked for."""
    if options.out is not None:
        check_writable(options.out)
    question = question_of(options)
    given = question.request, question.model, question.cluster, question.profiles, Path("--batch")
    deadline = until(CpuSeconds(options.time_limit))
    with progress() as tell:
        try:
            answer = find_best(*given, tell if sys.stderr.isatty() else _seldom(tell), left(deadline))
        except StoppedEarly:
            raise StoppedEarly("--time-limit", "was over before a plan was found", "give more seconds") from None
    if isinstance(answer, Infeasible):
        raise NothingFits(_nothing_fits(question, answer))
    rules, whole = latest(_rules_of_thumb(question), soon(0.0 if answer.stopped else deadline))
    rules = rules or ()
    choices = [_priced_choice(text, question) for text in options.against]
    answer = _never_worse(answer, [*rules, *choices], question)
    if options.out is not None:
        write_document(options.out, answer.chosen.plan)
    batches = tuple(better_batches(WhatIf("", *given), answer, deadline))
    show_rich(report(question, answer, rules, choices, whole, batches))


def _seldom(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that tells a line where none was told for `_SELDOM_S`."""
    told_s = process_time()

    def line(text: str) -> None:
        nonlocal told_s
        if process_time() - told_s >= _SELDOM_S:
            told_s = process_time()
            tell(text)

    return line


def _priced_choice(text: str, question: Question) -> PricedChoice:
    """Return a rule, or a choice of the user's, with its price."""
    name = text.removeprefix(_RULE)
    if name == text:
        plan, source = plan_of_choice(choice_of(text, question), f"--against {text}", question), ""
    else:
        plan = plan_of_rule(name, question, lambda plan: question.fits(plan, _priced(plan, question)))
        source = RULES[name].source
    return PricedChoice(text, plan, _priced(plan, question), source)


def _rules_of_thumb(question: Question) -> Iterator[tuple[PricedChoice, ...]]:
    """Yield the rules' plans so far with their prices, without those of which nothing divides batch and devices."""
    rules: tuple[PricedChoice, ...] = ()
    for name in RULES:
        with suppress(BadInput):
            rules = (*rules, _priced_choice(f"{_RULE}{name}", question))
        yield rules


def _never_worse(answer: SearchAnswer, choices: Sequence[PricedChoice], question: Question) -> SearchAnswer:
    """Return a choice that fits and takes less time as the answer, where the search was stopped."""
    best = answer.chosen
    for choice in choices if answer.stopped else ():
        quicker = choice.estimate.simulated_step_time_s < best.evaluation.estimate.simulated_step_time_s
        if quicker and question.fits(choice.plan, choice.estimate):
            best = Candidate(choice.plan, evaluate(choice.plan, question.profiles))
    if best is answer.chosen:
        return answer
    return replace(answer, chosen=best, optimum_s=min(answer.optimum_s, best.evaluation.estimate.objective_s))


def _priced(plan: Plan, question: Question) -> Estimate:
    return evaluate(plan, question.profiles, timeline=False).estimate


def _nothing_fits(question: Question, answer: Infeasible) -> str:
    """Return by how much each plan lacks memory, and what would do."""
    more = "" if answer.exact else "more than "
    return (
        f"{question.model.name} on {question.cluster.name}: no plan fits in {question.budget_words}, "
        f"even the leanest lacks {more}{answer.missing_bytes / GIB:.2f} GiB a rank: take more GPUs, GPUs that leave "
        f"{more}{answer.min_bytes / GIB:.2f} GiB, a smaller --batch or --seq"
    )
