"""The page of `advise --html` in a real browser, as wide as a desk's screen and as a telephone's."""

import html
import json
import re

import pytest
from see_page import seen

from shardwright.command.command_line import _exit_code
from shardwright_search.cli import APP


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("advice")
    arguments = ["--gpus", "8:A100-80", "--batch", "64", "--seq", "512", "--html-limit", "12"]
    assert _exit_code(APP, ["advise", "qwen2.5-3b", *arguments, "--html", str(folder / "page.html")]) == 0
    return folder / "page.html"


def _cells(page):
    """The outcome of each place of the sliders, in the words of the page."""
    text = page.read_text().partition('<script type="application/json" id="grid">')[2].partition("</script>")[0]
    grid = json.loads(text)
    return grid["labels"], {
        place: html.unescape(re.sub(r"<.*?>", "", grid["texts"][numbers[0]]))
        for place, numbers in grid["cells"].items()
    }


@pytest.mark.parametrize("width", [1280, 420])
def test_nothing_is_cut_off_wherever_the_sliders_stand(page, width):
    moves = """
      const sliders = [...page.querySelectorAll('input[type=range]')];
      const to = (slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); };
      for (const slider of sliders) {
        const before = slider.value;
        for (let value = 0; value <= slider.max; value++) { to(slider, value); look(); }
        to(slider, before);
      }
      for (const slider of sliders) { to(slider, slider.min); look(); }
      more.push(`${sliders.length} sliders, ${sliders[0].offsetWidth > 150 && sliders[0].offsetHeight > 10}`);
    """
    first, *rest = seen(page, width, moves)
    assert first.startswith(f"seen at {width} px: 3 pictures with ") and first.endswith(", 2 tables")
    assert rest == ["more: 4 sliders, true"]


def test_the_sliders_show_the_plan_of_their_size_and_say_what_was_not_computed(page):
    moves = """
      const sliders = [...page.querySelectorAll('input[type=range]')];
      const to = (slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); };
      const say = () => more.push(JSON.stringify([sliders.map((slider) => slider.value).join(','),
        [...page.querySelectorAll('output')].map((each) => each.textContent), page.getElementById('answer').textContent,
        page.querySelectorAll('#plan svg').length, page.querySelectorAll('#memory svg').length]));
      say();
      for (const slider of sliders) { to(slider, slider.min); say(); }
    """
    labels, cells = _cells(page)
    said = [json.loads(line.removeprefix("more: ")) for line in seen(page, 1280, moves)[1:]]
    assert len(said) == 5 and said[0][1] == ["8:A100-80", "64", "512", "73.6 GiB"]
    for place, outputs, answer, plans, memories in said:
        assert outputs == [labels[axis][int(value)] for axis, value in enumerate(place.split(","))]
        assert answer.split() == cells[place].split()
        assert plans == memories == (0 if "not computed" in answer or "No plan fits" in answer else 1)
    assert "not computed" in said[-1][2] and "Proven" in said[0][2]
