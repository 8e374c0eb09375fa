"""`shardwright-search advise`: whether a model fits a cluster, the best plan and what it yields, from shapes alone."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from shardwright_formats.io import BadInput, NothingFits, check_writable, write_document
from shardwright_formats.types import GIB, Plan
from shardwright_search.advise.choices import choice_of, plan_of_choice
from shardwright_search.advise.question import Question, question_of
from shardwright_search.advise.report import Beside, report
from shardwright_search.advise.rules import RULES, plan_of_rule
from shardwright_search.cost_model.plan import Evaluation, evaluate
from shardwright_search.explain.tables import show_rich
from shardwright_search.options import AdviseOptions
from shardwright_search.search import Candidate, Found, find_best
from shardwright_search.space.budget import Infeasible

_RULE = "rule:"


def advise(options: AdviseOptions) -> None:
    """Show the answer, and write the plan where it is asked for."""
    if options.out is not None:
        check_writable(options.out)
    question = question_of(options)
    found = find_best(
        question.request,
        question.model,
        question.cluster,
        question.profiles,
        Path("--batch"),
        lambda _: None,
        options.time_limit,
    )
    if isinstance(found, Infeasible):
        raise NothingFits(_nothing_fits(question, found))
    rules = [beside for name in RULES if (beside := _rule_of_thumb(name, question)) is not None]
    choices = [_beside(text, question) for text in options.against]
    found = _never_worse(found, [*rules, *choices], question)
    if options.out is not None:
        write_document(options.out, found.chosen.plan)
    show_rich(report(question, found, rules, choices))


def _beside(text: str, question: Question) -> Beside:
    """A rule, or a choice of the user's, priced."""
    name = text.removeprefix(_RULE)
    if name == text:
        plan, source = plan_of_choice(choice_of(text, question), f"--against {text}", question), ""
    else:
        plan, source = plan_of_rule(name, question, lambda plan: _fits(plan, question)), RULES[name].source
    return Beside(text, plan, _priced(plan, question).estimate, source)


def _rule_of_thumb(name: str, question: Question) -> Beside | None:
    """A rule's plan; None where nothing that the rule says divides batch and devices."""
    try:
        return _beside(f"{_RULE}{name}", question)
    except BadInput:
        return None


def _never_worse(found: Found, besides: Sequence[Beside], question: Question) -> Found:
    """Where the search was stopped, a choice that fits and takes less time is the answer."""
    best = found.chosen
    for beside in besides if found.stopped else ():
        evaluation = _priced(beside.plan, question)
        quicker = evaluation.estimate.simulated_step_time_s < best.evaluation.estimate.simulated_step_time_s
        if quicker and question.fits(beside.plan, evaluation.estimate):
            best = Candidate(beside.plan, evaluate(beside.plan, question.profiles))
    if best is found.chosen:
        return found
    return replace(found, chosen=best, optimum_s=min(found.optimum_s, best.evaluation.estimate.objective_s))


def _priced(plan: Plan, question: Question) -> Evaluation:
    return evaluate(plan, question.profiles, timeline=False)


def _fits(plan: Plan, question: Question) -> bool:
    return question.fits(plan, _priced(plan, question).estimate)


def _nothing_fits(question: Question, found: Infeasible) -> str:
    """By how much, and what would do."""
    lacks = f"{'' if found.exact else 'more than '}{found.missing_bytes / GIB:.2f} GiB a rank"
    least = f"{'' if found.exact else 'more than '}{found.min_bytes / GIB:.2f} GiB"
    return (
        f"{question.model.name} on {question.cluster.name}: no plan fits in {question.budget_words}, "
        f"even the leanest lacks {lacks}: take more GPUs, GPUs that leave {least}, a smaller --batch or --seq"
    )
