"""A plan on one page: its terms by pipeline stage, what binds, and what the runners-up would cost."""

import sys
from collections.abc import Sequence
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright_formats.command import show
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.prediction import Estimate, RunnerUp
from shardwright_search.explain.wording import MIB, headline, runs_words, stage_lines

__all__ = ["STEP_TERMS", "explanation", "show_rich"]

STEP_TERMS = ("gradient_sync", "optimizer")
"""Terms of time that come once a step, not with every microbatch."""
_WIDE = 1000
"""Columns of characters."""


def show_rich(what: RenderableType) -> None:
    """Print on standard output; what is no terminal has room for every column."""
    printed, is_terminal = StringIO(), sys.stdout.isatty()
    width = None if is_terminal else _WIDE
    Console(file=printed, force_terminal=is_terminal, width=width, highlight=False, soft_wrap=True).print(what)
    show(printed.getvalue().removesuffix("\n"))


def explanation(
    plan: Plan,
    estimate: Estimate,
    budget_bytes: int | None,
    lines: Sequence[str],
    runners_up: Sequence[RunnerUp],
) -> RenderableType:
    """Tables of time and memory by pipeline stage, `lines` on what binds, and the runners-up."""
    parts: list[RenderableType] = [
        Text("\n".join([headline(plan), *stage_lines(plan)])),
        _time_table(estimate),
        _memory_table(estimate, budget_bytes),
        Text("\n".join(lines)),
    ]
    if runners_up:
        parts.append(_runners_up_table(estimate, runners_up))
    return Group(*parts)


def _stage_table(title: str, stages: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("term", no_wrap=True)
    for index in range(stages):
        table.add_column(f"stage {index}", justify="right")
    return table


def _time_table(estimate: Estimate) -> Table:
    """Shares are of the stage's time of a microbatch; gradient sync and optimizer come once a step."""
    table = _stage_table("time in ms, and share of a microbatch", len(estimate.stages))
    for name in estimate.stages[0].time_terms_s:
        once = name in STEP_TERMS
        cells = []
        for stage in estimate.stages:
            time_s = stage.time_terms_s[name]
            cells.append(f"{time_s * 1e3:.3f}" + ("" if once else f" {_share(time_s, stage.time_s)}"))
        table.add_row(f"{name} (once a step)" if once else name, *cells)
    table.add_section()
    table.add_row("microbatch", *(f"{stage.time_s * 1e3:.3f}  100%" for stage in estimate.stages))
    return table


def _memory_table(estimate: Estimate, budget_bytes: int | None) -> Table:
    table = _stage_table("memory of a rank in MiB, and share", len(estimate.stages))
    for name in estimate.stages[0].memory_terms_bytes:
        cells = [(s.memory_terms_bytes[name], s.memory_bytes) for s in estimate.stages]
        table.add_row(name, *(f"{held / MIB:.2f} {_share(held, whole)}" for held, whole in cells))
    table.add_section()
    table.add_row("peak", *(f"{stage.memory_bytes / MIB:.2f}  100%" for stage in estimate.stages))
    if budget_bytes is not None:
        table.add_row("budget", *(f"{budget_bytes / MIB:.2f}  {'':4}" for _ in estimate.stages))
        table.add_row("left", *(f"{(budget_bytes - s.memory_bytes) / MIB:.2f}  {'':4}" for s in estimate.stages))
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:5.0%}"


def _runners_up_table(estimate: Estimate, runners_up: Sequence[RunnerUp]) -> Table:
    """The plans the chosen one was preferred to, against it."""
    table = Table(title="runners-up, against this plan", title_justify="left")
    for heading in ("plan", "ms a step", "time", "MiB", "memory"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for runner_up in runners_up:
        other = runner_up.estimate
        table.add_row(
            "\n  ".join(runs_words(runner_up.plan)),
            f"{other.simulated_step_time_s * 1e3:.3f}",
            f"{other.simulated_step_time_s / estimate.simulated_step_time_s - 1:+.1%}",
            f"{other.memory_bytes / MIB:.1f}",
            f"{other.memory_bytes / estimate.memory_bytes - 1:+.1%}",
        )
    return table
