"""Patterns of texts reach to the last character, a line break included."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOME = ROOT / "core/src/shardwright/types/limits.py"
FOLDERS = ("core/src", "stages", "workflow")


def states_a_pattern(source: str) -> bool:
    """Whether a text is limited by a pattern of its own, in place of `limits.whole`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return any(keyword.arg == "pattern" for call in calls for keyword in call.keywords)


@pytest.mark.parametrize("source", ['Meta(pattern="^a$")', 'Meta(max_length=3, pattern=r"a")'])
def test_a_pattern_of_its_own_is_seen(source: str) -> None:
    assert states_a_pattern(source)


def test_all_patterns_of_texts_are_whole() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert {path for path in files if states_a_pattern(path.read_text(encoding="utf-8"))} == {HOME}
