"""An evaluation under any plan comes to the loss of one process, and leaves the training to the bit as it is."""

import json
from pathlib import Path

import msgspec
import pytest
from context_plans import with_context
from evaluation_worker import MUTATIONS
from forked_ranks import run_worker
from random_plans import bare_plan, random_plan, uneven_plan
from rest_long import rest_long
from several_chunks import in_chunks
from tiny_models import CONFIGS, tiny

from shardwright.io import write_document
from shardwright.types import DataParallel, Model, Plan, Plans, Schedule

TOLERANCE = 1e-10
_DROPOUT = {
    "gpt2": dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.2),
    "bert": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.2),
    "t5": {"dropout_rate": 0.2},
}
MODELS = {family: tiny(family, **_DROPOUT.get(family, {})) for family in CONFIGS}
_ON_FOUR = [MODELS[family] for family in ("llama", "qwen3", "gpt2", "bert", "t5")]
_KINDS = ("llama", "gemma2", "bert", "t5", "swin", "whisper", "llava", "mixtral", "deepseek_v3")
"""Families of every kind of data and head, which `make test` evaluates."""
PARTS = ("two", "two again", "four")
"""Numbers of ranks."""
Errors = dict[str, dict[str, float]]


def _numbered(models: list[Model], first: int, world_size: int) -> list[Plan]:
    return [random_plan(model, first + number, world_size) for number, model in enumerate(models)]


def plans_on(part: str) -> list[Plan]:
    """On two ranks one of each family; ten on four with stages of unequal width and chunks without blocks.

    The last of the first on two ranks has dropout.
    """
    if part == "four":
        return _on_four()
    drawn = zip(MODELS, _numbered([*MODELS.values()], 40, 2), strict=True)
    plans = [plan for family, plan in drawn if (family in _KINDS) == (part == "two")]
    if part == "two again":
        return plans
    shared = with_context(random_plan(MODELS["llama"], 42, 2, stages=1), 42)
    shared = msgspec.structs.replace(shared, name="context")
    return [*plans, random_plan(MODELS["llama"], 50, 2), shared, random_plan(MODELS["gpt2"], 60, 2)]


def _on_four() -> list[Plan]:
    uneven = [uneven_plan(model, number, 4) for number, model in enumerate(_ON_FOUR[2:])]
    bare = [bare_plan(model, number, 4) for number, model in enumerate(_ON_FOUR[:2])]
    context = [with_context(random_plan(tiny(family), 71, 4, stages=1), 71) for family in ("llama", "bert")]
    context = [msgspec.structs.replace(plan, name=f"context {plan.name}") for plan in context]
    turning = [in_chunks(random_plan(_ON_FOUR[0], 73, 4, stages=4), each) for each in (Schedule.V_HALF, Schedule.V_MIN)]
    return [*_numbered(_ON_FOUR, 70, 4), *uneven, *bare, *context, *turning]


def _compared(part: str, folder: Path, mutations: tuple[str, ...] = ()) -> Errors:
    plans_file, result = folder / "plans.json", folder / "errors.json"
    plans = plans_on(part)
    write_document(plans_file, Plans(plans=tuple(plans)))
    run_worker("evaluation_worker", [str(plans_file), str(result), *mutations], plans[0].world_size)
    errors: Errors = json.loads(result.read_bytes())
    return errors


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    return _compared("two", tmp_path_factory.mktemp("two"), tuple(MUTATIONS))


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Plan], Errors]:
    """The plans of a part and what was seen of them."""
    part: str = request.param
    in_part = request.getfixturevalue("two") if part == "two" else _compared(part, tmp_path_factory.mktemp("part"))
    return plans_on(part), in_part


@pytest.mark.parametrize("compared", rest_long(1, PARTS), indirect=True)
def test_plans_evaluate_as_one_process(compared: tuple[list[Plan], Errors]) -> None:
    plans, errors = compared
    exact = {plan.name: max(errors[plan.name]["loss"], errors[plan.name]["labels"]) for plan in plans}
    assert len(exact) == len(plans)
    assert {name: error for name, error in exact.items() if error > TOLERANCE} == {}


@pytest.mark.parametrize("compared", rest_long(1, PARTS), indirect=True)
def test_an_evaluation_leaves_training_as_it_is_and_nothing_behind(compared: tuple[list[Plan], Errors]) -> None:
    plans, errors = compared
    trained = [errors[plan.name]["training"] for plan in plans if "training" in errors[plan.name]]
    assert {errors[plan.name]["left"] for plan in plans} == {0} and len(trained) >= 5 and set(trained) == {0}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_evaluation_is_seen(two: Errors, mutation: str) -> None:
    assert two[mutation]["loss"] > 1e-6


def test_the_evaluated_plans_cover_schedules_and_data_parallelism() -> None:
    plans = [plan for part in PARTS for plan in plans_on(part)]
    # A forward pass is the same whether backward passes are split; a V has another order.
    joint = {schedule for schedule in Schedule if not schedule.splits}
    assert {plan.schedule for plan in plans} == {*joint, Schedule.V_HALF, Schedule.V_MIN}
    assert {layer.data_parallel for plan in plans for layer in plan.layers if layer.dp_size > 1} == set(DataParallel)
    assert any(len({len(stage.ranks) for stage in plan.stages}) > 1 for plan in plans)
    assert {plan.model.family for plan in plans} == set(CONFIGS)
