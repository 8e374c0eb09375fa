"""Ranks of clusters that are larger than this machine, one after another, among peers that are not there."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright_profile.hardware import overlap, timing
from shardwright_profile.hardware.job import Progress, SweepIdentity, SweepJob
from shardwright_profile.hardware.journal import Journal, Kept
from shardwright_profile.hardware.process_groups import ProcessGroups
from shardwright_profile.hardware.session import Session
from shardwright_profile.hardware.sweep import sweep


def _swept(cluster, rank):
    identity = SweepIdentity(
        cluster=cluster, backend="gloo", min_bytes=1024, max_bytes=4096, max_repeats=2, versions="torch 0"
    )
    job = SweepJob(identity=identity, rendezvous="", time_budget_s=0.01, started_s=0.0, out="")
    said = []
    dist.init_process_group("fake", rank=rank, world_size=cluster.num_devices, store=FakeStore())
    try:
        session = Session(job, torch.device("cpu"), Journal(None, identity, Kept((), 0)), ProcessGroups())
        return sweep(session, said.append), said
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("nodes", "links"), [(((2, 2),), 3 + 2), (((1, 4), (1, 2)), 5 + 4 + 3)])
def test_all_ranks_of_a_sweep_measure_the_same_in_the_same_order(make_cluster, monkeypatch, nodes, links):
    def gathered(mine, _):
        # As if the others had taken as long; a rank outside all groups has no time of its own.
        return np.stack([mine.numpy() + 1e-6] * dist.get_world_size())

    for module in (timing, overlap):
        monkeypatch.setattr(module, "gathered", gathered)
    cluster = make_cluster(*nodes)
    swept = [_swept(cluster, rank) for rank in range(cluster.num_devices)]
    keys = [[entry.key for entry in entries] for entries, _ in swept]
    assert all(others == keys[0] for others in keys)
    assert len(set(keys[0])) == len(keys[0])
    counts = Counter(key[0] for key in keys[0])
    assert counts["pair"] == 2 * links
    assert counts["rate"] == 2
    assert counts["overlap"] % (3 * 3) == 0
    steps = [said.step for said in swept[0][1] if isinstance(said, Progress)]
    assert steps == sorted(steps)
    assert set(steps) == set(range(swept[0][1][-1].steps))
