"""Tables of a plan's terms by pipeline stage, and of other plans against it."""

import sys
from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright_formats.command import show
from shardwright_formats.display.node_types import binding, node_type_uses
from shardwright_formats.display.plan_words import headline, shape_and_runs, stage_lines
from shardwright_formats.io import BadInput
from shardwright_formats.types import MIB, Estimate, Plan, RunnerUp
from shardwright_search.explain.what_if import WhatIfAnswer
from shardwright_search.search import Found
from shardwright_search.space.budget import Infeasible


def node_types_table(plan: Plan, estimate: Estimate) -> Table | None:
    """Return a table with a row for each node type; None where there is one only."""
    uses = node_type_uses(plan, estimate)
    if not uses:
        return None
    binds = binding(uses).name
    headings = ("node type", "stages", "ranks", "busiest stage", "idle share", "idle USD a step")
    rows = [
        [
            f"{use.name} (binds)" if use.name == binds else use.name,
            f"{use.stages}",
            f"{use.ranks}",
            f"{use.busiest_s * 1e3:.3f}",
            f"{use.idle_share:.1%}",
            "no price" if use.idle_usd is None else f"{use.idle_usd:.6f}",
        ]
        for use in uses
    ]
    return table("node types, times in ms", headings, rows)


STEP_TERMS = ("gradient_sync", "optimizer")
"""Terms of time that come once a step, not with every microbatch."""
_WIDE = 1000
"""Width in characters where the output is no terminal."""
_PLAN = "plan"
"""Heading of a column whose cells have lines of their own."""


def show_rich(content: RenderableType) -> None:
    """Print on standard output; where that is no terminal, there is room for all columns."""
    printed, is_terminal = StringIO(), sys.stdout.isatty()
    width = None if is_terminal else _WIDE
    console = Console(
        file=printed, force_terminal=is_terminal, width=width, highlight=False, markup=False, soft_wrap=True
    )
    console.print(content)
    show(printed.getvalue().removesuffix("\n"))


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], last: Iterable[Sequence[str]] = ()
) -> Table:
    """Return a table of texts in the first column and numbers in the others; `last` are rows below a line."""
    made = Table(title=title, title_justify="left")
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=not number and heading != _PLAN)
    for row in rows:
        made.add_row(*row)
    made.add_section()
    for row in last:
        made.add_row(*row)
    return made


def explanation(
    plan: Plan,
    estimate: Estimate,
    budgets_bytes: Sequence[int] | None,
    lines: Sequence[str],
    runners_up: Sequence[RunnerUp],
) -> RenderableType:
    """Return tables of time and memory by pipeline stage, `lines` on what binds, and the runners-up."""
    parts: list[RenderableType] = [
        Text("\n".join([headline(plan), *stage_lines(plan)])),
        _time_table(estimate),
        _memory_table(estimate, budgets_bytes),
        Text("\n".join(lines)),
    ]
    if runners_up:
        headings = (_PLAN, "ms a step", "time", "MiB", "memory")
        rows = [_runner_up(other, estimate) for other in runners_up]
        parts.append(table("runners-up, against this plan", headings, rows))
    return Group(*parts)


def answers_shown(title: str, plan: Plan, estimate: Estimate, answers: Sequence[WhatIfAnswer]) -> RenderableType:
    """Return each answer against the plan: simulated time of a sample, memory of the fullest rank, and its plan."""
    headings = ("", "ms a step", "samples/s", "time a sample", "MiB", "memory")
    rows = [(difference, *_answer_figures(result, plan, estimate)) for difference, result in answers]
    groups: dict[str, list[str]] = {}
    for difference, result in answers:
        groups.setdefault(_words(result, plan), []).append(difference)
    lines = "\n".join(f"{', '.join(names)}: {words}" for words, names in groups.items())
    return Group(table(title, headings, rows), Text(lines))


def _time_table(estimate: Estimate) -> Table:
    """Return times with shares of the stage's time of a microbatch; gradient sync and optimizer come once a step."""
    stages, rows = estimate.stages, []
    for name in stages[0].time_terms_s:
        terms = [(stage.time_terms_s[name], stage.time_s) for stage in stages]
        if name in STEP_TERMS:
            rows.append((f"{name} (once a step)", *(f"{time_s * 1e3:.3f}" for time_s, _ in terms)))
        else:
            rows.append((name, *(f"{time_s * 1e3:.3f} {_share(time_s, whole)}" for time_s, whole in terms)))
    last = [("microbatch", *(f"{stage.time_s * 1e3:.3f}  100%" for stage in stages))]
    return table("time in ms, and share of a microbatch", _stage_headings(estimate), rows, last)


def _memory_table(estimate: Estimate, budgets_bytes: Sequence[int] | None) -> Table:
    stages, rows = estimate.stages, []
    for name in stages[0].memory_terms_bytes:
        terms = [(stage.memory_terms_bytes[name], stage.memory_bytes) for stage in stages]
        rows.append((name, *(f"{term / MIB:.2f} {_share(term, whole)}" for term, whole in terms)))
    last = [("peak", *(f"{stage.memory_bytes / MIB:.2f}  100%" for stage in stages))]
    if budgets_bytes is not None:
        left = (budget - stage.memory_bytes for budget, stage in zip(budgets_bytes, stages, strict=True))
        last.append(("budget", *(f"{budget / MIB:.2f}  {'':4}" for budget in budgets_bytes)))
        last.append(("left", *(f"{room / MIB:.2f}  {'':4}" for room in left)))
    return table("memory of a rank in MiB, and share", _stage_headings(estimate), rows, last)


def _stage_headings(estimate: Estimate) -> list[str]:
    return ["term", *(f"stage {index}" for index in range(len(estimate.stages)))]


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:5.0%}"


def sample_s(plan: Plan, estimate: Estimate) -> float:
    """Return the simulated seconds of a step for each of its samples."""
    return estimate.simulated_step_time_s / plan.global_batch_size


def _runner_up(other: RunnerUp, estimate: Estimate) -> tuple[str, ...]:
    step_s = other.estimate.simulated_step_time_s
    return (
        "\n  ".join(shape_and_runs(other.plan)),
        f"{step_s * 1e3:.3f}",
        f"{step_s / estimate.simulated_step_time_s - 1:+.1%}",
        *_memory_figures(other.estimate, estimate),
    )


def _answer_figures(result: Found | Infeasible | BadInput, plan: Plan, estimate: Estimate) -> Sequence[str]:
    """Return time and memory, absolute and against the plan's; dashes where there is no plan."""
    if not isinstance(result, Found):
        return ["-"] * 5
    other = result.chosen.evaluation.estimate
    return (
        f"{other.simulated_step_time_s * 1e3:.3f}",
        f"{other.samples_per_s:.6g}",
        f"{sample_s(result.chosen.plan, other) / sample_s(plan, estimate) - 1:+.1%}",
        *_memory_figures(other, estimate),
    )


def _memory_figures(other: Estimate, estimate: Estimate) -> tuple[str, str]:
    return f"{other.memory_bytes / MIB:.1f}", f"{other.memory_bytes / estimate.memory_bytes - 1:+.1%}"


def _words(result: Found | Infeasible | BadInput, plan: Plan) -> str:
    """Return a result in one line."""
    if isinstance(result, BadInput):
        return f"no plan: {result}"
    if isinstance(result, Infeasible):
        more = "" if result.exact else "more than "
        return f"no plan fits, the leanest lacks {more}{result.missing_bytes} bytes a rank"
    chosen = result.chosen.plan
    words = "this plan" if _decision(chosen) == _decision(plan) else "; ".join(shape_and_runs(chosen))
    return f"(the best so far) {words}" if result.stopped else words


def _decision(plan: Plan) -> tuple[object, ...]:
    """Return a plan's decisions, whatever its cluster and name."""
    shape = plan.global_batch_size, plan.num_microbatches, plan.schedule
    return plan.stages, plan.embedding, plan.layers, plan.head, shape
