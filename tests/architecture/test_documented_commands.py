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
_CALL = re.compile(r"(shardwright-(?:profile|search|train)|(?:^|(?<=`))shardwright) +([^`|#\n]*)", re.M)
_PROGRAMS = ("shardwright", "shardwright-profile", "shardwright-search", "shardwright-train")
_BATCH = {"batch": set()}


def _command_line(program):
    """The command line of a program, by the module that is named for it."""
    return importlib.import_module(f"{program.replace('-', '_')}.cli").APP


def _taken(program):
    """The commands of a program by name; of the one command those of the other stages, too."""
    commands = dict(_command_line(program).commands)
    if program == "shardwright":
        for stage in ("profile", "train"):
            further = _command_line(f"shardwright-{stage}").commands
            commands |= {f"{stage} {name}": command for name, command in further.items()}
    return commands


def _commands(program):
    """The names of a program's commands, each with its options."""
    spelled = {}
    for name, command in _taken(program).items():
        options = list(options_of(command.options))
        spelled[name] = {option.name for option in options} | {option.off for option in options if option.off}
        spelled[name] |= {option.name.replace("--", "--no-", 1) for option in options if option.is_switch}
    return spelled | ({} if program == "shardwright" else _BATCH)


def _calls(page):
    """Program and words of every call in a page; a line that ends in a backslash goes on."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [(program, words.split()) for program, words in _CALL.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_tells_to_type_can_be_typed(page):
    for program, words in _calls(page):
        known = _commands(program)
        name = next((name for name in known if words[: len(name.split())] == name.split()), None)
        if name is None:
            assert words[:1] == [] or not words[0].isascii() or words[0] == "import", f"no {program} {words}"
            continue
        asked = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help"}
        assert asked <= known[name], f"{program} {name}: {asked - known[name]}"


@pytest.mark.parametrize("program", _PROGRAMS)
def test_a_command_of_a_page_is_taken_by_its_program_with_all_that_it_says(program):
    commands = _taken(program)
    calls = [call for call in told(program) if not {"…", "..."} & {*call.words} and "--help" not in call.words]
    assert len(calls) >= (2 if program == "shardwright" else 11)
    for call in calls:
        name = max((name for name in commands if call.words[1:][: len(name.split())] == (*name.split(),)), key=len)
        try:
            commands[name].parse(program, call.words[1 + len(name.split()) :])
        except BadInput as error:
            pytest.fail(f"{call}: {error}")


def test_a_target_of_make_that_a_page_tells_of_is_one():
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    calls = told("make")
    assert len(calls) > 10 and [call for call in calls if call.words[1] not in targets] == []


def test_pages_tell_of_every_program():
    assert {program for page in PAGES for program, _ in _calls(page)} == {*_PROGRAMS}


def test_a_misspelled_option_of_the_one_command_is_seen_in_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Type `shardwright advise gpt2 --gpu 8:H100`, or:\n\n```\nshardwright train run --plans p.json\n```\n"
    )
    assert [program for program, _ in _calls(page)] == ["shardwright", "shardwright"]
    with pytest.raises(AssertionError, match=r"shardwright advise: \{'--gpu'\}"):
        test_what_a_page_tells_to_type_can_be_typed(page)
    page.write_text("`shardwright fly --high`\n")
    with pytest.raises(AssertionError, match="no shardwright"):
        test_what_a_page_tells_to_type_can_be_typed(page)
