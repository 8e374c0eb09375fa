"""Plans for Megatron-LM and torchtitan: the files, read back, say what the plan says, or one line says why not."""

import argparse
import re
import shlex
import tomllib
from pathlib import Path

import msgspec
import pytest

from shardwright_formats.errors import BadInput
from shardwright_formats.plan import Attention, GradientReduction, Plan, Precision, Schedule
from shardwright_formats.strategy import DataParallel, Recompute, SequenceParallel
from shardwright_search.interop.megatron import megatron_arguments
from shardwright_search.interop.torchtitan import torchtitan_toml
from shardwright_search.uniform import UniformRequest, uniform_plan

PLAN = Path("plan.json")
EVERY = GradientReduction.EVERY_MICROBATCH
BASE = UniformRequest(
    name="base",
    global_batch_size=32,
    num_microbatches=4,
    tp_size=2,
    pp_size=2,
    data_parallel=DataParallel.ZERO2,
    sequence_parallel=SequenceParallel.MEGATRON,
    recompute=Recompute.NONE,
    schedule=Schedule.ONE_F_ONE_B,
    precision=Precision(compute="bfloat16"),
    attention=Attention.AUTO,
)
"""For eight ranks: tp 2, dp 2, pp 2."""


@pytest.fixture
def planned(make):
    """A uniform plan for eight ranks, with changes to the request."""

    def plan_of(layers: int = 8, devices: int = 8, **changes: object) -> Plan:
        return uniform_plan(BASE._replace(**changes), make.model(layers), make.cluster(devices))

    return plan_of


def recomputing(plan: Plan, *which: int, kind: Recompute = Recompute.FULL) -> Plan:
    layers = [
        msgspec.structs.replace(layer, recompute=kind if i in which else Recompute.NONE)
        for i, layer in enumerate(plan.layers)
    ]
    return msgspec.structs.replace(plan, layers=tuple(layers))


def cut(plan: Plan, *sizes: int) -> Plan:
    """The plan with that many layers in each pipeline stage."""
    stages, low = [], 0
    for stage, size in zip(plan.stages, sizes, strict=True):
        stages.append(msgspec.structs.replace(stage, layers=((low, low + size),)))
        low += size
    return msgspec.structs.replace(plan, stages=tuple(stages))


def parser() -> argparse.ArgumentParser:
    """The options of Megatron-LM's arguments.py that a plan can set, with its types."""
    own = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in (
        "num-layers", "seq-length", "tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size",
        "global-batch-size", "recompute-num-layers", "num-layers-per-virtual-pipeline-stage",
        "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
    ):  # fmt: skip
        own.add_argument(f"--{name}", type=int)
    for name in (
        "sequence-parallel", "use-distributed-optimizer", "untie-embeddings-and-output-weights", "bf16", "fp16",
        "grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32", "use-megatron-fsdp",
        "no-gradient-accumulation-fusion",
    ):  # fmt: skip
        own.add_argument(f"--{name}", action="store_true")
    own.add_argument("--recompute-granularity", choices=["full", "selective"])
    own.add_argument("--recompute-method", choices=["uniform", "block"])
    own.add_argument("--data-parallel-sharding-strategy", default="no_shard")
    own.add_argument("--pipeline-model-parallel-layout")
    own.add_argument("--ckpt-format", default="torch_dist")
    own.add_argument("--optimizer", choices=["adam", "sgd"])
    return own


def megatron(plan: Plan) -> argparse.Namespace:
    return parser().parse_args(shlex.split(megatron_arguments(plan, PLAN).text))


def titan(plan: Plan) -> dict[str, dict[str, object]]:
    return tomllib.loads(torchtitan_toml(plan, PLAN).text)


def test_megatron_is_told_degrees_batch_precision_and_weights(planned):
    given = megatron(planned())
    assert (given.tensor_model_parallel_size, given.pipeline_model_parallel_size) == (2, 2)
    assert (given.micro_batch_size, given.global_batch_size, given.seq_length, given.num_layers) == (4, 32, 32, 8)
    assert given.global_batch_size // (given.micro_batch_size * 2) == 4  # dp_size 2: Megatron derives the microbatches
    assert given.sequence_parallel and given.untie_embeddings_and_output_weights and given.optimizer == "adam"
    assert given.bf16 and not (given.fp16 or given.grad_reduce_in_bf16)
    assert given.use_distributed_optimizer and not given.use_megatron_fsdp
    assert (given.recompute_granularity, given.pipeline_model_parallel_layout) == (None, None)


def test_megatrons_weights_are_tied_where_the_models_are(planned):
    model = planned().model
    named = {
        name: msgspec.structs.replace(model.types[name], parameters=(parameter,))
        for name, parameter in (
            (name, msgspec.structs.replace(model.types[name].parameters[0], name=f"{name}.weight"))
            for name in ("embedding", "head")
        )
    }
    tied = msgspec.structs.replace(model, types=model.types | named, tied=(("embedding.weight", "head.weight"),))
    plan = msgspec.structs.replace(planned(), model=tied)
    assert not megatron(plan).untie_embeddings_and_output_weights
    with pytest.raises(BadInput, match="torchtitan cannot express tied embedding and head in several pipeline stages"):
        titan(plan)


@pytest.mark.parametrize(
    ("changes", "sharding", "distributed"),
    [
        ({"data_parallel": DataParallel.DDP}, "no_shard", False),
        ({"data_parallel": DataParallel.ZERO2}, "no_shard", True),
        ({"data_parallel": DataParallel.ZERO2, "gradient_reduction": EVERY}, "optim_grads", True),
        ({"data_parallel": DataParallel.ZERO3, "gradient_reduction": EVERY}, "optim_grads_params", True),
        ({"data_parallel": DataParallel.ZERO3, "num_microbatches": 1}, "optim_grads_params", True),
        ({"data_parallel": DataParallel.ZERO3, "devices": 4}, "no_shard", False),  # dp_size 1: nothing to shard
    ],
)
def test_each_kind_of_data_parallelism_has_its_megatron(planned, changes, sharding, distributed):
    given = megatron(planned(**changes))
    assert (given.data_parallel_sharding_strategy, given.use_distributed_optimizer) == (sharding, distributed)
    fsdp = sharding != "no_shard"
    assert given.use_megatron_fsdp is given.no_gradient_accumulation_fusion is fsdp
    assert given.ckpt_format == ("fsdp_dtensor" if fsdp else "torch_dist")


def test_where_megatron_holds_more_gradients_the_user_is_told(planned):
    words = "whole gradients with one microbatch too"
    assert any(words in note for note in megatron_arguments(planned(num_microbatches=1), PLAN).notes)
    assert not any(words in note for note in megatron_arguments(planned(), PLAN).notes)
    assert megatron_arguments(planned(), PLAN).notes == ("run it on 8 ranks",)


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        (Precision(), set()),
        (Precision(compute="bfloat16"), {"bf16"}),
        (Precision(compute="bfloat16", reduce="bfloat16"), {"bf16", "grad_reduce_in_bf16"}),
        (Precision(compute="float16"), {"fp16", "accumulate_allreduce_grads_in_fp32"}),
        (Precision(compute="float16", reduce="float16"), {"fp16"}),
    ],
)
def test_each_precision_has_its_megatron(planned, precision, flags):
    given = vars(megatron(planned(precision=precision)))
    every = {"bf16", "fp16", "grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"}
    assert {name for name in every if given[name]} == flags


def layout_sizes(layout: str) -> list[int]:
    """Decoder layers of each range of `--pipeline-model-parallel-layout`, checked as Megatron checks it."""
    ranges = layout.split("|")
    assert ranges[0].startswith("E") and ranges[-1].endswith("L") and layout.count("E") == layout.count("L") == 1
    counts = [re.fullmatch(r"E?(?:t\*(\d+))?L?", one).group(1) for one in ranges]
    return [int(count or 0) for count in counts]


def test_megatron_cuts_layers_as_the_plan_does(planned):
    even = megatron(planned())
    assert even.decoder_first_pipeline_num_layers is even.pipeline_model_parallel_layout is None
    two = megatron(cut(planned(), 3, 5))
    assert (two.decoder_first_pipeline_num_layers, two.decoder_last_pipeline_num_layers) == (3, 5)
    four = planned(pp_size=4, layers=12, data_parallel=DataParallel.DDP)
    ends = megatron(cut(four, 2, 4, 4, 2))
    assert (ends.decoder_first_pipeline_num_layers, ends.decoder_last_pipeline_num_layers) == (2, 2)
    odd = megatron(cut(four, 2, 4, 3, 3))
    assert layout_sizes(odd.pipeline_model_parallel_layout) == [2, 4, 3, 3]
    assert odd.decoder_first_pipeline_num_layers is None
    assert layout_sizes(megatron(cut(four, 0, 6, 6, 0)).pipeline_model_parallel_layout) == [0, 6, 6, 0]
    interleaved = {"schedule": Schedule.INTERLEAVED_1F1B, "layer_ranges": 2}
    assert megatron(planned(**interleaved)).num_layers_per_virtual_pipeline_stage == 2
    uneven = megatron(planned(layers=7, **interleaved))
    assert layout_sizes(uneven.pipeline_model_parallel_layout) == [1, 2, 2, 2]
    assert megatron(planned(schedule=Schedule.INTERLEAVED_1F1B)) == even  # one range: it is 1F1B


def test_megatron_recomputes_every_layer_or_the_first_of_each_stage(planned):
    every = megatron(planned(recompute=Recompute.FULL))
    assert (every.recompute_granularity, every.recompute_method, every.recompute_num_layers) == ("full", "uniform", 1)
    first = megatron(recomputing(planned(), 0, 1, 4, 5))
    assert (first.recompute_granularity, first.recompute_method, first.recompute_num_layers) == ("full", "block", 2)
    short = megatron(recomputing(cut(planned(), 2, 6), 0, 1, 2, 3, 4))
    assert (short.recompute_method, short.recompute_num_layers) == ("block", 3)  # more than the first stage has
    with pytest.raises(BadInput, match=r"layers\[4\]: recompute none, where another pipeline stage recomputes its fir"):
        megatron(recomputing(planned(), 0, 1))
    with pytest.raises(BadInput, match=r"layers\[0\]: recompute none"):
        megatron(recomputing(planned(), 1, 5))


def changed(plan: Plan, **changes: object) -> Plan:
    return msgspec.structs.replace(plan, **changes)


def layer_changed(plan: Plan, index: int, **changes: object) -> Plan:
    layers = list(plan.layers)
    layers[index] = msgspec.structs.replace(layers[index], **changes)
    return changed(plan, layers=tuple(layers))


def of_two_types(plan: Plan) -> Plan:
    """The plan with a last layer of another type."""
    model = plan.model
    names, types = (*model.layers[:-1], "other"), model.types | {"other": model.types["block"]}
    layers = (*plan.layers[:-1], msgspec.structs.replace(plan.layers[-1], type="other"))
    return changed(plan, model=msgspec.structs.replace(model, layers=names, types=types), layers=layers)


NEITHER = {
    "layers[3]: tp_size 1, where layers[0] has 2": lambda p: layer_changed(p, 3, tp_size=1, dp_size=4),
    "layers[5]: data_parallel ddp, where layers[0] has zero2": lambda p: layer_changed(
        p, 5, data_parallel=DataParallel.DDP
    ),
    "layers[1]: sequence_parallel none, where layers[0] has megatron": lambda p: layer_changed(
        p, 1, sequence_parallel=SequenceParallel.NONE
    ),
    "embedding: tp_size 4, where layers[0] has 2": lambda p: changed(
        p, embedding=msgspec.structs.replace(p.embedding, tp_size=4, dp_size=1)
    ),
    "head: data_parallel zero3, where layers[0] has zero2": lambda p: changed(
        p, head=msgspec.structs.replace(p.head, data_parallel=DataParallel.ZERO3)
    ),
    "layers[2]: strided tensor-parallel groups": lambda p: layer_changed(p, 2, tp_consecutive=False),
    "layers[2]: sequence_parallel ulysses": lambda p: layer_changed(
        p, 2, sequence_parallel=SequenceParallel.ULYSSES
    ),
    "layers[6]: recompute attention": lambda p: layer_changed(p, 6, recompute=Recompute.ATTENTION),
    "layers[7]: type other, where layers[0] has block": of_two_types,
    "precision float64/float64/float64": lambda p: changed(
        p, precision=Precision(parameters="float64", compute="float64", reduce="float64")
    ),
    "stages[0]: its ranks are not 0 to 3": lambda p: changed(
        p, stages=tuple(
            msgspec.structs.replace(stage, ranks=tuple(range(i, 8, 2))) for i, stage in enumerate(p.stages)
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", NEITHER)
@pytest.mark.parametrize(("name", "export"), [("Megatron-LM", megatron_arguments), ("torchtitan", torchtitan_toml)])
def test_the_first_layer_that_neither_can_express_is_named(planned, name, export, words):
    with pytest.raises(BadInput) as error:
        export(NEITHER[words](planned()), PLAN)
    assert str(error.value).startswith(f"plan.json: {name} cannot express {words}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": Schedule.GPIPE}, "the schedule gpipe"),
        ({"schedule": Schedule.GPIPE, "pp_size": 1}, "gpipe in a single pipeline stage"),
        ({"data_parallel": DataParallel.DDP, "gradient_reduction": EVERY}, "layers[0]: ddp that reduces gradients"),
        ({"data_parallel": DataParallel.ZERO3}, "layers[0]: zero3 that holds whole gradients"),
        (
            {"schedule": Schedule.INTERLEAVED_1F1B, "layer_ranges": 2, "num_microbatches": 1},
            "1 interleaved microbatches",
        ),
    ],
)
def test_what_megatron_alone_has_not_is_refused(planned, changes, words):
    with pytest.raises(BadInput, match=re.escape(f"Megatron-LM cannot express {words}")):
        megatron(planned(**changes))


def test_torchtitan_is_told_degrees_batch_and_precision_of_a_pipeline(planned):
    given = titan(planned())
    assert given["parallelism"] == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "context_parallel_degree": 1,
        "fsdp_reshard_after_forward": "never",
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_microbatch_size": 4,
        "module_fqns_per_model_part": [
            ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"],
            ["layers.4", "layers.5", "layers.6", "layers.7", "norm", "output"],
        ],
    }
    assert given["training"] == {
        "local_batch_size": 16,  # four microbatches of four
        "global_batch_size": 32,
        "seq_len": 32,
        "mixed_precision_param": "bfloat16",
        "mixed_precision_reduce": "float32",
    }
    assert given["activation_checkpoint"] == {"mode": "none"}
    assert given["optimizer"] == {"name": "AdamW"}


def test_without_a_pipeline_torchtitan_accumulates_gradients_instead(planned):
    given = titan(planned(pp_size=1, gradient_reduction=EVERY))
    training, parallelism = given["training"], given["parallelism"]
    assert (training["local_batch_size"], training["global_batch_size"]) == (2, 32)
    assert training["global_batch_size"] // (training["local_batch_size"] * 4) == 4  # dp_size 4: accumulation steps
    assert not any(name.startswith("pipeline_parallel_s") or "fqns" in name for name in parallelism)
    with pytest.raises(BadInput, match="gradient_reduction deferred without a pipeline: choose every_microbatch"):
        titan(planned(pp_size=1))
    with pytest.raises(BadInput, match="gradient_reduction every_microbatch in a pipeline: choose deferred"):
        titan(planned(gradient_reduction=EVERY))


def test_torchtitan_replicates_or_shards(planned):
    flat = {"pp_size": 1, "tp_size": 1, "num_microbatches": 1}
    ddp = titan(planned(**flat, data_parallel=DataParallel.DDP))["parallelism"]
    assert (ddp["data_parallel_replicate_degree"], ddp["data_parallel_shard_degree"]) == (8, 1)
    assert "fsdp_reshard_after_forward" not in ddp
    zero3 = titan(planned(**flat, data_parallel=DataParallel.ZERO3))["parallelism"]
    assert (zero3["data_parallel_replicate_degree"], zero3["data_parallel_shard_degree"]) == (1, 8)
    assert zero3["fsdp_reshard_after_forward"] == "always"


@pytest.mark.parametrize(
    ("changes", "name", "parts"),
    [
        ({"schedule": Schedule.GPIPE}, "GPipe", [3, 4]),
        ({"schedule": Schedule.INTERLEAVED_1F1B}, "1F1B", [3, 4]),
        ({"schedule": Schedule.INTERLEAVED_1F1B, "layer_ranges": 2}, "Interleaved1F1B", [1, 2, 2, 2]),
    ],
)
def test_torchtitan_has_each_schedule_and_every_part_of_the_model(planned, changes, name, parts):
    given = titan(planned(layers=7, **changes))["parallelism"]
    assert given["pipeline_parallel_schedule"] == name
    names = given["module_fqns_per_model_part"]
    assert [sum(one.startswith("layers.") for one in part) for part in names] == parts
    assert [one for part in names for one in part] == [
        "tok_embeddings", *(f"layers.{i}" for i in range(7)), "norm", "output",
    ]  # fmt: skip


def test_torchtitan_recomputes_all_none_or_every_nth_layer_of_a_rank(planned):
    def kept(plan: Plan) -> dict[str, object]:
        return titan(plan)["activation_checkpoint"]

    assert kept(planned(recompute=Recompute.FULL)) == {"mode": "full"}
    assert kept(recomputing(planned(), 1, 3, 5, 7)) == {"mode": "selective", "selective_ac_option": "2"}
    # Stages of 3 and 5 layers: its counter starts anew on every rank, so the third of each is layer 2 and layer 5.
    assert kept(recomputing(cut(planned(), 3, 5), 2, 5)) == {"mode": "selective", "selective_ac_option": "3"}
    interleaved = planned(schedule=Schedule.INTERLEAVED_1F1B, layer_ranges=2, layers=4)
    # One layer a range: rank 0 holds layers 0 and 2, rank 1 layers 1 and 3.
    assert kept(recomputing(interleaved, 2, 3)) == {"mode": "selective", "selective_ac_option": "2"}
    with pytest.raises(BadInput, match=r"layers\[1\]: recompute none, number 2 of its rank"):
        kept(recomputing(planned(), 0))
    with pytest.raises(BadInput, match=r"layers\[5\]: recompute none, number 2 of its rank"):
        kept(recomputing(planned(), 1, 3, 6, 7))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence_parallel": SequenceParallel.NONE}, "embedding: tensor parallelism without sequence_parallel"),
        ({"data_parallel": DataParallel.DDP}, "embedding: ddp beside tensor or pipeline parallelism"),
        ({"num_microbatches": 1}, "1f1b with 1 microbatches in 2 pipeline stages"),
        ({"precision": Precision(compute="float16")}, "precision float32/float16/float32"),
        ({"precision": Precision(compute="bfloat16", reduce="bfloat16")}, "precision float32/bfloat16/bfloat16"),
        ({"devices": 4}, "precision float32/bfloat16/float32 without data-parallel ranks"),
    ],
)
def test_what_torchtitan_alone_has_not_is_refused(planned, changes, words):
    with pytest.raises(BadInput, match=re.escape(f"torchtitan cannot express {words}")):
        titan(planned(**changes))


def test_kernels_are_left_to_the_other_system_and_told(planned):
    plan = changed(planned(), attention=Attention.FLASH_ATTENTION_2, fused=("rotary",))
    for export in (megatron_arguments, torchtitan_toml):
        assert export(plan, PLAN).notes[-2:] == (
            "the attention kernel flash_attention_2 is not in the file",
            "kernels that compute rotary are not in the file",
        )
