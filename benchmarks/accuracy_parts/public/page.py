"""The table of published runs as a page, with what is known of the misses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

__all__ = ["NEAR", "page_text"]

NEAR = 1.05
"""Measured time of the chosen plan over the best one's up to which a choice counts as right."""
_NOTES = Path(__file__).with_name("notes.md")
_HEAD = """# Published runs, set by set

Written by `python benchmarks/accuracy.py public --reference FOLDER` from [its JSON](accuracy-public.json).
[accuracy.md](../../docs/accuracy.md) sums it up.

| set | runs | time: median, worst, bias | memory: median, worst, bias | ranks | chosen |
| --- | ---: | --- | --- | ---: | ---: |
"""


def page_text(sets: Sequence[Mapping[str, Any]]) -> str:
    """The page of uncalibrated sets with several runs, and the notes on how runs are read and on misses."""
    shown = (one for one in sets if one.get("how") == "uncalibrated" and one["time"] and one["time"]["runs"] > 1)
    return "".join((_HEAD, *map(_row, shown), "\n", _NOTES.read_text(encoding="utf-8")))


def _row(one: Mapping[str, Any]) -> str:
    cells = one["set"], one["time"]["runs"], _errors(one["time"]), _errors(one["memory"]), *_groups(one["groups"])
    return f"| {' | '.join(map(str, cells))} |\n"


def _errors(found: Mapping[str, float]) -> str:
    if not found:
        return ""
    bias = f"{found['bias']:+.1%}".replace("-", "−")
    return f"{found['median']:.1%}, {found['worst']:.1%}, {bias}".replace("%", " %")


def _groups(groups: Sequence[Mapping[str, float]]) -> tuple[str, str]:
    if not groups:
        return "", ""
    right, of_others = (sum(g[name] <= NEAR for g in groups) for name in ("chosen_over_best", "chosen_of_others"))
    without = f" ({of_others})" if of_others != right else ""
    return f"{fmean(g['rank_correlation'] for g in groups):.2f}", f"{right}{without} of {len(groups)}"
