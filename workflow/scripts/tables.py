"""The report's tables: predicted against measured, learned factors, and errors of a profile's curves."""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import product
from statistics import median

from results import Comparison, plan_text, ratio_text
from shardwright_formats.display.units import bytes_text, seconds_text
from shardwright_formats.types import Correction
from shardwright_formats.types.model_profile import ModelProfile

_COMPARED = ("step, predicted", "measured", "ratio", "at equal speed", "memory, predicted", "measured", "ratio")
_MODES = {
    "batch": "line in the micro-batch size",
    "sequence": "parabola in the sequence length",
    "joint": "both together",
}
_QUANTITIES = {"forward_s": "forward", "backward_s": "backward", "activation_bytes": "activations"}

_Row = tuple[Sequence[str], Sequence[str], bool]
"""Words and numbers of a row, and whether it stands out."""


def plans_table(comparisons: Iterable[Comparison]) -> str:
    """Return a table of every plan as predicted and as measured."""
    rows = [
        ((of.name, plan_text(of.plan)), _compared(of, of.estimate.memory_bytes, of.measured_time_s, of.measured_bytes))
        for of in comparisons
    ]
    return _table(("", "plan"), _COMPARED, [(*row, row[0][0].startswith("chosen")) for row in rows])


def ranks_table(comparisons: Iterable[Comparison]) -> str:
    """Return a table of every measured rank; predicted memory is its pipeline stage's, both include the process."""
    rows = [
        (
            (of.role,),
            (
                str(rank.rank),
                str(rank.stage),
                *_compared(
                    of,
                    of.estimate.stages[rank.stage].memory_bytes,
                    median(rank.step_s),
                    rank.memory.peak_bytes + rank.memory.process_bytes,
                ),
            ),
            False,
        )
        for of in comparisons
        if of.measured is not None
        for rank in of.measured.ranks
    ]
    return _table(("plan",), ("rank", "pipeline stage", *_COMPARED), rows)


def correction_table(correction: Correction) -> str:
    """Return a table of the learned factors, with their evidence."""
    rows = [
        (
            (str(term).replace("_", " "),),
            (f"{of.factor:.3f}", f"{of.lowest:.3f} to {of.highest:.3f}", str(of.num_plans), str(of.num_ranks)),
            False,
        )
        for term, of in correction.factors.items()
    ]
    return _table(("term",), ("measured over predicted", "of single plans", "plans", "ranks"), rows)


def fits_table(profile: ModelProfile) -> str:
    """Return a table of the relative errors of the curves through a profile's points; medians over the curves."""
    rows = []
    for (mode, words), (quantity, of) in product(_MODES.items(), _QUANTITIES.items()):
        if fits := [fit for fit in profile.fits.rows if (fit.mode, fit.quantity) == (mode, quantity)]:
            left_out = [fit.left_out_error for fit in fits if fit.left_out_points]
            numbers = (
                str(len(fits)),
                f"{median(fit.typical_residual for fit in fits):.1%}",
                f"{max(fit.worst_residual for fit in fits):.1%}",
                f"{median(left_out):.1%}" if left_out else "–",
            )
            rows.append(((of, words), numbers, False))
    return _table(("", "curve"), ("curves", "typical residual", "worst", "left out and predicted"), rows)


def html_list(sentences: Iterable[str]) -> str:
    """Return sentences as an HTML list; empty where there are none."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _compared(of: Comparison, size: int, measured_s: float | None, measured_bytes: int | None) -> tuple[str, ...]:
    time_s = of.estimate.simulated_step_time_s
    return (
        seconds_text(time_s),
        "–" if measured_s is None else seconds_text(measured_s),
        ratio_text(time_s, measured_s),
        ratio_text(time_s * of.slowdown, measured_s),
        bytes_text(size),
        "–" if measured_bytes is None else bytes_text(measured_bytes),
        ratio_text(size, measured_bytes),
    )


def _table(words: Sequence[str], numbers: Sequence[str], rows: Sequence[_Row]) -> str:
    """Return a table whose last columns are `numbers`; empty where it has no row."""
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in words)
    head += "".join(f'<th class="number">{name}</th>' for name in numbers)
    body = "".join(_row(*row) for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(words: Sequence[str], numbers: Sequence[str], stands_out: bool) -> str:
    cells = "".join(f"<td>{escape(word)}</td>" for word in words)
    cells += "".join(f'<td class="number">{escape(number)}</td>' for number in numbers)
    style = ' class="chosen"' if stands_out else ""
    return f"<tr{style}>{cells}</tr>"
