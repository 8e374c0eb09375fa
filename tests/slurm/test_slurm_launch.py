"""Scripts of an export on a real Slurm: nodes of two types are a heterogeneous job, each with its place in the plan."""

import os
import subprocess

from command_calls import call
from launch_stand_ins import PROGRAMS, said
from loopback import COMMAND_S
from made_up import make_mixed_cluster, make_model
from msgspec.structs import replace

from shardwright.io import write_document
from shardwright_search.cli import APP
from shardwright_search.options import UniformRequest
from shardwright_search.uniform_plan import uniform_plan


def test_nodes_of_two_types_are_a_heterogeneous_job_in_the_order_of_the_pipeline(idle, tmp_path):
    cluster = make_mixed_cluster(A100=(1, 2, 1 << 34), A10=(1, 1, 1 << 34))
    plan = uniform_plan("two types", UniformRequest(global_batch_size=4, pp_size=3), make_model(6), cluster)
    ranks = [(2,), (0,), (1,)]  # A10 first
    stages = tuple(replace(stage, ranks=own) for stage, own in zip(plan.stages, ranks, strict=True))
    write_document(tmp_path / "plan.json", replace(plan, stages=stages))
    (tmp_path / "hosts").write_text("n1 A100\nn2 A10\n")
    folder = tmp_path / "to start"
    given = ("--out", tmp_path / "args", "--launch", folder, "--hosts", tmp_path / "hosts")
    assert call(APP, "export", tmp_path / "plan.json", "--to", "megatron", *given).exit_code == 0
    script = (folder / "slurm.sh").read_text()  # this Slurm has no GPUs to ask for
    (folder / "slurm.sh").write_text("".join(line for line in script.splitlines(True) if "--gpus" not in line))
    (tmp_path / "torchrun").write_text("\n".join(line.strip() for line in PROGRAMS["torchrun"].splitlines()) + "\n")
    (tmp_path / "torchrun").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(tmp_path / "said"), "PRETRAIN": "/opt/a b.py"}
    command = ["sbatch", "--wait", "slurm.sh", "--data-path", "a b"]
    subprocess.run(command, cwd=folder, env=os.environ | path, check=True, timeout=COMMAND_S)
    told = said(path)
    assert [line[0] for line in told.values()] == ["n2", "n1"]
    places = ["--nnodes 2 --node_rank 0 --nproc_per_node 1", "--nnodes 2 --node_rank 1 --nproc_per_node 2"]
    assert [" ".join(line[2:8]) for line in told.values()] == places
    assert all(line[9] == "n2" and line[-2:] == ["--data-path", "a b"] for line in told.values())
