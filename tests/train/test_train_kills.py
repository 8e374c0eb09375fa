"""A few of the kills of `make kills`."""

import os
import subprocess
import sys
from pathlib import Path

import forked_ranks
import pytest

LIMIT_S = 500


@pytest.mark.long
def test_a_run_that_is_killed_at_random_moments_comes_to_the_same_bits(tmp_path: Path) -> None:
    script = Path(__file__).with_name("run_kills.py")
    command = [sys.executable, script, "--kills", "3", "--seed", "1", "--work", tmp_path / "work"]
    environment = os.environ | {"PYTHONPATH": str(Path(forked_ranks.__file__).parent)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "3 kills: every run came to the bits of the unbroken one" in ended.stdout
