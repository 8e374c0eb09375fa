"""Jobs whose nodes die without a word, with a stand-in for the ranks: which are queued again, and which are not."""

import os
import signal

import pytest
from loopback import ROOT, bring_back, detail, fail, hold_back, slurm, state, until

STAND_IN = """#!/bin/bash
# The second node's task waits; the first one's ends with 4 once that is gone, as a launcher does.
trap 'exit 0' TERM
echo $$ > {folder}/pid-$SLURM_NODEID
if [[ $SLURM_NODEID = 0 ]]; then
    until [[ -s {folder}/pid-1 ]]; do sleep 0.1; done
    while kill -0 "$(<{folder}/pid-1)"; do sleep 0.1; done 2>/dev/null
    exit 4
fi
while :; do sleep 0.1; done
"""


@pytest.fixture
def job(idle, tmp_path):
    """A job on both nodes that starts the stand-in as the workflow starts ranks; its number, once they run."""
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(STAND_IN.format(folder=tmp_path))
    stand_in.chmod(0o755)
    script = f"resume.sh 1 {tmp_path}/STOPPED.json on_nodes.sh 2x2 {stand_in}"
    submitted = (
        "sbatch", "--parsable", "--requeue", "--nodes=2", "--ntasks=2", "--exclusive", f"--output={tmp_path}/log",
        "--open-mode=append", f"--wrap=PATH={ROOT}/workflow/scripts:$PATH; {script}",
    )  # fmt: skip
    number = slurm(*submitted)
    _runs(tmp_path)
    yield number
    slurm("scancel", number)
    for node in ("n1", "n2"):
        if "down" in slurm("sinfo", "--noheader", "--partition=main", f"--nodes={node}", "--format=%T"):
            bring_back(node)


def _runs(folder):
    until(lambda: all((folder / f"pid-{node}").exists() for node in range(2)), "the tasks run")


def _again(job, folder):
    """Wait until the job is started again."""
    for node in range(2):
        (folder / f"pid-{node}").unlink()
    until(lambda: state(job) == "PENDING", "the job is queued again")
    hold_back(job)
    bring_back("n2")
    slurm("scontrol", "update", f"jobid={job}", "starttime=now+3")
    _runs(folder)


def test_a_job_whose_node_died_is_queued_again_a_number_of_times(job, tmp_path):
    """srun hears of the tasks' end and the job would fail, long before Slurm notices that the node is gone."""
    fail("n2", steps_report=True)
    _again(job, tmp_path)
    assert (detail(job, "Restarts"), (tmp_path / "LOST_NODES.txt").read_text()) == ("1", f"{job} n2\n")
    assert "n2 is lost" in (tmp_path / "log").read_text()
    fail("n2", steps_report=True)
    until(lambda: state(job) == "FAILED", "the job has failed")
    assert "after this job has lost nodes 1 times" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_slurm_queues_a_job_again_whose_node_is_gone_with_its_steps(job, node):
    """On n1 the job's own script is gone, too."""
    fail(node)
    until(lambda: state(job) == "PENDING", "the job is queued again")
    assert detail(job, "Restarts") == "1"


def test_a_task_that_fails_ends_the_job_soon(job, tmp_path):
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    until(lambda: state(job) == "FAILED", "the job has failed", 20)
    assert detail(job, "Restarts") == "0" and not (tmp_path / "LOST_NODES.txt").exists()


def test_a_job_that_is_cancelled_is_not_queued_again(job, tmp_path):
    slurm("scancel", job)
    until(lambda: state(job) == "CANCELLED", "the job is cancelled", 60)
    assert not (tmp_path / "LOST_NODES.txt").exists()
