"""`shardwright advise` on GPUs of several types."""

import pytest

from shardwright.command.command_line import _exit_code
from shardwright.devices.utilization import model_flops_utilization
from shardwright.io import BadInput, read_document
from shardwright.types import Plan
from shardwright_search.advise.question import question_of
from shardwright_search.cli import APP
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions

GPUS = "2x8:A100-40+1x8:A10"


def _question(gpus=GPUS, **more):
    return question_of(AdviseOptions(model="gpt2-xl", gpus=gpus, batch=64, inter_node_gbit_s="100", **more))


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """The plan, and what was said."""
    out = tmp_path_factory.mktemp("mixed") / "plan.json"
    asked = ["advise", "gpt2-xl", "--gpus", GPUS, "--batch", "64", "--inter-node-gbit-s", "100", "--time-limit", "60"]
    asked += ["--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("shardwright_search.commands.advise.show_rich", said.append)
        assert _exit_code(APP, asked) == 0
    (told,) = said
    return read_document(out, Plan), told


def _text(told):
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as seen:
        console.print(told)
    return seen.get()


def test_the_answer_names_the_type_of_each_stage_its_budget_and_what_binds(answer):
    plan, told = answer
    said = _text(told)
    assert "36.8 GiB of A100-40 and 22.1 GiB of A10" in said
    types = [plan.cluster.node_type_of_rank[stage.ranks[0]] for stage in plan.stages]
    counts = [high - low for ((low, high),) in (stage.layers for stage in plan.stages)]
    assert set(types) == {"A100-40", "A10"}
    assert " + ".join(f"{count} on {name}" for count, name in zip(counts, types, strict=True)) in said
    assert "idle USD a step" in said and "(binds)" in said
    assert "between nodes of A10: 100 Gbit/s a node (given)" in said


def test_slower_gpus_hold_fewer_layers_a_rank(answer):
    plan, _ = answer
    types, layers, ranks = plan.cluster.node_type_of_rank, {"A100-40": 0, "A10": 0}, {"A100-40": 0, "A10": 0}
    for stage in plan.stages:
        name, ((low, high),) = types[stage.ranks[0]], stage.layers
        layers[name] += high - low
        ranks[name] += len(stage.ranks)
    assert layers["A10"] / ranks["A10"] < layers["A100-40"] / ranks["A100-40"]


def test_a_stage_fits_the_memory_of_its_own_type(answer):
    plan, _ = answer
    question = _question()
    estimate = evaluate(plan, question.profiles).estimate
    assert question.fits(plan, estimate)
    left = [
        question.budgets[plan.cluster.node_type_of_rank[stage.ranks[0]]] - own.memory_bytes
        for stage, own in zip(plan.stages, estimate.stages, strict=True)
    ]
    assert question.left_bytes(plan, estimate) == tuple(left)
    full = question._replace(budgets=question.budgets | {"A10": 1})
    assert not full.fits(plan, estimate)


def test_utilization_is_of_the_sum_of_the_peaks(answer):
    plan, _ = answer
    question = _question()
    estimate = evaluate(plan, question.profiles).estimate
    forward = sum(plan.model.types[name].forward_flops_per_sample for name in ("embedding", *plan.model.layers, "head"))
    peak = 16 * 312e12 + 8 * 125e12
    utilization = model_flops_utilization(plan, estimate.simulated_step_time_s)
    assert utilization is not None and utilization.full_square == pytest.approx(
        3 * forward * estimate.samples_per_s / peak
    )


def test_links_are_those_of_each_type_and_of_one_node_too():
    question = _question()
    assert [own.hardware.device for own in question.profiles.per_device] == ["NVIDIA A100-SXM4-40GB", "NVIDIA A10"]
    for own in question.profiles.per_device:
        assert any(key.group_size > key.ranks_per_node for key in own.hardware.curves)


@pytest.mark.parametrize(
    ("gpus", "more", "said"),
    [
        (
            "2x8:A100-40+1x4:A100-40",
            {},
            "nodes of 8 and of 4 A100-40: give all nodes of a type the same number of GPUs",
        ),
        ("8:A100-40+", {}, "'' is not NODESxGPUS:DEVICE"),
        (GPUS, {"price_per_gpu_hour": 1.0}, "--price-per-gpu-hour: the GPUs are of several types: leave it out"),
        (GPUS, {"budget_gib": 30.0}, "--budget-gib: 30 is more than a A10 has, 24: give less"),
    ],
)
def test_bad_input_is_one_line(gpus, more, said):
    with pytest.raises(BadInput) as error:
        _question(gpus, **more)
    assert said in str(error.value)
