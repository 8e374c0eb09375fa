"""`shardwright advise`: whether a model fits a cluster, the best plan, its speed and cost, without measurements."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import process_time

from msgspec.structs import replace

from shardwright.display.columns import line_width, wrapped
from shardwright.display.units import gib_text
from shardwright.io import BadInput, NothingFits, check_new, check_writable, write_bytes, write_document
from shardwright.types import Cluster, Estimate, Model, Plan
from shardwright_search.advise.choices import RULES, plan_of_rule, reading_of
from shardwright_search.advise.page import advice_page
from shardwright_search.advise.question import Question, config_notes, question_of
from shardwright_search.advise.report import Advice, PricedChoice, report
from shardwright_search.advise.sizes import Sized, by_schedule, outcomes_by_budget
from shardwright_search.advise.targeted import Within, best_for, started
from shardwright_search.advise.ways_out import ways_out
from shardwright_search.candidates import Candidate, kind_of
from shardwright_search.commands.given_plans import written_files
from shardwright_search.commands.prediction import progress
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.explain.printing import show_rich
from shardwright_search.explain.what_if import WhatIf, better_batches
from shardwright_search.options import AdviseOptions, System
from shardwright_search.search import SearchAnswer, StoppedEarly, find_best
from shardwright_search.simplest import Simple, simplest
from shardwright_search.solver.stopping import CpuSeconds, latest, left, soon, until
from shardwright_search.space.budget import Infeasible
from shardwright_search.space.request import SearchRequest
from shardwright_search.systems.launch import own_launch
from shardwright_search.systems.registry import SYSTEMS

_RULE = "rule:"
_RUNNER_UP = "runner-up:"
_SELDOM_S = 5.0
"""CPU seconds between two lines of progress in a file: a quick answer has none."""


def advise(options: AdviseOptions) -> None:
    """Show the answer, and write the plan and the files that start it if requested."""
    _check(options)
    question = question_of(options)
    for note in config_notes(options):
        print(note, file=sys.stderr, flush=True)
    deadline = until(CpuSeconds(options.time_limit))
    with progress() as tell:
        line = tell if sys.stderr.isatty() else _seldom(tell)
        answer = searched(options, question, line, deadline)
        if isinstance(answer, Infeasible) and options.budget_gib is None:
            # Runs that filled a GPU further have run, too: the answer says that it is near the limit.
            question = question.whole
            answer = searched(options, question, line, deadline)
        if isinstance(answer, Infeasible):
            raise NothingFits(nothing_fits(options, question, answer))
        rules, whole = latest(_rules_of_thumb(question), soon(0.0 if answer.stopped else deadline))
        rules = rules or ()
        choices = [_priced_choice(text, question) for text in options.against]
        answer = _never_worse(answer, [*rules, *choices], question, options.target)
        simple = simple_plan(options, question, answer)
        answer = replace(answer, chosen=simple.plan, tolerance=simple.tolerance, beside=_other_kinds(answer, simple))
        taken = _taken(options.take, answer, [*rules, *choices], simple)
        within, batches = None, tuple[Candidate, ...]()
        if options.target is None:
            batches = tuple(better_batches(WhatIf("", *_given(question)), answer, deadline))
        else:
            within = _within(options.target, question, answer, taken, _seldom(tell), options.time_limit)
        schedules = tuple(by_schedule(question, side_search(options), line)) if options.schedules else ()
        advice = Advice(question, answer, rules, choices, whole, batches, within, simple, schedules)
        page = None if options.html is None else _page(options, advice, tell)
        launch = None if options.launch is None else _launch(within, taken)
    texts = {} if options.launch is None else {options.launch / name: text for name, text in (launch or {}).items()}
    with written_files(texts, executable=texts):
        if options.out is not None:
            write_document(options.out, taken)
        if options.html is not None and page is not None:
            write_bytes(options.html, page.encode())
        show_rich(report(advice))


def _check(options: AdviseOptions) -> None:
    """Raise BadInput for files that cannot be written, and for options that need other options."""
    for path in filter(None, (options.out, options.html)):
        check_writable(path)
    if options.launch is not None:
        check_new(options.launch)
        check_writable(options.launch / "node.sh")


def _launch(within: Within | None, taken: Plan) -> dict[str, str]:
    """Return the files that start a plan in the requested system, else in this runtime."""
    if within is not None:
        return within.started.files
    launch = own_launch(taken, "--launch")
    print("\n".join(launch.notes), file=sys.stderr, flush=True)
    return launch.files


def _page(options: AdviseOptions, advice: Advice, tell: Callable[[str], None]) -> str:
    """Return the HTML page, with answers for smaller budgets as time allows."""
    tell(f"smaller budgets: at most {options.html_limit:g} s of CPU time")
    asked = Sized.of_answer(advice.question, advice.answer)
    budgets = outcomes_by_budget(asked, side_search(options), until(CpuSeconds(options.html_limit)))
    return advice_page(advice, options.gpus, budgets)


def _quiet(_line: str) -> None:
    pass


def _given(question: Question) -> tuple[SearchRequest, Model, Cluster, Profiles, Path]:
    return question.request, question.model, question.cluster, question.profiles, Path("--batch")


def searched(
    options: AdviseOptions, question: Question, tell: Callable[[str], None], deadline: float
) -> SearchAnswer | Infeasible:
    """Return the best plan before a deadline, only of the system of --for if given; StoppedEarly if none is known."""
    try:
        if options.target is not None:
            return best_for(options.target, question, tell, options.time_limit)
        return find_best(*_given(question), tell, left(deadline))
    except StoppedEarly:
        raise StoppedEarly("--time-limit", "expired before a plan was found", "give more seconds") from None


def _within(
    system: System,
    question: Question,
    answer: SearchAnswer,
    taken: Plan,
    tell: Callable[[str], None],
    limit_s: float,
) -> Within:
    """Return the files that start the taken plan, and the best plan without the system's limits, searched as long.

    If that plan is slower, because only gradients reduced once a step were searched, the system's own plan is the best
    of all.
    """
    start = started(system, taken, question.is_tuned)
    try:
        unlimited = find_best(*_given(question), tell, CpuSeconds(limit_s))
    except StoppedEarly:
        return Within(SYSTEMS[system], start, None)
    slower = isinstance(unlimited, Infeasible) or unlimited.chosen.sample_s > answer.chosen.sample_s
    return Within(SYSTEMS[system], start, answer if slower else unlimited)  # type: ignore[arg-type]


def simple_plan(options: AdviseOptions, question: Question, answer: SearchAnswer) -> Simple:
    """Return the simplest plan within the tolerance that the system runs; without tolerance the fastest."""
    if options.tolerance:
        simple = simplest(answer, question.budgets, options.tolerance)
        if _runs(options.target, simple.plan.plan):
            return simple
    return Simple(answer.chosen, answer.chosen, None, 0.0)


def _other_kinds(answer: SearchAnswer, simple: Simple) -> Callable[[], tuple[Candidate, ...]]:
    """Return a function that finds runners-up of other kinds than the answer and than one another."""

    def beside() -> tuple[Candidate, ...]:
        kinds = {kind_of(simple.plan.plan): simple.plan}
        for other in answer.runners_up:
            kinds.setdefault(kind_of(other.plan), other)
        return tuple(kinds.values())[1:]

    return beside


def _taken(name: str, answer: SearchAnswer, choices: Sequence[PricedChoice], simple: Simple) -> Plan:
    """Return the plan to write by its name; raise BadInput for an unknown name."""
    plans = {"best": answer.chosen.plan, "fastest": simple.fastest.plan}
    plans |= {} if simple.uniform is None else {"uniform": simple.uniform.plan}
    plans |= {choice.name: choice.plan for choice in choices}
    if name not in plans and name.startswith(_RUNNER_UP):
        plans |= {f"{_RUNNER_UP}{i}": other.plan for i, other in enumerate(answer.runners_up, 1)}
    if name not in plans:
        further = "" if name.startswith(_RUNNER_UP) else f" or {_RUNNER_UP}N"
        raise BadInput("--take", f"{name} is not one of the plans", f"choose {', '.join(plans)}{further}")
    return plans[name]


def _seldom(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that reports a line if none was reported for `_SELDOM_S` seconds of CPU time."""
    told_s = process_time()

    def line(text: str) -> None:
        nonlocal told_s
        if process_time() - told_s >= _SELDOM_S:
            told_s = process_time()
            tell(text)

    return line


def _priced_choice(text: str, question: Question) -> PricedChoice:
    """Return the plan of a rule, or of the user's choice, with its price."""
    name = text.removeprefix(_RULE)
    if name == text:
        plan, notes = reading_of(text, question.setting)
        source = "; ".join(notes)
    else:
        plan = plan_of_rule(name, question, lambda plan: question.fits(plan, _priced(plan, question)))
        source = RULES[name].source
    return PricedChoice(text, plan, _priced(plan, question), source)


def _rules_of_thumb(question: Question) -> Iterator[tuple[PricedChoice, ...]]:
    """Yield the plans of the rules so far with their prices, without rules that fit neither batch nor devices."""
    rules: tuple[PricedChoice, ...] = ()
    for name in RULES:
        with suppress(BadInput):
            rules = (*rules, _priced_choice(f"{_RULE}{name}", question))
        yield rules


def _never_worse(
    answer: SearchAnswer, choices: Sequence[PricedChoice], question: Question, system: System | None
) -> SearchAnswer:
    """Return the answer; if the search was stopped, with a choice that fits, is quicker and runs in the system."""
    best = answer.chosen
    for choice in choices if answer.stopped else ():
        quicker = choice.estimate.simulated_step_time_s < best.evaluation.estimate.simulated_step_time_s
        if quicker and question.fits(choice.plan, choice.estimate) and _runs(system, choice.plan):
            best = Candidate(choice.plan, evaluate(choice.plan, question.profiles))
    if best is answer.chosen:
        return answer
    return replace(answer, chosen=best, optimum_s=min(answer.optimum_s, best.evaluation.estimate.objective_s))


def _runs(system: System | None, plan: Plan) -> bool:
    """Return whether a system can run a plan; None: no system was requested."""
    if system is not None:
        try:
            started(system, plan)
        except BadInput:
            return False
    return True


def _priced(plan: Plan, question: Question) -> Estimate:
    return evaluate(plan, question.profiles, timeline=False).estimate


def nothing_fits(options: AdviseOptions, question: Question, answer: Infeasible) -> str:
    """Return by how much the leanest plan exceeds the budget, and on further lines what would make it fit."""
    system = options.target
    kind = "plan" if system is None else f"plan that {SYSTEMS[system].title} runs"
    more = "" if answer.exact else "more than "
    first = (
        f"{question.model.name} on {question.cluster.name}: no {kind} fits in {question.budget_words}, even the "
        f"leanest exceeds it by {more}{gib_text(answer.missing_bytes)} a rank: each of these is a way out, or part"
    )
    ways = (f"  {way}" for way in ways_out(options, question, answer, side_search(options)))
    return wrapped((f"{first} of one:", *ways), line_width())


def side_search(options: AdviseOptions) -> Callable[[Question, float], SearchAnswer | Infeasible]:
    """Return a function that searches a changed question, within some CPU seconds."""

    def search(question: Question, limit_s: float) -> SearchAnswer | Infeasible:
        if options.target is not None:
            return best_for(options.target, question, _quiet, limit_s)
        return find_best(*_given(question), _quiet, CpuSeconds(limit_s))

    return search
