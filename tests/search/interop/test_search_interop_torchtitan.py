"""Plans for torchtitan: its TOML, read back, says what the plan says, or one line says why not."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from shardwright.io import BadInput
from shardwright.types.plan import GradientReduction, Plan, Precision, Schedule
from shardwright.types.strategy import DataParallel, Recompute, SequenceParallel
from shardwright_search.systems.torchtitan import torchtitan_toml

PLAN = Path("plan.json")
EVERY = GradientReduction.EVERY_MICROBATCH


def titan(plan: Plan) -> dict[str, dict[str, object]]:
    return tomllib.loads(torchtitan_toml(plan, PLAN).text)


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
    groups = titan(planned(**flat, data_parallel=DataParallel.ZERO3, shard_size=2))["parallelism"]
    assert (groups["data_parallel_replicate_degree"], groups["data_parallel_shard_degree"]) == (4, 2)


@pytest.mark.parametrize(
    ("changes", "name", "parts"),
    [
        ({"schedule": Schedule.GPIPE}, "GPipe", [3, 4]),
        ({"schedule": Schedule.INTERLEAVED_1F1B}, "1F1B", [3, 4]),
        ({"schedule": Schedule.INTERLEAVED_1F1B, "layer_ranges": 2}, "Interleaved1F1B", [1, 2, 2, 2]),
        (
            {"schedule": Schedule.INTERLEAVED_ZERO_BUBBLE, "layer_ranges": 2},
            "InterleavedZeroBubble",
            [1, 2, 2, 2],
        ),
        ({"schedule": Schedule.ZERO_BUBBLE_V, "layer_ranges": 2}, "ZBVZeroBubble", [1, 2, 2, 2]),
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


def test_torchtitan_recomputes_all_none_or_every_nth_layer_of_a_rank(planned, change):
    def kept(plan: Plan) -> dict[str, object]:
        return titan(plan)["activation_checkpoint"]

    assert kept(planned(recompute=Recompute.FULL)) == {"mode": "full"}
    assert kept(change.recomputing(planned(), 1, 3, 5, 7)) == {"mode": "selective", "selective_ac_option": "2"}
    # Stages of 3 and 5 layers: its counter starts anew on every rank, so the third of each is layer 2 and layer 5.
    assert kept(change.recomputing(change.cut(planned(), 3, 5), 2, 5)) == {
        "mode": "selective",
        "selective_ac_option": "3",
    }
    interleaved = planned(schedule=Schedule.INTERLEAVED_1F1B, layer_ranges=2, layers=4)
    # One layer a range: rank 0 holds layers 0 and 2, rank 1 layers 1 and 3.
    assert kept(change.recomputing(interleaved, 2, 3)) == {"mode": "selective", "selective_ac_option": "2"}
    with pytest.raises(BadInput, match=r"layers\[1\]: recompute none, number 2 of its rank"):
        kept(change.recomputing(planned(), 0))
    with pytest.raises(BadInput, match=r"layers\[5\]: recompute none, number 2 of its rank"):
        kept(change.recomputing(planned(), 1, 3, 6, 7))


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


def test_torchtitan_ties_no_weights_across_a_pipeline(planned, change):
    model = planned().model
    table = model.types["embedding"].parameters[0]
    types = {
        name: msgspec.structs.replace(
            model.types[name], parameters=(msgspec.structs.replace(table, name=f"{name}.weight"),)
        )
        for name in ("embedding", "head")
    }
    tied = change.plan(model, types=model.types | types, tied=(("embedding.weight", "head.weight"),))
    with pytest.raises(BadInput, match="torchtitan cannot express tied embedding and head in several pipeline stages"):
        titan(change.plan(planned(), model=tied))
    titan(change.plan(planned(pp_size=1, gradient_reduction=EVERY), model=tied))


def test_torchtitan_takes_few_microbatches_with_gpipe_and_needs_no_casts_in_float32(planned):
    given = titan(planned(schedule=Schedule.GPIPE, num_microbatches=1))["parallelism"]
    assert (given["pipeline_parallel_schedule"], given["pipeline_parallel_microbatch_size"]) == ("GPipe", 16)
    plain = titan(planned(devices=4, precision=Precision()))["training"]
    assert plain["mixed_precision_param"] == "float32"
