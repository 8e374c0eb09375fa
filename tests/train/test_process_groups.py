"""The groups of a plan: made, used first and destroyed in one order on all ranks, and counted from the plan."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from context_plans import with_context
from forked_ranks import run_worker
from random_plans import bare_plan, random_plan, uneven_plan
from tiny_models import tiny

from shardwright.io import write_document
from shardwright.launch.heartbeat import RankFiles
from shardwright.plan.group_names import described_ranks
from shardwright.plan.process_groups import EDGE_CHANNELS, PlannedGroup, Purpose, communicators, process_groups
from shardwright.types import Plan, Plans
from shardwright_train.parallel import world as world_module
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import joined_world
from shardwright_train.torch_private import FakeStore

TIED = tiny("llama", tie_word_embeddings=True)
RANKS = 4


def plans(half: int | None = None) -> list[Plan]:
    """Every kind of parallelism, redistribution, tied parameters, stages of equal and other width."""
    numbers = range(8) if half is None else range(half, 8, 2)
    drawn = [random_plan(TIED, number, RANKS) for number in numbers]
    others = [random_plan(tiny("t5"), 2, RANKS), uneven_plan(TIED, 1, RANKS), bare_plan(TIED, 3, RANKS)]
    others.append(with_context(random_plan(TIED, 5, RANKS, stages=1), 5))
    some = [*drawn, *(others if half != 1 else [])]
    return [msgspec.structs.replace(plan, name=f"{number}") for number, plan in enumerate(some)]


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.long)])
def half(request: pytest.FixtureRequest) -> int:
    """The part of the plans that is tried."""
    return int(request.param)


@pytest.fixture(scope="module")
def found(half: int, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """By rank and plan."""
    folder = tmp_path_factory.mktemp("groups")
    write_document(folder / "plans.json", Plans(plans=tuple(plans(half))))
    run_worker("groups_worker", [str(folder / "plans.json"), str(folder)], RANKS)
    return [json.loads((folder / f"{rank}.json").read_bytes()) for rank in range(RANKS)]


def test_four_ranks_destroy_their_groups_in_the_order_in_which_all_ranks_make_them(
    found: list[list[dict[str, Any]]],
) -> None:
    for of_rank in found:
        for of_plan in of_rank:
            assert of_plan["destroyed"] == of_plan["made"] == sorted(of_plan["made"], key=int) != []


def test_no_group_is_used_for_the_first_time_in_a_step(found: list[list[dict[str, Any]]]) -> None:
    for of_rank in found:
        for of_plan in of_rank:
            assert set(of_plan["used"]) == set(of_plan["warm"])
            assert of_plan["warm"] == sorted(of_plan["warm"], key=int), "one order on all ranks"
    assert any(of_plan["warm"] for of_rank in found for of_plan in of_rank)


def test_each_rank_has_the_groups_that_are_counted_from_the_plan(half: int, found: list[list[dict[str, Any]]]) -> None:
    for number, plan in enumerate(plans(half)):
        for rank, counted in enumerate(communicators(plan)):
            of_plan = found[rank][number]
            edges = counted[Purpose.EDGE]
            assert len(set(of_plan["messages"])) == edges
            assert len(set(of_plan["warm"])) == sum(counted.values()) - edges - counted[Purpose.WORLD]
    assert {purpose for plan in plans(0) for one in communicators(plan) for purpose in one} == {*Purpose} - {
        Purpose.ONE_RANK
    }


def _all_get_on(todo: Sequence[Sequence[PlannedGroup]]) -> bool:
    """Whether ranks that wait in each group of their lists for all its ranks come to the end."""
    lists = [list(groups) for groups in todo]
    while any(lists):
        ready = next((own[0] for own in lists if own and all(lists[r][:1] == [own[0]] for r in own[0].ranks)), None)
        if ready is None:
            return False
        for rank in ready.ranks:
            lists[rank].pop(0)
    return True


@pytest.mark.parametrize("world_size", [4, 8])
def test_ranks_that_wait_in_every_group_get_on_in_the_order_of_the_plan(world_size: int) -> None:
    stuck = 0
    for number in range(60):
        plan = random_plan(tiny(("llama", "t5")[number % 2]), number, world_size)
        lists = [[group for group in process_groups(plan) if rank in group.ranks] for rank in range(world_size)]
        assert _all_get_on(lists), plan.name
        stuck += not _all_get_on([own[::-1] if rank % 2 else own for rank, own in enumerate(lists)])
    assert stuck > 30, "an order of each rank's own is seen to wait for ever"


def test_the_description_of_a_group_says_its_ranks() -> None:
    every = [group for plan in plans() for group in process_groups(plan)]
    assert [described_ranks(group.description) for group in every] == [group.ranks for group in every]
    assert described_ranks("undefined") == ()
    assert Counter(map(len, map(process_groups, plans()))) == Counter(
        len({group.description for group in process_groups(plan)}) for plan in plans()
    )


def test_edges_alone_get_few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for NCCL's options: no GPU is here."""
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(min_ctas=None, max_ctas=None)))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(Groups, "_warm_up", lambda *_: None)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(dist, "new_group", lambda _, group_desc, pg_options: asked.update({group_desc: pg_options}))
    plan = next(plan for plan in plans() if len(plan.stages) == 2)
    Groups("cuda").prepare(plan)
    for group in process_groups(plan):
        given = asked[group.description]
        if group.purpose is Purpose.EDGE:
            assert (given.config.min_ctas, given.config.max_ctas) == (EDGE_CHANNELS, EDGE_CHANNELS)
        else:
            assert given is None
    Groups("cpu").prepare(plan)
    assert set(asked.values()) == {None}


@pytest.mark.parametrize(("device_type", "bound"), [("cpu", None), ("cuda", torch.device("cuda", 0))])
def test_nccl_is_told_the_device_of_its_rank(
    device_type: str, bound: torch.device | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stand-ins: no GPU is here."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in (place | RankFiles.of_rank(tmp_path, 0).environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world_module, "_device", lambda kind, rank: torch.device(kind, rank))
    told: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **asked: told.update(asked))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with joined_world(device_type):
        assert told["device_id"] == bound


def test_a_group_of_all_ranks_of_a_fake_world_is_looked_up_not_made() -> None:
    plan = plans()[0]
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    try:
        groups = Groups("cpu")
        groups.prepare(plan)
        before = dict(dist.distributed_c10d._world.pg_names)
        for strategy in dict.fromkeys(plan.layers):
            mesh = groups.mesh(plan, strategy)
            assert mesh["tp"].get_group() is not None
        assert dist.distributed_c10d._world.pg_names == before
        assert all(first < second for first, second in pairwise(map(int, before.values())))
    finally:
        dist.destroy_process_group()
