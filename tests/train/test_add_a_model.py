"""docs/add-a-model.md shows a family that is there, whole: its facts, its runtime file and its row of the registry."""

import re
from pathlib import Path

import pytest

import shardwright_models
import shardwright_train

PAGE = Path(__file__).parents[2] / "docs" / "add-a-model.md"
MODELS, TRAIN = (Path(str(package.__file__)).parent for package in (shardwright_models, shardwright_train))
MOST_LINES = 60


def test_the_page_shows_the_files_of_a_family() -> None:
    facts, runtime, row = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert (MODELS / "families" / "olmo2.py").read_text() == facts
    assert (TRAIN / "models" / "olmo2.py").read_text() == runtime
    assert row.count("\n") == 1 and row in (MODELS / "registry.py").read_text()


@pytest.mark.parametrize("family", ("olmo2", "gemma2", "gemma3", "glm4", "granite", "baichuan"))
def test_a_family_takes_two_files_of_few_lines(family: str) -> None:
    files = MODELS / "families" / f"{family}.py", TRAIN / "models" / f"{family}.py"
    assert all(0 < len(file.read_text().splitlines()) <= MOST_LINES for file in files)
