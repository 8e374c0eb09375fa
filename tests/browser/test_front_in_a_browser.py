"""The page of a front in a real browser, as wide as a desk's screen and as a telephone's."""

import pytest
from sample_results import a_plan
from see_page import seen

from shardwright_search.rent.table import FrontWords, Status, SubClusterRow, draw_front, front_page


def _row(number, status):
    return SubClusterRow(
        nodes=f"{number}xp4d+{9 - number}xg5", status=status, step_s=2.0 - number / 10, is_bound=number == 7,
        simulated_step_s=1.9, usd_per_step=0.1 + number / 50, usd_per_hour=300.0,
        hours=12345.6, usd=1234567.8, dominated_by="" if number < 6 else "5xp4d+4xg5",
        plan="p.json" if number < 6 else "",
    )  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    rows = tuple(_row(number, Status.FRONT if number < 6 else Status.DOMINATED) for number in range(1, 9))
    plans = {row.nodes: a_plan() for row in rows if row.plan}
    lines = ["exact: no plan is as fast and as cheap as a point and better in one of the two"]
    drawing = draw_front(rows, frozenset({rows[0].nodes}), "Llama 2 70B on rented nodes of p4d and g5")
    words = FrontWords("llama-2-70b", "p4d-and-g5", lines)
    (folder / "front.html").write_text(front_page(rows, plans, drawing, words))
    return folder


@pytest.mark.parametrize("width", [1280, 420])
def test_nothing_is_cut_off_and_tables_are_read_without_scrolling(pages, width):
    first, *wrong = seen(pages / "front.html", width)
    assert first.startswith(f"seen at {width} px: 1 pictures with ") and first.endswith(", 2 tables")
    assert wrong == []
