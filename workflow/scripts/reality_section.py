"""The part of a search's section that holds the prediction against what was measured: plans, ranks, what it taught."""

from collections.abc import Iterable, Sequence
from html import escape
from statistics import median

from results import Comparison, SearchOutcome, bytes_text, plan_text, ratio_text, seconds_text
from shardwright_formats.types.correction import Correction

__all__ = ["reality_section"]

_COMPARED = ("step, predicted", "measured", "ratio", "memory, predicted", "measured", "ratio")


def reality_section(search: SearchOutcome) -> str:
    """Every plan as predicted and as measured, the ranks of those that were run, and the factors learned from them."""
    rows = [_plan_row(comparison) for comparison in search.comparisons]
    drawn = "<h3>Predicted against measured (ratio: measured over predicted)</h3>"
    drawn += _table(("", "plan"), _COMPARED, rows)
    ranks = [row for comparison in search.comparisons for row in _rank_rows(comparison)]
    if ranks:
        drawn += f"<details><summary>Every rank of these plans</summary>{_table(('plan',), _RANKED, ranks)}</details>"
    return drawn + ("" if search.correction is None else _learned(search.correction))


_RANKED = ("rank", "pipeline stage", *_COMPARED)


def _plan_row(comparison: Comparison) -> str:
    numbers = _compared(
        comparison.estimate.simulated_step_time_s,
        comparison.measured_time_s,
        comparison.estimate.memory_bytes,
        comparison.measured_bytes,
    )
    style = ' class="chosen"' if comparison.role == "chosen" else ""
    return _row((comparison.name, plan_text(comparison.plan)), numbers, style)


def _rank_rows(comparison: Comparison) -> Iterable[str]:
    """Memory is predicted of the rank's pipeline stage, process included on both sides."""
    for rank in () if comparison.measured is None else comparison.measured.ranks:
        numbers = _compared(
            comparison.estimate.simulated_step_time_s,
            median(rank.step_s),
            comparison.estimate.stages[rank.stage].memory_bytes,
            rank.memory.peak_bytes + rank.memory.process_bytes,
        )
        yield _row((comparison.role,), (str(rank.rank), str(rank.stage), *numbers))


def _compared(time_s: float, measured_s: float | None, size: int, measured_bytes: int | None) -> tuple[str, ...]:
    return (
        seconds_text(time_s),
        "–" if measured_s is None else seconds_text(measured_s),
        ratio_text(time_s, measured_s),
        bytes_text(size),
        "–" if measured_bytes is None else bytes_text(measured_bytes),
        ratio_text(size, measured_bytes),
    )


def _learned(correction: Correction) -> str:
    rows = [
        _row(
            (str(term).replace("_", " "),),
            (f"{of.factor:.3f}", f"{of.lowest:.3f} to {of.highest:.3f}", str(of.num_plans), str(of.num_ranks)),
        )
        for term, of in correction.factors.items()
    ]
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in correction.warnings)
    return (
        "<h3>What was learned (a search uses it only where its <code>correction</code> says so)</h3>"
        + _table(("term",), ("measured over predicted", "of single plans", "plans", "ranks"), rows)
        + (f"<ul>{warnings}</ul>" if warnings else "")
    )


def _table(words: Sequence[str], numbers: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{name}</th>" for name in words)
    head += "".join(f'<th class="number">{name}</th>' for name in numbers)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(words: Sequence[str], numbers: Sequence[str], style: str = "") -> str:
    cells = "".join(f"<td>{escape(word)}</td>" for word in words)
    cells += "".join(f'<td class="number">{escape(number)}</td>' for number in numbers)
    return f"<tr{style}>{cells}</tr>"
