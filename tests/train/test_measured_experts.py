"""Experts measured by themselves on one rank: any number of them, of any part of their features."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from estimated_memory import FLOAT32
from priced_experts import MODEL, plan_of
from tiny_models import tiny

from shardwright.estimate.hardware import Link
from shardwright.estimate.layers import Machine, estimate_experts
from shardwright.key import ExpertKey
from shardwright.types import ExpertProbe, Recompute
from shardwright_train.measurement.measure import measure_experts

NONE, FULL, SELECTIVE = Recompute.NONE, Recompute.FULL, Recompute.SELECTIVE
JOB = SimpleNamespace(steps=2, warmup_steps=1, min_time_s=0.0)
MACHINE = Machine(1e12, 1e12, Link(1e12, 0.0))


@pytest.fixture
def world():
    """A world of this process alone, which nobody watches."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(rank=0, device=torch.device("cpu"), heartbeat=SimpleNamespace(begin=lambda _: None))
    dist.destroy_process_group()


def probe_of(number, etp_size, recompute, rows, name="sparse"):
    return ExpertProbe(type=name, experts=number, etp_size=etp_size, recompute=recompute, rows=rows)


def test_experts_keep_what_is_estimated(world) -> None:
    plan = plan_of(None, precision=FLOAT32)
    probes = [probe_of(number, etp_size, kind, rows) for number, etp_size, kind, rows in (
        (8, 1, NONE, 512), (2, 1, NONE, 512), (4, 2, NONE, 1024), (2, 1, FULL, 512), (2, 1, SELECTIVE, 515),
    )]  # fmt: skip
    for measured in measure_experts(plan, probes, JOB, world):
        probe = measured.probe
        estimated = estimate_experts(MODEL, ExpertKey.from_fields(probe), FLOAT32, MACHINE)
        assert len(measured.forward_s) == len(measured.backward_s) == 2
        assert min(*measured.forward_s, *measured.backward_s, measured.reference_s) > 0
        assert measured.activation_bytes == pytest.approx(estimated.activation_bytes, rel=0.02, abs=9000)
        assert 0.9 < measured.workspace_bytes / estimated.workspace_bytes < 1.4


def test_experts_of_all_families_are_measured(world) -> None:
    for family in ("qwen3_moe", "gpt_oss", "deepseek_v2"):
        model = tiny(family)
        name = next(kind for kind in model.layers if model.types[kind].experts is not msgspec.UNSET)
        plan = SimpleNamespace(model=model, precision=FLOAT32, name="p")
        experts = model.types[name].experts
        probes = [probe_of(experts.number // 2, 2, NONE, 24, name), probe_of(experts.number, 1, FULL, 7, name)]
        for measured in measure_experts(plan, probes, JOB, world):
            assert measured.activation_bytes >= 0 and measured.workspace_bytes > 0
