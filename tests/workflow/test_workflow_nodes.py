"""How the workflow starts what runs on several nodes."""

import asyncio
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

from snakemake_executor_plugin_slurm import Executor as SlurmExecutor
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

import snakemake_executor_plugin_shardwright as plugin
from snakemake_executor_plugin_shardwright import Executor, ExecutorSettings

ROOT = Path(__file__).parents[2]


def test_a_cluster_of_several_nodes_is_started_once_on_each(finished):
    def with_two_nodes(config):
        config["node_types"]["cpu"]["slurm"] = {"socket_interface": "ib0", "cpus_per_node": 8}
        config["clusters"]["laptop"]["nodes"][0].update(count=2)
        config["runs"]["demo"].update(max_restarts=1)

    finished.configure(with_two_nodes)
    asked = finished.snakemake("all", "-n", "-p", "-F").output
    started = r"on_nodes\.sh 2x8@ib0 +(--no-kill --kill-on-bad-exit=0)? *"
    found = re.findall(rf"{started}(shardwright \w+ \w+)", asked)
    outliving = "--no-kill --kill-on-bad-exit=0"
    assert sorted(found) == sorted(
        [
            ("", "shardwright profile hardware"), ("", "shardwright train run"), (outliving, "shardwright train run"),
            *[("", "shardwright train measure")] * 2,
        ]
    )  # fmt: skip


def test_jobs_on_all_nodes_of_a_mixed_cluster_are_started_on_each_component_in_rank_order(finished):
    """What they ask Slurm for: test_workflow_configuration.py, and tests/slurm."""

    def with_two_node_types(config):
        slow = {"partition": "slow", "cpus_per_node": 4, "socket_interface": "ib0"}
        config["node_types"]["slow"] = {"device": "cpu/2", "devices_per_node": 1, "memory_gib": 2.0, "slurm": slow}
        config["node_types"]["cpu"].update(devices_per_node=1, slurm={"partition": "fast", "cpus_per_node": 8})
        config["clusters"]["laptop"]["nodes"] = [{"node_type": "slow", "count": 2}, {"node_type": "cpu", "count": 3}]

    finished.configure(with_two_node_types)
    asked = finished.snakemake("all", "-n", "-p", "-F").output
    found = re.findall(r"on_nodes\.sh ('[^']*'|\S+) +(shardwright \w+ \w+)", asked)
    both, measured = "'2x4@ib0 3x8'", "shardwright train measure"
    assert sorted(found) == sorted(
        [
            ("1x4", measured), ("1x8", measured), (both, "shardwright profile hardware"),
            *[(both, measured)] * 2, *[(both, "shardwright train run")] * 2,
        ]
    )  # fmt: skip


def _submitted(number, extra=""):
    return SubmittedJobInfo(SimpleNamespace(resources={"slurm_extra": extra}), external_jobid=number, aux={})


def test_the_end_of_a_heterogeneous_job_is_found_by_the_name_of_its_first_component(monkeypatch):
    """The plugin for Slurm, of which squeue says that 7+0 and 8 have ended, and that 9 runs."""
    ended, looked_for = {"7+0", "8"}, []

    async def check_active_jobs(_executor, jobs):
        looked_for.append([job.external_jobid for job in jobs])
        for job in jobs:
            if job.external_jobid not in ended:
                yield job

    monkeypatch.setattr(SlurmExecutor, "check_active_jobs", check_active_jobs)
    monkeypatch.setattr(SlurmExecutor, "get_status_command", lambda _: "squeue")
    executor = Executor.__new__(Executor)
    jobs = [_submitted("7", "--exclusive : -n1"), _submitted("8"), _submitted("9"), _submitted("11", "-n1 : -n1")]

    async def left():
        return [job async for job in executor.check_active_jobs(jobs)]

    assert asyncio.run(left()) == [jobs[2], jobs[3]]
    assert looked_for == [["7", "8", "9", "11"], ["7+0", "11+0"]]
    jobs = jobs[1:3]
    assert asyncio.run(left()) == [jobs[1]] and len(looked_for) == 3


def test_a_job_that_someone_has_cancelled_has_failed_where_sacct_is_asked(monkeypatch, tmp_path):
    """The plugin for Slurm takes it to run, since its state names who it was; so does sacct here."""
    rows = "7|RUNNING\\n8|CANCELLED by 1000\\n9_2|CANCELLED by 0\\n11+0|CANCELLED by 0\\n11+1|RUNNING\\n12|CANCELLED\\n"
    sacct = tmp_path / "sacct"
    sacct.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\nprintf '{rows}'\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    async def check_active_jobs(_executor, jobs):
        for job in jobs:
            yield job

    failed = {}
    monkeypatch.setattr(SlurmExecutor, "check_active_jobs", check_active_jobs)
    monkeypatch.setattr(
        SlurmExecutor,
        "report_job_error",
        lambda _, job, msg, aux_logs: failed.update({job.external_jobid: (msg, aux_logs)}),
    )
    jobs = [_submitted(number, extra) for number, extra in (("7", ""), ("8", ""), ("9_2", ""), ("11", "-n1 : -n1"))]
    jobs[1].aux["slurm_logfile"] = tmp_path / "8.log"

    async def left():
        return [job async for job in Executor.__new__(Executor).check_active_jobs(jobs)]

    monkeypatch.setattr(SlurmExecutor, "get_status_command", lambda _: "squeue")
    assert asyncio.run(left()) == jobs and not failed and not (tmp_path / "asked").exists()
    monkeypatch.setattr(SlurmExecutor, "get_status_command", lambda _: "sacct")
    assert asyncio.run(left()) == jobs[:1]
    assert (tmp_path / "asked").read_text().split()[-1] == "--jobs=7,8,9_2,11"
    said = {number: f"SLURM-job '{number}' failed, SLURM status is: 'CANCELLED by 0'." for number in ("9_2", "11")}
    assert failed == {number: (words, []) for number, words in said.items()} | {
        "8": ("SLURM-job '8' failed, SLURM status is: 'CANCELLED by 1000'.", [str(tmp_path / "8.log")])
    }
    # A database that does not answer ends no job, and the next look asks it again.
    sacct.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(plugin, "_SACCT_LIMIT_S", 0.2)
    failed.clear()
    assert asyncio.run(left()) == jobs and not failed


def test_jobs_are_looked_at_every_half_minute_at_least():
    """The plugin for Slurm waits for ten seconds more after each look at which no job has ended."""
    executor = Executor.__new__(Executor)
    executor.workflow = SimpleNamespace(executor_settings=ExecutorSettings(status_command="squeue"))
    seen = []
    executor.next_seconds_between_status_checks = 3
    for _ in range(8):
        seen.append(executor.next_seconds_between_status_checks)
        executor.next_seconds_between_status_checks = min(executor.next_seconds_between_status_checks + 10, 180)
    assert seen == [3, 13, 23, 30, 30, 30, 30, 30]


def test_one_machine_stands_for_all_nodes_where_the_configuration_says_so(finished):
    def with_two_node_types(config):
        config["node_types"]["slow"] = {"device": "cpu/2", "devices_per_node": 1, "memory_gib": 2.0}
        config["node_types"]["cpu"]["devices_per_node"] = 1
        nodes = [{"node_type": "cpu", "count": 1}, {"node_type": "slow", "count": 1}]
        config["clusters"]["laptop"].update(nodes=nodes, all_nodes_here=True)

    finished.configure(with_two_node_types)
    asked = finished.snakemake("all", "-n", "-p", "-F").output
    started = re.findall(r"on_nodes\.sh 1x.*", asked)
    assert len(started) == len(re.findall(r"on_nodes\.sh", asked)) == 7
    # All but the probes, which are of one node.
    assert ["--all-nodes-here" in line for line in started if "results/probes" not in line] == [True] * 5


def _on_nodes(*words, **environment):
    script = ROOT / "workflow/scripts/on_nodes.sh"
    done = subprocess.run(
        [script, *words], capture_output=True, text=True, check=True, timeout=300, env=os.environ | environment
    )
    return done.stdout.strip()


def test_ranks_are_started_by_srun_in_a_job_of_slurm_alone(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "srun $* in $SLURM_HET_SIZE of $SLURM_JOB_NODELIST_HET_GROUP_0"\n')
    srun.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert _on_nodes("2x8", "--no-kill", "echo", "--here", **path) == "--here"
    job = path | {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n4"}
    said = "--ntasks-per-node=1 --cpus-per-task={} --cpu-bind=none --kill-on-bad-exit=1{} echo --here"
    assert _on_nodes("2x8", "--no-kill", "echo", "--here", **job) == (
        f"srun --nodes=2 --ntasks=2 {said.format(8, ' --no-kill')} in  of"
    )
    interface = " --no-kill env GLOO_SOCKET_IFNAME=^lo NCCL_SOCKET_IFNAME=^lo"
    assert _on_nodes("1x8@^lo 2x4", "--no-kill", "echo", "--here", **job) == (
        f"srun --het-group=0 --nodes=1 --ntasks=1 {said.format(8, interface)}"
        f" : --het-group=1 --nodes=2 --ntasks=2 {said.format(4, ' --no-kill')} in 2 of n4"
    )
    assert _on_nodes("1x8 2x4", "echo", "--here", **job, SLURM_STEP_ID="0") == "--here"
