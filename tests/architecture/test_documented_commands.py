"""Every command and option that the documentation writes exists."""

import importlib
import re
from functools import cache
from pathlib import Path

import pytest
from documented import told

from shardwright.command.options import options_of
from shardwright.devices.table import read_devices
from shardwright.estimate.hardware import node_rates
from shardwright.io import BadInput
from shardwright.models.registry import read_presets
from shardwright.schema.field_docs import class_doc, field_docs
from shardwright_search.advise.choices import RULES, reading_of
from shardwright_search.advise.question import machines_of, model_of
from shardwright_search.options import AdviseOptions
from shardwright_search.systems.entry import Setting

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(page for folder in ("docs", "config", "benchmarks/results") for page in sorted((ROOT / folder).rglob("*.md"))),
]
_CALL = re.compile(r"(?:^|(?<=`))(shardwright) +([^`|#\n]*)", re.M)
_STAGES = ("profile", "search", "train")
_BATCH = {name: set() for name in ("batch", "profile batch", "train batch")}


def _app(stage):
    return importlib.import_module(f"shardwright_{stage}.cli").APP


@cache
def _taken():
    """The commands of the program by name."""
    prefixes = {stage: "" if stage == "search" else f"{stage} " for stage in _STAGES}
    return {f"{prefixes[s]}{name}": command for s in _STAGES for name, command in _app(s).commands.items()}


@cache
def _commands():
    """The names of the program's commands, each with its options."""
    spelled = {}
    for name, command in _taken().items():
        options = list(options_of(command.options))
        spelled[name] = {option.name for option in options} | {option.off for option in options if option.off}
        spelled[name] |= {option.name.replace("--", "--no-", 1) for option in options if option.is_switch}
    return spelled | _BATCH


def _calls(page):
    """Program and words of every call in a page; a line that ends in a backslash goes on."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return [(program, words.split()) for program, words in _CALL.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_tells_to_type_can_be_typed(page):
    for program, words in _calls(page):
        known = _commands()
        name = next((name for name in known if words[: len(name.split())] == name.split()), None)
        if name is None:
            assert words[:1] == [] or not words[0].isascii() or "import" in words[:2], f"no {program} {words}"
            continue
        asked = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help"}
        assert asked <= known[name], f"{program} {name}: {asked - known[name]}"


def test_a_command_of_a_page_is_taken_by_the_program_with_all_that_it_says():
    commands = _taken()
    calls = [call for call in told("shardwright") if not {"…", "..."} & {*call.words} and "--help" not in call.words]
    assert len(calls) >= 35
    for call in calls:
        names = [name for name in commands if call.words[1:][: len(name.split())] == (*name.split(),)]
        assert names, call
        name = max(names, key=len)
        try:
            commands[name].parse("shardwright", call.words[1 + len(name.split()) :])
        except BadInput as error:
            pytest.fail(f"{call}: {error}")


def test_a_target_of_make_that_a_page_tells_of_is_one():
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    calls = told("make")
    assert len(calls) > 10 and [call for call in calls if call.words[1] not in targets] == []


def test_pages_tell_of_commands_of_every_stage():
    calls = {" ".join(words[:count]) for page in PAGES for _, words in _calls(page) for count in (1, 2)}
    assert {"train run", "profile hardware", "plan", "advise"} <= calls


@cache
def _setting():
    """What choices in help are read for: 64 GPUs, and a model whose layers 4 pipeline stages share."""
    asked = AdviseOptions(model="llama-3-70b", gpus="8x8:H100-SXM")
    return Setting(model_of(asked)[0], machines_of(asked, read_devices()).cluster, 512)


_EXAMPLES = {
    r"\b\d+x\d+:[\w:+-]*\w": lambda text: machines_of(AdviseOptions(model="llama-3-70b", gpus=text), read_devices()),
    r"\btp=[\w=,]*\w": lambda text: reading_of(text, _setting()),
    r"\brule:[a-z][\w-]*": lambda text: RULES[text.removeprefix("rule:")],
    r"(?<=such as )[a-z][\w.-]*\d\w*b\b": lambda text: read_presets()[text],
    r"(?<![\w.])\d+:\d+(?:,\d+:\d+)+\b(?!\.\d)": node_rates,
    r"\b\d\.\d+:\d\.\d+(?:,\d\.\d+:\d\.\d+)?": lambda text: (
        AdviseOptions(model="", gpus="", overlap_slowdowns=text).assumed
    ),
}
"""Patterns of examples in the help of options, each with what reads such a text."""


def test_an_example_in_the_help_of_an_option_is_taken():
    docs = [(command.options, field_docs(command.options)) for command in _taken().values()]
    texts = [meanings.get(each.field, each.description) for kind, meanings in docs for each in options_of(kind)]
    for pattern, read in _EXAMPLES.items():
        found = {example for text in texts for example in re.findall(pattern, " ".join(text.split()))}
        assert found, pattern
        for example in found:
            read(example)


def test_a_command_that_the_help_names_is_one():
    named = set()
    for command in _taken().values():
        said = " ".join([class_doc(command.options), *field_docs(command.options).values()])
        named |= {words for words in re.findall(r"`shardwright ([a-z][^`]*)`", said)}
    assert len(named) >= 3
    for words in named:
        assert any(words.startswith(name) for name in _taken()), words


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
