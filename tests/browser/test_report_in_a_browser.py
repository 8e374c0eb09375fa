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
    assert first == f"seen at {width} px: 16 pictures with 156 hover texts, 7 tables"
    assert wrong == []


@pytest.mark.parametrize("width", [1280, 420])
def test_text_in_pictures_is_as_large_as_it_was_drawn(page, width):
    """11 px at least, but for what rounding takes."""
    moves = """
      const sizes = [...page.querySelectorAll('svg text')].filter((word) => word.getBoundingClientRect().width).map(
        (word) => parseFloat(frame.contentWindow.getComputedStyle(word).fontSize) * word.getScreenCTM().a);
      more.push(`${sizes.length > 50} ${Math.min(...sizes).toFixed(1)}`);
    """
    (said,) = seen(page, width, moves)[1:]
    assert said.startswith("more: true ") and float(said.split()[-1]) >= 10.9


def test_a_narrow_table_names_each_number(page):
    moves = """
      const cell = page.querySelector('details summary') && page.querySelector('td.number');
      more.push(frame.contentWindow.getComputedStyle(cell, '::before').content);
      more.push(frame.contentWindow.getComputedStyle(page.querySelector('thead')).display);
    """
    assert seen(page, 420, moves)[1:] == ['more: "step, predicted"', "more: none"]
    assert seen(page, 1280, moves)[1:] == ["more: none", "more: table-header-group"]
