"""Split backward passes: found by simulation behind the best plan of the other schedules, priced, refused by name."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.estimate.weight_passes import NO_WEIGHT_PASS, WeightPass, weight_pass
from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.types import DataParallel, GradientReduction, Precision, Schedule, Strategy
from shardwright.types.plan import Attention
from shardwright_search.commands.prediction import plan_summary, prediction_of_searched
from shardwright_search.cost_model import stage_costs
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import System, UniformRequest
from shardwright_search.search import find_best
from shardwright_search.space import stage_prices
from shardwright_search.space.configurations import configurations
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan

F1B, SPLIT = Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE
LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def world(make, monkeypatch):
    """A made-up model, of whose backward passes weight passes take two fifths, on two devices."""

    def made(deferred_bytes: int = 1000):
        block = WeightPass(0.4, deferred_bytes)
        for module in (stage_costs, stage_prices):
            monkeypatch.setattr(
                module, "weight_pass", lambda model, name, *_: block if name == "block" else NO_WEIGHT_PASS
            )
        model, cluster = make.model(4), make.cluster(2)
        return model, cluster, make.profiles(model, cluster)

    return made


def searched(make, world, *schedules: Schedule, **changes: object):
    asked = replace(make.request(num_microbatches=[4], pp_sizes=[2]), schedules=schedules, **changes)
    return asked, find_best(asked, *world, Path("s.json"), lambda line: None)


def test_the_plan_is_shorter_by_simulation_and_what_is_proven_of_it_is_told(make, world) -> None:
    given = world()
    _, plain = searched(make, given, F1B)
    asked, found = searched(make, given, F1B, SPLIT)
    plan, estimate = found.chosen.plan, found.chosen.evaluation.estimate
    assert plan.schedule is SPLIT and found.split > 0
    assert estimate.simulated_step_time_s < 0.95 * plain.chosen.evaluation.estimate.simulated_step_time_s
    # What is proven is of the other schedules, and stays.
    assert (found.optimum_s, found.bound_s) == (plain.optimum_s, plain.bound_s)
    same = evaluate(replace(plain.chosen.plan, schedule=SPLIT), given[2]).estimate
    assert estimate.simulated_step_time_s <= same.simulated_step_time_s
    assert estimate.simulated_lower_bound_s <= estimate.simulated_step_time_s
    prediction = prediction_of_searched(found, asked, (1 << 30,) * 2, {})
    assert "schedules 1f1b;" in prediction.proof.scope
    assert f"of {found.split} plans found within 10% of the optimum" in prediction.proof.scope
    assert (
        prediction.proof.scope.endswith(", proven") and "under zero_bubble was taken; no plan" in prediction.proof.scope
    )
    assert 0 < prediction.proof.split_bound_s <= estimate.simulated_step_time_s
    lines = plan_summary(plan, prediction)
    assert any(line.startswith("found by simulation: zero_bubble") and line.endswith("proven") for line in lines)
    assert not any("proven optimal" in line for line in lines)
    assert any("estimated: the share of backward passes" in line for line in lines)


def test_passes_take_as_long_together_and_weight_passes_are_events(make, world) -> None:
    given = world()
    _, plain = searched(make, given, F1B)
    joint, split = (evaluate(replace(plain.chosen.plan, schedule=each), given[2]).estimate for each in (F1B, SPLIT))
    for one, other in zip(joint.stages, split.stages, strict=True):
        assert one.time_s == other.time_s
        terms, weight = other.time_terms_s, other.time_terms_s["weight"]
        assert one.time_terms_s["backward"] == pytest.approx(terms["backward"] + weight) and weight > 0
    weights = [event for event in split.timeline if event.kind == "weight"]
    assert sorted((event.stage, event.microbatch) for event in weights) == [(i, m) for i in range(2) for m in range(4)]


def test_a_plan_that_no_longer_fits_is_left_as_it_was(make, world) -> None:
    given = world(deferred_bytes=1 << 40)
    _, plain = searched(make, given, F1B)
    _, found = searched(make, given, F1B, SPLIT)
    assert found.chosen.plan == plain.chosen.plan and found.split > 0


@pytest.mark.parametrize(
    ("schedules", "changes", "problem"),
    [
        ((SPLIT,), {}, "zero_bubble is looked for behind the best plan of another schedule"),
        ((F1B, SPLIT), {"compile": True}, "zero_bubble splits backward passes, compiled ones are joint"),
        (
            (F1B, SPLIT),
            {"gradient_reduction": GradientReduction.EVERY_MICROBATCH},
            "zero_bubble sums gradients over a step",
        ),
    ],
)
def test_requests_that_cannot_be_answered_are_refused_by_name(make, schedules, changes, problem) -> None:
    with pytest.raises(BadInput, match=f"schedules: {problem}"):
        configurations(make.request(schedules=schedules, **changes), make.model(), make.cluster(), Path("s.json"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_systems_with_another_order_refuse_it_by_name(make, system) -> None:
    model = model_of_config(LLAMA, "m", 64, "config.json")
    compute = "bfloat16" if system is System.MEGATRON_BRIDGE else "float32"
    request = UniformRequest(
        global_batch_size=16, num_microbatches=4, pp_size=2, precision_compute=compute, data_parallel=DataParallel.ZERO2
    )
    plan = uniform_plan("mine", replace(request, schedule=SPLIT), model, make.cluster(4))
    with pytest.raises(BadInput, match=r"plan\.json: .* cannot express (the schedule zero_bubble|2 pipeline stages)"):
        SYSTEMS[system].export(plan, "plan.json")


def test_what_is_kept_are_inputs_once_and_gradients_of_outputs() -> None:
    """Of two samples of 64 positions in float32; ranks share outputs of the first and inputs of the second matrices."""
    model = model_of_config(LLAMA, "m", 64, "config.json")
    given = (2, Precision(), Attention.SDPA)
    queries, keys = 64, 32
    attention = (64 + queries + 2 * keys) + (queries + 64)
    feed_forward = (64 + 160 + 160) + (160 + 64)
    whole = weight_pass(model, "block", Strategy(tp_size=1, dp_size=1), *given)
    assert whole.deferred_bytes == 2 * 64 * 4 * (attention + feed_forward)
    wide = LLAMA | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    wide = model_of_config(wide, "m", 64, "config.json")
    of_wide = weight_pass(wide, "block", Strategy(tp_size=1, dp_size=1), 32, *given[1:]).share
    assert 0 < whole.share < 0.3 < of_wide < 0.5
    shared = 2 * 64 + (queries + 2 * keys + queries) // 2 + 64 + (3 * 160) // 2 + 64
    assert weight_pass(model, "block", Strategy(tp_size=2, dp_size=1), *given).deferred_bytes == 2 * 64 * 4 * shared
    assert weight_pass(model, "head", Strategy(tp_size=1, dp_size=1), *given) == NO_WEIGHT_PASS
