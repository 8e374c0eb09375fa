"""Names and docstrings of the product say the thing: `docs/` and CONTRIBUTING.md have the rule."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from count_code import PACKAGES, ROOT

SAY_NOTHING = {"own", "what", "every", "of", "found", "told"}
BEGINNINGS = ("Of ", "By ", "What ", "As ", "The same ")
MOST = 20
"""Docstrings that may begin so: a few are clear enough."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Each file of the product."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Variables, fields, parameters, functions and classes, by line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts that stand alone, of modules, classes, functions and attributes, by line."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def test_no_name_says_nothing() -> None:
    nothing = [
        f"{path}:{line}: {name}"
        for path, tree in trees()
        for line, name in named(tree)
        if name.strip("_") in SAY_NOTHING
    ]
    assert nothing == []


def test_docstrings_begin_with_what_they_are_about() -> None:
    dangling = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, tree in trees()
        for line, text in docstrings(tree)
        if text.startswith(BEGINNINGS)
    ]
    assert len(dangling) <= MOST, dangling


@pytest.mark.parametrize(
    "code",
    [
        "own = 1",
        "def f(what): ...",
        "def of(): ...",
        "class told: ...",
        "self.found = 1",
        "every: int",
        "for _own in x: ...",
    ],
)
def test_such_a_name_is_seen(code: str) -> None:
    assert {name.strip("_") for _, name in named(ast.parse(code))} & SAY_NOTHING


def test_such_a_docstring_is_seen() -> None:
    assert [text for _, text in docstrings(ast.parse('class A:\n    x: int\n    """Of the order."""'))] == [
        "Of the order."
    ]
