"""Answers for other GPUs, batches, lengths and budgets than those that were asked about, as many as time allows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.devices.table import read_devices
from shardwright.io import BadInput
from shardwright.types import GIB, Estimate, Model, Plan
from shardwright_search.advise.question import Question, group_of, machines_of, model_of, question_of
from shardwright_search.options import AdviseOptions
from shardwright_search.search import SearchAnswer, StoppedEarly
from shardwright_search.solver.stopping import CpuSeconds, left, until
from shardwright_search.space.budget import Infeasible

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Sizes of the cluster over those that were asked."""
_NEAR_FACTORS = (0.5, 1.0, 2.0)
"""Batches and lengths over those that were asked."""
_SHARES = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
"""Budgets over the one that was asked, the last."""
_SHARE_OF_TIME = 3
"""How many times the mean of the time that is left one column may take."""

Searched = Callable[[Question, float], SearchAnswer | Infeasible]
"""A search: the question, and the CPU seconds until the best plan so far is taken."""


class Axes(NamedTuple):
    """Values of each size, ascending, with the one that was asked among them: of budgets it is the largest."""

    gpus: tuple[str, ...]
    """As `--gpus` takes them."""
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    """Tokens of a sample; one alone for a model of images."""
    shares: tuple[float, ...]
    """Budgets over the one that was asked."""

    def columns(self, asked: "Column") -> list["Column"]:
        """Return the clusters, batches and lengths, those that are the fewest steps from the asked ones first."""

        def steps(column: Column) -> int:
            axes = zip((self.gpus, self.batches, self.lengths), column, asked, strict=True)
            return sum(abs(values.index(one) - values.index(other)) for values, one, other in axes)

        return sorted((Column(*each) for each in product(self.gpus, self.batches, self.lengths)), key=steps)


class Column(NamedTuple):
    """A cluster, a batch and a length, which answers for all budgets share."""

    gpus: str
    batch: int
    length: int


class Sized(NamedTuple):
    """The best plan for one column and budget, and what is known of others."""

    question: Question
    plan: Plan
    estimate: Estimate
    gap: float | None
    """By what share another plan may be faster at most; None: that is not known."""
    stopped: bool

    @classmethod
    def of_answer(cls, question: Question, answer: SearchAnswer) -> "Sized":
        """Return an answer without what the search has made on its way."""
        plan, evaluation = answer.chosen
        gap = answer.optimum_s / answer.bound_s - 1 if answer.bound_s else None
        return cls(question, plan, evaluation.estimate, gap, answer.stopped)


Outcome = Sized | str | None
"""An answer, the reason why there is no plan, or None: time was over before it was known."""
Outcomes = Mapping[tuple[Column, float], Outcome]


def column_of(question: Question, gpus: str) -> Column:
    """Return the column of a question about some `--gpus`."""
    assert isinstance(question.request.global_batch_size, int)
    return Column(gpus, question.request.global_batch_size, question.model.sequence_length)


def axes_of(options: AdviseOptions, question: Question) -> Axes:
    """Return sizes near the asked ones: those for which there are figures, and lengths that the model allows."""
    asked = column_of(question, options.gpus)
    return Axes(
        gpus=tuple(dict.fromkeys(gpus for factor in _FACTORS for gpus in _resized(options, factor))),
        batches=tuple(dict.fromkeys(max(1, round(asked.batch * factor)) for factor in _NEAR_FACTORS)),
        lengths=tuple(_lengths(options, question.model)),
        shares=_SHARES,
    )


def _resized(options: AdviseOptions, factor: float) -> Iterator[str]:
    """Yield the nodes times a factor, or fewer GPUs of a single node; nothing where there are no figures of them."""
    groups, table = options.gpus.split("+"), read_devices()
    scaled = [text for each in groups if (text := _scaled(group_of(each, table), factor, may_split=len(groups) == 1))]
    if len(scaled) == len(groups):
        gpus = options.gpus if factor == 1 else "+".join(scaled)
        with suppress(BadInput):  # no network is known of several nodes, or there are too many
            machines_of(replace(options, gpus=gpus), table)
            yield gpus


def _scaled(group: tuple[str, int, int], factor: float, *, may_split: bool) -> str | None:
    """Return a group of nodes with a multiple of them, or with a part of one node's GPUs; None: there is neither."""
    device, nodes, per_node = group
    if (nodes * factor).is_integer():
        return f"{int(nodes * factor)}x{per_node}:{device}"
    split = nodes * per_node * factor
    return f"1x{int(split)}:{device}" if may_split and split.is_integer() and split >= 1 else None


def _lengths(options: AdviseOptions, model: Model) -> Iterator[int]:
    asked = model.sequence_length
    for length in (round(asked * factor) for factor in _NEAR_FACTORS):
        with suppress(BadInput):  # the model takes no other length
            if length == asked or model_of(replace(options, seq=length))[0].sequence_length == length:
                yield length


def outcomes_of(
    options: AdviseOptions,
    axes: Axes,
    asked: Sized,
    search: Searched,
    tell: Callable[[str], None],
    deadline: float,
) -> Outcomes:
    """Return the outcome for each column and budget that is known at a deadline or Ctrl-C; the asked column is first.

    A column has a few times its part of the time that is left.
    """
    column = column_of(asked.question, options.gpus)
    columns = axes.columns(column)
    known: dict[tuple[Column, float], Outcome] = {}
    with suppress(KeyboardInterrupt):
        for number, each in enumerate(columns):
            left_s = left(deadline) or 0.0
            tell(f"other sizes: {number} of {len(columns)} done, at most {max(left_s, 0):.0f} s of CPU time left")
            share_s = min(left_s, _SHARE_OF_TIME * left_s / (len(columns) - number))
            if number and left_s <= 0:
                break
            question = asked.question if number == 0 else _question(options, each, column)
            best = asked if number == 0 else None
            for share, outcome in _budgets(question, axes.shares, best, search, share_s):
                known[each, share] = outcome
    return known


def _question(options: AdviseOptions, column: Column, asked: Column) -> Question | str:
    """Return the question of a column; the reason where there is none, such as a batch without a search."""
    seq = options.seq if column.length == asked.length else column.length
    try:
        return question_of(replace(options, gpus=column.gpus, batch=column.batch, seq=seq))
    except BadInput as error:
        return f"There is no such plan: {error.args[1]}."


def _budgets(
    question: Question | str, shares: Sequence[float], best: Sized | None, search: Searched, limit_s: float
) -> Iterator[tuple[float, Outcome]]:
    """Yield the outcome for each budget, descending; a plan that fits a smaller budget is the best there, too.

    `best`: that of the largest, where it is known. A text in place of the question is the outcome of all budgets.
    """
    if isinstance(question, str):
        yield from ((share, question) for share in shares)
        return
    deadline, lacking = until(CpuSeconds(limit_s)), None
    for share in sorted(shares, reverse=True):
        narrow = _narrowed(question, share)
        if best is not None and narrow.fits(best.plan, best.estimate):
            yield share, best._replace(question=narrow)
        elif lacking is not None:
            yield share, _reason(narrow, lacking)
        else:
            result = _searched(narrow, search, deadline)
            lacking, best = (result, None) if isinstance(result, Infeasible) else (None, best)
            if isinstance(result, SearchAnswer):
                best = Sized.of_answer(narrow, result)
                yield share, best
            else:
                yield share, _reason(narrow, result) if isinstance(result, Infeasible) else result


def _searched(question: Question, search: Searched, deadline: float) -> SearchAnswer | Infeasible | str | None:
    """Return the answer, None where time was over; raise KeyboardInterrupt where Ctrl-C ended the search."""
    answer, left_s = None, left(deadline) or 0.0
    if left_s <= 0:
        return None
    try:
        answer = search(question, CpuSeconds(left_s))
    except StoppedEarly:
        pass
    except BadInput as error:
        return f"There is no such plan: {error.args[1]}."
    if (answer is None or answer.stopped) and (left(deadline) or 0.0) > 0:
        raise KeyboardInterrupt
    return answer


def _narrowed(question: Question, share: float) -> Question:
    """Return a question with a share of its budgets."""
    memory_gib = question.request.memory_gib
    assert isinstance(memory_gib, dict)
    request = replace(question.request, memory_gib={name: gib * share for name, gib in memory_gib.items()})
    budgets = {name: int(gib * share * GIB) for name, gib in memory_gib.items()}
    return question._replace(request=request, budgets=budgets)


def _reason(question: Question, lacking: Infeasible) -> str:
    more = "" if lacking.exact else "more than "
    return f"No plan fits in {question.budget_words}: even the leanest needs {more}{lacking.min_bytes / GIB:.1f} GiB."
