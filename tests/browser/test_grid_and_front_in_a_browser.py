"""The pages of a grid and of a front in a real browser, as wide as a desk's screen and as a telephone's."""

import pandas as pd
import pytest
from sample_results import a_plan
from see_page import seen

from grid_html import grid_html
from grid_page import draw_grid, grid_markdown
from shardwright_formats.types import GIB
from shardwright_search.rent.page import FrontWords, front_page
from shardwright_search.rent.table import Status, SubClusterRow, draw_front

SPACES = ("dp", "zero", "tp", "pp", "dp+tp", "dp+pp", "3d", "fasop", "full")


def _row(number, status):
    return SubClusterRow(
        nodes=f"{number}xp4d+{9 - number}xg5", status=status, step_s=2.0 - number / 10, is_bound=number == 7,
        expected_step_s=2.0 - number / 10, simulated_step_s=1.9, usd_per_step=0.1 + number / 50, usd_per_hour=300.0,
        checkpoint_steps=0, hours=12345.6, usd=1234567.8, dominated_by="" if number < 6 else "5xp4d+4xg5",
        plan="p.json" if number < 6 else "",
    )  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    rows = tuple(_row(number, Status.FRONT if number < 6 else Status.DOMINATED) for number in range(1, 9))
    plans = {row.nodes: a_plan() for row in rows if row.plan}
    lines = ["exact: no plan of the space is as fast and as cheap as a point and better in one"]
    drawing = draw_front(rows, frozenset({rows[0].nodes}), "Llama 2 70B on rented nodes of p4d and g5")
    words = FrontWords("llama-2-70b", "p4d-and-g5", lines)
    (folder / "front.html").write_text(front_page(rows, plans, drawing, words))
    cells = pd.DataFrame(
        {
            "model": model, "cluster": "eight-a100-80", "memory_gib": 8.0, "global_batch_size": 1024, "space": space,
            "predicted_step_s": 1 + place / 8, "samples_per_s": 9.0, "measured_step_s": None, "reason": None,
            "published_step_s": 2.0 if space == "full" else None, "published_memory_bytes": 9.0 * GIB,
        }
        for model in ("llama-2-7b", "bert-huge-48")
        for place, space in enumerate(reversed(SPACES))
    ).astype({"measured_step_s": float})  # fmt: skip
    (folder / "grid.html").write_text(grid_html("galvatron", cells, [grid_markdown(cells)], draw_grid(cells), []))
    return folder


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize(("name", "tables"), [("front", 2), ("grid", 1)])
def test_nothing_is_cut_off_and_tables_are_read_without_scrolling(pages, name, tables, width):
    first, *wrong = seen(pages / f"{name}.html", width)
    assert first.startswith(f"seen at {width} px: 1 pictures with ") and first.endswith(f", {tables} tables")
    assert wrong == []
