"""An evaluation under any plan comes to the loss of one process, and leaves the training to the bit as it is."""

import json
from pathlib import Path

import msgspec
import pytest
from context_plans import with_context
from evaluation_worker import MUTATIONS
from forked_ranks import run_worker
from random_plans import bare_plan, random_plan, uneven_plan
from tiny_models import CONFIGS, tiny

from shardwright_formats.io import write_document
from shardwright_formats.types import DataParallel, Model, Plan, Plans, Schedule

TOLERANCE = 1e-10
_DROPOUT = {
    "gpt2": dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.2),
    "bert": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.2),
    "t5": {"dropout_rate": 0.2},
}
MODELS = {family: tiny(family, **_DROPOUT.get(family, {})) for family in CONFIGS}
_FIRST = [MODELS[family] for family in ("llama", "qwen3", "gpt2", "bert", "t5")]
Errors = dict[str, dict[str, float]]


def _numbered(models: list[Model], first: int, world_size: int) -> list[Plan]:
    return [random_plan(model, first + number, world_size) for number, model in enumerate(models)]


def plans_on(world_size: int) -> list[Plan]:
    """One of each family on two ranks, and ten on four with stages of unequal width and chunks without blocks.

    The last on two ranks has dropout.
    """
    if world_size == 2:
        shared = with_context(random_plan(MODELS["llama"], 42, 2, stages=1), 42)
        shared = msgspec.structs.replace(shared, name="context")
        once_more = [random_plan(MODELS["llama"], 50, 2), shared, random_plan(MODELS["gpt2"], 60, 2)]
        return [*_numbered([*MODELS.values()], 40, 2), *once_more]
    uneven = [uneven_plan(model, number, 4) for number, model in enumerate(_FIRST[2:])]
    bare = [bare_plan(model, number, 4) for number, model in enumerate(_FIRST[:2])]
    context = [with_context(random_plan(tiny(family), 71, 4, stages=1), 71) for family in ("llama", "bert")]
    context = [msgspec.structs.replace(plan, name=f"context {plan.name}") for plan in context]
    return [*_numbered(_FIRST, 70, 4), *uneven, *bare, *context]


def _compared(world_size: int, folder: Path, mutations: tuple[str, ...] = ()) -> Errors:
    plans_file, result = folder / "plans.json", folder / "errors.json"
    write_document(plans_file, Plans(plans=tuple(plans_on(world_size))))
    run_worker("evaluation_worker", [str(plans_file), str(result), *mutations], world_size)
    errors: Errors = json.loads(result.read_bytes())
    return errors


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    return _compared(2, tmp_path_factory.mktemp("two"), tuple(MUTATIONS))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    return _compared(4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_plans_evaluate_as_one_process(request: pytest.FixtureRequest, world_size: int) -> None:
    found: Errors = request.getfixturevalue("two_ranks" if world_size == 2 else "four_ranks")
    exact = {plan.name: max(found[plan.name]["loss"], found[plan.name]["labels"]) for plan in plans_on(world_size)}
    assert len(exact) == len(plans_on(world_size))
    assert {name: error for name, error in exact.items() if error > TOLERANCE} == {}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_an_evaluation_leaves_training_as_it_is_and_nothing_behind(
    request: pytest.FixtureRequest, world_size: int
) -> None:
    found: Errors = request.getfixturevalue("two_ranks" if world_size == 2 else "four_ranks")
    errors = [found[plan.name] for plan in plans_on(world_size)]
    trained = [one["training"] for one in errors if "training" in one]
    assert {one["left"] for one in errors} == {0} and len(trained) >= 5 and set(trained) == {0}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_evaluation_is_seen(two_ranks: Errors, mutation: str) -> None:
    assert two_ranks[mutation]["loss"] > 1e-6


def test_the_evaluated_plans_cover_schedules_and_data_parallelism() -> None:
    plans = plans_on(2) + plans_on(4)
    assert {plan.schedule for plan in plans} == set(Schedule)
    assert {layer.data_parallel for plan in plans for layer in plan.layers if layer.dp_size > 1} == set(DataParallel)
    assert any(len({len(stage.ranks) for stage in plan.stages}) > 1 for plan in plans)
    assert {plan.model.family for plan in plans} == set(CONFIGS)
