"""Optimizer states and activations in host memory change no bit, are where they should be, or are refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import pytest
import torch
from estimated_memory import CLUSTER, FLOAT32, estimated_profiles, held_bytes
from forked_command import forked_command
from forked_ranks import run_worker
from msgspec.structs import replace
from offload_worker import STEPS, Seen
from offloaded import with_moved_activations, with_offload
from random_plans import cluster_of, random_plan
from run_parity import TOLERANCE
from run_resumes import TOLERANCE as RESUMED
from run_resumes import resumed, saved
from shared_experts import with_shared_experts
from stock_optimizers import with_optimizers
from tiny_models import tiny
from torch import nn

from shardwright.io import BadInput, read_document, write_document
from shardwright.models.description import model_of_config
from shardwright.plan.offload import host_inputs, host_states
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import (
    Attention,
    Cluster,
    LayerStrategy,
    Measurement,
    Offload,
    PipelineStage,
    Plan,
    Plans,
    Recompute,
    Schedule,
    SequenceParallel,
    Strategy,
)
from shardwright_search.cost_model.plan import evaluate
from shardwright_train.commands.ranks import check_host_memory
from shardwright_train.dry_run import check_roles, simulate_step
from shardwright_train.engine.host import CountedHost, LateUpdates
from shardwright_train.engine.learning_rate import ANY
from shardwright_train.engine.optimizer import ShardedOptimizer
from shardwright_train.models.base import family_named
from shardwright_train.models.support import check_supported
from shardwright_train.parallel.world import World

Errors = dict[str, dict[str, float]]
NAMES = "adamw", "adamw-bf16", "adamw-8bit", "sgd", "lion"
CLIPPED = with_fields(ANY, clip_norm=0.5, steps=10, learning_rate=1e-2)


def _plans(dtype: str) -> list[Plan]:
    families = "llama", "mixtral", "llama", "gpt2", "mixtral"
    drawn = [random_plan(tiny(family), 60 + number, 2, dtype) for number, family in enumerate(families)]
    named = [plan for i, plan in enumerate(drawn) for plan in with_optimizers([plan], (NAMES[i],))]
    return with_offload([*named, with_shared_experts(drawn[1], 0)])


def _moved(dtype: str) -> list[Plan]:
    """Plans whose layers move activations: decoders, encoders, experts, two stacks, and latents."""
    families = "llama", "gpt2", "mixtral", "bert", "deepseek_v3", "t5", "qwen3"
    return with_moved_activations(random_plan(tiny(family), 300 + i, 2, dtype) for i, family in enumerate(families))


def _updated(dtype: str) -> list[Plan]:
    """Plans some of whose layers the host updates, with each optimizer that moves its states."""
    plain = random_plan(tiny("llama"), 70, 2, dtype)
    plans = [each for name in NAMES for each in with_optimizers([plain], (name,))]
    return [
        replace(plan, name=f"updated {plan.name}", layers=tuple(_on_host(layer) for layer in plan.layers))
        for plan in with_offload(plans)
    ]


def _on_host(layer: LayerStrategy) -> LayerStrategy:
    return replace(layer, offload=Offload.UPDATE) if layer.offloads_optimizer else layer


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Seen]]:
    """What each of two ranks saw of each plan."""
    folder = tmp_path_factory.mktemp("offload")
    plans = *_plans("bfloat16"), *_moved("float32"), *_updated("bfloat16")
    write_document(folder / "plans.json", Plans(plans=plans))
    run_worker("offload_worker", [str(folder / "plans.json"), str(folder / "seen.json")], 2)
    found = json.loads((folder / "seen.json").read_bytes())
    return {name: [Seen(*each) for each in ranks] for name, ranks in found.items()}


def test_offload_changes_no_bit_of_what_a_checkpoint_has(seen: dict[str, list[Seen]]) -> None:
    assert len(seen) >= len(NAMES) + 1 + 5 + len(NAMES)
    assert {name: [each.differing for each in ranks] for name, ranks in seen.items()} == {name: [0, 0] for name in seen}


def test_bytes_in_host_memory_and_of_copies_are_those_of_the_formula(seen: dict[str, list[Seen]]) -> None:
    for name, ranks in seen.items():
        assert any(each.held_bytes or each.moved_out for each in ranks), name
        for each in ranks:
            assert each.held_bytes == each.formula_bytes, name
            if name.startswith("updated"):
                assert each.bytes_in == each.bytes_out == 0 < each.without - each.on_device < each.formula_bytes, name
                continue
            assert each.bytes_in == each.bytes_out == STEPS * each.formula_bytes, name
            assert each.without - each.on_device == each.formula_bytes, name


def test_activations_come_back_as_they_went_and_none_is_left_on_the_host(seen: dict[str, list[Seen]]) -> None:
    plans = {plan.name: plan for plan in _moved("float32")}
    assert len(plans) >= 5
    for name, plan in plans.items():
        for rank, each in enumerate(seen[name]):
            assert each.moved_out == each.moved_in and each.left == 0, name
            assert each.most_moved >= host_inputs(plan, rank) > 0 or each.moved_out == host_inputs(plan, rank) == 0
            in_flight = schedule_of(plan.schedule).in_flight(
                len(plan.stages), plan.num_microbatches, plan.stage_of_rank(rank)
            )
            assert each.most_moved * STEPS * plan.num_microbatches == each.moved_out * in_flight, name
            if {x.recompute for x in plan.layers if x.offloads_activations} == {Recompute.FULL}:
                assert each.most_moved == host_inputs(plan, rank), name


def test_no_more_than_three_parameters_states_are_on_the_device_at_once(seen: dict[str, list[Seen]]) -> None:
    for name, ranks in seen.items():
        for each in ranks if not name.startswith("updated") else ():
            assert 3 * each.largest_bytes <= each.most_bytes < 3 * (each.largest_bytes + 4 * 256), f"{name}: aligned"


def test_updates_start_before_the_layer_before_computes_and_come_before_their_own_is_read(
    seen: dict[str, list[Seen]],
) -> None:
    assert {name: [each.late for each in ranks] for name, ranks in seen.items()} == {name: [0, 0] for name in seen}


class _Noted:
    """Updates that only note what becomes of them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start_updates(self, layer: str) -> None:
        self.events.append(f"start {layer}")

    def finish_updates(self, layer: str) -> None:
        self.events.append(f"finish {layer}")

    def end_updates(self) -> None:
        self.events.append("end")

    def since(self) -> list[str]:
        events, self.events = self.events, []
        return events


def test_updates_of_layers_that_are_gathered_ahead_come_before_the_layer_before() -> None:
    late, noted = LateUpdates(("a", "b", "c", "d"), {"c"}), _Noted()
    late.wait_for_use(noted, {"d", "c", "b"})
    assert noted.since() == ["start b"]
    late.before("a")
    assert noted.since() == []
    late.before("b")
    assert noted.since() == ["finish b", "start c", "finish c", "start d"]
    late.before("c")
    late.after_forward()
    assert noted.since() == []
    late.before("d")
    assert noted.since() == ["finish d"]
    late.before("a")
    assert noted.since() == ["end"]
    late.before("b")
    assert noted.since() == []


def test_updates_that_wait_are_finished_in_order_when_something_reads_all() -> None:
    late, noted = LateUpdates(("a", "b", "c")), _Noted()
    late.flush()
    late.wait_for_use(noted, ("a", "b", "c"))
    late.before("a")
    late.flush()
    assert noted.since() == ["start a", "finish a", "start b", "finish b", "start c", "finish c", "end"]
    late.flush()
    assert noted.since() == []


def test_plans_with_offload_train_as_one_process_does(compare: Callable[..., Errors]) -> None:
    found = compare([plan for plan in (*_plans("float64"), *_moved("float64")) if plan.optimizer == "adamw"])
    assert len(found) >= 2 + 5
    assert {plan: error for plan, error in found.items() if not max(error.values()) <= TOLERANCE} == {}


@pytest.mark.parametrize(
    "offloaded", [{"one": ("first", "second"), "two": ("third",)}, {"one": ("second",)}, {"two": ("second", "third")}]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_not_finite_changes_nothing_in_host_memory(
    one_rank: World, name: str, offloaded: dict[str, tuple[str, ...]]
) -> None:
    generator = torch.Generator().manual_seed(0)
    start = {key: torch.randn(6, 40, generator=generator) for key in ("first", "second", "third")}
    both = [
        ShardedOptimizer(
            {key: nn.Parameter(x.clone()) for key, x in start.items()}, CLIPPED, optimizer=name, offloaded=on
        )
        for on in (dict[str, tuple[str, ...]](), offloaded)
    ]
    host = both[1].host
    assert isinstance(host, CountedHost) and len(both[1].host_states) == sum(map(len, offloaded.values()))
    for step in range(1, 5):
        before = [x.clone() for x in (*both[1].parameters.values(), *both[1].state().values())]
        gradients = {key: torch.randn(6, 40, generator=generator) for key in start}
        gradients["second"][2, 3] = torch.inf if step == 3 else 0.0
        for optimizer in both:
            for key, parameter in optimizer.parameters.items():
                parameter.grad = gradients[key].clone()
            optimizer.step(step, torch.zeros((), dtype=torch.float64), False)
        states = [tuple(each.state().values()) for each in both]
        plain, other = ((*each.parameters.values(), *there) for each, there in zip(both, states, strict=True))
        assert all(map(torch.equal, plain, other))
        assert all(map(torch.equal, before, other)) == (step == 3)
    assert both[0].state_bytes - both[1].state_bytes == host.bytes_in // 4 == host.bytes_out // 4


_CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
MODEL = model_of_config(_CONFIG, "m", 256, "config.json")


def _memory_plan(
    offloaded: int,
    ranks: int,
    cluster: Cluster,
    kind: Offload = Offload.OPTIMIZER,
    recompute: Recompute = Recompute.NONE,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> Plan:
    given: dict[str, Any] = {"tp_size": 1, "dp_size": ranks, "recompute": recompute}
    asked = [{"offload": kind} if number < offloaded else {} for number in range(len(MODEL.layers))]
    ends = {name: given[name] for name in ("tp_size", "dp_size")}
    return Plan(
        name=f"p{offloaded}", model=MODEL, cluster=cluster, global_batch_size=4 * ranks, num_microbatches=2,
        schedule=schedule, precision=FLOAT32, attention=Attention.SDPA,
        stages=(PipelineStage(ranks=tuple(range(ranks)), layers=((0, 4),)),),
        embedding=Strategy(**ends), head=Strategy(**ends),
        layers=tuple(LayerStrategy(type="block", **given, **more) for more in asked),
    )  # fmt: skip


def test_memory_is_as_predicted_and_what_goes_to_the_host_is_free() -> None:
    """Of a rank, within 3 %; and by as much as the states in host memory less than without."""
    node = replace(CLUSTER.node_types["n"], host_memory_gib=1.0, host_bytes_per_s=1e9)
    cluster = replace(CLUSTER, node_types={"n": node})
    profiles, family = estimated_profiles(FLOAT32, (2, 4), MODEL), family_named("llama", "test")
    plans = [_memory_plan(offloaded, 4, cluster) for offloaded in (0, 3)]
    predicted = [held_bytes(plan, profiles) for plan in plans]
    simulated = [simulate_step(plan, 0, family, "sdpa") for plan in plans]
    assert predicted == pytest.approx([step.peak_bytes for step in simulated], rel=0.03)
    hosted = sum(host_states(plans[1], 0))
    assert simulated[1].host_bytes == hosted == simulated[0].optimizer_bytes - simulated[1].optimizer_bytes > 0
    assert simulated[0].peak_bytes - simulated[1].peak_bytes == hosted
    (stage,) = evaluate(plans[1], profiles, timeline=False).estimate.stages
    assert stage.host_bytes == hosted


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_memory_is_as_predicted_where_activations_go_to_the_host(recompute: Recompute, schedule: Schedule) -> None:
    """Of all layers as near as without, and of the host within 3 %; of some of them at most more is predicted."""
    node = replace(CLUSTER.node_types["n"], host_memory_gib=1.0, host_bytes_per_s=1e9)
    cluster = replace(CLUSTER, node_types={"n": node})
    profiles, family = estimated_profiles(FLOAT32, (2, 4), MODEL), family_named("llama", "test")
    plans = [
        _memory_plan(count, 4, cluster, Offload.ACTIVATIONS, recompute, schedule)
        for count in range(len(MODEL.layers) + 1)
    ]
    steps = [simulate_step(plan, 0, family, "sdpa") for plan in plans]
    ratios = [held_bytes(plan, profiles) / step.peak_bytes for plan, step in zip(plans, steps, strict=True)]
    assert ratios[-1] == pytest.approx(ratios[0], rel=0.03) and min(ratios) > 0.97
    peaks = [step.peak_bytes for step in steps]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0]
    for plan, step in zip(plans[1:], steps[1:], strict=True):
        (stage,) = evaluate(plan, profiles, timeline=False).estimate.stages
        assert stage.host_bytes == pytest.approx(step.host_activation_bytes, rel=0.03)
        assert step.host_activation_bytes >= host_inputs(plan, 0)


def test_a_measured_step_holds_what_check_finds(tmp_path: Path) -> None:
    """On two ranks, within 3 %, by tensors that are not in host memory."""
    plans = tuple(_memory_plan(offloaded, 2, cluster_of(2)) for offloaded in (0, 4))
    write_document(tmp_path / "plans.json", Plans(plans=plans))
    given = ["--steps", 1, "--warmup-steps", 1, "--out", tmp_path / "out.json"]
    done = forked_command(["measure", tmp_path / "plans.json", *given])
    _, err = done.communicate(timeout=500)
    assert done.returncode == 0, err
    for found in read_document(tmp_path / "out.json", Measurement).plans:
        (check,) = check_roles(found.plan, family_named("llama", "test"), "sdpa", lambda _done, _all: None)
        for rank in found.ranks:
            assert rank.memory.optimizer_bytes == pytest.approx(check.step.optimizer_bytes, abs=4096), "counts of steps"
            assert check.peak_bytes == pytest.approx(rank.memory.peak_bytes, rel=0.03)


def test_activations_are_refused_where_they_cannot_move() -> None:
    plan = _memory_plan(2, 2, cluster_of(2), Offload.BOTH)
    check_supported(plan, "plan.json")
    with pytest.raises(BadInput, match=r"layers\[0\]\.offload: activations of compiled layers are not in host memory"):
        check_supported(replace(plan, compile=True), "plan.json")
    with pytest.raises(BadInput, match=r"layers\[0\]\.offload: activations are not in host memory under zero_bubble"):
        check_supported(replace(plan, schedule=Schedule.ZERO_BUBBLE), "plan.json")
    gathers: dict[str, Any] = {"tp_size": 2, "dp_size": 1, "sequence_parallel": SequenceParallel.MEGATRON}
    for wrong in ({"recompute": Recompute.SELECTIVE}, gathers, {"cp_size": 2}):
        with pytest.raises(ValueError, match="offload activations needs recompute full, or none where no rank gathers"):
            LayerStrategy(type="block", **{"tp_size": 1, "dp_size": 1, "offload": Offload.ACTIVATIONS} | wrong)
    LayerStrategy(type="block", **gathers, recompute=Recompute.FULL, offload=Offload.ACTIVATIONS)


@pytest.mark.parametrize("offloads_first", [False, True])
def test_any_plan_resumes_from_a_plan_with_offload_and_the_other_way_round(
    tmp_path: Path, offloads_first: bool
) -> None:
    plain = [replace(random_plan(tiny("llama"), number, 2), global_batch_size=16) for number in (1, 2)]
    first, second = (with_offload([x])[0] if i == offloads_first else x for i, x in enumerate(reversed(plain)))
    told = saved(tmp_path, run_worker, [first])
    assert [one.error <= RESUMED for one in resumed(tmp_path, run_worker, [second], told)] == [True]


def test_muon_is_refused_by_name() -> None:
    plan = with_offload([random_plan(tiny("llama"), 0, 2)])[0]
    check_supported(plan, "plan.json")
    number = next(i for i, layer in enumerate(plan.layers) if layer.offloads_optimizer)
    with pytest.raises(BadInput, match=rf"plan\.json: layers\[{number}\]\.offload: muon updates whole matrices"):
        check_supported(replace(plan, optimizer="muon"), "plan.json")


def test_host_memory_that_is_short_is_one_line_before_anything_starts() -> None:
    plan = with_offload([random_plan(tiny("llama"), 0, 2)])[0]
    needed = sum(sum(host_states(plan, rank)) for rank in range(2))
    check_host_memory(plan, range(2), needed, "plan.json")
    with pytest.raises(
        BadInput,
        match=r"plan\.json: its 2 ranks here keep [1-9].* KiB and more of offloaded layers .*, .* KiB are free",
    ):
        check_host_memory(plan, range(2), needed - 1, "plan.json")


def test_a_layer_says_in_one_way_that_nothing_is_offloaded() -> None:
    with pytest.raises(ValueError, match="offload none: leave it out"):
        LayerStrategy(type="block", tp_size=1, dp_size=1, offload=Offload.NONE)
