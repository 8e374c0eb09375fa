"""The bytes that a rank moves in a fake world are those of the formulas, for every kind of strategy, to the byte."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from command_calls import call
from context_plans import with_context, with_rings
from random_plans import bare_plan, cluster_of, precision_of, random_plan, uneven_plan
from rest_long import rest_long
from shared_experts import MODELS, with_shared_experts
from special_plans import hollow_plan
from tiny_models import tiny

from shardwright.io import write_document
from shardwright.plan.chunks import gathers_spared, placed
from shardwright.plan.communication import Cause, step_messages
from shardwright.plan.process_groups import communicator_bytes, communicators
from shardwright.types.model import Model
from shardwright.types.plan import GradientReduction, PipelineStage, Plan, Schedule
from shardwright.types.strategy import (
    RECOMPUTE_WHOLE,
    ContextParallel,
    DataParallel,
    LayerStrategy,
    Recompute,
    SequenceParallel,
    Strategy,
)
from shardwright_train.cli import APP
from shardwright_train.dry_run import roles_of, simulate_step
from shardwright_train.models.base import family_named
from shardwright_train.parallel.data import Gathers

WORLD = 8
RANDOM = (
    ("llama", 3),
    ("mixtral", 0),
    ("swin", 3),
    ("deepseek_v2", 0),
    ("llama", 7),
    ("gpt2", 1),
    ("bert", 0),
    ("qwen3_moe", 0),
)


def uniform(model: Model, name: str, every: bool, recompute: Recompute, **sharding: object) -> Plan:
    """One strategy for all layers of one stage, another for embedding and head, so that layouts change too."""
    outer = Strategy(tp_size=2, dp_size=4, data_parallel=DataParallel.ZERO2, sequence_parallel=SequenceParallel.NONE)
    layer = {"type": "block", "recompute": recompute, **sharding}
    return Plan(
        name=name,
        model=model,
        cluster=cluster_of(WORLD),
        global_batch_size=16,
        num_microbatches=2,
        schedule=Schedule.ONE_F_ONE_B,
        gradient_reduction=GradientReduction.EVERY_MICROBATCH if every else GradientReduction.DEFERRED,
        precision=precision_of("bfloat16"),
        stages=(PipelineStage(ranks=tuple(range(WORLD)), layers=((0, len(model.layers)),)),),
        embedding=outer,
        head=outer,
        layers=tuple(LayerStrategy(**layer) for _ in model.layers),  # type: ignore[arg-type]
    )


def kinds_of_strategy() -> Iterator[Plan]:
    model = tiny("llama", num_hidden_layers=2)
    for every, data_parallel in ((every, kind) for every in (False, True) for kind in DataParallel):
        sharding = {"tp_size": 1, "dp_size": 8, "data_parallel": data_parallel}
        yield uniform(model, f"{data_parallel} every={every}", every, Recompute.NONE, **sharding)
    for split, recompute in ((split, recompute) for split in SequenceParallel for recompute in RECOMPUTE_WHOLE):
        sharding = {"tp_size": 4, "dp_size": 2, "data_parallel": DataParallel.ZERO3, "sequence_parallel": split}
        yield uniform(model, f"{split} {recompute}", False, recompute, **sharding)
    for every, data_parallel in ((every, kind) for every in (False, True) for kind in ("zero2", "zero3")):
        sharding = {"tp_size": 2, "dp_size": 4, "data_parallel": DataParallel(data_parallel), "shard_size": 2}
        yield uniform(model, f"{data_parallel} in groups every={every}", every, Recompute.FULL, **sharding)
    sharding = {"tp_size": 4, "dp_size": 2, "data_parallel": DataParallel.ZERO3, "shard_size": 4}
    sharding |= {"sequence_parallel": SequenceParallel.ULYSSES}
    yield uniform(model, "ulysses in groups", False, Recompute.NONE, **sharding)
    # Fewer key and value heads than the degree.
    sharding = {"tp_size": 8, "dp_size": 1, "sequence_parallel": SequenceParallel.ULYSSES}
    yield uniform(model, "ulysses of 8", False, Recompute.NONE, **sharding)


def first_kinds() -> list[Plan]:
    """A part of them: of each sequence parallelism with each recomputation, every third; all else."""
    pairs = [f"{split} {recompute}" for split in SequenceParallel for recompute in RECOMPUTE_WHOLE]
    return [plan for plan in kinds_of_strategy() if plan.name not in pairs or pairs.index(plan.name) % 3 == 0]


def _marked(plan: Plan) -> object:
    first = plan.name in {own.name for own in first_kinds()}
    return pytest.param(plan, id=plan.name, marks=() if first else pytest.mark.long)


def by_formula(plan: Plan, rank: int) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    for message in step_messages(plan, rank):
        # The fake step ends before the optimizer's.
        if message.cause is not Cause.NORM:
            found[message.collective, message.group_size] += message.times * message.bytes
    return found


def counted(plan: Plan, rank: int) -> Counter[tuple[str, int]]:
    step = simulate_step(plan, rank, family := family_named(plan.model.family, "test"), family.plain_kernel)
    return Counter({(kind.collective, kind.group_size): size for kind, size in step.message_bytes.items()})


@pytest.mark.parametrize("plan", [_marked(plan) for plan in kinds_of_strategy()])
def test_every_kind_of_strategy_moves_the_bytes_of_its_formula(plan: Plan) -> None:
    assert counted(plan, 5) == by_formula(plan, 5)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_layers_that_stay_gathered_from_pass_to_pass_are_not_gathered_again(schedule: Schedule) -> None:
    """On both stages of a pipeline whose layers, embedding and head are all of ZeRO-3, some recomputed."""
    model, chunks = tiny("llama"), 2 if schedule.interleaves else 1
    sharding = {"tp_size": 1, "dp_size": 4, "data_parallel": DataParallel.ZERO3}
    plan = uniform(model, schedule.value, False, Recompute.FULL, **sharding | {"dp_size": WORLD})
    layers = tuple(msgspec.structs.replace(layer, dp_size=4) for layer in plan.layers)
    step = 4 // (2 * chunks)
    ranges = placed([(low, low + step) for low in range(0, 4, step)], schedule, 2)
    plan = msgspec.structs.replace(
        plan,
        schedule=schedule,
        num_microbatches=4,
        stages=tuple(PipelineStage(ranks=tuple(range(4 * i, 4 * i + 4)), layers=own) for i, own in enumerate(ranges)),
        embedding=Strategy(**sharding),  # type: ignore[arg-type]
        head=Strategy(**sharding),  # type: ignore[arg-type]
        layers=(layers[0], *(msgspec.structs.replace(layer, recompute=Recompute.NONE) for layer in layers[1:])),
    )
    spared = sum(sum(gathers_spared(plan, stage, chunk).values()) for stage in range(2) for chunk in range(chunks))
    assert spared > 0
    for rank in (1, 6):
        assert counted(plan, rank) == by_formula(plan, rank)


SHARED = ("mixtral", 0), ("gpt_oss", 0), ("deepseek_v3", 0), ("mixtral", 1), ("qwen3_moe", 3), ("deepseek_v3", 1)


@pytest.mark.parametrize(("family", "number"), rest_long(1, SHARED))
def test_experts_that_ranks_share_out_move_the_bytes_of_even_load(family: str, number: int) -> None:
    (model,) = (model for model in MODELS if model.family == family)
    plan = with_shared_experts(random_plan(model, number, WORLD, "bfloat16"), number)
    assert any(message.cause is Cause.EXPERTS for message in step_messages(plan, 5))
    assert counted(plan, 5) == by_formula(plan, 5)


CONTEXT = (
    *(("t5", 7), ("deepseek_v3", 1), ("mixtral", 0), ("llama", 5)),
    *(("qwen3", 0), ("gemma2", 3), ("bert", 5), ("baichuan", 0)),
)


@pytest.mark.parametrize(("family", "number"), rest_long(1, CONTEXT))
def test_positions_that_attend_across_ranks_move_the_bytes_of_the_formulas(family: str, number: int) -> None:
    plan = with_context(random_plan(tiny(family), number, WORLD, "bfloat16"), number)
    assert any(message.cause is Cause.CONTEXT for message in step_messages(plan, 5))
    for rank in (5, WORLD - 1):
        assert counted(plan, rank) == by_formula(plan, rank)


@pytest.mark.parametrize(("family", "number"), rest_long(1, (("llama", 5), ("deepseek_v3", 7), ("vit", 0))))
def test_keys_that_go_round_a_ring_move_the_bytes_of_the_formulas(family: str, number: int) -> None:
    """Of every kind of recomputation, of which some repeat a round."""
    plan = with_context(random_plan(tiny(family), number, WORLD, "bfloat16"), number)
    plan = msgspec.structs.replace(plan, num_microbatches=1, global_batch_size=plan.microbatch_samples)
    rings = max((with_rings(plan, turn) for turn in range(2)), key=_rings)
    assert _rings(rings) > 0
    for recompute in RECOMPUTE_WHOLE:
        layers = tuple(msgspec.structs.replace(layer, recompute=recompute) for layer in rings.layers)
        one = msgspec.structs.replace(rings, layers=layers)
        assert counted(one, 5) == by_formula(one, 5), recompute


RING, GATHER = (DataParallel.ZERO2, ContextParallel.RING), (DataParallel.ZERO3, ContextParallel.GATHER)
FORMS = (
    *((SequenceParallel.NONE, *RING), (SequenceParallel.MEGATRON, *GATHER), (SequenceParallel.ULYSSES, *RING)),
    *((SequenceParallel.NONE, *GATHER), (SequenceParallel.MEGATRON, *RING), (SequenceParallel.ULYSSES, *GATHER)),
)


@pytest.mark.parametrize(("split", "data", "context"), rest_long(3, FORMS))
def test_each_form_of_shared_positions_moves_the_bytes_of_the_formulas(
    split: SequenceParallel, data: DataParallel, context: ContextParallel
) -> None:
    """On dp 2 x cp 2 x tp 2; under Ulysses with one key head, which two ranks repeat."""
    model = tiny("llama", num_key_value_heads=1 if split is SequenceParallel.ULYSSES else 2)
    sharding = {"tp_size": 2, "cp_size": 2, "dp_size": 2, "sequence_parallel": split, "data_parallel": data}
    plan = uniform(model, "form", False, Recompute.NONE, context=context, **sharding)
    assert {message.cause for message in step_messages(plan, 5)} >= {Cause.CONTEXT, Cause.PARAMETERS}
    assert counted(plan, 5) == by_formula(plan, 5)


def _rings(plan: Plan) -> int:
    return sum(layer.context is ContextParallel.RING for layer in plan.layers)


@pytest.mark.parametrize(("family", "number"), rest_long(2, RANDOM))
def test_mixed_plans_with_pipelines_and_ties_move_the_bytes_of_the_formulas(family: str, number: int) -> None:
    plan = random_plan(tiny(family), number, WORLD, "bfloat16")
    for rank in (0, WORLD - 1):
        assert counted(plan, rank) == by_formula(plan, rank)


@pytest.mark.parametrize(
    ("family", "number"),
    rest_long(1, (("gemma2", 5), ("llama", 0), ("gpt2", 1), ("qwen3", 2), ("bert", 3), ("olmo2", 4))),
)
def test_plans_with_stages_of_unequal_width_move_the_bytes_of_the_formulas(family: str, number: int) -> None:
    plan = uneven_plan(tiny(family), number, WORLD)
    for stage in plan.stages:
        assert counted(plan, stage.ranks[-1]) == by_formula(plan, stage.ranks[-1])


@pytest.mark.parametrize(
    ("family", "number"), rest_long(1, (("swin", 0), ("t5", 2), ("llama", 0), ("vit", 3), ("gpt2", 1)))
)
def test_stages_and_chunks_without_blocks_move_the_bytes_of_the_formulas(family: str, number: int) -> None:
    plan = bare_plan(tiny(family), number, WORLD)
    for rank in (0, WORLD - 1):
        assert counted(plan, rank) == by_formula(plan, rank)


def test_chunks_inside_without_blocks_hand_on_what_they_receive() -> None:
    plan = hollow_plan(tied=True)
    for rank in range(plan.world_size):
        assert counted(plan, rank) == by_formula(plan, rank)


def test_a_gather_too_many_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = next(plan for plan in kinds_of_strategy() if plan.name == "zero3 every=False")
    monkeypatch.setattr("shardwright_train.parallel.parallelize.Gathers", lambda *_layers: Gathers([]))
    assert counted(plan, 0) != by_formula(plan, 0)


@pytest.mark.parametrize("widths", [pytest.param((4, 4), marks=pytest.mark.long), (6, 2)])
def test_the_check_of_a_plan_shows_every_role(tmp_path: Path, widths: tuple[int, int]) -> None:
    plan = random_plan(tiny("llama"), 4, WORLD, "bfloat16", widths=widths)
    write_document(tmp_path / "plan.json", plan)
    ended = call(APP, "check", str(tmp_path / "plan.json"))
    assert ended.exit_code == 0, ended.stderr
    assert "The bytes counted in the simulated step match the formulas." in ended.stdout
    assert f"simulated {len(roles_of(plan))} of {len(roles_of(plan))} roles" in ended.stderr
    assert {rank for role in roles_of(plan) for rank in role.ranks} == set(range(WORLD))


def test_a_plan_that_lacks_memory_says_how_much(tmp_path: Path) -> None:
    plan = json.loads(msgspec.json.encode(random_plan(tiny("llama"), 4, 2, "float32")))
    plan["cluster"]["node_types"]["cpu"]["memory_bytes"] = 1000
    (tmp_path / "plan.json").write_text(json.dumps({"format": "shardwright.plan", "version": 1} | plan))
    ended = call(APP, "check", str(tmp_path / "plan.json"))
    assert ended.exit_code == 3
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "exceeds its memory by" in last and " bytes" in last


def test_the_check_of_a_plan_for_gpus_counts_their_communicators(tmp_path: Path) -> None:
    """Counted and added up as in a prediction; a device that has room for the tensors alone has too little."""
    drawn = random_plan(tiny("llama"), 4, 2, "float32", stages=2)
    node = {"device": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 << 30}
    gpus = msgspec.structs.replace(drawn.cluster.node_types["cpu"], **node)
    plan = msgspec.structs.replace(drawn, cluster=msgspec.structs.replace(drawn.cluster, node_types={"cpu": gpus}))
    write_document(tmp_path / "plan.json", plan)
    ended = call(APP, "check", str(tmp_path / "plan.json"))
    assert ended.exit_code == 0, ended.stderr
    (held,) = {f"{communicator_bytes(own) / (1 << 20):.1f}" for own in communicators(plan)}
    (line, other) = [line for line in ended.stdout.splitlines() if " of an edge of the pipeline" in line]
    assert "1 of all ranks" in line and line.split()[-2] == other.split()[-2] == held
    few = msgspec.structs.replace(gpus, memory_bytes=64 << 20)
    plan = msgspec.structs.replace(drawn, cluster=msgspec.structs.replace(drawn.cluster, node_types={"cpu": few}))
    write_document(tmp_path / "plan.json", plan)
    assert call(APP, "check", str(tmp_path / "plan.json")).exit_code == 3


def test_a_check_counts_masks_where_it_is_asked_to_and_refuses_where_there_are_none(tmp_path: Path) -> None:
    for family in ("llama", "t5"):
        plan = random_plan(tiny(family), 1, 2)
        nodes = {name: msgspec.structs.replace(node, memory_bytes=1) for name, node in plan.cluster.node_types.items()}
        cluster = msgspec.structs.replace(plan.cluster, node_types=nodes)
        write_document(tmp_path / f"{family}.json", msgspec.structs.replace(plan, cluster=cluster))
    lacks = []
    for asked in ([], ["--reset-attention-mask"]):
        checked = call(APP, "check", tmp_path / "llama.json", *asked)
        assert checked.exit_code == 3
        lacks.append(int(re.findall(r"exceeds its memory by (\d+) bytes", checked.stderr)[0]))
    assert lacks[1] > lacks[0]
    refused = call(APP, "check", tmp_path / "t5.json", "--reset-attention-mask")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == "error: --reset-attention-mask: samples of this family have no documents: leave it out\n"
