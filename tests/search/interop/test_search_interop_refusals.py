"""What other systems have no words for is refused in one line that names it; what they leave open is told."""

from pathlib import Path

import msgspec
import pytest

from shardwright.io import BadInput
from shardwright.types.plan import Attention, PipelineStage, Plan, Precision, Schedule
from shardwright.types.strategy import DataParallel, Recompute, SequenceParallel
from shardwright_search.systems.galvatron import galvatron_file
from shardwright_search.systems.megatron import megatron_arguments
from shardwright_search.systems.torchtitan import torchtitan_toml

PLAN = Path("plan.json")


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


REFUSED = {
    "layers[1]: recompute attention": lambda p: layer_changed(p, 1, recompute=Recompute.ATTENTION),
    "layers[0]: recompute mlp": lambda p: layer_changed(p, 0, recompute=Recompute.MLP),
    "layers[4]: zero2, where layers[0] has ddp": lambda p: layer_changed(p, 4, data_parallel=DataParallel.ZERO2),
    "layers[1]: sequence_parallel none, where layers[0] has megatron": lambda p: layer_changed(
        p, 1, sequence_parallel=SequenceParallel.NONE
    ),
    "layers[2]: states sharded in groups of 2": lambda p: layer_changed(
        p, 2, data_parallel=DataParallel.ZERO3, shard_size=2
    ),
    "layers[4]: strided groups": lambda p: layer_changed(p, 4, tp_consecutive=False),
    "embedding: strided groups": lambda p: changed(
        p, embedding=msgspec.structs.replace(p.embedding, tp_consecutive=False)
    ),
    "head: strided groups": lambda p: changed(
        p, head=msgspec.structs.replace(p.head, tp_consecutive=False, sequence_parallel=SequenceParallel.MEGATRON)
    ),
    "a head sharded differently": lambda p: changed(p, head=msgspec.structs.replace(p.head, tp_size=4, dp_size=2)),
    "precision float64/float64/float64": lambda p: changed(
        p, precision=Precision(parameters="float64", compute="float64", reduce="float64")
    ),
    "precision float32/float32/bfloat16": lambda p: changed(p, precision=Precision(reduce="bfloat16")),
    "stages[1] without a layer": lambda p: changed(
        p, stages=(PipelineStage(ranks=p.stages[0].ranks, layers=((0, 5),)),
                   PipelineStage(ranks=p.stages[1].ranks, layers=((5, 5),)))
    ),
    "stages[0]: its ranks are not 0 to 7": lambda p: changed(
        p, stages=tuple(PipelineStage(ranks=tuple(range(i, 16, 2)), layers=s.layers) for i, s in enumerate(p.stages))
    ),
    "several layer ranges": lambda p: changed(
        p, schedule=Schedule.INTERLEAVED_1F1B,
        stages=(PipelineStage(ranks=p.stages[0].ranks, layers=((0, 1), (2, 3))),
                PipelineStage(ranks=p.stages[1].ranks, layers=((1, 2), (3, 5)))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_the_file_cannot_say_is_refused_by_name(read, words, config):
    with pytest.raises(BadInput) as error:
        galvatron_file(REFUSED[words](read(config())), PLAN)
    assert str(error.value).startswith(f"plan.json: Galvatron cannot express {words}")


def test_a_single_microbatch_has_no_order(planned):
    alone = planned(pp_size=1, num_microbatches=1, schedule=Schedule.GPIPE)
    for export in (galvatron_file, megatron_arguments, torchtitan_toml):
        export(alone, PLAN)


@pytest.mark.parametrize(("name", "export"), [("Megatron-LM", megatron_arguments), ("torchtitan", torchtitan_toml)])
def test_shard_groups_of_some_layers_alone_are_refused(planned, name, export):
    plan = planned(pp_size=1, num_microbatches=1, data_parallel=DataParallel.ZERO3)
    head = msgspec.structs.replace(plan.head, shard_size=2)
    with pytest.raises(BadInput, match=f"{name} cannot express head: shard_size 2, where .* has 0"):
        export(changed(plan, head=head), PLAN)


@pytest.mark.parametrize(("name", "export"), [("Megatron-LM", megatron_arguments), ("torchtitan", torchtitan_toml)])
def test_ulysses_everywhere_is_refused_as_well(planned, name, export):
    with pytest.raises(BadInput, match=f"{name} cannot express embedding: sequence_parallel ulysses"):
        export(planned(sequence_parallel=SequenceParallel.ULYSSES), PLAN)


def test_gpipe_in_one_stage_is_refused_for_galvatron_never_holds_several_microbatches_there(read, config):
    alone = read(config(pp_deg=1, pp_division="5"))
    with pytest.raises(BadInput, match="gpipe in a single pipeline stage"):
        galvatron_file(changed(alone, schedule=Schedule.GPIPE), PLAN)


def test_stages_of_unequal_width_are_refused(read, config):
    plan = read(config(tp_sizes_enc="1,1,1,1,1", use_sp="0,0,0,0,0", global_bsz=48, chunks=1, vtp=1, vsp=0))
    narrow = {"tp_size": 1, "dp_size": 4}
    stages = (
        PipelineStage(ranks=tuple(range(4)), layers=((0, 2),)),
        PipelineStage(ranks=tuple(range(4, 16)), layers=((2, 5),)),
    )
    layers = tuple(
        msgspec.structs.replace(layer, **narrow | ({"dp_size": 12} if i > 1 else {}))
        for i, layer in enumerate(plan.layers)
    )
    ends = {
        "embedding": msgspec.structs.replace(plan.embedding, **narrow),
        "head": msgspec.structs.replace(plan.head, dp_size=12),
    }
    with pytest.raises(BadInput, match=r"stages\[1\]: 12 ranks, stages\[0\] has 4"):
        galvatron_file(changed(plan, stages=stages, layers=layers, **ends), PLAN)


def test_kernels_are_left_to_the_other_system_and_told(planned):
    plan = changed(planned(), attention=Attention.FLASH_ATTENTION_2, fused=("rotary",))
    for export in (megatron_arguments, torchtitan_toml):
        assert export(plan, PLAN).notes[-2:] == (
            "the attention kernel flash_attention_2 is not in the file",
            "kernels that compute rotary are not in the file",
        )
