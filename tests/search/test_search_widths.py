"""Lines of what people read: none is wider than the terminal, and nothing is lost by breaking them."""

import shlex

import pytest
from command_calls import call

from shardwright.display.columns import wrapped, wrapped_command
from shardwright_search.cli import APP


def _told(*arguments: object) -> str:
    result = call(APP, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def files_of_a_plan(make, files, tmp_path):
    """The options of a search with its profiles, and of its plan."""
    model, cluster = make.model(4), make.cluster()
    paths = files(model, cluster, make.request(memory_gib=4 / 1024), make.profile(model))
    measured = [part for role in ("hardware", "profile") for part in (f"--{role}", paths[role])]
    inputs = [part for role in ("cluster", "model", "search") for part in (f"--{role}", paths[role])]
    search = "plan", *measured, *inputs, "--out", tmp_path / "plan.json"
    call(APP, *search)
    plan = tmp_path / "plan.json", *measured
    return {
        "plan": search,
        "explain": ("explain", *plan, "--search", paths["search"]),
        "simulate": ("simulate", *plan),
        "evaluate": ("evaluate", *plan, "--out", tmp_path / "evaluated.json"),
        "advise": (
            "advise",
            "gpt2-xl",
            "--gpus",
            "2x8:A100-80",
            "--batch",
            64,
            "--against",
            "pp=2",
            "--for",
            "megatron",
        ),
    }


@pytest.mark.parametrize("columns", [None, 72])
def test_no_line_is_wider_than_the_terminal_and_no_table_has_over_six_columns(
    files_of_a_plan, usual_width, monkeypatch, columns
):
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    for command, arguments in files_of_a_plan.items():
        lines = _told(*arguments).splitlines()
        assert max(map(len, lines)) <= (columns or usual_width), command
        assert all(line.count("┃") <= 7 for line in lines), command
    assert sum(" " * 4 in line[:4] for line in lines) > 5  # something was broken


def test_a_broken_line_keeps_its_words_in_order_and_stands_under_its_first():
    line = "  predicted " + " ".join(f"word{number}" for number in range(40))
    broken = wrapped([line, "short"], 50).splitlines()
    assert broken[-1] == "short" and all(len(part) <= 50 for part in broken)
    assert " ".join(" ".join(broken[:-1]).split()) == line.strip()
    assert all(part.startswith("      w") for part in broken[1:-1]) and broken[0].startswith("  predicted ")


def test_a_broken_command_is_the_same_command():
    command = '  torchrun --nproc-per-node 8 "$PRETRAIN file" $(xargs < a.txt) --name ' + "'one two  three' " * 8
    broken = wrapped_command(command, 60)
    assert broken.count("\\\n") > 2 and all(len(line) <= 60 for line in broken.splitlines())
    assert shlex.split(broken.replace("\\\n", " ")) == shlex.split(command)
