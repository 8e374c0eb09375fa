"""Uniform plans: every option of Galvatron's GLOBAL mode, with and without profiles."""

from pathlib import Path

import pytest
from command_calls import Called
from command_calls import call as call_app
from msgspec.structs import replace

from shardwright.io import BadInput, read_document
from shardwright.plan import axes
from shardwright.types.plan import GradientReduction, Plan, Schedule
from shardwright.types.prediction import Prediction
from shardwright.types.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel
from shardwright_search.cli import APP
from shardwright_search.options import UniformRequest
from shardwright_search.space.uniform import UniformStrategy, plan_of_uniform
from shardwright_search.uniform_plan import uniform_plan

PLAIN = UniformRequest(global_batch_size=16, num_microbatches=2)


@pytest.fixture
def planned(make):
    """A uniform plan of eight layers for eight devices, with changes to the plain request."""

    def plan_of(**changes: object) -> Plan:
        return uniform_plan("plain", replace(PLAIN, **changes), make.model(8), make.cluster(8))

    return plan_of


def test_every_layer_gets_the_strategy_that_is_asked_for(planned):
    plan = planned(
        tp_size=2, tp_consecutive=False, pp_size=2, data_parallel=DataParallel.ZERO3, recompute=Recompute.FULL,
        sequence_parallel=SequenceParallel.MEGATRON, gradient_reduction=GradientReduction.EVERY_MICROBATCH,
        schedule=Schedule.GPIPE,
    )  # fmt: skip
    (layer,) = set(plan.layers)
    assert (layer.tp_size, layer.dp_size, layer.tp_consecutive) == (2, 2, False)
    assert (layer.data_parallel, layer.recompute) == (DataParallel.ZERO3, Recompute.FULL)
    assert layer.sequence_parallel is SequenceParallel.MEGATRON
    assert (plan.schedule, plan.gradient_reduction) == (Schedule.GPIPE, GradientReduction.EVERY_MICROBATCH)
    assert plan.embedding == plan.head and not plan.head.tp_consecutive


def test_one_strategy_of_all_layers_keeps_every_field_of_a_layer(make, monkeypatch):
    """A field of tomorrow reaches each layer of the plan."""

    class Tomorrow(LayerStrategy, frozen=True, kw_only=True, forbid_unknown_fields=True):
        offload: bool = False

    monkeypatch.setattr(axes, "_KNOWN_FIELDS", {*Tomorrow.__struct_fields__})
    choice = UniformStrategy(Tomorrow(type="block", tp_size=2, dp_size=4, offload=True))
    step = {"global_batch_size": 8, "num_microbatches": 1, "schedule": Schedule.ONE_F_ONE_B}
    plan = plan_of_uniform("mine", choice, make.model(8), make.cluster(8), **step)
    assert [layer.offload for layer in plan.layers] == [True] * 8


def test_states_are_shared_out_in_groups_where_asked(planned):
    plan = planned(tp_size=2, data_parallel=DataParallel.ZERO3, shard_size=2, vocab_data_parallel=DataParallel.DDP)
    assert {layer.shard_size for layer in plan.layers} == {2} and plan.head.shard_size == 0
    with pytest.raises(BadInput, match="shard_size 3 is not a proper divisor of the 4 ranks of data parallelism"):
        planned(tp_size=2, data_parallel=DataParallel.ZERO3, shard_size=3)


def test_embedding_and_head_are_spread_on_their_own_where_asked(planned):
    alike = planned(tp_size=2, data_parallel=DataParallel.ZERO2)
    assert (alike.head.tp_size, alike.head.data_parallel) == (2, DataParallel.ZERO2)
    own = planned(
        tp_size=2, data_parallel=DataParallel.ZERO2, vocab_tp_size=4, vocab_data_parallel=DataParallel.ZERO3,
        vocab_sequence_parallel=SequenceParallel.ULYSSES,
    )  # fmt: skip
    assert own.layers == alike.layers and own.embedding == own.head
    assert (own.head.tp_size, own.head.dp_size, own.head.data_parallel) == (4, 2, DataParallel.ZERO3)
    assert own.head.sequence_parallel is SequenceParallel.ULYSSES
    plain = planned(tp_size=2, sequence_parallel=SequenceParallel.MEGATRON, vocab_tp_size=1)
    assert (plain.head.tp_size, plain.head.sequence_parallel) == (1, SequenceParallel.NONE)


def test_interleaved_stages_hold_every_other_range(planned):
    plan = planned(pp_size=2, schedule=Schedule.INTERLEAVED_1F1B, layer_ranges=2)
    assert [stage.layers for stage in plan.stages] == [((0, 2), (4, 6)), ((2, 4), (6, 8))]
    uneven = planned(pp_size=2, schedule=Schedule.INTERLEAVED_1F1B, layer_ranges=3)
    sizes = [high - low for chunk in range(3) for low, high in (stage.layers[chunk] for stage in uneven.stages)]
    assert sum(sizes) == 8 and set(sizes) == {1, 2} and sizes[0] == 1


def test_choices_that_do_nothing_are_spelled_in_one_way(planned):
    alone = planned(
        tp_size=8, tp_consecutive=False, data_parallel=DataParallel.ZERO3, sequence_parallel=SequenceParallel.MEGATRON
    )
    assert alone.layers[0].data_parallel is DataParallel.DDP and alone.layers[0].tp_consecutive
    flat = planned(tp_consecutive=False, sequence_parallel=SequenceParallel.MEGATRON)
    assert flat.layers[0].sequence_parallel is SequenceParallel.NONE and flat.layers[0].tp_consecutive
    ulysses = planned(tp_size=8, data_parallel=DataParallel.ZERO3, sequence_parallel=SequenceParallel.ULYSSES)
    assert ulysses.layers[0].data_parallel is DataParallel.ZERO3  # all eight ranks share the parameters


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp_size": 3}, "tp 3 x pp 1 does not divide 8 devices"),
        ({"pp_size": 2, "vocab_tp_size": 8}, "vocab-tp 8 x pp 2 does not divide 8 devices"),
        ({"pp_size": 8, "layer_ranges": 2, "schedule": Schedule.INTERLEAVED_1F1B}, "16 layer ranges for 8 layers"),
        ({"pp_size": 2, "layer_ranges": 2}, "several layer ranges in a stage need an interleaved schedule"),
        ({"layer_ranges": 2, "schedule": Schedule.INTERLEAVED_1F1B}, "several layer ranges need several pipeline"),
        ({"num_microbatches": 4}, "dp_size 8 does not divide the 4 samples of a microbatch"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(planned, changes, words):
    with pytest.raises(BadInput, match=words):
        planned(**changes)


def call(paths: dict[str, Path], out: Path, *more: object) -> Called:
    """The command for the plain plan of a batch of eight."""
    inputs = ["--model", paths["model"], "--cluster", paths["cluster"], "--global-batch-size", 8]
    return call_app(APP, "uniform", *inputs, "--out", out, *more)


@pytest.fixture
def inputs(make, files):
    model = make.model(4)
    return files(model, make.cluster(4), make.request(), make.profile(model))


def test_the_command_knows_every_option(inputs, tmp_path):
    out = tmp_path / "u.json"
    result = call(
        inputs, out, "--tp", 2, "--tp-strided", "--pp", 1, "--data-parallel", "zero2",
        "--sequence-parallel", "megatron", "--recompute", "full", "--num-microbatches", 2,
        "--gradient-reduction", "every_microbatch", "--vocab-tp", 4,
        "--vocab-data-parallel", "ddp", "--vocab-sequence-parallel", "none", "--name", "mine",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    made = read_document(out, Plan)
    assert made.name == "mine" and made.num_microbatches == 2
    assert made.gradient_reduction is GradientReduction.EVERY_MICROBATCH
    assert not made.layers[0].tp_consecutive and made.layers[0].recompute is Recompute.FULL
    assert (made.layers[0].data_parallel, made.layers[0].sequence_parallel) == ("zero2", "megatron")
    assert (made.head.tp_size, made.head.sequence_parallel) == (4, "none")
    assert not (tmp_path / "u.prediction.json").exists()
    result = call(inputs, out, "--pp", 2, "--schedule", "interleaved_1f1b", "--layer-ranges", 2)
    assert result.exit_code == 0, result.output
    assert [len(stage.layers) for stage in read_document(out, Plan).stages] == [2, 2]


def test_with_profiles_the_prediction_is_written_beside_and_shown(inputs, tmp_path):
    out = tmp_path / "u.json"
    profiles = ("--hardware", inputs["hardware"], "--profile", inputs["profile"])
    result = call(inputs, out, "--tp", 2, *profiles)
    assert result.exit_code == 0, result.output
    plan, prediction = read_document(out, Plan), read_document(tmp_path / "u.prediction.json", Prediction)
    assert prediction.plan_sha256 == plan.sha256 and prediction.proof is None
    assert set(prediction.inputs_sha256) == {"cluster", "model", "hardware", "profile"}
    assert "ms a step" in result.output


def test_one_profile_alone_is_refused_and_nothing_is_written(inputs, tmp_path):
    for role in ("hardware", "profile"):
        result = call(inputs, tmp_path / "u.json", f"--{role}", inputs[role])
        assert result.exit_code == 2 and "one is given without the other" in result.stderr
    assert not list(tmp_path.glob("u*"))


def test_no_plan_appears_where_it_cannot_be_priced(make, files, tmp_path):
    model = make.model(4)
    paths = files(model, make.cluster(4), make.request(), make.profile(model, tp_sizes=(1,)))
    result = call(paths, tmp_path / "u.json", "--tp", 2, "--hardware", paths["hardware"], "--profile", paths["profile"])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("u*"))
