"""The mistakes of tests/run_mutations.py change text that their module has once, and name tests that exist."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from run_mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mistake", MUTATIONS, ids=lambda mistake: mistake.what.replace(" ", "-"))
def test_a_mistake_can_be_made(mistake: Mutation) -> None:
    spec = find_spec(mistake.module)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).read_text(encoding="utf-8").count(mistake.old) == 1
    files = [word for word in mistake.tests.split() if word.endswith(".py")]
    assert files and all((ROOT / file).is_file() for file in files)
