"""What is written is read back, and equal values are equal bytes at any time."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from random_documents import documents, plans

from shardwright.io import Document, read_document, sha256_of_value, write_document
from shardwright.types.cluster import Cluster, NodeGroup, NodeType
from shardwright.types.measurement import Measurement, PlanMeasurement, RankMeasurement
from shardwright.types.model import Model, Parameter
from shardwright.types.plan import Attention, GradientReduction, Plan, Precision, Schedule

EXAMPLES = Path(__file__).parents[2] / "core" / "examples"


@settings(max_examples=25, deadline=None)
@given(documents)
def test_a_document_is_read_as_it_was_written(document: Document) -> None:
    with TemporaryDirectory() as folder:
        first, second = Path(folder, "first.json"), Path(folder, "second.json")
        write_document(first, document)
        again = read_document(first, type(document))
        assert again == document
        write_document(second, again)
        assert second.read_bytes() == first.read_bytes()
        assert sha256_of_value(again) == sha256_of_value(document)


@settings(max_examples=15, deadline=None)
@given(plans())
def test_every_layer_of_a_valid_plan_lies_on_the_stage_that_names_it(plan: Plan) -> None:
    assert plan.world_size == plan.cluster.num_devices == len(plan.cluster.node_of_rank)
    for layer in range(len(plan.layers)):
        stage = plan.stages[plan.stage_of(f"layers[{layer}]")]
        assert any(low <= layer < high for low, high in stage.layers)
    # A V comes back to the stage that it begins at.
    last = 0 if plan.schedule.turns else len(plan.stages) - 1
    assert (plan.stage_of("embedding"), plan.stage_of("head")) == (0, last)


def test_the_identity_of_a_plan_does_not_depend_on_the_order_of_keys(tmp_path: Path) -> None:
    text = json.loads((EXAMPLES / "plan.json").read_text())
    shuffled = tmp_path / "plan.json"
    shuffled.write_text(json.dumps(dict(reversed(text.items()))))
    first, second = read_document(EXAMPLES / "plan.json", Plan), read_document(shuffled, Plan)
    assert first.sha256 == second.sha256
    text["num_microbatches"] = 4
    shuffled.write_text(json.dumps(text))
    assert read_document(shuffled, Plan).sha256 != first.sha256


def test_a_run_is_identified_by_what_its_plan_executes_alone() -> None:
    """No name, price, memory, node or node type, nor a length that only the planner reads, begins a run anew."""
    plan = read_document(EXAMPLES / "plan.json", Plan)
    replace = msgspec.structs.replace
    (name, kind), *_ = plan.cluster.node_types.items()
    kinds = [replace(kind, usd_per_hour=123.0), replace(kind, memory_bytes=1), replace(kind, device="Another")]
    clusters = [
        replace(plan.cluster, name="another"),
        replace(plan.cluster, node_types=plan.cluster.node_types | {"unused": kind}),
        *(replace(plan.cluster, node_types=plan.cluster.node_types | {name: other}) for other in kinds),
    ]
    types = {name: replace(kind, forward_flops_per_sample=1) for name, kind in plan.model.types.items()}
    models = [replace(plan.model, name="another"), replace(plan.model, types=types)]
    same = [replace(plan, name="another"), *(replace(plan, cluster=cluster) for cluster in clusters)]
    for other in [*same, *(replace(plan, model=model) for model in models)]:
        assert other.sha256 != plan.sha256 and other.executed_sha256 == plan.executed_sha256
    executed = dict(
        model=replace(plan.model, config=plan.model.config | {"seed": 1}),
        global_batch_size=2 * plan.global_batch_size,
        num_microbatches=1,
        schedule=Schedule.GPIPE,
        gradient_reduction=GradientReduction.EVERY_MICROBATCH,
        precision=Precision(compute="bfloat16"),
        attention=Attention.EAGER,
        fused=("norm",),
        compile=True,
        optimizer="lion",
        loss_chunks=2,
    )
    for field, value in executed.items():
        other = replace(plan, **{field: value})  # type: ignore[arg-type]
        assert other.executed_sha256 != plan.executed_sha256, field
    moved = {"stages", "embedding", "head", "layers", "expert_placement"}
    assert {*plan.__struct_fields__} == {*executed, *moved, "name", "cluster"}, "is a new field executed?"
    before = "814f48f64222d79d352a755f58e3160106434152f9d20ffa22a0b4627e20ead0"  # without cp_size and context
    split = replace(plan.embedding, cp_size=2, dp_size=1)
    assert plan.executed_sha256 == before != replace(plan, embedding=split).executed_sha256
    for field in moved:  # no valid plan differs in one of them alone
        value = getattr(plan, field)
        other = replace(plan)
        msgspec.structs.force_setattr(other, field, [] if value is msgspec.UNSET else [value, value])
        assert other.executed_sha256 != plan.executed_sha256, field


def test_parameters_are_counted_with_their_tensor_parallel_share_and_ties_once() -> None:
    model = read_document(EXAMPLES / "model.json", Model)
    assert model.types["block"].parameter_count() == 8 + 32 * 8 + 8 * 32
    assert model.types["block"].parameter_count(2) == 8 + 16 * 8 + 8 * 16
    assert Parameter(name="w", shape=(5, 3), tp_dim=0).numel(2) == 9
    assert model.parameter_count == 64 * 8 + 3 * 520


def test_the_layer_count_does_not_change_what_a_profile_measures() -> None:
    model = read_document(EXAMPLES / "model.json", Model)
    fields = {name: getattr(model, name) for name in model.__struct_fields__}
    assert Model(**fields | {"layers": ("block",)}).architecture_sha256 == model.architecture_sha256
    assert Model(**fields | {"sequence_length": 32}).architecture_sha256 == model.architecture_sha256
    assert Model(**fields | {"family": "other"}).architecture_sha256 != model.architecture_sha256


def test_a_measured_step_takes_as_long_as_its_slowest_rank() -> None:
    (measured,) = read_document(EXAMPLES / "measurement.json", Measurement).plans
    slow = {name: getattr(measured.ranks[1], name) for name in RankMeasurement.__struct_fields__}
    ranks = (measured.ranks[0], RankMeasurement(**slow | {"step_s": (0.5, 9.0)}), *measured.ranks[2:])
    assert PlanMeasurement(plan=measured.plan, ranks=ranks).step_times_s == (1.0, 9.0)
    assert measured.peak_bytes == 8192


def test_how_fast_a_machine_was_is_the_mean_of_its_ranks() -> None:
    """A process beside two ranks takes half of one core: a step takes 1.4 times as long then, not twice."""
    (measured,) = read_document(EXAMPLES / "measurement.json", Measurement).plans
    ranks = tuple(
        msgspec.structs.replace(rank, reference_s=(2.0, 2.0) if rank.rank % 2 else (1.0, 1.0))
        for rank in measured.ranks
    )
    assert PlanMeasurement(plan=measured.plan, ranks=ranks).reference_s == 1.5


def test_a_rank_runs_on_the_node_that_the_cluster_lists_for_it() -> None:
    kinds = {
        "two": NodeType(device="a", devices_per_node=2, memory_bytes=1),
        "one": NodeType(device="b", devices_per_node=1, memory_bytes=1),
    }
    nodes = (NodeGroup(node_type="one", count=2), NodeGroup(node_type="two", count=1))
    cluster = Cluster(name="c", nodes=nodes, node_types=kinds)
    assert cluster.node_of_rank == (0, 1, 2, 2)
    assert cluster.node_type_of_rank == ("one", "one", "two", "two")
    with pytest.raises(ValueError, match="'three'"):
        Cluster(name="c", nodes=(NodeGroup(node_type="three", count=1),), node_types=kinds)
