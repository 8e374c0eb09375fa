"""Every command and option that the documentation writes exists."""

import importlib
import re
from pathlib import Path

import pytest
from documented import told

from shardwright_formats.command.options import options_of
from shardwright_formats.io import BadInput

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "config").glob("*.md"))]
_CALL = re.compile(r"shardwright-(profile|search|train) +([^`|#\n]*)")
_BATCH = {"batch": set()}


def _commands(stage):
    """The names of a program's commands, each with its options."""
    app = importlib.import_module(f"shardwright_{stage}.cli").APP
    spelled = {}
    for name, command in app.commands.items():
        options = list(options_of(command.options))
        spelled[name] = {option.name for option in options} | {option.off for option in options if option.off}
        spelled[name] |= {option.name.replace("--", "--no-", 1) for option in options if option.is_switch}
    return spelled | _BATCH


def _calls(page):
    """Program and words of every call in a page; a line that ends in a backslash goes on."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [(stage, words.split()) for stage, words in _CALL.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_tells_to_type_can_be_typed(page):
    for stage, words in _calls(page):
        known = _commands(stage)
        name = next((name for name in known if words[: len(name.split())] == name.split()), None)
        if name is None:
            assert words[:1] == [] or not words[0].isascii() or words[0] == "import", f"no shardwright-{stage} {words}"
            continue
        asked = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help"}
        assert asked <= known[name], f"shardwright-{stage} {name}: {asked - known[name]}"


@pytest.mark.parametrize("stage", ["profile", "search", "train"])
def test_a_command_of_a_page_is_taken_by_its_program_with_all_that_it_says(stage):
    app = importlib.import_module(f"shardwright_{stage}.cli").APP
    calls = [call for call in told(app.name) if not {"…", "..."} & {*call.words} and "--help" not in call.words]
    assert len(calls) > 10
    for call in calls:
        name = max((name for name in app.commands if call.words[1:][: len(name.split())] == (*name.split(),)), key=len)
        try:
            app.commands[name].parse(app.name, call.words[1 + len(name.split()) :])
        except BadInput as error:
            pytest.fail(f"{call}: {error}")


def test_a_target_of_make_that_a_page_tells_of_is_one():
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    calls = told("make")
    assert len(calls) > 10 and [call for call in calls if call.words[1] not in targets] == []


def test_pages_tell_of_every_program():
    assert {stage for page in PAGES for stage, _ in _calls(page)} == {"profile", "search", "train"}
