"""Sums over a tensor-parallel group are taken where their terms lie."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_train.parallel.collectives import copy_to_group, sum_over_group
from shardwright_train.torch_private import FakeStore


@pytest.fixture
def two_ranks() -> Iterator[dist.ProcessGroup]:
    """A group of this process and one that is not there, so that a sum is what this process has of it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_sum_takes_no_memory_beside_its_term_in_either_pass(two_ranks: dist.ProcessGroup) -> None:
    places: list[int] = []

    def noted(gradient: Tensor) -> None:
        places.append(gradient.data_ptr())

    weight = torch.ones(3, 4, requires_grad=True)
    product = weight * 2.0
    total = sum_over_group(product, two_ranks)
    assert total.data_ptr() == product.data_ptr()
    entering = copy_to_group(total, two_ranks)
    entering.register_hook(noted)
    total.register_hook(noted)
    (entering * 3.0).sum().backward()
    assert places[0] == places[1]
    assert torch.equal(weight.grad, torch.full((3, 4), 6.0))
