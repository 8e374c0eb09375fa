"""The script that starts a run again where it stopped in order, and leaves it to Slurm where Slurm asked it to stop."""

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "workflow/scripts/resume.sh"


def _resumed(tmp_path, times, *command, reason="max_time_s", **environment):
    """What the script makes of a command; it leaves a note where it ends with 75, or is told to."""
    note = tmp_path / "STOPPED.json"
    note.write_text("of a run before")
    writes = f"echo '{json.dumps({'reason': reason})}' > {note}; exit"
    command = [word.replace("exit 75", f"{writes} 75").replace("exit 143", f"{writes} 143") for word in command]
    return subprocess.run(
        [SCRIPT, str(times), note, *command], capture_output=True, text=True, check=False, timeout=60,
        env=os.environ | environment,
    )  # fmt: skip


def test_a_run_is_resumed_a_number_of_times_and_only_where_it_stopped_in_order(tmp_path):
    stops = _resumed(tmp_path, 2, "bash", "-c", f"echo x >> {tmp_path}/calls; exit 75")
    assert (stops.returncode, (tmp_path / "calls").read_text()) == (75, "x\n" * 3)
    assert "time 2 of 2 at most" in stops.stderr and stops.stderr.count("\n") == 2
    for status in (0, 2, 4, 130):
        once = _resumed(tmp_path, 2, "bash", "-c", f"exit {status}")
        assert (once.returncode, once.stderr) == (status, "")
    other_task = _resumed(tmp_path, 1, "bash", "-c", "exit 143")
    assert (other_task.returncode, "time 1 of 1" in other_task.stderr) == (75, True)
    signalled = _resumed(tmp_path, 2, "bash", "-c", "kill -TERM $PPID; exit 75")
    assert (signalled.returncode, signalled.stderr) == (75, "")


def _slurm(tmp_path, state="RUNNING"):
    """The environment of a job in a state; the stand-in ends the script, as Slurm does with what it takes back."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f"""#!/bin/sh
        [ "$2" = show ] && echo "JobId=$4 JobName=run UserId=root(0) JobState={state} Reason=None" && exit
        echo "$*" >> {tmp_path}/asked
        [ -n "$REFUSED" ] && exit 1
        kill -TERM $PPID"""
    )
    scontrol.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


def test_a_run_that_slurm_signals_is_queued_again_where_slurm_lets_it(tmp_path):
    job = _slurm(tmp_path)
    stops = ("bash", "-c", f"echo x >> {tmp_path}/calls; exit 75")
    queued = _resumed(tmp_path, 2, *stops, reason="signal", **job)
    assert (queued.returncode, (tmp_path / "asked").read_text()) == (75, "requeue 7\n")
    assert ((tmp_path / "calls").read_text(), "queued again" in queued.stderr) == ("x\n", True)
    own_time = _resumed(tmp_path, 1, *stops, reason="max_time_s", **job)
    assert ((tmp_path / "asked").read_text(), "resumed, time 1" in own_time.stderr) == ("requeue 7\n", True)
    refused = _resumed(tmp_path, 1, *stops, reason="signal", REFUSED="yes", **job)
    assert (refused.returncode, "resumed, time 1" in refused.stderr) == (75, True)


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "TIMEOUT"])
def test_a_run_whose_job_is_cancelled_is_not_queued_again(tmp_path, state):
    """Its ranks can end before the script itself is signalled."""
    stops = ("bash", "-c", f"echo x >> {tmp_path}/calls; exit 75")
    ended = _resumed(tmp_path, 2, *stops, reason="signal", **_slurm(tmp_path, state))
    assert (ended.returncode, state in ended.stderr) == (75, True)
    assert (tmp_path / "calls").read_text() == "x\n" and not (tmp_path / "asked").exists()
