"""The reference workload, which may never change: times of profiles and of plans are compared by it."""

import pytest
import torch

from shardwright_train.measurement import timing
from shardwright_train.measurement.timing import Interval
from shardwright_train.parallel.world import World


def test_the_workload_is_the_one_that_profiles_were_measured_beside() -> None:
    assert timing._WORKLOADS == {
        "cpu": (torch.float32, 256, 40, 1 << 20, 20),
        "cuda": (torch.float16, 4096, 40, 1 << 24, 100),
    }
    assert timing._REPEATS == 4


def test_its_time_is_the_mean_of_some_in_a_row(one_rank: World, monkeypatch: pytest.MonkeyPatch) -> None:
    products = []
    monkeypatch.setattr(torch, "mm", lambda *_factors, out: products.append(out))
    monkeypatch.setattr(timing, "clock_for", lambda _device: _Clock())
    assert timing.reference_time_s(one_rank.device) == 2.0
    assert len(products) == 4 * 40


class _Clock:
    """Eight seconds between two events."""

    def hook(self, name: str) -> None:
        assert name in ("start", "reference")

    def intervals(self) -> list[Interval]:
        return [Interval("reference", None, 0.0, 8.0)]
