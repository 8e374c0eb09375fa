"""The printed answer of `advise`: the plan, its speed, memory by category, other plans, and the user's choices."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace
from rich.console import Group, RenderableType

from shardwright.devices.utilization import MFU_COUNTS, model_flops_utilization
from shardwright.display.plan_words import layer_runs, optimizer_words, strategy_words
from shardwright.display.units import duration_text, gib_text, usd_text
from shardwright.estimate.notes import EXPANDABLE, SEEN, SPARE_SHARE, memory_range
from shardwright.models.context import plan_obstacle
from shardwright.types import GIB, Estimate, Offload, Plan
from shardwright.types.model_profile import ExchangeRow
from shardwright.types.strategy import Dispatcher
from shardwright_search.advise.question import Question
from shardwright_search.advise.sizes import LIMIT_S, SPLIT_LIMIT_S, OfSchedule
from shardwright_search.advise.targeted import Within
from shardwright_search.advise.ways_out import ways_to_fit
from shardwright_search.candidates import Candidate
from shardwright_search.cost_model.plan import evaluate, kept_bytes
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.explain.printing import Lines, ShellCommand, table
from shardwright_search.explain.tables import node_types_table, plan_differences, sample_s, time_changes
from shardwright_search.search import SearchAnswer, proof_words, split_words
from shardwright_search.simplest import FEW, Simple, num_strategies
from shardwright_search.space.budget import device_bytes_of, headroom
from shardwright_search.space.request import left_out
from shardwright_search.systems.entry import Entry

_NO_GAIN = 5e-4
"""The share of time below which a faster plan is not shown, as 0.0 %."""
_LESS_BY = {
    "parameters": "zero3, a larger tp_size, or more pipeline stages",
    "gathered_parameters": "more data-parallel ranks in a shard, or zero2",
    "gradients": "zero2 or zero3, a larger tp_size, or more pipeline stages",
    "optimizer": "zero2 or zero3 over more data-parallel ranks",
    "activations": "recompute, a smaller micro-batch, sequence parallelism, or fewer pipeline stages",
    "workspace": "a smaller micro-batch, or a larger vocabulary tp_size",
    "process": "nothing in a plan: CUDA's context, assumed",
    "communicators": "fewer kinds of parallelism in a stage, or fewer pipeline stages: NCCL's buffers, assumed",
}
"""Remedies that make a category of memory smaller."""


class PricedChoice(NamedTuple):
    """A plan of the user's choice, or of a rule of thumb, with its price."""

    name: str
    plan: Plan
    estimate: Estimate
    source: str
    """The rule in words, and where it was published; empty for the user's choice."""


class Advice(NamedTuple):
    """The answer to a question, with runners-up, rules of thumb and the user's choices."""

    question: Question
    answer: SearchAnswer
    rules: Sequence[PricedChoice]
    """Rules of thumb, rows of the table of plans."""
    choices: Sequence[PricedChoice]
    """The user's choices; the report has a paragraph for each."""
    all_rules: bool = True
    """False if time was up before all rules were priced."""
    batches: Sequence[Candidate] = ()
    within: Within | None = None
    simple: Simple | None = None
    """The answer as the simplest plan within a tolerance, the fastest, and the best of one strategy; None: no other."""
    schedules: Sequence[OfSchedule] = ()
    """The best plan of each schedule, if requested."""

    @property
    def lines(self) -> list[str]:
        """Return the answer in lines: the plan, its speed, what is proven, and how to start it in another system."""
        lines = list(_answer(self))
        return lines if self.within is None else [*lines, *_starts(self.within)]

    @property
    def plans(self) -> list[tuple[Plan, Estimate, str]]:
        """Return the best plan, its runners-up and the plans of rules, each with its name."""
        plan, evaluation = self.answer.chosen
        beside = [] if self.simple is None else [("fastest", self.simple.fastest), ("uniform", self.simple.uniform)]
        beside += [("runner-up", other) for other in self.answer.runners_up]
        others = [
            (other.plan, other.evaluation.estimate, name)
            for name, other in beside
            if other is not None and other.plan != plan
        ]
        others += [(rule.plan, rule.estimate, rule.name) for rule in self.rules]
        return [(plan, evaluation.estimate, "the answer"), *others]

    @property
    def assumed(self) -> list[str]:
        """Return the assumptions, one line each."""
        limits = () if self.within is None else _limits_of(self.question, self.within.target)
        warnings = _assumptions(self.answer.chosen.evaluation.warnings)
        return [*self.question.assumed, *limits, MFU_COUNTS, *warnings]


def report(advice: Advice) -> RenderableType:
    """Return the whole report."""
    question, (plan, evaluation) = advice.question, advice.answer.chosen
    parts: list[RenderableType] = [
        Lines(list(_answer(advice))),
        _memory_table(question, plan, evaluation.estimate),
        _plans_table(question, advice.plans),
    ]
    if (node_types := node_types_table(plan, evaluation.estimate)) is not None:
        parts.insert(1, node_types)
    if advice.schedules:
        parts.append(_schedules_table(question, plan, evaluation.estimate, advice.schedules))
    parts += [Lines(list(_against(question, plan, evaluation.estimate, choice))) for choice in advice.choices]
    if not advice.all_rules:
        parts.append(Lines(["some rules of thumb were not priced within the time limit"]))
    if advice.within is not None:
        how, command, *notes = _starts(advice.within)
        parts += [Lines([how]), ShellCommand(command), Lines(notes)]
    return Group(*parts, Lines(["assumed", *(f"  {line}" for line in advice.assumed), SEEN]))


def usd_per_billion_tokens(plan: Plan, estimate: Estimate) -> float | None:
    """Return the price of training on a billion tokens in USD; None if the GPUs have no price."""
    if estimate.usd_per_step is None:
        return None
    return estimate.usd_per_step / (plan.global_batch_size * plan.model.sequence_length) * 1e9


def plan_words(plan: Plan) -> str:
    """Return a plan in one line."""
    shape = f"pp{len(plan.stages)}, {plan.num_microbatches} x {plan.microbatch_samples} samples{optimizer_words(plan)}"
    if plan.schedule.interleaves:
        shape += f", {plan.schedule}"
    runs = layer_runs(plan, 0, len(plan.layers))
    return ", ".join([shape, strategy_words(plan.layers[0])] if len(runs) == 1 else [shape, *runs])


def _answer(advice: Advice) -> Iterator[str]:
    """Yield the lines of the answer: the plan, its speed, what is proven, and batch sizes that are much faster."""
    question, answer, batches, within = advice.question, advice.answer, advice.batches, advice.within
    model, plan, estimate = question.model, answer.chosen.plan, answer.chosen.evaluation.estimate
    fits = verdict(plan, estimate, question.profiles)
    budgets = f", within {question.budget_words}" if len(question.budgets) > 1 else ""
    yield _in_short(question, plan, estimate)
    yield (
        f"{model.name} ({model.parameter_count / 1e9:.3g} B parameters, {model.sequence_length} tokens a sample) on "
        f"{question.cluster.name}, batch {plan.global_batch_size}: {fits}{budgets}"
    )
    is_fastest = advice.simple is None or advice.simple.fastest.plan == plan
    within_words = f"within {answer.tolerance:.0%} of the bound"
    if is_fastest:
        name = "best plan"
    elif num_strategies(plan) <= FEW:
        name = f"simplest plan {within_words}"
    else:
        name = f"best plan, none of at most {FEW} strategies was found {within_words}"
    yield f"{name}: {plan_words(plan)}"
    yield f"  layers of each pipeline stage: {_layer_counts(plan)}"
    yield f"  embedding {strategy_words(plan.embedding)}; head {strategy_words(plan.head)}"
    price = usd_per_billion_tokens(plan, estimate)
    words = [f"{estimate.simulated_step_time_s:.4g} s a step", *_yields(question, plan, estimate)]
    words += [] if price is None else [f"{price:,.2f} USD per billion tokens"]
    yield f"  predicted {', '.join(words)}"
    yield from ways_of_experts(question, plan)
    yield from _proofs(advice)
    if within is None:
        yield f"  not searched: {', '.join(_not_searched(question, answer))}"
    else:
        yield f"  {_cost_of_limits(answer, within)}"
        yield f"  not searched of what {within.target.title} has: {', '.join(within.target.unsearched)}"
    for other, evaluation in batches:
        gives = ", ".join(_yields(question, other, evaluation.estimate))
        shape = f"{len(other.stages)} pipeline stage(s), {other.num_microbatches} microbatch(es)"
        divides = f"{question.cluster.num_devices} GPUs divide it, and not {plan.global_batch_size}"
        yield f"  --batch {other.global_batch_size} gives {gives} ({shape}): {divides}"


def _in_short(question: Question, plan: Plan, estimate: Estimate) -> str:
    """Return a sentence that needs no knowledge of plans: whether the model fits, how long it takes, and the cost."""
    held_bytes, device_bytes, _ = _expected(plan, estimate, question.profiles)
    fits = memory_range(held_bytes)[1] <= device_bytes
    tokens_per_s = estimate.samples_per_s * question.model.sequence_length
    price = usd_per_billion_tokens(plan, estimate)
    costs = "" if price is None else f" and cost about {usd_text(price)}"
    return (
        f"{'Yes' if fits else 'Probably, but memory is tight'}: {question.model.name} can be trained on "
        f"{question.cluster.name}, where a billion tokens take about {duration_text(1e9 / tokens_per_s)}{costs}."
    )


def _expected(plan: Plan, estimate: Estimate, profiles: Profiles) -> tuple[float, float, bool]:
    """Return the bytes that the fullest rank is expected to hold, its device's bytes, and whether it needs fewer."""
    needed = [stage.memory_bytes for stage in estimate.stages]
    kept = kept_bytes(plan, needed, device_bytes_of(plan), profiles)
    stages = zip(estimate.stages, kept, strict=True)
    held = tuple(replace(stage, memory_bytes=stage.memory_bytes + more) for stage, more in stages)
    free_bytes, share_free = headroom(plan, replace(estimate, stages=held))
    device_bytes = free_bytes / share_free if free_bytes else float(estimate.memory_bytes)
    return device_bytes - free_bytes, device_bytes, any(kept)


def verdict(plan: Plan, estimate: Estimate, profiles: Profiles) -> str:
    """Return the expected memory of the fullest GPU as a range, and an allocator setting if memory is tight."""
    held_bytes, device_bytes, needs_less = _expected(plan, estimate, profiles)
    low, high = (size / GIB for size in memory_range(held_bytes))
    device = device_bytes / GIB
    words = f"{low:.0f} to {high:.0f} of {device:.0f} GiB a GPU, {held_bytes / GIB:.1f} expected"
    if needs_less:
        words += ", with gathered inputs that the allocator gives back if it has to"
    if high <= device:
        return f"fits: {words}"
    usual = held_bytes <= (1 - SPARE_SHARE) * device_bytes
    near = "near the limit" if usual else "near the limit, beyond the usual budget"
    return f"{near}: {words}; set {EXPANDABLE}"


def _yields(question: Question, plan: Plan, estimate: Estimate) -> list[str]:
    share = model_flops_utilization(plan, estimate.simulated_step_time_s)
    tokens_per_s = estimate.samples_per_s * question.model.sequence_length
    return [f"{tokens_per_s:,.0f} tokens/s", *([] if share is None else [share.words])]


def ways_of_experts(question: Question, plan: Plan) -> Iterator[str]:
    """Yield the step time of a plan if its runtime exchanges experts' rows in the other way, plain or tuned."""
    if question.other is None or (plan.layers[0].experts is UNSET and plan.layers[-1].experts is UNSET):
        return
    plain, tuned = (question.other, question.profiles) if question.is_tuned else (question.profiles, question.other)
    once = ExchangeRow(dispatcher=Dispatcher.PER_NODE, overlapped=False)
    ways = _exchanging(plain, None), _exchanging(plain, once), tuned
    all_s, once_s, tuned_s = (evaluate(plan, way, timeline=False).estimate.simulated_step_time_s for way in ways)
    yield f"    plain, experts' rows all to all: {all_s:.4g} s; once to each node: {once_s:.4g} s"
    yield f"    as tuned (--tuned), with {TUNED_FLAGS}: {tuned_s:.4g} s"


def _exchanging(profiles: Profiles, row: ExchangeRow | None) -> Profiles:
    return profiles.each(lambda each: each._replace(exchange=row))


TUNED_FLAGS = (
    "--moe-token-dispatcher-type flex, --overlap-moe-expert-parallel-comm and CUDA graphs where a plan allows them "
    "and, in MXFP8, the operator fuser; FP8 attention, which no argument asks for, under --runtime alone"
)


def _cost_of_limits(answer: SearchAnswer, within: Within) -> str:
    """Return, in words, the ratio of the answer's time of a sample to the time of the best of all plans."""
    name = within.target.title
    if within.unlimited is None:
        return f"what the limits of {name} cost is not known: no other plan was found in time (--time-limit)"
    other, estimate = within.unlimited.chosen.plan, within.unlimited.chosen.evaluation.estimate
    ratio = answer.chosen.sample_s / within.unlimited.chosen.sample_s
    best = f"{estimate.simulated_step_time_s:.4g} s a step, {plan_words(other)}"
    known = ", as far as is known" if within.unlimited.stopped else ""
    if other == answer.chosen.plan:
        return f"the limits of {name} cost nothing{known}: no plan that Shardwright runs is faster"
    return f"the limits of {name} cost a factor of {ratio:.3f}{known}: without them, on the same kernels, {best}"


def _starts(within: Within) -> Iterator[str]:
    """Yield the commands that start the plan in the system that it is for."""
    yield f"to start it in {within.target.title}, on each node ({', '.join(within.started.files)}: --launch FOLDER):"
    yield f"  {within.started.command}"
    yield from (f"  {note}" for note in within.started.notes)


def _limits_of(question: Question, target: Entry) -> Iterator[str]:
    """Yield which of a system's plans are searched, and the source of its limits."""
    ways = "; or ".join(way.words for way in target.limits(question.model, question.request.precision))
    yield f"{target.version} runs: {ways}"
    yield from (f"{target.version}: {source}" for source in target.sources)


def _proofs(advice: Advice) -> Iterator[str]:
    """Yield what is proven, and the fastest plan and the best plan of one strategy if they differ from the answer."""
    answer, simple = advice.answer, advice.simple
    proven = _proven(answer, advice.within)
    if simple is None or simple.fastest.plan == answer.chosen.plan:
        yield f"  {proven}"
    else:
        # The bound is on the closed form: by simulation, which chooses among near plans, another plan may gain more.
        gap = answer.chosen.evaluation.estimate.objective_s / answer.bound_s - 1
        proof = "by the closed form, proven under these estimates (--tolerance)"
        faster = f"  no plan is more than {gap * 100:.1f} % faster {proof}"
        if simple.gain < _NO_GAIN:  # the same strategies in another order
            yield f"{faster}{_stopped(answer)}"
        else:
            yield faster
            yield f"  fastest plan, {simple.gain * 100:.1f} % less time: {_timed_words(simple.fastest)}; {proven}"
    if simple is not None and simple.uniform is not None and simple.uniform.plan != answer.chosen.plan:
        more = simple.uniform.sample_s / answer.chosen.sample_s - 1
        yield f"  best plan of one strategy, {more * 100:.1f} % more time: {_timed_words(simple.uniform)}"


def _timed_words(candidate: Candidate) -> str:
    """Return a plan with its step time, in words."""
    step_s = candidate.evaluation.estimate.simulated_step_time_s
    return f"{step_s:.4g} s a step, {plan_words(candidate.plan)}"


def _proven(answer: SearchAnswer, within: Within | None) -> str:
    limits = "" if within is None else f" within what {within.target.title} runs,"
    return f"{proof_words(answer.optimum_s, answer.bound_s, limits)}{_stopped(answer)}"


def _stopped(answer: SearchAnswer) -> str:
    return "; the search was stopped by the time limit (--time-limit)" if answer.stopped else ""


def _not_searched(question: Question, answer: SearchAnswer) -> Iterator[str]:
    """Yield the ways of running a step that were not searched."""
    if any(schedule.interleaves for schedule in question.request.schedules):
        chunks = max(question.request.chunks_per_stage)
        yield f"interleaved schedules of over {chunks} chunks a stage (--against pp=2,vpp={2 * chunks} prices one)"
    else:
        yield "interleaved schedules (--against pp=2,vpp=2 prices one)"
    yield from _context_not_searched(question)
    yield from _experts_not_searched(question)
    yield "a split backward pass (zero bubble; --schedules shows it)"
    if Offload.BOTH not in question.request.offload:
        kinds = {Offload.OPTIMIZER: "optimizer states", Offload.ACTIVATIONS: "activations"}
        left = [f"of {words}" for kind, words in kinds.items() if kind not in question.request.offload]
        yield f"offloading {'to the host' if len(left) > 1 else left[0]}"
    if not question.request.fine_grained:
        yield "strategies of each layer (--uniform)"


def _context_not_searched(question: Question) -> Iterator[str]:
    """Yield the context parallelism that is not searched: larger degrees, and what the runtime does not support."""
    most, lacking = max(question.request.cp_sizes), tuple(left_out(question.request, question.model, question.cluster))
    if lacking:
        yield from lacking
        return
    further = f" of over {most} ranks" if most > 1 else ""
    yield f"context parallelism{further} (--against cp={2 * most} prices it)"


def _experts_not_searched(question: Question) -> Iterator[str]:
    """Yield the ways to split a model's experts that were not searched; nothing for a model without experts."""
    if sizes := question.request.ep_sizes:
        yield f"experts in more than {max(sizes)} parts, or with their features split too (etp)"


def _layer_counts(plan: Plan) -> str:
    counts = [sum(high - low for low, high in stage.layers) for stage in plan.stages]
    ranks = plan.cluster.node_type_of_rank
    types = [" and ".join(dict.fromkeys(ranks[rank] for rank in stage.ranks)) for stage in plan.stages]
    if len(set(ranks)) > 1:
        return " + ".join(f"{count} on {name}" for count, name in zip(counts, types, strict=True))
    if len(set(counts)) == 1:
        return str(counts[0])
    runs = [(len(list(run)), count) for count, run in groupby(counts)]
    return " + ".join(f"{number} x {count}" if number > 1 else str(count) for number, count in runs)


def memory_rows(question: Question, plan: Plan, estimate: Estimate) -> list[tuple[str, str, str, str]]:
    """Return the memory categories of a rank of the fullest stage: name, GiB, share, and what reduces it."""
    _, number = _fullest(question, plan, estimate)
    stage = estimate.stages[number]
    terms = sorted(stage.memory_terms_bytes.items(), key=lambda term: -term[1])
    return [
        (name, f"{size / GIB:.2f}", f"{size / stage.memory_bytes:.0%}", _LESS_BY[name]) for name, size in terms if size
    ]


def _fullest(question: Question, plan: Plan, estimate: Estimate) -> tuple[int, int]:
    """Return the bytes that the fullest stage leaves of its budget, and its number."""
    return min((left, number) for number, left in enumerate(question.left_bytes(plan, estimate)))


def _memory_table(question: Question, plan: Plan, estimate: Estimate) -> RenderableType:
    """Return the table of the categories of memory of a rank of the fullest pipeline stage."""
    left, number = _fullest(question, plan, estimate)
    whole = f"{estimate.stages[number].memory_bytes / GIB:.2f}"
    last = [("together", whole, "100%", ""), ("left", f"{left / GIB:.2f}", "", "")]
    title = f"memory of the fullest rank (pipeline stage {number})"
    return table(title, ("what", "GiB", "share", "less of it by"), memory_rows(question, plan, estimate), last)


PLAN_HEADINGS = ("", "plan", "s a step", "slowdown", "GiB", "fits")
"""Headings of `plan_rows`."""


def plan_rows(question: Question, plans: Sequence[tuple[Plan, Estimate, str]]) -> list[tuple[str, ...]]:
    """Return a row for each plan, compared with the first one."""
    plan, estimate, _ = plans[0]
    return [
        (
            name,
            plan_words(other),
            f"{there.simulated_step_time_s:.4g}",
            f"{sample_s(other, there) / sample_s(plan, estimate):.2f}",
            f"{there.memory_bytes / GIB:.1f}",
            "yes" if question.fits(other, there) else "no",
        )
        for other, there, name in plans
    ]


def _plans_table(question: Question, plans: Sequence[tuple[Plan, Estimate, str]]) -> RenderableType:
    title = "the best plan, others, and rules of thumb (--against tells how they differ)"
    return table(title, PLAN_HEADINGS, plan_rows(question, plans))


def _schedules_table(question: Question, plan: Plan, estimate: Estimate, found: Sequence[OfSchedule]) -> RenderableType:
    """Return a table of the best plan of each schedule, compared with the answer; all of them fit."""
    rows = list[tuple[str, ...]]()
    for schedule, best, why, _ in found:
        if best is None:
            rows.append((str(schedule), why, "", "", ""))
        else:
            shown = best.plan, best.evaluation.estimate, str(schedule)
            rows.append(plan_rows(question, [(plan, estimate, "the answer"), shown])[1][:-1])
    limits = f"{LIMIT_S:g} CPU s, {SPLIT_LIMIT_S:g} if it splits backward passes"
    proven = "; ".join(_proven_of_schedules(sample_s(plan, estimate), found))
    title = f"the best plan of each schedule, searched for {limits}"
    return table(title + (f"; beside the answer {proven}" if proven else ""), PLAN_HEADINGS[:-1], rows)


def _proven_of_schedules(time_s: float, found: Sequence[OfSchedule]) -> Iterator[str]:
    """Yield what is proven about schedules that split backward passes, against the answer's seconds of a sample."""
    unknown = [str(each.schedule) for each in found if each.bound_sample_s == 0]
    for schedule, _, _, bound_s in found:
        if bound_s:
            yield split_words(time_s, bound_s, f"under {schedule}")
    if unknown:
        yield f"how much faster others under {', '.join(unknown)} may be is not known"


def _against(question: Question, plan: Plan, estimate: Estimate, choice: PricedChoice) -> Iterator[str]:
    """Yield lines that compare a choice with the best plan: time, memory, differences, and the terms that gain most."""
    yield f"against {choice.name}" + (f": {choice.source}" if choice.source else "")
    _, other, there, _ = choice
    lacks = -min(question.left_bytes(other, there))
    yield f"  it is {plan_words(other)}"
    if (obstacle := plan_obstacle(other)) is not None:
        yield f"  it is not trained here: {obstacle.problem}"
    more = (there.memory_bytes - estimate.memory_bytes) / GIB
    ratio = sample_s(other, there) / sample_s(plan, estimate)
    yield f"  predicted {', '.join([f'{there.simulated_step_time_s:.4g} s a step', *_yields(question, other, there)])}"
    yield from ways_of_experts(question, other)
    yield f"  yours takes {ratio:.2f} times the time, {abs(more):.1f} GiB {'more' if more >= 0 else 'less'}"
    if lacks > 0:
        yield f"  it does not fit: it exceeds {question.budget_words} by {gib_text(lacks)} a rank"
        yield from (f"    {way}" for way in ways_to_fit(question, other))
    yield "  here is what differs, best plan → yours:"
    yield from (f"    {line}" for line in plan_differences(plan, other) or ("nothing that is done",))
    changes = sorted(time_changes(plan, estimate, other, there), key=lambda change: -abs(change.binding.gain))
    terms = [f"{change.term} {change.binding.gain * 1e3:+.0f} ms" for change in changes[:3] if change.binding.gain]
    if terms:
        yield f"  most of the time, on the slowest stage of each: {', '.join(terms)} a step"


def _assumptions(warnings: Iterable[str]) -> Iterator[str]:
    """Yield the warnings of a prediction, without those that only repeat that nothing was measured."""
    yield from (warning for warning in warnings if "nothing was measured" not in warning)
