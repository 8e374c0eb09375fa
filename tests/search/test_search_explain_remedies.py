"""What the line of an infeasible request promises: each remedy makes the search succeed; a step less does not."""

import re

import pytest
from msgspec.structs import replace
from random_requests import FILE, World, random_world
from rest_long import rest_long

from shardwright.io import BadInput
from shardwright.types import GIB
from shardwright_search.explain.what_if import further_remedies, remedies
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.budget import Infeasible, budgets_of
from shardwright_search.space.configurations import divisors
from shardwright_search.space.request import BatchRange, batch_sizes


def answer(world: World):
    try:
        return find_best(world.request, world.model, world.cluster, world.profiles, FILE, lambda _: None)
    except BadInput as error:
        return error


def changed(world: World, **changes: object) -> World:
    return world._replace(request=replace(world.request, **changes))


def with_nodes(world: World, count: int) -> World:
    (group,) = world.cluster.nodes
    return world._replace(cluster=replace(world.cluster, nodes=(replace(group, count=count),)))


@pytest.fixture
def lacking(make) -> World:
    """A batch and a node too few; the hardware profile covers four nodes."""
    model, cluster = make.model(4), make.cluster(2)
    profiles = make.profiles(model, cluster, make.hardware(make.cluster(8, nodes=4)))
    return World(make.request(memory_gib=1.9 / 1024), model, cluster, profiles)


def promised(world: World) -> str:
    found = answer(world)
    assert isinstance(found, Infeasible)
    return found.reason + further_remedies(*world[:4], FILE)


def test_the_line_names_stage_bytes_and_every_remedy(lacking):
    line, found = promised(lacking), remedies(*lacking[:4], FILE)
    assert "\n" not in line
    pattern = (
        r"no plan fits: even the leanest \(batch 8, .*\) exceeds the budget by (\d+) bytes a rank in pipeline "
        r"stage \d+: "
        r"raise memory_gib to at least (\S+), or lower global_batch_size to (\d+), the largest divisor that fits, "
        r"or take (\d+) nodes of n"
    )
    missing, gib, batch, nodes = re.fullmatch(pattern, line).groups()
    assert (int(batch), int(nodes)) == found
    assert found.nodes == 2 and isinstance(answer(with_nodes(lacking, 2)), SearchAnswer)
    budget = budgets_of(lacking.request, lacking.cluster, FILE)["n"]
    assert isinstance(answer(changed(lacking, memory_gib=(budget + int(missing)) / GIB)), SearchAnswer)
    assert isinstance(answer(changed(lacking, memory_gib=(budget + int(missing) - 1) / GIB)), Infeasible)
    assert isinstance(answer(changed(lacking, memory_gib=float(gib))), SearchAnswer)
    assert isinstance(answer(changed(lacking, memory_gib=float(gib) - 2e-6)), Infeasible)


def test_a_batch_that_is_promised_fits_and_the_next_divisor_does_not(lacking):
    size = remedies(*lacking[:4], FILE).global_batch_size
    sizes = divisors(8)
    assert isinstance(answer(changed(lacking, global_batch_size=size)), SearchAnswer)
    assert isinstance(answer(changed(lacking, global_batch_size=sizes[sizes.index(size) + 1])), Infeasible)


def test_nodes_that_are_promised_are_enough_and_one_less_is_not(make):
    """Of three nodes the devices do not divide the batch and the heads."""
    model, cluster = make.model(8), make.cluster(1)
    profiles = make.profiles(model, cluster, make.hardware(make.cluster(8, nodes=8)))
    world = World(make.request(tp_sizes=[1], pp_sizes=[1], memory_gib=1.9 / 1024), model, cluster, profiles)
    nodes = remedies(*world[:4], FILE).nodes
    assert nodes is not None and nodes > 2
    assert isinstance(answer(with_nodes(world, nodes)), SearchAnswer)
    for fewer in range(2, nodes):
        assert not isinstance(answer(with_nodes(world, fewer)), SearchAnswer)


def test_what_does_not_help_is_not_promised(lacking, make):
    tiny = changed(lacking, memory_gib=1.01 / 1024)
    assert remedies(*tiny[:4], FILE) == (None, None)
    assert promised(tiny).endswith(f"raise memory_gib to at least {promised(tiny).rsplit(' ', 1)[1]}")
    narrow = lacking._replace(profiles=make.profiles(lacking.model, lacking.cluster))
    assert remedies(*narrow[:4], FILE).nodes is None and " nodes" not in promised(narrow)
    listed = changed(lacking, num_microbatches=(8,))
    assert remedies(*listed[:4], FILE).global_batch_size is None
    assert isinstance(answer(changed(listed, global_batch_size=1)), BadInput)


def test_of_a_range_the_smallest_batch_is_divided(lacking):
    batches = changed(lacking, global_batch_size=BatchRange(min=8, max=16, step=8))
    assert remedies(*batches[:4], FILE) == remedies(*lacking[:4], FILE)


def test_more_memory_than_a_device_has_is_told_as_larger_devices(make):
    """memory_gib above the device's memory is refused, so raising it is no remedy."""
    model = make.model(4)
    cluster = make.cluster(2, memory_bytes=1_900_000)
    world = World(make.request(), model, cluster, make.profiles(model, cluster))
    line = promised(world)
    gib = float(re.search(r"take devices of at least (\S+) GiB", line).group(1).rstrip(","))
    for size, kind in ((gib, SearchAnswer), (gib - 2e-6, Infeasible)):
        machines = make.cluster(2, memory_bytes=int(size * GIB))
        assert isinstance(answer(world._replace(cluster=machines)), kind)


def test_what_is_left_free_and_corrected_memory_are_counted(lacking):
    for world in (
        changed(lacking, reserve_gib=0.1 / 1024),
        lacking._replace(profiles=lacking.profiles._replace(memory_factor=1.25)),
        changed(lacking, megatron_gather_buffer=True),
    ):
        found = answer(world)
        gib = float(re.search(r"raise memory_gib to at least (\S+)", found.reason).group(1))
        assert isinstance(answer(changed(world, memory_gib=gib)), SearchAnswer)
        assert isinstance(answer(changed(world, memory_gib=gib - 2e-6)), Infeasible)


@pytest.mark.parametrize("num_microbatches", [None, (4,)])
def test_what_chunks_need_is_told_by_the_byte_and_only_what_a_search_finds_is_promised(make, num_microbatches):
    model, cluster = make.model(8), make.cluster(2)
    request = make.request(schedules=["interleaved_1f1b"], num_microbatches=num_microbatches)
    world = World(request, model, cluster, make.profiles(model, cluster, make.hardware(make.cluster(8, nodes=4))))
    found = answer(changed(world, memory_gib=1.2 / 1024))
    assert found.exact and "raise memory_gib to at least" in found.reason
    bound = changed(world, memory_gib=(found.min_bytes - 1) / GIB)
    assert isinstance(answer(bound), Infeasible) and answer(bound).missing_bytes == 1
    assert isinstance(answer(changed(world, memory_gib=found.min_bytes / GIB)), SearchAnswer)
    batch, nodes = remedies(*bound[:4], FILE)
    smaller = [size for size in (1, 2, 4) if isinstance(answer(changed(bound, global_batch_size=size)), SearchAnswer)]
    assert batch == max(smaller, default=None)
    assert nodes is not None and isinstance(answer(with_nodes(bound, nodes)), SearchAnswer)


@pytest.mark.parametrize("block", rest_long(1, range(6)))
def test_promises_hold_for_random_requests(block):
    kept = 0
    for seed in range(2 * block, 2 * block + 2):
        world = random_world(seed, devices=(2, 4), most_layers=4)
        none = answer(changed(world, memory_gib=2**20 / GIB))
        assert isinstance(none, Infeasible)
        for share in (0.97, 0.8):
            gib = (2**20 + share * (none.min_bytes - 2**20)) / GIB
            tight = changed(world, memory_gib=gib)
            assert isinstance(answer(tight), Infeasible)
            batch, nodes = remedies(*tight[:4], FILE)
            if batch is not None:
                sizes = divisors(min(batch_sizes(tight.request)))
                assert isinstance(answer(changed(tight, global_batch_size=batch)), SearchAnswer), seed
                following = sizes[sizes.index(batch) + 1]
                assert not isinstance(answer(changed(tight, global_batch_size=following)), SearchAnswer), seed
                kept += 1
            assert nodes is None  # the made-up hardware profile covers the cluster as it is
    assert kept > 0
