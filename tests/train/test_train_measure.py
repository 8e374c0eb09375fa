"""Measured plans: times and memory of every rank by segment and pass; what is counted is what is known."""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from estimated import predicted_bytes
from forked_command import forked_command
from random_plans import cluster_of
from tiny_models import tiny

from shardwright.io import BadInput, read_document, write_document
from shardwright.launch.journal import Journal
from shardwright.plan.chunks import stage_actions
from shardwright.types.measurement import Measurement, PlanMeasurement, RankMeasurement
from shardwright.types.plan import ContextProbe, GradientReduction, PipelineStage, Plan, Plans, Precision, Schedule
from shardwright.types.strategy import DataParallel, LayerStrategy, Recompute, Strategy
from shardwright_train.commands.ranks import start_measure
from shardwright_train.dry_run import simulate_step
from shardwright_train.measurement import profiles
from shardwright_train.measurement.measure import MeasureIdentity, open_journal
from shardwright_train.models.base import family_named
from shardwright_train.options import MeasureJob, MeasureOptions
from shardwright_train.parallel.world import World

Measured = dict[str, PlanMeasurement]
REPEATS = 2
ONE_LAYER, TWO_LAYERS = (((0, 1),),), (((0, 2),),)
HALVES, IN_TURNS = (((0, 1),), ((1, 2),)), (((0, 1), (2, 3)), ((1, 2), (3, 4)))
FLOAT32 = Precision(parameters="float32", compute="float32", reduce="float32")
BFLOAT16 = Precision(parameters="float32", compute="bfloat16", reduce="float32")


class State(NamedTuple):
    """A plan whose states are compared with a table, and the table's bytes per parameter on 2 ranks."""

    kind: DataParallel
    precision: Precision
    num_microbatches: int
    reduction: GradientReduction
    parameters: int
    gathered: int
    unreduced: int
    gradients: int
    optimizer: int

    @property
    def name(self) -> str:
        return f"{self.kind} {self.precision.compute} {self.num_microbatches} {self.reduction}"


DEFERRED, EVERY = GradientReduction.DEFERRED, GradientReduction.EVERY_MICROBATCH
DDP, ZERO2, ZERO3 = DataParallel.DDP, DataParallel.ZERO2, DataParallel.ZERO3
STATES = (
    State(DDP, BFLOAT16, 1, DEFERRED, 4, 2, 0, 4, 8),
    State(DDP, BFLOAT16, 2, DEFERRED, 4, 2, 4, 4, 8),
    State(ZERO2, BFLOAT16, 1, DEFERRED, 2, 2, 0, 2, 4),
    State(ZERO2, BFLOAT16, 2, DEFERRED, 2, 2, 4, 2, 4),
    State(ZERO3, BFLOAT16, 1, DEFERRED, 2, 0, 0, 2, 4),
    State(ZERO3, BFLOAT16, 2, DEFERRED, 2, 0, 4, 2, 4),
    State(ZERO3, BFLOAT16, 2, EVERY, 2, 0, 0, 2, 4),
    State(DDP, FLOAT32, 2, DEFERRED, 4, 0, 4, 4, 8),
    State(DDP, FLOAT32, 2, EVERY, 4, 0, 0, 4, 8),
    State(ZERO2, FLOAT32, 2, DEFERRED, 2, 4, 4, 2, 4),
    State(ZERO3, FLOAT32, 2, DEFERRED, 2, 0, 4, 2, 4),
)


def _plan(
    name: str,
    stages: tuple[tuple[tuple[int, int], ...], ...] = TWO_LAYERS,
    kind: DataParallel = DDP,
    recompute: Recompute = Recompute.NONE,
    **changes: Any,
) -> Plan:
    # Every size is even: nothing is padded on 2 ranks.
    model = tiny("llama", vocab_size=64, num_hidden_layers=stages[-1][-1][-1])
    dp_size = 2 // len(stages)
    sharding: dict[str, Any] = {"tp_size": 1, "dp_size": dp_size, "data_parallel": kind}
    fields = {
        "schedule": Schedule.INTERLEAVED_1F1B if len(stages[0]) > 1 else Schedule.ONE_F_ONE_B,
        "global_batch_size": 16,
        "num_microbatches": 2,
        "gradient_reduction": DEFERRED,
        "precision": FLOAT32,
    }
    return Plan(
        name=name,
        model=model,
        cluster=cluster_of(2),
        stages=tuple(
            PipelineStage(ranks=tuple(range(i * dp_size, (i + 1) * dp_size)), layers=layers)
            for i, layers in enumerate(stages)
        ),
        embedding=Strategy(**sharding),
        head=Strategy(**sharding),
        layers=tuple(LayerStrategy(type=type_, recompute=recompute, **sharding) for type_ in model.layers),
        **(fields | changes),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measure")


@pytest.fixture(scope="module")
def measured(folder: Path) -> Measured:
    plans = (
        _plan("kept"),
        _plan("recomputed", recompute=Recompute.FULL),
        _plan("pipeline", HALVES),
        _plan("in turns", IN_TURNS, num_microbatches=4),
        *(_plan(f"{n} in turns", IN_TURNS, num_microbatches=n, global_batch_size=2 * n) for n in (2, 8, 16)),
        *(
            _plan(
                state.name,
                ONE_LAYER,
                kind=state.kind,
                precision=state.precision,
                num_microbatches=state.num_microbatches,
                gradient_reduction=state.reduction,
            )
            for state in STATES
        ),
        _plan("share of four"),
    )
    names = [plan.name for plan in plans]
    # What has fewer layers first; the second one's memory is measured when the others are gone, the last one's, too.
    in_turns = tuple(names.index(name) for name in ("ddp float32 2 deferred", "zero2 float32 2 deferred", "kept"))
    context = (ContextProbe(plan=len(plans) - 1, cp_size=4),)
    write_document(folder / "plans.json", Plans(plans=plans, in_turns=(in_turns,), context=context))
    asked = ["--steps", REPEATS, "--warmup-steps", 1, "--trace", folder / "traces", "--out", folder / "out.json"]
    done = forked_command(["measure", folder / "plans.json", *asked])
    _, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    return {m.plan.name: m for m in read_document(folder / "out.json", Measurement).plans}


def _ranks(measured: Measured) -> list[RankMeasurement]:
    return [rank for plan in measured.values() for rank in plan.ranks]


def test_every_rank_reports_every_segment_it_has(measured: Measured) -> None:
    names = [[s.name for s in rank.segments] for rank in measured["kept"].ranks]
    assert names == [["embedding", "layers", "head"]] * 2
    for plan in ("pipeline", "in turns"):
        assert [[s.name for s in r.segments] for r in measured[plan].ranks] == [
            ["embedding", "layers"],
            ["layers", "head"],
        ]
    for rank in _ranks(measured):
        repeats = len(rank.step_s)
        assert REPEATS <= repeats == len(rank.optimizer_s) <= 3 * REPEATS
        assert all(len(s.forward_s) == len(s.backward_s) == repeats for s in rank.segments)
        assert [s.name for s in rank.memory.segments] == [s.name for s in rank.segments]


def test_plans_in_turns_have_as_many_steps_each_and_name_one_another(measured: Measured) -> None:
    turns = measured["kept"].in_turns
    together = [found for found in measured.values() if found.in_turns]
    assert [found.plan.name for found in sorted(together, key=lambda found: turns.index(found.plan.sha256))] == [
        "ddp float32 2 deferred", "zero2 float32 2 deferred", "kept",
    ]  # fmt: skip
    assert {found.in_turns for found in together} == {turns}
    (again,) = {found.measured_again for found in together}
    assert {len(rank.step_s) for found in together for rank in found.ranks} == {(1 + again) * REPEATS}


def test_a_share_of_positions_is_measured_with_the_keys_of_all_ranks(measured: Measured) -> None:
    assert {name: one.cp_size for name, one in measured.items() if one.cp_size} == {"share of four": 4}


def test_the_parts_of_a_step_are_no_longer_than_the_step(measured: Measured) -> None:
    for rank in _ranks(measured):
        for i, step_s in enumerate(rank.step_s):
            assert 0 < sum(s.forward_s[i] + s.backward_s[i] for s in rank.segments) + rank.optimizer_s[i] < step_s


def test_passes_come_in_the_order_of_the_schedule_and_fill_the_median_step(measured: Measured) -> None:
    for plan in measured.values():
        made = plan.plan
        for rank in plan.ranks:
            wanted = stage_actions(made, rank.stage)
            assert [(p.kind, p.microbatch, p.chunk) for p in rank.passes] == list(wanted)
            over_s = 0.0
            for one in rank.passes:
                assert over_s <= one.start_s - one.wait_s
                over_s = one.start_s + one.time_s
            repeat = plan.median_repeat
            assert over_s + rank.optimizer_s[repeat] < rank.step_s[repeat]


def test_waiting_for_a_message_is_no_part_of_a_pass(measured: Measured) -> None:
    first, last = ({(p.kind, p.microbatch): p for p in rank.passes} for rank in measured["pipeline"].ranks)
    # Between its own passes of a microbatch the first stage leaves the last one the time for both of its.
    for i in range(2):
        forward, backward = first["forward", i], first["backward", i]
        there_s = last["forward", i].time_s + last["backward", i].time_s
        assert backward.start_s - (forward.start_s + forward.time_s) > there_s
    # With nobody to wait for nobody waits.
    alone = measured["kept"].ranks[0].passes
    assert sum(p.wait_s for p in alone) < 0.5 * sum(p.time_s for p in alone)


@pytest.mark.parametrize("state", STATES, ids=[state.name for state in STATES])
def test_states_take_the_bytes_of_the_table(measured: Measured, state: State) -> None:
    count = _parameters(measured[state.name].plan)
    for rank in measured[state.name].ranks:
        memory = rank.memory
        found = (memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_bytes)
        assert found == (count * state.parameters, count * state.gradients, count * state.optimizer)


def _parameters(plan: Plan) -> int:
    return sum(plan.model.types[name].parameter_count() for name in ("embedding", *plan.model.layers, "head"))


def _resident(plan: Plan, rank: int) -> dict[tuple[str, tuple[int, int]], int]:
    """What a rank has resident at each event of a simulated step."""
    return dict(simulate_step(plan, rank, family_named("llama", "test"), "sdpa").resident_bytes)


@pytest.mark.parametrize("state", [s for s in STATES if s.num_microbatches > 1], ids=lambda state: state.name)
def test_between_two_passes_lie_the_states_and_what_waits(measured: Measured, state: State) -> None:
    """Beside parameters and optimizer: parameters gathered for compute, and gradients, reduced or not."""
    plan = measured[state.name].plan
    resident = _resident(plan, 0)
    before, between = (resident["forward.begin", (microbatch, 0)] for microbatch in (0, 1))
    count = _parameters(plan)
    waiting = count * (state.gathered + (state.unreduced or state.gradients))
    # Where every microbatch reduces, FSDP2 keeps the last message, the embedding's, until the next pass.
    kept = 64 * 32 * 4 * (state.kind is not DDP and state.reduction is EVERY)
    # The tokens of the step come to the device with its first pass.
    held = waiting + kept + plan.global_batch_size * 16 * 8
    assert held <= between - before < held + 100, "beside a few numbers of the loss"


def test_messages_do_not_pile_up_with_the_microbatches(measured: Measured) -> None:
    eight, sixteen = (measured[f"{n} in turns"].ranks for n in (8, 16))
    assert [r.memory.peak_bytes for r in eight] == [r.memory.peak_bytes for r in sixteen]


def test_memory_of_chunks_with_as_many_microbatches_as_stages_is_predicted(measured: Measured, tmp_path: Path) -> None:
    """From an estimated profile: within 5 % where all of it is held, with gradients from the start 12 % off."""
    found = measured["2 in turns"]
    predicted = predicted_bytes(found.plan, tmp_path)
    for size, rank in zip(predicted, found.ranks, strict=True):
        assert size == pytest.approx(rank.memory.peak_bytes, rel=0.05)


def test_activations_are_those_of_the_microbatches_in_flight(measured: Measured) -> None:
    pipeline = measured["pipeline"]
    first, second = (_resident(pipeline.plan, rank) for rank in range(2))
    one = sum(segment.activation_bytes for segment in pipeline.ranks[0].memory.segments)
    assert first["forward.end", (1, 0)] - first["forward.wait", (1, 0)] == one > 0
    # The first of two stages is one microbatch ahead; beside it lie the tokens and labels, and what the next
    # action begins with is being received, a gradient: of 8 samples of 16 tokens of 32 numbers.
    inputs, received = 3 * pipeline.plan.global_batch_size * 16 * 8, 8 * 16 * 32 * 4
    ahead = first["forward.end", (1, 0)] - first["forward.begin", (0, 0)]
    assert 2 * one + received <= ahead < 2 * one + received + inputs
    # The second receives its next input while it goes backward.
    assert received <= second["backward.wait", (0, 0)] - second["backward.begin", (0, 0)] < received + inputs


def test_recompute_trades_memory_for_time(measured: Measured) -> None:
    kept, recomputed = (measured[name].ranks[0] for name in ("kept", "recomputed"))
    layers = [next(s for s in rank.memory.segments if s.name == "layers") for rank in (kept, recomputed)]
    assert layers[1].activation_bytes < layers[0].activation_bytes / 4
    assert recomputed.memory.peak_bytes < kept.memory.peak_bytes
    assert layers[1].backward_workspace_bytes > layers[0].backward_workspace_bytes, "what is recomputed is there"


def test_replicas_count_the_same_memory(measured: Measured) -> None:
    for plan in measured.values():
        if len(plan.plan.stages) == 1:
            first, second = (rank.memory for rank in plan.ranks)
            assert (first.segments, first.peak_bytes) == (second.segments, second.peak_bytes)


def test_gloos_threads_are_waited_for_until_they_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as one has yet to run, it holds a collective's tensors, which would count as resident for ever."""
    states = {"1": ("python", "R"), "2": ("pt_gloo_runloop", "S"), "3": ("pt_gloo_runloop", "R")}
    for number, (name, state) in states.items():
        (tmp_path / number).mkdir()
        (tmp_path / number / "comm").write_text(f"{name}\n")
        (tmp_path / number / "stat").write_text(f"{number} ({name}) {state} 1 1")
    (tmp_path / "4").mkdir()  # one that has ended since
    pauses = 0

    def pause(_: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 5:
            (tmp_path / "3/stat").write_text("3 (pt_gloo_runloop) S 1 1")

    monkeypatch.setattr(profiles.time, "sleep", pause)
    profiles.settle(tmp_path)
    assert pauses == 5


def test_a_trace_of_each_plan_and_rank_names_its_passes(measured: Measured, folder: Path) -> None:
    assert len(list((folder / "traces").iterdir())) == 2 * len(measured)
    processes, flows = [], []
    for rank in range(2):
        (file,) = (folder / "traces").glob(f"in-turns-*.rank{rank}.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        spans = [(e["ts"], e["name"]) for e in events if e.get("cat") == "user_annotation" and e["pid"] == rank]
        made = measured["in turns"].plan
        wanted = [f"{kind} microbatch {i} chunk {c}" for kind, i, c in stage_actions(made, rank)]
        assert [name for _, name in sorted(spans) if name in wanted] == wanted
        assert {f"wait for {name}" for name in wanted} | {"optimizer"} <= {name for _, name in spans}
        names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert names == [f"rank {rank}"]
        processes.append({e["pid"] for e in events})
        flows.append({e["id"] for e in events if "id" in e})
    assert processes == [{0}, {1}]
    assert flows[0] and flows[1] and not flows[0] & flows[1], "put together, no arrow leads from rank to rank"


def test_a_folder_for_traces_that_is_a_file_is_refused(tmp_path: Path) -> None:
    write_document(tmp_path / "plan.json", _plan("kept"))
    (tmp_path / "traces").write_text("mine")
    with pytest.raises(BadInput, match=r"traces: is not a folder"):
        start_measure(_options(tmp_path, trace=tmp_path / "traces"))
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "traces"}


def _options(folder: Path, **more: Any) -> MeasureOptions:
    return MeasureOptions(plans=(folder / "plan.json",), out=folder / "out.json", steps=1, warmup_steps=1, **more)


def test_a_plan_for_another_number_of_nodes_is_refused(tmp_path: Path) -> None:
    write_document(tmp_path / "plan.json", _plan("kept"))
    with pytest.raises(BadInput, match=r"plan\.json: is for 1 nodes, --nnodes is 2"):
        start_measure(_options(tmp_path, nnodes=2, rendezvous="127.0.0.1:1"))
    assert not (tmp_path / "out.json").exists()


def test_a_measurement_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    write_document(tmp_path / "plans.json", Plans(plans=(_plan("first", ONE_LAYER), _plan("second", ONE_LAYER))))
    out = tmp_path / "out.json"
    command = ["measure", tmp_path / "plans.json", "--out", out, "--steps", 1, "--warmup-steps", 1]
    cut_off = forked_command(command)
    cut_off.until_said("measured 1/2", 120)
    cut_off.kill()
    cut_off.wait(20)
    assert not out.exists()
    again = forked_command(command)
    said = again.communicate(120)[1]
    assert again.returncode == 0, said
    assert "1 of 2 plans were already measured" in said
    assert "measured 1/2" not in said
    assert [found.plan.name for found in read_document(out, Measurement).plans] == ["first", "second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "plans.json"]


@pytest.mark.parametrize(
    "changed", [{}, {"warmup_steps": 2}, {"steps": 2}, {"min_time_s": 1.0}, {"versions": "1"}, {"device": "cpu/2"}]
)
def test_what_was_measured_otherwise_is_measured_anew(
    measured: Measured, tmp_path: Path, one_rank: World, changed: dict[str, Any]
) -> None:
    def opened(device: str = "cpu", **more: Any) -> Journal[MeasureIdentity, PlanMeasurement]:
        options = {"steps": 1, "warmup_steps": 1} | more
        versions = options.pop("versions", "torch 0")
        job = MeasureJob(plans=(), out=tmp_path / "o.json", journal=tmp_path / "o.journal", **options)
        return open_journal(job, one_rank, device, versions)

    opened().add([measured["kept"]])
    assert opened(**changed).kept_count == (not changed)
