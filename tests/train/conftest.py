"""A tiny Llama, random valid plans for it, and one launch that compares many plans with one process."""

from collections.abc import Callable, Iterator

import pytest
import random_plans
import run_parity
import torch
import torch.distributed as dist
from forked_ranks import run_worker
from tiny_models import tiny

from shardwright.types import Model, Plan
from shardwright_train.parallel.world import World

PlanMaker = Callable[..., Plan]
Errors = dict[str, dict[str, float]]


@pytest.fixture(scope="session")
def tiny_model() -> Model:
    return tiny("llama")


@pytest.fixture(scope="session")
def random_plan(tiny_model: Model) -> PlanMaker:
    """A plan for the tiny Llama, drawn by number."""

    def make(number: int, world_size: int, dtype: str = "float64", stages: int | None = None) -> Plan:
        return random_plans.random_plan(tiny_model, number, world_size, dtype, stages)

    return make


@pytest.fixture(scope="session")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Errors]:
    """Largest error of loss, gradients, norm and parameters after three steps, by plan; one launch for all.

    The last plan is compared once more under each mutation, under the mutation's name.
    """

    def run(plans: list[Plan], mutations: tuple[str, ...] = ()) -> Errors:
        return run_parity.compare(plans, tmp_path_factory.mktemp("parity"), run_worker, mutations)

    return run


@pytest.fixture
def one_rank() -> Iterator[World]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), "gloo", heartbeat=None)  # type: ignore[arg-type]
    dist.destroy_process_group()
