"""The page of `advise --html` in a real browser, as wide as a desk's screen and as a telephone's."""

import pytest
from driven import LOOK, a_tab
from see_page import seen

from shardwright.command.command_line import _exit_code
from shardwright_search.cli import APP


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice")
    arguments = ["--gpus", "8:A100-80", "--batch", "64", "--seq", "512", "--html-limit", "12"]
    assert _exit_code(APP, ["advise", "qwen2.5-3b", *arguments, "--html", str(folder / "page.html")]) == 0
    return folder / "page.html"


@pytest.mark.parametrize("width", [1280, 420])
def test_nothing_is_cut_off(page, width):
    first, *rest = seen(page, width)
    assert first.startswith(f"seen at {width} px: 6 pictures with ") and first.endswith(", 2 tables")
    assert rest == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (420, False), (420, True)])
def test_text_in_pictures_is_read_without_a_glass(page, width, dark):
    with a_tab() as tab:
        tab.open(page.as_uri(), width, dark=dark)
        assert tab.run(LOOK) == []
        shown = "[...document.querySelectorAll('svg')].filter(each => each.getBoundingClientRect().width).length"
        assert tab.run(shown) == 3 and tab.run("document.querySelectorAll('input[type=range]').length") == 0
