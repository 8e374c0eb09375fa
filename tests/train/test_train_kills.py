"""A few of the kills of `make kills`."""

import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 500


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_at_random_moments_comes_to_the_same_bits(tmp_path: Path) -> None:
    script = Path(__file__).with_name("run_kills.py")
    command = [sys.executable, script, "--kills", "3", "--seed", "1", "--work", tmp_path / "work"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "3 kills: every run came to the bits of the unbroken one" in ended.stdout
