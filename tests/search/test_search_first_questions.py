"""The first questions of docs/advise.md: the command below each prints the lines that are quoted."""

import json
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from command_calls import call

from shardwright_search.cli import APP

PAGE = Path(__file__).parents[2] / "docs/advise.md"
SECTION = re.search(r"^## First questions\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
BLOCKS = [block.strip().splitlines() for block in re.findall(r"```\n(.*?)```", SECTION, re.DOTALL)]


def test_there_are_ten_of_one_command_each():
    assert len(BLOCKS) == len(re.findall(r"^\*.*\?\*", SECTION, re.MULTILINE)) == 10
    assert all(lines[0].startswith("shardwright ") and len(lines) > 1 for lines in BLOCKS)


@pytest.mark.long
@pytest.mark.parametrize("lines", BLOCKS, ids=lambda lines: " ".join(lines[0].split()[1:3]))
def test_each_answer_is_the_one_that_is_quoted(tmp_path, monkeypatch, lines):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-adapter").mkdir()
    adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": "all-linear"}
    (tmp_path / "my-adapter/adapter_config.json").write_text(json.dumps(adapter))
    ended = partial(call, APP)(*shlex.split(lines[0])[1:])
    said = " ".join((ended.stdout + ended.stderr).split())
    assert ended.exit_code in (0, 3) and all(line in said for line in lines[1:]), ended.output
