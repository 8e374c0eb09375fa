"""How the workflow starts what runs on several nodes."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_cluster_of_several_nodes_is_started_once_on_each(finished):
    def with_two_nodes(config):
        config["node_types"]["cpu"]["slurm"] = {"socket_interface": "ib0", "cpus_per_node": 8}
        config["clusters"]["laptop"]["nodes"][0].update(count=2)
        config["runs"]["demo"].update(max_restarts=1)

    finished.configure(with_two_nodes)
    asked = finished.snakemake("all", "-n", "-p", "-F").output
    started = r"on_nodes\.sh 2 8 +(--no-kill --kill-on-bad-exit=0)? *env GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0"
    found = re.findall(rf"{started} (shardwright-\w+ \w+)", asked)
    outliving = "--no-kill --kill-on-bad-exit=0"
    assert sorted(found) == sorted(
        [
            ("", "shardwright-profile hardware"), ("", "shardwright-train run"), (outliving, "shardwright-train run"),
            *[("", "shardwright-train measure")] * 2,
        ]
    )  # fmt: skip


def test_one_machine_stands_for_all_nodes_where_the_configuration_says_so(finished):
    def with_two_node_types(config):
        config["node_types"]["slow"] = {"device": "cpu/2", "devices_per_node": 1, "memory_gib": 2.0}
        config["node_types"]["cpu"]["devices_per_node"] = 1
        nodes = [{"node_type": "cpu", "count": 1}, {"node_type": "slow", "count": 1}]
        config["clusters"]["laptop"].update(nodes=nodes, all_nodes_here=True)

    finished.configure(with_two_node_types)
    asked = finished.snakemake("all", "-n", "-p", "-F").output
    started = re.findall(r"on_nodes\.sh 1 .*", asked)
    assert len(started) == len(re.findall(r"on_nodes\.sh", asked)) == 7
    # All but the probes, which are of one node.
    assert ["--all-nodes-here" in line for line in started if "results/probes" not in line] == [True] * 5


def _on_nodes(*words, **environment):
    script = ROOT / "workflow/scripts/on_nodes.sh"
    done = subprocess.run(
        [script, *words], capture_output=True, text=True, check=True, timeout=60, env=os.environ | environment
    )
    return done.stdout.strip()


def test_ranks_are_started_by_srun_in_a_job_of_slurm_alone(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "srun $*"\n')
    srun.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert _on_nodes("2", "8", "--no-kill", "echo", "--here", **path) == "--here"
    assert _on_nodes("2", "8", "--no-kill", "echo", "--here", **path, SLURM_JOB_ID="7") == (
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=8 --cpu-bind=none --kill-on-bad-exit=1"
        " --no-kill echo --here"
    )
    assert _on_nodes("2", "8", "echo", "--here", **path, SLURM_JOB_ID="7", SLURM_STEP_ID="0") == "--here"
