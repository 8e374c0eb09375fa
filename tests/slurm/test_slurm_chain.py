"""The workflow on a real Slurm: from the hardware profile to a trained model, and through what happens to jobs."""

import json
import os
import signal

import pytest
from loopback import bring_back, detail, ended, fail, hold_back, ranks, slurm, state, until

BEGINNING = "step 1/"
"""What the first lines of a run's output hold alone."""
LONG = 100_000


def _losses(workspace):
    """The loss of each step so far."""
    (metrics,) = workspace.results.glob("checkpoints/run-*/*/metrics.jsonl")
    return [json.loads(line)["loss"] for line in metrics.read_text().split("\n")[:-1]]


def _said_by_run(workspace, job):
    """What the job of the run has printed since it was started the last time."""
    (log,) = workspace.folder.glob(f"slurm-logs/rule_run/run-*/{job}.log")
    return log.read_text()


def _training(workspace, *options):
    """The workflow in the middle of its training, with a checkpoint: its process and the number of that job."""
    workflow = workspace.start("runs", *options)
    until(lambda: workspace.checkpoints() or workflow.poll() is not None, "a checkpoint is saved")
    assert workflow.poll() is None, workspace.said()
    return workflow, workspace.job()


def _start_again(job):
    """Let a job that was queued again begin soon: by itself Slurm has it wait for two minutes.

    Not at once: a job that begins in the second in which its last start was revoked is taken for that one, and fails.
    """
    until(lambda: state(job) == "PENDING", "the job is queued again")
    slurm("scontrol", "update", f"jobid={job}", "starttime=now+10", "timelimit=20")


def _fail_in_training(workspace, job, node):
    """Let a node fail when the job has saved once more, wait until it is queued again, and bring the node back.

    Slurm hears that the ranks have ended there, and not that the node is gone.
    """
    saved = workspace.checkpoints()[-1]
    until(lambda: len(ranks(workspace.folder)) == 4 and workspace.checkpoints()[-1] > saved, "it has saved again")
    fail(node, steps_report=True)
    until(lambda: state(job) == "PENDING", "the job is queued again")
    assert f"{job} {node}\n" in (workspace.out / "LOST_NODES.txt").read_text()
    hold_back(job)
    bring_back(node)


def _same_end(workspace, chain, job):
    """The run came, from a checkpoint, to the end that it has without a break."""
    said = _said_by_run(workspace, job)
    assert BEGINNING not in said and "step 600/600:" in said, said
    assert workspace.done()["final_loss"] == chain.done()["final_loss"]


def test_one_command_goes_from_the_hardware_profile_to_a_trained_model(chain):
    assert chain.done()["steps"] == 600
    job = chain.job()
    assert (state(job), detail(job, "NumNodes")) == ("COMPLETED", "2")
    assert BEGINNING in _said_by_run(chain, job)
    submitted = {path.name for path in (chain.folder / "slurm-logs").iterdir()}
    grouped = {f"group_{name}_{name}" for name in ("describe", "probes", "fit", "search")}
    assert submitted == {"rule_hardware", "rule_measure", "rule_prepare", "rule_run"} | grouped


def test_a_job_is_known_by_name_and_comment(chain):
    job = chain.job()
    shown = slurm("squeue", "--noheader", "--states=all", "--jobs", job, "--Format=Name:60,Comment:40").split()
    assert shown[0].startswith("shardwright_") and shown[1] == f"rule_run_wildcards_{chain.out.name}"


def test_a_preempted_run_waits_for_its_nodes_and_comes_to_the_same_loss(chain, planned):
    """Drained in training a node goes on; preempted, the run is queued again and waits for the node that is drained.

    Then that node fails, and the run is queued again once more.
    """
    workflow, job = _training(planned)
    slurm("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    assert state(job) == "RUNNING"
    slurm("sbatch", "--partition=high", "--nodelist=n1", "--exclusive", "--output=/dev/null", "--wait", "--wrap=true")
    _start_again(job)
    until(lambda: "drained" in slurm("sinfo", "--noheader", "--nodes=n2", "--format=%T"), "n2 is drained")
    second = planned.start("runs", into="second.txt")
    assert (ended(second), state(job)) == (1, "PENDING")
    assert "LockException" in (planned.folder / "second.txt").read_text()
    slurm("scontrol", "update", "nodename=n2", "state=resume")
    _fail_in_training(planned, job, "n2")
    _start_again(job)
    assert ended(workflow) == 0, planned.said()
    assert detail(job, "Restarts") == "2"
    _same_end(planned, chain, job)


def test_a_run_whose_time_is_nearly_up_saves_and_is_queued_again(chain, planned):
    """It is too long to end before: it is compared with the shorter one as far as that goes, and interrupted."""
    planned.configure(steps=LONG)
    workflow, job = _training(planned)
    hours, minutes, _ = map(int, detail(job, "RunTime").split(":"))
    slurm("scontrol", "update", f"jobid={job}", f"timelimit={60 * hours + minutes + 1}")
    note = planned.out / "STOPPED.json"
    until(note.exists, "the signal has come", 120)
    stopped = json.loads(note.read_text())
    assert stopped["reason"] == "signal" and f"step-{stopped['step']:08}" in planned.checkpoints()
    _start_again(job)
    further = max(stopped["step"], 600) + 1
    until(lambda: len(_losses(planned)) > further or workflow.poll() is not None, "the run has gone on")
    assert workflow.poll() is None, planned.said()
    assert detail(job, "Restarts") == "1"
    assert _losses(planned)[:600] == _losses(chain)
    assert BEGINNING not in _said_by_run(planned, job)
    workflow.send_signal(signal.SIGINT)
    assert ended(workflow) == 1
    until(lambda: not slurm("squeue", "--noheader"), "its job is cancelled", 180)


def test_the_cause_of_a_failing_rank_is_in_the_log_and_no_task_outlives_it(chain, planned):
    workflow, job = _training(planned)
    os.kill(int(ranks(planned.folder)[3]["PID"]), signal.SIGKILL)
    assert ended(workflow) == 1
    assert "error: rank 3" in planned.said(), planned.said()
    assert state(job) == "FAILED"
    until(lambda: not ranks(planned.folder), "all ranks have ended", 30)
    assert planned.call("runs") == 0, planned.said()
    _same_end(planned, chain, planned.job())


def test_what_is_cancelled_ends_and_goes_on_when_it_is_asked_for_again(chain, planned):
    workflow, job = _training(planned)
    slurm("scancel", job)
    assert ended(workflow) == 1
    assert "CANCELLED" in planned.said()
    until(lambda: not ranks(planned.folder), "all ranks have ended", 60)
    workflow = planned.start("runs")
    until(lambda: ranks(planned.folder), "the ranks are started")
    workflow.send_signal(signal.SIGINT)
    assert ended(workflow) == 1
    until(lambda: not slurm("squeue", "--noheader"), "its job is cancelled", 180)
    assert planned.checkpoints(), "a cancelled run keeps its checkpoints"


def test_nodes_of_two_types_train_in_one_heterogeneous_job_through_the_failure_of_one(chain, planned):
    """The pipeline begins on n2, the slow one, whose partition the node type says; that of n1 is the profile's."""
    planned.configure(mixed=True, steps=LONG)
    of_profile = ("--default-resources", "slurm_partition=first", "mem_mb=2000", "runtime=30")
    assert planned.call("plans", *of_profile) == 0, planned.said()
    workflow, job = _training(planned, *of_profile)
    assert detail(job, "HetJobIdSet") == f"{job}-{int(job) + 1}"
    components = slurm("squeue", "--noheader", "--format=%i %P %N %m", "--jobs", job).split("\n")
    assert set(components) == {f"{job}+0 last n2 3000M", f"{job}+1 first n1 4000M"}
    of_ranks = ranks(planned.folder)
    assert [of_ranks[rank]["SLURMD_NODENAME"] for rank in range(4)] == ["n2", "n2", "n1", "n1"]
    _fail_in_training(planned, job, "n1")
    _start_again(job)
    stood, saved = len(_losses(planned)), planned.checkpoints()[-1]
    # Only a change of something wakes the part of Slurm that starts heterogeneous jobs.
    wake = ("scontrol", "update", f"jobid={job}", "timelimit=20")
    until(lambda: state(job) == "RUNNING" or slurm(*wake), "the job is started again")
    until(lambda: planned.checkpoints()[-1] > saved or workflow.poll() is not None, "the run has gone on")
    assert workflow.poll() is None, planned.said()
    assert (detail(job, "Restarts"), BEGINNING in _said_by_run(planned, job)) == ("1", False)
    workflow.send_signal(signal.SIGINT)
    assert ended(workflow) == 1
    until(lambda: not slurm("squeue", "--noheader") and not ranks(planned.folder), "all of it is cancelled", 180)
    losses = _losses(planned)
    assert len(losses) > stood
    shared = min(len(losses), 600)
    assert losses[:shared] == pytest.approx(_losses(chain)[:shared], rel=1e-3)
