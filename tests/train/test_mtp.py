"""Multi-token prediction: any plan trains it as one process does."""

from collections.abc import Callable

import msgspec
import pytest
from random_plans import random_plan
from run_parity import TOLERANCE
from tiny_models import tiny

from shardwright.models.mtp import with_mtp
from shardwright.types import Model, Plan

Errors = dict[str, dict[str, float]]
Compare = Callable[..., Errors]


def predicting(family: str, depths: int = 1, **changes: object) -> Model:
    return with_mtp(tiny(family, **changes), depths)


def _named(plan: Plan, name: str) -> Plan:
    return msgspec.structs.replace(plan, name=f"{name} {plan.name}")


def _on_two() -> list[Plan]:
    models = {"v3": predicting("deepseek_v3"), "dense": predicting("llama", 2), "tied": predicting("llama", tie_word_embeddings=True)}
    return [_named(random_plan(model, number, 2), name) for name, model in models.items() for number in range(4)]


@pytest.fixture(scope="module")
def two_ranks(compare: Compare) -> Errors:
    return compare(_on_two())


def test_plans_on_two_ranks_train_exactly_as_one_process(two_ranks: Errors) -> None:
    assert {name: found for name, found in two_ranks.items() if max(found.values()) > TOLERANCE} == {}
