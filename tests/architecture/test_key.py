"""Figures are looked up by one key: nothing takes its columns by position, and a column is added once."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("core/src", "stages/profile/src", "stages/search/src", "workflow", "benchmarks")
NAMED_KEY = re.compile(r"(?i)(^|_)key$|Key$")


def _files():
    listed = subprocess.run(
        ["git", "ls-files", *(f"{source}/**/*.py" for source in SOURCES)], cwd=ROOT, text=True, capture_output=True
    )
    return [ROOT / path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def _name(node):
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _keys_taken_apart(source):
    """Lines where a key is sliced or unpacked, and where a class of keys is no `Key`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Subscript(value=value, slice=ast.Slice()) if NAMED_KEY.search(_name(value)):
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Starred(value=ast.Attribute() as value) if NAMED_KEY.search(_name(value)):
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.ClassDef(name=name, bases=bases) if name.endswith("Key") and name != "Key":
                if "Key" not in map(ast.unparse, bases):
                    yield f"{node.lineno}: class {name}"


def test_no_key_is_sliced_and_no_other_class_is_a_key():
    files = _files()
    assert len(files) > 200
    taken_apart = {str(path.relative_to(ROOT)): list(_keys_taken_apart(path.read_text())) for path in files}
    assert {path: lines for path, lines in taken_apart.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "fits.get((*key[:4], quantity))",
        "other[:4] == layer_key[:4]",
        "find('point', *kind.key, size)",
        "class CurveKey(NamedTuple): type: str",
        "class CurveKey(msgspec.Struct): type: str",
        "row.key[1:]",
    ],
)
def test_a_key_taken_apart_is_seen(line):
    assert list(_keys_taken_apart(line))


ADDED = {
    "key.py": ("    recompute: Recompute | None = None\n", "    gp_size: int = 0\n"),
    "types/model_profile.py": (
        '    """Kind of sequence parallelism of the tensor-parallel ranks."""\n',
        "    gp_size: Ranks = 1\n",
    ),
    "plan/axes.py": ('    *("type", "recompute", "context", "offload"),  # these cut nothing\n', '    "gp_size",\n'),
    "types/strategy.py": (
        '    """Ranks that one sample, or its part under `cp_size`, is split over."""\n',
        "    gp_size: Ranks = 1\n",
    ),
}
"""Lines after which a column for a further degree is added: key, tables of a pass, axes and strategy."""


def test_a_column_is_added_by_a_line_in_the_key_and_one_in_the_tables(tmp_path):
    """With that, and the field in strategy and axes, profiles are fitted, written, read and priced by the column."""
    package = tmp_path / "shardwright"
    shutil.copytree(ROOT / "core/src/shardwright", package)
    for name, (before, line) in ADDED.items():
        text = (package / name).read_text()
        assert text.count(before) == 1, name
        (package / name).write_text(text.replace(before, before + line))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'tests/search'}"}
    command = [sys.executable, str(Path(__file__).with_name("column_of_the_key.py")), str(tmp_path)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "priced by gp_size\n"), done.stderr
