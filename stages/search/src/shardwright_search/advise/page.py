"""Advice as one page that opens offline: pictures of plan and memory, and sliders over searches of other sizes."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from shardwright.devices.utilization import Utilization, model_flops_utilization
from shardwright.display.html import html_drawing, html_list, html_page, html_table, html_tiles, with_contents
from shardwright.display.plan_picture import draw_memory, draw_plan
from shardwright.display.units import seconds_text
from shardwright.estimate.accuracy import SEEN
from shardwright.types import GIB
from shardwright_search.advise.front_picture import Point, draw_front
from shardwright_search.advise.question import Question
from shardwright_search.advise.report import (
    PLAN_HEADINGS,
    Advice,
    memory_rows,
    plan_rows,
    plan_words,
    usd_per_billion_tokens,
)
from shardwright_search.advise.sizes import Axes, Column, Outcome, Outcomes, Sized
from shardwright_search.proof_words import proof_words

_PARTS = ("answer", "plan", "memory", "front")
"""Ids of the parts that the sliders change, in the order of the page."""
_OPEN = (
    "This was not computed: the time for other sizes was over before (--html-limit). Whether a plan fits is not known."
)
_FRONT = (
    "Each point is the best plan for a budget of memory: a faster step needs more of it. Hollow points are of searches "
    "that were stopped: faster plans may exist. The ring is at the budget that is chosen."
)
_ROWS = "Rows are pipeline stages, columns are layers. Pictures grow when they are clicked."
_NAMES = ("GPUs", "Samples of a step", "Tokens of a sample", "Memory that a plan may use of a GPU")
_NO_SCRIPT = (
    "<noscript><p>The sliders need JavaScript, which this browser does not run. All else is here.</p></noscript>"
)


class _Texts:
    """Different texts by number, each once, however many sizes share it."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a text."""
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def all(self) -> list[str]:
        """Return all texts, by their numbers."""
        return list(self._numbers)


def advice_page(advice: Advice, column: Column, axes: Axes, outcomes: Outcomes) -> str:
    """Return the whole page: the advice, and the outcomes of other sizes than the `column` that was asked."""
    asked, texts, places = Sized.of_answer(advice.question, advice.answer), _Texts(), _places(axes)
    cells = {
        ",".join(map(str, place)): [texts.number(part) for part in _parts(each, share, axes, outcomes)]
        for place, (each, share) in places.items()
    }
    here = next(place for place, at in places.items() if at == (column, axes.shares[-1]))
    shown = [texts.all[number] for number in cells[",".join(map(str, here))]]
    answer, plan, memory, front = (f'<div id="{part}">{text}</div>' for part, text in zip(_PARTS, shown, strict=True))
    labels = _labels(advice.question, axes)
    plans = [((name, words), numbers, False) for name, words, *numbers in plan_rows(advice.question, advice.plans)]
    sections = [
        ("Other sizes", f"{_NO_SCRIPT}{_sliders(labels, here)}{answer}"),
        ("The plan", f'<p class="soft">{_ROWS}</p>{plan}'),
        ("Memory of a GPU, by category", memory),
        ("Memory against time", f"<p>{_FRONT}</p>{front}"),
        ("The best plan for the asked size, and others", html_table(PLAN_HEADINGS[:2], PLAN_HEADINGS[2:], plans)),
        ("The answer as the command prints it", html_list(line.strip() for line in advice.lines)),
        ("What was computed", f"<p>{escape(counts_of(axes, outcomes))}</p>"),
        ("What is assumed", html_list([*advice.assumed, SEEN])),
    ]
    data = json.dumps({"texts": texts.all, "cells": cells, "labels": labels, "parts": _PARTS}).replace("<", "\\u003c")
    script = files("shardwright_search.advise").joinpath("page.js").read_text(encoding="utf-8")
    body = f'{with_contents(sections)}<script type="application/json" id="grid">{data}</script>'
    return html_page(f"{asked.question.model.name} on {column.gpus}", escape(_first_line(asked)), body, script)


def _places(axes: Axes) -> dict[tuple[int, int, int, int], tuple[Column, float]]:
    """Return column and budget by the places of the four sliders."""
    return {
        (g, b, n, m): (Column(gpus, batch, length), share)
        for g, gpus in enumerate(axes.gpus)
        for b, batch in enumerate(axes.batches)
        for n, length in enumerate(axes.lengths)
        for m, share in enumerate(axes.shares)
    }


def _first_line(asked: Sized) -> str:
    """Return the answer in words that need no knowledge of plans."""
    question, plan, estimate = asked.question, asked.plan, asked.estimate
    gpus = "1 GPU" if plan.world_size == 1 else f"{plan.world_size} GPUs"
    model, samples = question.model, estimate.samples_per_s
    speed = f"{samples * model.sequence_length:,.0f} tokens ({samples:,.4g} samples) a second"
    return (
        f"{model.name} ({model.parameter_count / 1e9:.3g} billion parameters) would train on {gpus} at {speed}: a step "
        f"of {plan.global_batch_size} samples takes {seconds_text(estimate.simulated_step_time_s)}, and the fullest "
        f"GPU needs {estimate.memory_bytes / GIB:.1f} GiB. This is an estimate from the model's shapes and published "
        "figures of the GPUs; nothing was measured."
    )


def _sliders(labels: Sequence[Sequence[str]], here: Sequence[int]) -> str:
    drawn = ""
    for number, (name, words, place) in enumerate(zip(_NAMES, labels, here, strict=True)):
        fixed = " disabled" if len(words) == 1 else ""
        drawn += (
            f'<label class="slider"><span>{name}</span><output id="value-{number}">{escape(words[place])}</output>'
            f'<input type="range" id="slider-{number}" min="0" max="{len(words) - 1}" value="{place}"{fixed}/></label>'
        )
    return f'<form class="sliders" autocomplete="off">{drawn}</form>'


def _labels(question: Question, axes: Axes) -> list[list[str]]:
    """Return the words for each value of each slider."""
    budgets = question.budgets.values()
    shares = [" and ".join(f"{size * share / GIB:.1f} GiB" for size in budgets) for share in axes.shares]
    numbers = ([f"{number:,}" for number in values] for values in (axes.batches, axes.lengths))
    return [list(axes.gpus), *numbers, shares]


def _parts(column: Column, share: float, axes: Axes, outcomes: Outcomes) -> Iterator[str]:
    """Yield what stands in each of the parts that the sliders change."""
    outcome = outcomes.get((column, share))
    if isinstance(outcome, Sized):
        yield _answer(outcome)
        yield html_drawing(draw_plan(outcome.plan, together=True))
        yield _memory(outcome)
    else:
        yield f'<p class="none">{escape(outcome or _OPEN)}</p>'
        yield from ["<p>There is no plan to be shown.</p>"] * 2
    yield _front([outcomes.get((column, each)) for each in axes.shares], axes.shares.index(share))


def _answer(sized: Sized) -> str:
    question, plan, estimate = sized.question, sized.plan, sized.estimate
    share, price = model_flops_utilization(plan, estimate.simulated_step_time_s), usd_per_billion_tokens(plan, estimate)
    tiles = [
        (seconds_text(estimate.simulated_step_time_s), "a step"),
        (f"{estimate.samples_per_s * question.model.sequence_length:,.0f}", "tokens a second"),
        *([] if share is None else [(f"{share.causal:.1%}", f"of the GPUs' peak ({_counted(share)})")]),
        (f"{estimate.memory_bytes / GIB:.1f} GiB", f"of the fullest GPU, of {question.budget_words}"),
        *([] if price is None else [(f"${price:,.2f}", "a billion tokens")]),
    ]
    return f"{html_tiles(tiles)}<p>{escape(plan_words(plan))}</p><p>{_proof(sized)}</p>"


def _counted(share: Utilization) -> str:
    return "MFU" if share.causal == share.full_square else f"MFU; full-square {share.full_square:.1%}"


def _proof(sized: Sized) -> str:
    words = proof_words(1.0, 0.0 if sized.gap is None else 1 / (1 + sized.gap))
    return f"{words[:1].upper()}{words[1:]}{' (the search was stopped)' if sized.stopped else ''}."


def _memory(sized: Sized) -> str:
    question, plan, estimate = sized.question, sized.plan, sized.estimate
    budget = max(question.budgets.values()) if len(question.budgets) == 1 else None
    terms = memory_rows(question, plan, estimate)
    rows = [((name.replace("_", " "), remedy), (size, share), False) for name, size, share, remedy in terms]
    table = html_table(("in the fullest GPU", "less of it by"), ("GiB", "share"), rows)
    return html_drawing(draw_memory(estimate, budget)) + table


def _front(outcomes: Sequence[Outcome], chosen: int) -> str:
    points = [
        Point(each.estimate.memory_bytes, each.estimate.simulated_step_time_s, plan_words(each.plan), not each.stopped)
        if isinstance(each, Sized)
        else None
        for each in outcomes
    ]
    return (
        html_drawing(draw_front(points, chosen)) if any(points) else "<p>No plan is known for any of these budgets.</p>"
    )


def counts_of(axes: Axes, outcomes: Outcomes) -> str:
    """Return how many of the sizes are known, and how well, in words."""
    all_of = list(_places(axes).values())
    known = [outcomes.get(each) for each in all_of]
    plans = [each for each in known if isinstance(each, Sized)]
    stopped, without = sum(each.stopped for each in plans), sum(isinstance(each, str) for each in known)
    return (
        f"Of {len(all_of)} combinations of the sliders {len(plans)} have a plan ({stopped} of them from a search that "
        f"was stopped), {without} have none that fits or divides, and {len(all_of) - len(plans) - without} were not "
        "computed in time (--html-limit, CPU seconds). The asked size was searched first, then its neighbours."
    )
