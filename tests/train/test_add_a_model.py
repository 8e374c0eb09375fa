"""The model that docs/add-a-model.md adds trains as its stock model does, from its facts and runtime file alone."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardwright_models
import shardwright_train
from shardwright_formats.io import read_document
from shardwright_formats.types import Plans, Recompute, SequenceParallel

PAGE = Path(__file__).parents[2] / "docs" / "add-a-model.md"
MOST_LINES = 60
TOLERANCE = 1e-10


def blocks_of_the_page() -> tuple[str, str, str]:
    """The family's facts, its runtime file, and its import in the registry."""
    facts, runtime, row = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return facts, runtime, row


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of copies of two packages that have the page's files."""
    folder = tmp_path_factory.mktemp("added")
    for package in (shardwright_train, shardwright_models):
        stock = Path(str(package.__file__)).parent
        shutil.copytree(stock, folder / package.__name__, ignore=shutil.ignore_patterns("__pycache__"))
    facts, runtime, row = blocks_of_the_page()
    models, train = folder / "shardwright_models", folder / "shardwright_train" / "models"
    for file, text in ((models / "families" / "olmo2.py", facts), (train / "olmo2.py", runtime)):
        assert not file.exists()
        file.write_text(text)
    registry = (models / "registry.py").read_text()
    added = registry.replace("\n\nFAMILIES", f"\n{row}\nFAMILIES").replace("T5, VIT)", "T5, VIT, OLMO2)")
    assert added.count("OLMO2") == 2
    (models / "registry.py").write_text(added)
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
    facts, runtime, row = blocks_of_the_page()
    assert all(0 < len(file.splitlines()) <= MOST_LINES for file in (facts, runtime)) and row.count("\n") == 1


@pytest.mark.long
def test_the_copy_with_the_added_file_is_what_ran(added: Path) -> None:
    packages = json.loads((added / "packages.json").read_bytes())
    assert packages == [str(added / "shardwright_train"), str(added / "shardwright_models")]


@pytest.mark.long
def test_the_added_facts_are_what_describe_reads_off_the_stock_model(added: Path) -> None:
    by_shapes, described = (json.loads((added / f"{name}.json").read_bytes()) for name in ("shapes", "described"))
    assert by_shapes == described


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
