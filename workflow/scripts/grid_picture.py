"""The picture of a grid: each space's step time over the full space's, one row for each size."""

from collections.abc import Sequence

import pandas as pd

from shardwright_formats.display.chart import Panel, linear_axis, logarithmic_axis
from shardwright_formats.display.svg import PALETTE, WIDTH, element, legend, line, marker, picture, text

_LEFT, _RIGHT, _TOP, _ROW = 330.0, 20.0, 40.0, 18.0
_LEAST_RANGE = 2.0


def draw_grid(cells: pd.DataFrame, size: Sequence[str], ours: str) -> str:
    """Draw the ratio of predicted step times on a logarithmic axis; a space without a plan has no mark."""
    spaces = [space for space in dict.fromkeys(cells["space"]) if space != ours]
    own = cells[cells["space"] == ours].set_index(list(size))["predicted_step_s"]
    rows = [key for key in own.index if pd.notna(own[key])]
    found = {
        (tuple(row[: len(size)]), row[-2]): float(row[-1]) / own[tuple(row[: len(size)])]
        for row in cells[[*size, "space", "predicted_step_s"]].itertuples(index=False, name=None)
        if pd.notna(row[-1]) and tuple(row[: len(size)]) in rows
    }
    high = max([_LEAST_RANGE, *found.values()])
    bottom = _TOP + _ROW * max(1, len(rows))
    x = logarithmic_axis(1.0, high, _LEFT, WIDTH - _RIGHT, "{:g}×".format, base=2)
    drawn = [Panel(x, linear_axis(0, 1, bottom, _TOP)._replace(marks=())).frame("", "step time over the full space's")]
    drawn.append(line(x.at(1), _TOP, x.at(1), bottom, stroke="var(--soft)"))
    for place, key in enumerate(rows):
        y = _TOP + _ROW * (place + 0.5)
        model, cluster, memory_gib, batch = key
        said = f"{model}, {cluster}, {memory_gib:g} GiB, batch {batch}"
        drawn.append(text(_LEFT - 10, y + 4, said, text_anchor="end", class_="small"))
        drawn.append(line(_LEFT, y, WIDTH - _RIGHT, y, stroke="var(--faint)"))
        drawn += [
            marker(number, x.at(found[key, space]), y, 4, f"{space}: {found[key, space]:.3f} times as long; {said}")
            for number, space in enumerate(spaces)
            if (key, space) in found
        ]
    entries = [(element("rect", width=13, height=13, rx=2, fill=PALETTE[i % 8]), each) for i, each in enumerate(spaces)]
    named, _ = legend(entries, _LEFT, 8, WIDTH - _LEFT)
    return picture(named + "".join(drawn), WIDTH, bottom + 40, "step times of each space over the full space's")
