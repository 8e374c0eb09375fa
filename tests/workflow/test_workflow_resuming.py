"""The script that starts a run again where it stopped in order, and has Slurm queue a job again that is to go on."""

import json
import os
import socket
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
        [SCRIPT, str(times), note, *command], capture_output=True, text=True, check=False, timeout=300,
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


def _slurm(tmp_path, state="RUNNING", node="State=ALLOCATED NodeAddr=127.0.0.1 Port=9"):
    """The environment of a job in a state; the stand-in ends the script, as Slurm does with what it takes back."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f"""#!/bin/sh
        [ "$2" = config ] && echo "SlurmdPort = 6818" && exit
        [ "$3" = node ] && echo "NodeName=n1 {node}" && exit
        [ "$2" = show ] && echo "JobId=$4 JobName=run UserId=root(0) JobState={state} Reason=None NodeList=n1" && exit
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


@pytest.fixture
def slurmd():
    """The port of a slurmd that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("lost", ["DOWN", "IDLE+NOT_RESPONDING", "ALLOCATED*"])
def test_a_job_that_lost_a_node_is_queued_again_a_number_of_times(tmp_path, slurmd, lost):
    job = _slurm(tmp_path, node=f"State={lost} NodeAddr=127.0.0.1 Port={slurmd}")
    queued = _resumed(tmp_path, 1, "bash", "-c", "exit 4", **job)
    assert (queued.returncode, (tmp_path / "asked").read_text()) == (4, "requeue 7\n")
    assert "n1 is lost (4): the job is queued again" in queued.stderr
    once_more = _resumed(tmp_path, 1, "bash", "-c", "exit 4", **job)
    assert (once_more.returncode, (tmp_path / "asked").read_text()) == (4, "requeue 7\n")
    assert "after this job has lost nodes 1 times" in once_more.stderr
    assert (tmp_path / "LOST_NODES.txt").read_text() == "7 n1\n"


@pytest.mark.parametrize("status", [0, 1, 2, 4, 137])
def test_a_failed_rank_on_nodes_that_are_there_ends_the_job(tmp_path, slurmd, status):
    job = _slurm(tmp_path, node=f"State=ALLOCATED NodeAddr=127.0.0.1 Port={slurmd}")
    (tmp_path / "STOPPED.json").unlink(missing_ok=True)
    ended = _resumed(tmp_path, 2, "bash", "-c", f"exit {status}", **job)
    assert (ended.returncode, ended.stderr, (tmp_path / "asked").exists()) == (status, "", False)


def test_a_cancelled_job_is_not_queued_again_though_a_node_is_lost(tmp_path):
    ended = _resumed(tmp_path, 2, "bash", "-c", "exit 4", **_slurm(tmp_path, "CANCELLED", "State=DOWN"))
    assert (ended.returncode, (tmp_path / "asked").exists()) == (4, False)


def test_a_node_whose_slurmd_takes_no_connection_is_lost(tmp_path, slurmd):
    def lost(port):
        job = _slurm(tmp_path, node=f"State=ALLOCATED NodeAddr=127.0.0.1 Port={port}")
        command = [SCRIPT.with_name("lost_node.sh"), "7", "1"]
        return subprocess.run(command, env=os.environ | job, capture_output=True, text=True, check=False, timeout=300)

    assert (lost(slurmd).returncode, lost(slurmd).stdout) == (1, "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    assert (lost(gone).returncode, lost(gone).stdout) == (0, "n1\n")
