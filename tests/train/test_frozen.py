"""Models of which parts are frozen train exactly as one process does, and move and hold what formulas say."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from forked_ranks import run_worker
from frozen_models import FROZEN, frozen_model, frozen_plan, lora_plan
from rest_long import rest_long
from run_parity import TOLERANCE
from run_resumes import TOLERANCE as RESUMED
from run_resumes import resumed, saved
from test_train_traffic import by_formula, counted

from shardwright.plan.communication import Cause, step_messages
from shardwright.plan.schedules.passes import Pass
from shardwright.types import DataParallel, PipelineStage, Plan, Schedule
from shardwright.types.hardware_profile import Collective
from shardwright_search.cost_model.parameters import parameter_memory
from shardwright_train.dry_run import simulate_step
from shardwright_train.models.base import family_named

Errors = dict[str, dict[str, float]]
pytestmark = pytest.mark.timeout(900)
MORE = {2: range(10, 15), 4: range(4)}
"""Numbers of the plans of `make test-long`, by the number of ranks."""


@pytest.fixture(scope="module")
def two_ranks(compare: Callable[..., Errors]) -> Errors:
    return compare([frozen_plan(name, number, 2) for number, name in enumerate(FROZEN)])


@pytest.fixture(scope="module")
def more_plans(compare: Callable[..., Errors], every: int) -> Errors:
    found: Errors = {}
    for world_size, numbers in MORE.items():
        found |= compare([frozen_plan(name, number, world_size) for number in numbers[::every] for name in FROZEN])
    return found


@pytest.mark.parametrize("name", FROZEN)
def test_a_model_with_frozen_parts_trains_exactly_as_one_process(two_ranks: Errors, name: str) -> None:
    (errors,) = (errors for plan, errors in two_ranks.items() if plan.startswith(name))
    assert max(errors.values()) < TOLERANCE


@pytest.mark.long
def test_more_plans_and_ranks_train_exactly_as_one_process(more_plans: Errors, every: int) -> None:
    assert len(more_plans) == sum(len(numbers[::every]) for numbers in MORE.values()) * len(FROZEN)
    assert {name: errors for name, errors in more_plans.items() if max(errors.values()) > TOLERANCE} == {}


@pytest.mark.long
def test_what_a_plan_with_frozen_parts_saves_other_plans_go_on_from(tmp_path: Path) -> None:
    frozen = [frozen_plan("all but the last two", number, 2) for number in range(3)]
    adapted = [lora_plan("queries and values", number, 2) for number in range(3)]
    for plans in (frozen, adapted):
        same = [msgspec.structs.replace(plan, global_batch_size=16, num_microbatches=2) for plan in plans]
        told = saved(tmp_path / same[0].name[:4], run_worker, same[:1])
        found = list(resumed(tmp_path / same[0].name[:4], run_worker, same[1:], told))
        assert len(found) == 2 and max(one.error for one in found) < RESUMED


@pytest.mark.parametrize("name", rest_long(4, FROZEN))
def test_frozen_parts_move_the_bytes_of_their_formula(name: str) -> None:
    plan = frozen_plan(name, 1, 4)
    assert counted(plan, 3) == by_formula(plan, 3)


@pytest.mark.long
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", FROZEN)
def test_many_plans_with_frozen_parts_move_the_bytes_of_their_formula(name: str, number: int) -> None:
    plan = frozen_plan(name, number, 4)
    seen, formula = counted(plan, 0), by_formula(plan, 0)
    if name == "the encoder":  # formulas count gradients of its states where a decoder's layers change the layout
        for key in [key for key in formula if Collective.ALL_TO_ALL in key]:
            assert seen.pop(key, 0) <= formula.pop(key)
    if name == "a vision tower":  # they count it as passing on a gradient, for embeddings of texts beside it have one
        assert seen.keys() <= formula.keys() and all(seen[key] <= formula[key] for key in seen)
        return
    assert seen == formula


def _staged(name: str) -> Plan:
    """Two stages of two layers, all of them replicated."""
    plan = frozen_plan(name, 0, 2, widths=(1, 1))
    stages = tuple(PipelineStage(ranks=(rank,), layers=((2 * rank, 2 * rank + 2),)) for rank in range(2))
    return msgspec.structs.replace(plan, stages=stages, schedule=Schedule.ONE_F_ONE_B, num_microbatches=8)


def test_nothing_goes_back_to_layers_before_all_that_is_trained() -> None:
    plan = _staged("all but the last two")
    passes = {(m.cause, m.during) for rank in range(2) for m in step_messages(plan, rank)}
    assert (Cause.PIPELINE, Pass.FORWARD) in passes and (Cause.PIPELINE, Pass.BACKWARD) not in passes
    frozen, trained = (simulate_step(plan, rank, family_named("llama", "test"), "sdpa") for rank in range(2))
    assert frozen.gradients_bytes == frozen.optimizer_bytes == 0 < trained.optimizer_bytes
    ends = [size for (event, _), size in frozen.resident_bytes.items() if event == "forward.end"]
    (output,) = plan.model.boundary
    output_bytes = plan.microbatch_samples * output.sequence_length * output.features * 8
    # Two outputs on their way and the tokens are all that is there beside the parameters.
    assert len(ends) == 8
    assert 2 * output_bytes < max(ends) - frozen.parameters_bytes < 3 * output_bytes


@pytest.mark.parametrize("data_parallel", list(DataParallel))
def test_memory_of_states_counts_what_is_trained(data_parallel: DataParallel) -> None:
    model = frozen_model("a stretch")
    plan = frozen_plan("a stretch", 0, 2, widths=(2,))
    strategy = msgspec.structs.replace(plan.head, tp_size=1, dp_size=2, data_parallel=data_parallel, shard_size=0)
    layers = tuple(
        msgspec.structs.replace(layer, **{f: getattr(strategy, f) for f in strategy.__struct_fields__})
        for layer in plan.layers
    )
    plan = msgspec.structs.replace(plan, embedding=strategy, head=strategy, layers=layers, num_microbatches=2)
    step = simulate_step(plan, 0, family_named("vit", "test"), "sdpa")
    deferred = plan.gradient_reduction.value == "deferred"
    memory = [
        parameter_memory(model.types[kind], strategy, plan.precision, deferred=deferred)
        for kind in ("embedding", *model.layers, "head")
    ]
    assert step.parameters_bytes == sum(each.parameters for each in memory)
    # Beside the moments there is the number of updates.
    assert 0 <= step.optimizer_bytes - sum(each.optimizer for each in memory) < 1024
    assert memory[2].optimizer == memory[2].gradients == 0 < memory[1].gradients
