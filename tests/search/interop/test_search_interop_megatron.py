"""Plans for Megatron-LM: its arguments, read back, say what the plan says, or one line says why not."""

import re
from pathlib import Path

import msgspec
import pytest
from megatron_parser import megatron

from shardwright.io import BadInput
from shardwright.types import DataParallel, GradientReduction, Precision, Recompute, Schedule
from shardwright_search.systems.megatron import megatron_arguments

PLAN = Path("plan.json")
EVERY = GradientReduction.EVERY_MICROBATCH


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


@pytest.mark.parametrize(
    ("changes", "sharding", "distributed"),
    [
        ({"data_parallel": DataParallel.DDP}, "no_shard", False),
        ({"data_parallel": DataParallel.ZERO2}, "no_shard", True),
        ({"data_parallel": DataParallel.ZERO2, "gradient_reduction": EVERY, "pp_size": 1}, "optim_grads", True),
        ({"data_parallel": DataParallel.ZERO3, "gradient_reduction": EVERY, "pp_size": 1}, "optim_grads_params", True),
        ({"data_parallel": DataParallel.ZERO3, "num_microbatches": 1, "pp_size": 1}, "optim_grads_params", True),
        ({"data_parallel": DataParallel.ZERO2, "num_microbatches": 1, "gradient_reduction": EVERY}, "no_shard", True),
        ({"data_parallel": DataParallel.DDP, "devices": 4, "gradient_reduction": EVERY}, "no_shard", False),
        ({"data_parallel": DataParallel.ZERO3, "devices": 4}, "no_shard", False),  # dp_size 1: nothing to shard
    ],
)
def test_each_kind_of_data_parallelism_has_its_megatron(planned, changes, sharding, distributed):
    given = megatron(planned(**changes))
    assert (given.data_parallel_sharding_strategy, given.use_distributed_optimizer) == (sharding, distributed)
    fsdp = sharding != "no_shard"
    assert given.use_megatron_fsdp is given.no_gradient_accumulation_fusion is fsdp
    assert given.ckpt_format == ("fsdp_dtensor" if fsdp else "torch_dist")


def test_what_megatron_needs_beside_its_arguments_is_told(planned):
    def notes(**changes: object) -> tuple[str, ...]:
        return megatron_arguments(planned(**changes), PLAN).notes

    data = "its data are made up until --data-path and --tokenizer-type replace --mock-data and the NullTokenizer"
    pieces = "--tp-comm-overlap needs Transformer Engine's user buffers, inside a node: without them leave it out"
    ranks, connections = (
        "run it on 8 ranks",
        "set CUDA_DEVICE_MAX_CONNECTIONS=1 where the GPUs are older than Blackwell",
    )
    assert notes() == (ranks, data, pieces, connections)
    assert notes(tp_size=1) == (ranks, data)
    whole = "its distributed optimizer holds whole gradients with one microbatch too, 4 bytes a parameter"
    assert notes(num_microbatches=1) == (ranks, data, pieces, connections, whole)
    zero3 = {"data_parallel": DataParallel.ZERO3, "num_microbatches": 1, "pp_size": 1}
    assert notes(**zero3) == (ranks, data, pieces, "unset CUDA_DEVICE_MAX_CONNECTIONS, as Megatron-FSDP wants it")


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


def test_megatron_cuts_layers_as_the_plan_does(planned, change):
    even = megatron(planned())
    assert even.decoder_first_pipeline_num_layers is even.pipeline_model_parallel_layout is None
    assert even.num_layers_per_virtual_pipeline_stage is None
    two = megatron(change.cut(planned(), 3, 5))
    assert (two.decoder_first_pipeline_num_layers, two.decoder_last_pipeline_num_layers) == (3, 5)
    four = planned(pp_size=4, layers=12, data_parallel=DataParallel.DDP)
    ends = megatron(change.cut(four, 2, 4, 4, 2))
    assert (ends.decoder_first_pipeline_num_layers, ends.decoder_last_pipeline_num_layers) == (2, 2)
    odd = megatron(change.cut(four, 2, 4, 3, 3))
    assert layout_sizes(odd.pipeline_model_parallel_layout) == [2, 4, 3, 3]
    assert odd.decoder_first_pipeline_num_layers is None
    assert layout_sizes(megatron(change.cut(four, 0, 6, 6, 0)).pipeline_model_parallel_layout) == [0, 6, 6, 0]
    interleaved = {"schedule": Schedule.INTERLEAVED_1F1B, "layer_ranges": 2}
    assert megatron(planned(**interleaved)).num_layers_per_virtual_pipeline_stage == 2
    uneven = megatron(planned(layers=7, **interleaved))
    assert layout_sizes(uneven.pipeline_model_parallel_layout) == [1, 2, 2, 2]
    assert megatron(planned(schedule=Schedule.INTERLEAVED_1F1B)) == even  # one range: it is 1F1B


def test_megatron_recomputes_every_layer_or_the_first_of_each_stage(planned, change):
    every = megatron(planned(recompute=Recompute.FULL))
    assert (every.recompute_granularity, every.recompute_method, every.recompute_num_layers) == ("full", "uniform", 1)
    first = megatron(change.recomputing(planned(), 0, 1, 4, 5))
    assert (first.recompute_granularity, first.recompute_method, first.recompute_num_layers) == ("full", "block", 2)
    short = megatron(change.recomputing(change.cut(planned(), 2, 6), 0, 1, 2, 3, 4))
    assert (short.recompute_method, short.recompute_num_layers) == ("block", 3)  # more than the first stage has
    with pytest.raises(BadInput, match=r"layers\[4\]: recompute none, where another pipeline stage recomputes its fir"):
        megatron(change.recomputing(planned(), 0, 1))
    with pytest.raises(BadInput, match=r"layers\[0\]: recompute none"):
        megatron(change.recomputing(planned(), 1, 5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": Schedule.GPIPE}, "the schedule gpipe"),
        ({"schedule": Schedule.GPIPE, "pp_size": 1}, "gpipe in a single pipeline stage"),
        ({"data_parallel": DataParallel.DDP, "gradient_reduction": EVERY}, "layers[0]: ddp that reduces gradients"),
        ({"data_parallel": DataParallel.ZERO3, "pp_size": 1}, "layers[0]: zero3 that holds whole gradients"),
        ({"data_parallel": DataParallel.ZERO3}, "layers[0]: zero3 in several pipeline stages"),
        ({"gradient_reduction": EVERY}, "layers[0]: zero2 that reduces gradients after every microbatch in several"),
        (
            {"schedule": Schedule.INTERLEAVED_1F1B, "layer_ranges": 2, "num_microbatches": 1},
            "1 interleaved microbatches",
        ),
    ],
)
def test_what_megatron_alone_has_not_is_refused(planned, changes, words):
    with pytest.raises(BadInput, match=re.escape(f"Megatron-LM cannot express {words}")):
        megatron(planned(**changes))


def test_megatron_is_told_how_many_groups_share_the_states_out(planned):
    flat = {"pp_size": 1, "tp_size": 2, "num_microbatches": 1, "shard_size": 2}
    zero2 = megatron(planned(**flat, data_parallel=DataParallel.ZERO2))
    assert (zero2.num_distributed_optimizer_instances, zero2.use_megatron_fsdp) == (2, False)
    zero3 = megatron(planned(**flat, data_parallel=DataParallel.ZERO3))
    assert (zero3.num_distributed_optimizer_instances, zero3.outer_dp_sharding_strategy) == (2, "no_shard")
    assert megatron(planned(**flat | {"shard_size": None})).num_distributed_optimizer_instances is None
