"""The model that docs/add-a-model.md adds trains as its stock model does, from the page's file and row alone."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright_train
from shardwright_formats.io.json import read_document
from shardwright_formats.types.plan import Plans
from shardwright_formats.types.strategy import Recompute, SequenceParallel

PAGE = Path(__file__).parents[2] / "docs" / "add-a-model.md"
MOST_LINES = 60
TOLERANCE = 1e-10


def blocks_of_the_page() -> tuple[str, str]:
    """The family's file, and its row of the registry."""
    file, row = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return file, row


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of a copy of the package that has the page's file."""
    folder = tmp_path_factory.mktemp("added")
    stock, copy = Path(shardwright_train.__file__).parent, folder / "shardwright_train"
    shutil.copytree(stock, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert not (copy / "models" / "olmo2.py").exists()
    file, row = blocks_of_the_page()
    (copy / "models" / "olmo2.py").write_text(file)
    registry = (copy / "models" / "registry.py").read_text()
    (copy / "models" / "registry.py").write_text(registry.replace("_ROWS = {\n", f"_ROWS = {{\n{row}"))
    path = os.pathsep.join(filter(None, [str(folder), str(PAGE.parents[1] / "tests"), os.environ.get("PYTHONPATH")]))
    script = Path(__file__).with_name("added_model.py")
    ended = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return folder


def test_the_page_adds_a_model_in_few_lines() -> None:
    file, row = blocks_of_the_page()
    assert 0 < len(file.splitlines()) <= MOST_LINES and row.count("\n") == 1


@pytest.mark.long
def test_the_copy_with_the_added_file_is_what_ran(added: Path) -> None:
    assert json.loads((added / "package.json").read_bytes()) == str(added / "shardwright_train")


@pytest.mark.long
def test_the_added_model_trains_exactly_as_the_stock_model(added: Path) -> None:
    plans = read_document(added / "plans.json", Plans).plans
    errors: dict[str, dict[str, float]] = json.loads((added / "errors.json").read_bytes())
    assert list(errors) == [plan.name for plan in plans]
    split = {layer.sequence_parallel for plan in plans for layer in plan.layers if layer.tp_size == 2}
    # Queries and keys are normed across all heads.
    assert split == {SequenceParallel.ULYSSES}
    ends = [strategy for plan in plans for strategy in (plan.embedding, plan.head) if strategy.tp_size == 2]
    assert {strategy.sequence_parallel for strategy in ends} >= {SequenceParallel.NONE, SequenceParallel.MEGATRON}
    assert {layer.recompute for plan in plans for layer in plan.layers} == set(Recompute)
    assert {name: found for name, found in errors.items() if max(found.values()) > TOLERANCE} == {}
