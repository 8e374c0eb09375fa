"""Rates between devices and their host: each way, alone and together, and the host's updates; used by prices."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shardwright.types.hardware_profile import HOST_ALONE, HOST_COPIES, HOST_UPDATES
from shardwright_profile.hardware import measurements
from shardwright_profile.hardware.measurements import host_measurements, rate_tasks

_CPU = torch.device("cpu")
_COPIED, _UPDATED = 4096, 512


class _Ranks:
    """A stopwatch of four ranks, of which this is one: a call that works takes 2 s, and one that does not, none."""

    device = _CPU

    def __init__(self, me: int) -> None:
        self.me, self.worked = me, 0

    def rank_times_s(self, call, repeats):
        before = self.worked
        for _ in range(repeats):
            call()
        mine = 2.0 if self.worked > before else 1e-6
        return np.full((4, repeats), mine)


@pytest.mark.parametrize("me", range(4))
def test_ranks_of_a_node_copy_at_once_and_in_turn(monkeypatch, make_cluster, me):
    cluster, clock = make_cluster((2, 2)), _Ranks(me)
    copy = torch.Tensor.copy_
    shapes = set()

    def counted(target, source, **given):
        clock.worked += 1
        shapes.add((target.nbytes, source.nbytes))
        return copy(target, source, **given)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    monkeypatch.setattr(measurements.dist, "get_rank", lambda: me)
    measured = host_measurements(cluster, measurements._Sizes(_COPIED, _UPDATED))
    for name in HOST_COPIES:
        assert measured[name](clock) == (_COPIED / 2,) * 4
    for name in HOST_ALONE:
        # In the turn of this rank, the first or second of its node, it works, and in the others it does not.
        found = measured[name](clock)
        assert [rate == _COPIED / 2 for rate in found] == [rank % 2 == me % 2 for rank in range(4)]
    assert shapes == {(_COPIED, _COPIED)}


def test_the_host_updates_as_many_parameters_as_it_is_given(monkeypatch, make_cluster):
    clock, stepped = _Ranks(0), []
    step = torch.optim.AdamW.step

    def counted(optimizer):
        clock.worked += 1
        stepped.append(optimizer.param_groups[0]["params"][0].numel())
        return step(optimizer)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    measured = host_measurements(make_cluster((1, 4)), measurements._Sizes(_COPIED, _UPDATED))
    assert measured[HOST_UPDATES](clock) == (_UPDATED / 2,) * 4
    assert set(stepped) == {_UPDATED}


def test_only_devices_that_have_a_host_apart_are_measured(monkeypatch, make_cluster):
    session = SimpleNamespace(
        stopwatch=SimpleNamespace(device=_CPU), identity=SimpleNamespace(cluster=make_cluster((1, 2)))
    )
    keys = {*HOST_COPIES, *HOST_ALONE, HOST_UPDATES}
    assert not keys & {name for task in rate_tasks(session) for _, name in task.keys}
    monkeypatch.setattr("shardwright_profile.hardware.measurements.on_accelerator", lambda _: True)
    assert keys <= {name for task in rate_tasks(session) for _, name in task.keys}
