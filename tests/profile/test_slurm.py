from pathlib import Path

import pytest

from shardwright_formats.io.errors import BadInput
from shardwright_profile.hardware.slurm import rendezvous_of_step


def _scontrol(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin")


def test_the_nodes_of_a_step_meet_at_its_first_one_on_the_jobs_port(tmp_path, monkeypatch):
    _scontrol(tmp_path, '[ "$*" = "show hostnames gpu[3-4]" ] && printf "gpu3\\ngpu4\\n"', monkeypatch)
    step = {"SLURM_STEP_NODELIST": "gpu[3-4]", "SLURM_JOB_ID": "1234567"}
    assert rendezvous_of_step(step) == "gpu3:24567"


def test_outside_a_step_nothing_is_known():
    assert rendezvous_of_step({"SLURM_JOB_ID": "5"}) is None


def test_node_lists_that_scontrol_does_not_resolve_are_refused(tmp_path, monkeypatch):
    step = {"SLURM_STEP_NODELIST": "gpu[3-", "SLURM_JOB_ID": "5"}
    _scontrol(tmp_path, "echo invalid hostlist >&2; exit 1", monkeypatch)
    with pytest.raises(BadInput, match=r"does not resolve 'gpu\[3-' \(invalid hostlist\): pass --rendezvous"):
        rendezvous_of_step(step)
    (tmp_path / "scontrol").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="pass --rendezvous"):
        rendezvous_of_step(step)
