"""Plans from and for Galvatron: small files in its format, what they mean, and what is refused."""

import json
from functools import partial
from pathlib import Path

import pytest
from command_calls import call as call_app
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shardwright.io import BadInput, read_document, write_document
from shardwright.types.model import BoundaryTensor
from shardwright.types.plan import Attention, GradientReduction, Plan, Precision, Schedule
from shardwright.types.strategy import DataParallel, Recompute, SequenceParallel
from shardwright_search.cli import APP
from shardwright_search.options import GalvatronRun
from shardwright_search.systems.galvatron import (
    GalvatronLayer,
    GalvatronStrategy,
    galvatron_file,
    galvatron_keys,
    galvatron_limits,
    galvatron_strategy,
    plan_of_galvatron,
    read_galvatron,
)

PLAN = Path("plan.json")
BF16 = Precision(compute="bfloat16", reduce="bfloat16")
RUN = GalvatronRun(sequence_parallel="megatron")


def without(raw: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in raw.items() if name not in names}


def test_a_file_becomes_the_plan_that_galvatron_would_run(read, config):
    plan = read(config())
    assert [stage.layers for stage in plan.stages] == [((0, 2),), ((2, 5),)]
    assert [stage.ranks for stage in plan.stages] == [tuple(range(8)), tuple(range(8, 16))]
    assert (plan.global_batch_size, plan.num_microbatches, plan.schedule) == (64, 4, Schedule.GPIPE)
    first, second, third, fourth, fifth = plan.layers
    assert (first.tp_size, first.dp_size, first.tp_consecutive, first.recompute) == (4, 2, False, Recompute.FULL)
    assert (first.data_parallel, first.sequence_parallel) == (DataParallel.DDP, SequenceParallel.MEGATRON)
    assert (second.data_parallel, second.recompute) == (DataParallel.ZERO3, Recompute.NONE)
    assert (third.tp_size, third.dp_size, third.sequence_parallel) == (1, 8, SequenceParallel.NONE)
    assert (fourth.tp_size, fourth.dp_size) == (8, 1)
    assert (fifth.sequence_parallel, fifth.dp_size) == (SequenceParallel.ULYSSES, 4)
    assert plan.embedding == plan.head
    assert (plan.head.sequence_parallel, plan.head.data_parallel) == (SequenceParallel.ULYSSES, DataParallel.ZERO3)
    assert plan.precision == BF16


def test_what_is_imported_is_exported_with_every_key_as_it_was(read, config):
    raw = config()
    exported = json.loads(galvatron_file(read(raw), PLAN).text)
    newer = {"cp_sizes_enc": "1,1,1,1,1", "vcp": 1, "vocab_sdp": 1}
    assert exported == raw | newer
    assert json.loads(galvatron_file(read(exported), PLAN).text) == exported


def pyramid(plan: Plan) -> Plan:
    """The plan of five layers with a sixth behind the second, which changes the shape of what that hands on."""
    names, kind = plan.model.layers, plan.model.types[plan.model.layers[1]]
    outputs = (BoundaryTensor(name="states", sequence_length=plan.model.sequence_length, features=2),)
    model = replace(
        plan.model,
        layers=(*names[:2], "merge", *names[2:]),
        types=plan.model.types | {"merge": replace(kind, outputs=outputs)},
    )
    first, second = plan.stages
    return replace(
        plan,
        model=model,
        layers=(*plan.layers[:2], replace(plan.layers[1], type="merge"), *plan.layers[2:]),
        stages=(replace(first, layers=((0, 3),)), replace(second, layers=((3, 6),))),
    )


def test_a_layer_that_changes_a_blocks_shape_is_a_part_of_the_block(read, config):
    """As in Galvatron's Swin, whose last block of a stage merges its patches."""
    plan = pyramid(read(config()))
    assert plan.model.reshaping == ("merge",)
    exported = galvatron_file(plan, PLAN).text
    assert exported == galvatron_file(read(config()), PLAN).text
    strategy = galvatron_strategy(plan, PLAN)
    back = plan_of_galvatron(plan.name, strategy, plan.model, plan.cluster, RUN, PLAN)
    assert (back.layers, back.stages) == (plan.layers, plan.stages)


def test_a_layer_that_changes_a_blocks_shape_has_the_blocks_strategy_and_stage(read, config):
    plan = pyramid(read(config()))
    other = replace(plan.layers[2], recompute=Recompute.FULL)
    with pytest.raises(
        BadInput, match=r"plan\.json: Galvatron cannot express layers\[2\], merge, sharded or recomputed"
    ):
        galvatron_file(replace(plan, layers=(*plan.layers[:2], other, *plan.layers[3:])), PLAN)
    first, second = plan.stages
    cut = (replace(first, layers=((0, 2),)), replace(second, layers=((2, 6),)))
    with pytest.raises(BadInput, match=r"Galvatron cannot express a cut before layers\[2\], merge"):
        galvatron_file(replace(plan, stages=cut), PLAN)
    assert galvatron_limits(plan.model, BF16) == () != galvatron_limits(read(config()).model, BF16)


def test_keys_that_older_files_lack_have_the_value_their_reader_takes(read, config):
    older = without(config(tp_consecutive_flags="1,1,1,1,1"), "use_sp", "checkpoint", "vtp", "vsp", "embed_sdp")
    exported = json.loads(galvatron_file(read(without(older, "pp_division")), PLAN).text)
    absent = {"use_sp": "0,0,0,0,0", "checkpoint": "0,0,0,0,0", "vtp": 1, "vsp": 0, "embed_sdp": 0, "vocab_sdp": 0}
    assert exported == older | absent | {"cp_sizes_enc": "1,1,1,1,1", "vcp": 1, "pp_division": "2,3"}


@pytest.mark.parametrize("name", ["embed_sdp", "vocab_sdp"])
def test_both_names_for_the_vocabularys_zero3_are_read(read, name, config):
    raw = without(config(), "embed_sdp")
    assert read(raw).embedding.data_parallel is DataParallel.DDP
    assert read(raw | {name: 1}).embedding.data_parallel is DataParallel.ZERO3


def test_galvatron_has_no_strided_ulysses_groups_whatever_the_flag(read, config):
    assert read(config(tp_consecutive_flags="0,1,1,1,0")).layers[4].tp_consecutive


def test_without_a_pipeline_its_type_says_nothing(read, config):
    alone = config(pp_deg=1, pp_division="5", tp_consecutive_flags="0,1,1,0,1")
    assert read(alone).schedule is Schedule.ONE_F_ONE_B
    assert read(alone | {"pipeline_type": "pipedream_flush"}) == read(alone)


def test_microbatches_are_those_that_torchs_chunk_makes(read, config):
    flat = config(vtp=8, vsp=0, tp_sizes_enc="8,8,8,8,8", use_sp="0,0,0,0,0", tp_consecutive_flags="1,1,1,1,1")
    assert read(flat | {"global_bsz": 6, "chunks": 4}).num_microbatches == 3  # of 2 samples: four would be 2, 2, 2, 0
    with pytest.raises(BadInput, match="chunks 4 cuts a rank's 7 samples into microbatches of 2 and one of 1"):
        read(flat | {"global_bsz": 7, "chunks": 4})
    chosen = read(flat | {"global_bsz": 7, "chunks": 4}, replace(RUN, num_microbatches=7))
    assert (chosen.num_microbatches, chosen.microbatch_samples) == (7, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cp_sizes_enc": "1,2,1,1,0"}, "cp_sizes_enc has a degree below 1"),
        ({"cp_sizes_enc": "1,3,1,1,1"}, "tp_sizes_enc of layer 1: 2 x cp 3 does not divide the 8 ranks"),
        ({"cp_sizes_enc": "2,1,1,1,1"}, "tp_sizes_enc of layer 0: strided tp groups with cp 2"),
        ({"vcp": 8}, "vtp: 2 x cp 8 does not divide the 8 ranks"),
        (
            {"ep_sizes_enc": "1,2,2,2,2"},
            "ep_sizes_enc or tp_of_ep_sizes_enc of layer 1, which has no experts, is not 1",
        ),
        ({"tp_of_ep_sizes_enc": "1,1,0,1,1"}, "ep_sizes_enc or tp_of_ep_sizes_enc has a degree below 1"),
        ({"checkpoint": "1,2,0,0,0"}, "checkpoint of layer 1 is 2"),
        ({"use_sp": "1,0"}, "use_sp has 2 numbers, tp_sizes_enc has 5"),
        ({"tp_sizes_enc": "4,2,x,8,2"}, "tp_sizes_enc is not a list of numbers"),
        ({"tp_sizes_enc": "4,2,3,8,2"}, "tp_sizes_enc of layer 2: 3 does not divide the 8 ranks"),
        ({"tp_sizes_enc": "4,2,0,8,2"}, "tp_sizes_enc of layer 2: 0 does not divide the 8 ranks"),
        ({"vtp": 16}, "vtp: 16 does not divide the 8 ranks"),
        ({"pp_division": "2,2"}, "pp_division 2,2 does not share 5 layers out to 2 pipeline stages"),
        ({"pp_division": "5,0"}, "pp_division 5,0 does not share 5 layers out"),
        ({"pp_deg": 3}, "pp_division 2,3 does not share 5 layers out to 3"),
        ({"pp_deg": 3, "pp_division": "2,2,1"}, "pp_deg 3 does not divide the 16 devices"),
        ({"pipeline_type": "zb"}, "Invalid enum value 'zb' - at `$.pipeline_type`"),
        ({"default_dp_type": "sdp"}, "Invalid enum value 'sdp'"),
        ({"chunks": -1}, "Expected `int` >= 1 - at `$.chunks`"),
        ({"global_bsz": 62}, "global_bsz 62 is not split evenly over the 4 ranks"),
        ({"vocab_sdp": 0}, "embed_sdp and vocab_sdp differ"),
        ({"zero_stage": 3}, "unknown field `zero_stage`"),
    ],
)
def test_what_no_plan_can_say_is_refused_by_name(read, changes, words, config):
    with pytest.raises(BadInput) as error:
        read(config(**changes))
    assert words in str(error.value) and "galvatron_config.json" in str(error.value)


@pytest.mark.parametrize("name", ["pp_deg", "chunks", "pipeline_type", "default_dp_type"])
def test_a_key_that_only_the_run_would_decide_must_be_there(read, name, config):
    with pytest.raises(BadInput, match=f"missing required field `{name}`"):
        read(without(config(), name))


def test_another_model_or_cluster_is_refused(read, config):
    with pytest.raises(BadInput, match="it has 5 layers, model made-up 4"):
        read(config(), layers=4)
    with pytest.raises(BadInput, match="tp_sizes_enc of layer 3: 8 does not divide the 4 ranks"):
        read(config(), devices=8)
    with pytest.raises(BadInput, match="microbatch"):
        read(config(chunks=16))


def test_tensor_parallelism_needs_the_word_whether_it_shares_the_sequence(read, config):
    silent = replace(RUN, sequence_parallel=None)
    with pytest.raises(
        BadInput, match=r"tp_sizes_enc of layer 0 is 4, and the file does not state .*--sequence-parallel"
    ):
        read(config(), silent)
    only_ulysses = config(tp_sizes_enc="1,1,1,1,2")
    assert read(only_ulysses, silent) == read(only_ulysses)
    assert read(config(), replace(RUN, sequence_parallel="none")).layers[0].sequence_parallel == "none"


def test_choices_that_do_nothing_hinder_no_export(read, config, change):
    plan = read(config())
    idle = change.layer(plan, 3, data_parallel=DataParallel.ZERO2, tp_consecutive=False)  # dp_size 1: nothing to share
    idle = change.layer(idle, 2, tp_consecutive=False)  # tp_size 1: no group
    assert galvatron_strategy(idle, PLAN) == galvatron_strategy(plan, PLAN)


def test_the_options_of_the_run_are_told(read, config, change):
    plan = read(config())
    assert galvatron_file(plan, PLAN).notes == ("run it on 16 ranks with --mixed_precision bf16 --sequence-parallel",)
    other = change.plan(
        plan,
        precision=Precision(compute="float16"),
        gradient_reduction=GradientReduction.EVERY_MICROBATCH,
        attention=Attention.EAGER,
        fused=("norm",),
    )
    once = change.plan(other, num_microbatches=1)
    assert "--no_async_grad_reduce" not in galvatron_file(once, PLAN).notes[0]
    first, *kernels = galvatron_file(other, PLAN).notes
    assert first.endswith("--mixed_precision fp16 --reduce_in_fp32 --sequence-parallel --no_async_grad_reduce")
    assert kernels == ["the attention kernel eager is not in the file", "kernels that compute norm are not in the file"]
    silent = read(config(), replace(RUN, sequence_parallel="none"))
    assert "--sequence-parallel" not in galvatron_file(silent, PLAN).notes[0]


@st.composite
def galvatron_strategies(draw: st.DrawFn) -> GalvatronStrategy:
    """Files in the one spelling that Galvatron's search writes, for 8 ranks and 6 layers."""
    pp_size = draw(st.sampled_from([1, 2, 4]))
    width = 8 // pp_size

    def layer(vocabulary: bool) -> GalvatronLayer:
        tp_size = draw(st.sampled_from([size for size in (1, 2, 4, 8) if size <= width]))
        ulysses = tp_size > 1 and draw(st.booleans())
        free = 1 < tp_size < width and not ulysses and not vocabulary
        shared = tp_size < width or ulysses
        return GalvatronLayer(
            tp_size=tp_size,
            tp_consecutive=not (free and draw(st.booleans())),
            zero3=shared and draw(st.booleans()),
            ulysses=ulysses,
            checkpoint=not vocabulary and draw(st.booleans()),
        )

    layers, vocabulary = tuple(layer(False) for _ in range(6)), layer(True)
    cuts = sorted(draw(st.sets(st.integers(1, 5), min_size=pp_size - 1, max_size=pp_size - 1)))
    used = any(not own.zero3 and (own.tp_size < width or own.ulysses) for own in (*layers, vocabulary))
    return GalvatronStrategy(
        layers=layers,
        vocabulary=vocabulary,
        pp_division=tuple(high - low for low, high in zip([0, *cuts], [*cuts, 6], strict=True)),
        global_bsz=64,
        chunks=draw(st.sampled_from([1, 2, 4, 8])),
        pipeline_type=draw(st.sampled_from(["gpipe", "pipedream_flush"])) if pp_size > 1 else "pipedream_flush",
        default_dp_type=draw(st.sampled_from(["ddp", "zero2"])) if used else "zero2",
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(galvatron_strategies(), st.sampled_from(["none", "megatron"]))
def test_every_file_comes_back_from_its_plan(make, tmp_path, strategy, sequence_parallel):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(galvatron_keys(strategy)))
    run = replace(RUN, sequence_parallel=sequence_parallel)
    plan = plan_of_galvatron("imported", read_galvatron(path), make.model(6), make.cluster(8), run, path)
    assert galvatron_strategy(plan, PLAN) == strategy


def test_the_commands_read_and_write_files(make, tmp_path, config, change):
    paths = {name: tmp_path / f"{name}.json" for name in ("config", "model", "cluster", "out", "back")}
    paths["config"].write_text(json.dumps(config()))
    write_document(paths["model"], make.model(5))
    write_document(paths["cluster"], make.cluster(16, 2))

    call = partial(call_app, APP)
    source = ["import", "galvatron", paths["config"], "--model", paths["model"], "--cluster", paths["cluster"]]
    refused = call(*source, "--out", paths["out"])
    assert refused.exit_code == 2 and not paths["out"].exists()
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: {paths['config']}: tp_sizes_enc of layer 0 is 4")
    imported = call(*source, "--sequence-parallel", "megatron", "--precision-reduce", "float32", "--out", paths["out"])
    assert imported.exit_code == 0, imported.output
    plan = read_document(paths["out"], Plan)
    assert (plan.name, plan.precision) == ("out", Precision(compute="bfloat16", reduce="float32"))
    exported = call("export", paths["out"], "--to", "galvatron", "--out", paths["back"])
    assert exported.exit_code == 0, exported.output
    assert "--reduce_in_fp32 --sequence-parallel" in exported.output
    assert json.loads(paths["back"].read_text()).items() >= config().items()
    paths["back"].unlink()
    write_document(paths["out"], change.layer(plan, 1, recompute=Recompute.MLP))
    refused = call("export", paths["out"], "--to", "galvatron", "--out", paths["back"])
    assert refused.exit_code == 2 and not paths["back"].exists()
    assert refused.stderr.startswith(f"error: {paths['out']}: Galvatron cannot express layers[1]: recompute mlp")
    assert len(refused.stderr.splitlines()) == 1
