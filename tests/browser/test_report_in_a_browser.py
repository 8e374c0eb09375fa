"""The report in a real browser, as wide as a desk's screen and as a telephone's."""

import pytest
from sample_results import write_sample_results
from see_page import seen

import report
from results import read_run, read_search


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for name in ("roomy", "tight"):
        write_sample_results(folder, search=name)
    searches, runs = [read_search(folder, name) for name in ("roomy", "tight")], [read_run(folder, "demo")]
    (folder / "report.html").write_text(report.page(searches, runs))
    return folder / "report.html"


@pytest.mark.parametrize("width", [1280, 420])
def test_nothing_is_cut_off_and_tables_are_read_without_scrolling(page, width):
    first, *wrong = seen(page, width)
    assert first == f"seen at {width} px: 8 pictures with 78 hover texts, 6 tables"
    assert wrong == []


def test_a_narrow_table_names_each_number(page):
    moves = """
      const cell = page.querySelector('details summary') && page.querySelector('td.number');
      more.push(frame.contentWindow.getComputedStyle(cell, '::before').content);
      more.push(frame.contentWindow.getComputedStyle(page.querySelector('thead')).display);
    """
    assert seen(page, 420, moves)[1:] == ['more: "step, predicted"', "more: none"]
    assert seen(page, 1280, moves)[1:] == ["more: none", "more: table-header-group"]
