"""Budgets of a request, and requests that are refused."""

from pathlib import Path

import msgspec
import pytest
from made_up import make_request
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import GIB
from shardwright.types.cluster import Cluster, NodeGroup, NodeType
from shardwright_search.search import Infeasible, SearchAnswer
from shardwright_search.space.budget import budgets_of

FILE = Path("s.json")


def two_types(make) -> Cluster:
    small = NodeType(device="cpu", devices_per_node=2, memory_bytes=GIB)
    return Cluster(
        name="two",
        nodes=(NodeGroup(node_type="small", count=1), NodeGroup(node_type="large", count=1)),
        node_types={"small": small, "large": replace(small, memory_bytes=2 * GIB), "unused": small},
    )


def test_budgets_are_told_for_each_node_type_less_the_reserve(make):
    cluster = two_types(make)
    plain = make.request()
    assert budgets_of(plain, cluster, FILE) == {"small": GIB, "large": 2 * GIB}
    one = replace(plain, memory_gib=0.5, reserve_gib=0.25)
    assert budgets_of(one, cluster, FILE) == {"small": GIB // 4, "large": GIB // 4}
    some = replace(plain, memory_gib={"large": 1.5}, reserve_gib=0.25)
    assert budgets_of(some, cluster, FILE) == {"small": GIB * 3 // 4, "large": GIB * 5 // 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_gib": {"huge": 1.0}}, "memory_gib names node type 'huge', cluster two has small, large"),
        ({"memory_gib": {"unused": 1.0}}, "memory_gib names node type 'unused'"),
        ({"memory_gib": 1.5}, "memory_gib 1.5 is more than a device has, 1"),
        ({"memory_gib": 0.5, "reserve_gib": 0.5}, "reserve_gib 0.5 leaves nothing"),
    ],
)
def test_budgets_that_no_device_has_are_refused(make, changes, message):
    with pytest.raises(BadInput) as caught:
        budgets_of(replace(make.request(), **changes), two_types(make), FILE)
    assert str(caught.value).startswith(f"s.json: {message}")


def test_a_reserve_is_left_free(searched):
    whole = searched(memory_gib=2**20 / GIB)
    assert isinstance(whole, Infeasible)
    budget = whole.min_bytes / GIB
    assert isinstance(searched(memory_gib=budget + 0.25, reserve_gib=0.25), SearchAnswer)
    short = searched(memory_gib=budget + 0.25, reserve_gib=0.25 + 2**10 / GIB)
    assert isinstance(short, Infeasible) and short.missing_bytes == 2**10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": [3]}, "num_microbatches: 3 does not divide any global_batch_size"),
        ({"pp_sizes": [3]}, "pp_sizes: 3 does not divide the number of devices, 4"),
        ({"tp_sizes": [8]}, "tp_sizes: 8 does not divide the number of devices, 4"),
        ({"stage_widths": [[2, 1]]}, "stage_widths: [2, 1] are 3 ranks, the cluster has 4 devices: list widths"),
        ({"stage_widths": [[3, 1]], "fine_grained": False}, "stage_widths: [3, 1], but one strategy for all layers"),
        ({"stage_widths": [[3, 1]], "schedules": ["interleaved_1f1b"]}, "stage_widths: [3, 1], but interleaved stages"),
        ({"stage_widths": [[3, 1]], "tp_sizes": [2]}, "tp_sizes: 2 does not divide any of stage_widths"),
        ({"stage_widths": [[3, 1]], "pp_sizes": [1]}, "pp_sizes: no stage_widths are of 1 stages"),
        ({"stage_widths": "any", "pp_sizes": [5]}, "pp_sizes: 5 is more than the number of devices, 4"),
        ({"stage_widths": "any", "tp_sizes": [5]}, "tp_sizes: 5 does not divide the number of devices, 4"),
        ({"global_batch_size": 1, "tp_sizes": [1], "pp_sizes": [1]}, "no strategy divides"),
        ({"schedules": ["interleaved_1f1b"], "pp_sizes": [1]}, "no strategy divides"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_in_one_line(searched, changes, message):
    with pytest.raises(BadInput) as caught:
        searched(**changes)
    assert str(caught.value).startswith(f"s.json: {message}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": {"min": 8, "max": 4, "step": 1}}, "min 8 is above max 4"),
        ({"global_batch_size": {"min": 1, "max": 2**31 - 1, "step": 1}}, "more than 10000 sizes: take a larger step"),
        (
            {"global_batch_size": {"min": 4, "max": 8, "step": 4}, "objective": "step_time"},
            "objective step_time needs one global_batch_size, not a range",
        ),
        ({"memory_gib": {}}, "length >= 1 - at `..memory_gib`"),
        ({"memory_gb": 3}, "unknown field `memory_gb`"),
        ({"embedding": {"tp_size": [1]}}, "unknown field `tp_size`"),
        ({"space": "4d"}, "Invalid enum value '4d'"),
        ({"chunks_per_stage": []}, "length >= 1"),
        ({"reserve_gib": -1}, ">= 0"),
    ],
)
def test_a_request_that_says_what_it_cannot_is_no_request(changes, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        make_request(**changes)
