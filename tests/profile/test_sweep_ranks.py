"""Ranks of clusters that are larger than this machine, one after another, among peers that are not there."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.launch.journal import Journal, Kept
from shardwright.plan.process_groups import EDGE_CHANNELS
from shardwright_profile.hardware.profile import JOURNAL, Progress, SweepIdentity
from shardwright_profile.hardware.session import ProcessGroups, Session, Stopwatch
from shardwright_profile.hardware.worker import sweep

CPU = torch.device("cpu")


def _swept(cluster, rank):
    identity = SweepIdentity(
        cluster=cluster, backend="gloo", min_bytes=1024, max_bytes=4096, max_repeats=2, versions="torch 0"
    )
    said = []
    dist.init_process_group("fake", rank=rank, world_size=cluster.num_devices, store=FakeStore())
    try:
        journal = Journal(None, JOURNAL, identity, Kept())
        session = Session(identity, Stopwatch(CPU), journal, ProcessGroups(CPU))
        return sweep(session, 0.01, said.append), said
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("nodes", "links"), [(((2, 2),), 3 + 2), (((1, 4), (1, 2)), 5 + 4 + 3)])
def test_all_ranks_of_a_sweep_measure_the_same_in_the_same_order(make_cluster, monkeypatch, nodes, links):
    def gathered(_, mine):
        # As if the others had taken as long; a rank outside all groups has no time of its own.
        return np.stack([mine.numpy() + 1e-6] * dist.get_world_size())

    monkeypatch.setattr(Stopwatch, "gathered", gathered)
    cluster = make_cluster(*nodes)
    swept = [_swept(cluster, rank) for rank in range(cluster.num_devices)]
    keys = [[entry.key for entry in entries] for entries, _ in swept]
    assert all(others == keys[0] for others in keys)
    assert len(set(keys[0])) == len(keys[0])
    counts = Counter(key[0] for key in keys[0])
    assert counts["pair"] == 2 * links
    assert counts["rate"] == 2 + 2
    assert counts["overlap"] % 3 == 0  # ratios; fewer kinds of sends than of collectives
    steps = [said.step for said in swept[0][1] if isinstance(said, Progress)]
    assert steps == sorted(steps)
    assert set(steps) == set(range(swept[0][1][-1].steps))


def test_pairs_are_timed_over_as_few_channels_as_training_gives_its_edges(monkeypatch):
    """On a stand-in for NCCL's options: no GPU is here."""
    stand_in = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(min_ctas=None, max_ctas=None)))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", stand_in, raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    asked = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, pg_options: asked.append((tuple(ranks), pg_options)))
    groups = ProcessGroups(torch.device("cuda", 0))
    groups.pair(((0, 1),))
    groups.mine(((0, 1, 2),))
    (pair, edge), (whole, usual) = asked
    assert (pair, whole, usual) == ((0, 1), (0, 1, 2), None)
    assert (edge.config.min_ctas, edge.config.max_ctas) == (EDGE_CHANNELS, EDGE_CHANNELS)
