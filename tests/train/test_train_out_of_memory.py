"""A device that lacks memory for a plan ends that plan's measurement, not the command's."""

from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from faults import LACKING_PLAN, WORDS, lack_memory_for_a_plan
from forked_command import Fault, forked_command
from random_plans import random_plan
from tiny_models import tiny
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.io import BadInput, OutOfMemory, read_document, write_document
from shardwright.launch.failure_report import NodeReport, RankState, failure_report
from shardwright.launch.heartbeat import Asked, RankError, Step
from shardwright.launch.ranks import EXPANDABLE, _environment
from shardwright.types import Measurement, Plan, Plans
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, check_device, out_of_memory_said


def _plan(name: str) -> Plan:
    plan = msgspec.structs.replace(random_plan(tiny("llama"), 1, 2, "float32", stages=1), name=name)
    return msgspec.structs.replace(plan, num_microbatches=2)


def _measure(folder: Path, *names: str, in_turns: tuple[int, ...] = ()) -> tuple[Measurement, str]:
    plans = Plans(plans=tuple(map(_plan, names)), in_turns=(in_turns,) if in_turns else ())
    write_document(folder / "plans.json", plans)
    out = folder / "measured.json"
    command = ("measure", folder / "plans.json", "--out", out, "--steps", 1, "--warmup-steps", 2)
    measuring = forked_command(command, fault=Fault(1, lack_memory_for_a_plan))
    said = measuring.communicate(200)[1]
    assert measuring.wait(0) == 0, said
    assert sorted(path.name for path in folder.iterdir()) == ["measured.json", "plans.json"], "no journal is left"
    return read_document(out, Measurement), said


def test_the_plans_before_and_after_one_that_lacks_memory_are_measured(tmp_path: Path) -> None:
    """Those that it was to be measured in turns with are measured one by one."""
    found, said = _measure(tmp_path, "before", LACKING_PLAN, "after", in_turns=(0, 1))
    assert [one.plan.name for one in found.plans] == ["before", "after"]
    (failed,) = found.failed
    assert (failed.plan.name, failed.category, failed.rank) == (LACKING_PLAN, "out_of_memory", 1)
    assert (failed.where, failed.asked_bytes) == (f"in step 2 of {LACKING_PLAN}", int(2.5 * 2**30))
    assert f"{LACKING_PLAN} was not measured: rank 1: out of memory in step 2 of {LACKING_PLAN}: {WORDS}" in said
    assert f"{LACKING_PLAN}: rank 1: out of memory in step 2 of {LACKING_PLAN}: {WORDS}" in said
    assert "it and the plans that it takes turns with are measured one by one" in said
    assert "1 of 2 plans were already measured" in said
    assert not any(one.in_turns for one in found.plans)


def test_a_measurement_of_a_single_plan_that_lacks_memory_says_so(tmp_path: Path) -> None:
    found, _ = _measure(tmp_path, LACKING_PLAN)
    assert (found.plans, found.device, found.backend) == ((), "cpu", "gloo")
    assert [failed.plan.name for failed in found.failed] == [LACKING_PLAN]


@pytest.mark.parametrize(
    ("words", "asked"),
    [(WORDS, 2_684_354_560), ("Tried to allocate 512 bytes.", 512), ("CUDA error: out of memory", None)],
)
def test_what_was_asked_for_is_read_from_what_pytorch_says(words: str, asked: int | None) -> None:
    with pytest.raises(OutOfMemory) as caught, out_of_memory_said("a plan"):
        raise torch.OutOfMemoryError(words)
    assert (caught.value.subject, caught.value.asked_bytes) == ("a plan", asked)


def test_the_rank_that_lacked_memory_is_named_before_those_that_lost_it() -> None:
    lacking = RankError(time_s=1.0, text=WORDS, exit_code=4, asked=Asked("plan", 5))
    lost = RankError(time_s=0.5, text="connection closed", lost_connection=True)
    ranks = tuple(
        RankState(rank=rank, status=1, seen_s=2.0, step=Step(0.0, "in step 2"), error=error)
        for rank, error in enumerate((lost, lacking))
    )
    found = failure_report([NodeReport(node=0, ranks=ranks, ended=True)]).out_of_memory
    assert found is not None
    assert (found.rank, found.where, found.subject, found.asked_bytes) == (1, "in step 2", "plan", 5)


def test_ranks_are_told_of_expandable_segments_unless_the_caller_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert _environment("lo", 1, 1)["PYTORCH_ALLOC_CONF"] == EXPANDABLE
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert _environment("lo", 1, 1)["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    assert _environment("lo", 1, 1)["PYTORCH_ALLOC_CONF"] == "backend:native"


def test_ranks_keep_freed_host_memory_unless_the_caller_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"
    for name in told:
        monkeypatch.delenv(name, raising=False)
    assert [int(_environment("lo", 1, 1)[name]) for name in told] == [2**40, 32 * 2**20]
    monkeypatch.setenv(told[0], "131072")
    assert [int(_environment("lo", 1, 1)[name]) for name in told] == [131072, 32 * 2**20]


def test_kernels_and_connections_are_loaded_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = {"CUDA_MODULE_LOADING": "EAGER", "NCCL_RUNTIME_CONNECT": "0"}
    for name in eager:
        monkeypatch.delenv(name, raising=False)
    assert eager.items() <= _environment(None, 1, 1).items()
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    assert _environment(None, 1, 1)["CUDA_MODULE_LOADING"] == "LAZY"


@pytest.mark.parametrize("number", [1, 3, 6])
def test_the_groups_of_a_plan_are_gone_when_they_are_closed(number: int) -> None:
    plan = random_plan(tiny("llama"), number, 8, "float32")
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        before = set(dist.distributed_c10d._world.pg_map)
        groups = Groups("cpu")
        groups.prepare(plan)
        assert len(dist.distributed_c10d._world.pg_map) > len(before)
        groups.close()
        assert set(dist.distributed_c10d._world.pg_map) == before
        groups.prepare(plan)  # the same again
    finally:
        dist.destroy_process_group()


def test_a_plan_for_another_device_is_refused(one_rank: World) -> None:
    plan = random_plan(tiny("llama"), 1, 1, "float32")
    check_device(plan, one_rank, "plan.json")
    node = msgspec.structs.replace(plan.cluster.node_types["cpu"], device="NVIDIA H200")
    cluster = msgspec.structs.replace(plan.cluster, node_types={"cpu": node})
    with pytest.raises(BadInput, match=r"plan\.json: rank 0 is planned for NVIDIA H200 but runs on cpu"):
        check_device(msgspec.structs.replace(plan, cluster=cluster), one_rank, "plan.json")
