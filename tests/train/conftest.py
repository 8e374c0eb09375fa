"""A tiny Llama, random valid plans for it, and one launch that compares many plans with one process."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import random_plans
from tiny_models import tiny

from shardwright_formats.files import write_document
from shardwright_formats.model import Model
from shardwright_formats.plan import Plan, Plans
from shardwright_train.launch import Nodes, launch

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
        folder = tmp_path_factory.mktemp("parity")
        plans_file, result = folder / "plans.json", folder / "errors.json"
        write_document(plans_file, Plans(plans=tuple(plans)))
        command = [sys.executable, str(Path(__file__).with_name("parity_worker.py")), str(plans_file), str(result)]
        launch([*command, *mutations], plans[0].world_size, 0, plans[0].world_size, Nodes())
        errors: Errors = json.loads(result.read_bytes())
        return errors

    return run
