"""Models, clusters and made-up measurements for the tests of the profile room."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from probe_plans import probe_settings

from shardwright.types import (
    Cluster,
    DataParallel,
    LayerType,
    Measurement,
    Model,
    NodeGroup,
    NodeType,
    Parameter,
    PassTime,
    Plan,
    PlanMeasurement,
    RankMeasurement,
    RankMemory,
    Recompute,
    Segment,
    SegmentMemory,
)
from shardwright_profile.model.probes import make_probes


class Constants(NamedTuple):
    """A world in which every cost is linear in the number of layers, whatever the strategy."""

    base_s: float
    layer_s: Mapping[str, float]
    layer_bytes: Mapping[str, int]
    workspace_bytes: int
    ends_bytes: int
    optimizer_constant_s: float
    optimizer_s_per_parameter: float
    overhead_s: float
    reference_s: float = 0.015
    gather_s: float = 0.0
    """Of a forward pass under ZeRO-3."""
    replay: float = 1.0
    """Share of the layers' forward pass that full recomputation repeats."""


def _model(
    layers: Sequence[str] = ("block",) * 4, sequence_length: int = 32, tied: bool = False, whole_ends: bool = False
) -> Model:
    """`whole_ends`: each rank has all of embedding and head, as of models without facts."""

    def kind(*parameters: Parameter) -> LayerType:
        return LayerType(
            parameters=parameters,
            forward_flops_per_sample=1,
            tp_must_divide={"heads": 8},
            ulysses_must_divide={"heads": 8},
        )

    blocks = {
        name: kind(
            Parameter(name=f"{name}.w", shape=(16, 8 * (i + 1)), tp_dim=0), Parameter(name=f"{name}.n", shape=(8,))
        )
        for i, name in enumerate(dict.fromkeys(layers))
    }
    ends = {
        "embedding": kind(Parameter(name="embed.weight", shape=(64, 8), tp_dim=0)),
        "head": kind(Parameter(name="norm.weight", shape=(8,)), Parameter(name="head.weight", shape=(64, 8), tp_dim=0)),
    }
    if whole_ends:
        ends = {name: msgspec.structs.replace(end, tp_must_divide={"ends": 1}) for name, end in ends.items()}
    return Model(
        name="toy",
        family="toy",
        config={},
        sequence_length=sequence_length,
        layers=tuple(layers),
        types=blocks | ends,
        tied=(("embed.weight", "head.weight"),) if tied else (),
    )


def _cluster(*nodes: tuple[int, int]) -> Cluster:
    return Cluster(
        name="toys",
        nodes=tuple(NodeGroup(node_type=f"cpu-{size}", count=count) for count, size in nodes),
        node_types={
            f"cpu-{size}": NodeType(device="cpu", devices_per_node=size, memory_bytes=2**32) for _, size in nodes
        },
    )


def _measured_plan(plan: Plan, constants: Constants) -> PlanMeasurement:
    counts = {name: plan.model.layers.count(name) for name in constants.layer_s}
    # A microbatch twice the size takes twice as long, a backward pass twice as long as a forward pass.
    samples = plan.microbatch_samples // plan.layers[0].dp_size
    layers_s = constants.base_s + samples * sum(counts[name] * constants.layer_s[name] for name in counts)
    layers_s += constants.gather_s * (plan.embedding.data_parallel is DataParallel.ZERO3)
    times_s = {"embedding": constants.base_s, "layers": layers_s, "head": 2 * constants.base_s}
    replay_s = constants.replay * layers_s * (plan.layers[0].recompute is Recompute.FULL)
    backward_s = {name: 2 * time_s + replay_s * (name == "layers") for name, time_s in times_s.items()}
    layer_bytes = sum(counts[name] * constants.layer_bytes[name] for name in counts)
    held_bytes = {"embedding": 7, "layers": 11 + samples * layer_bytes, "head": 13}
    types, ends = plan.model.types, plan.embedding.tp_size
    parameters = sum(types[name].parameter_count(plan.layers[0].tp_size) for name in plan.model.layers)
    parameters += sum(types[name].parameter_count(ends) for name in ("embedding", "head"))
    if plan.model.tied:
        parameters -= 64 * 8 // ends
    optimizer_s = constants.optimizer_constant_s + constants.optimizer_s_per_parameter * parameters
    reduction_s = constants.base_s / 3
    passes_s = sum(times_s.values()) + sum(backward_s.values())
    step_s = plan.num_microbatches * passes_s + reduction_s + optimizer_s + constants.overhead_s

    def rank(number: int) -> RankMeasurement:
        # The last rank is the slowest and the fullest; its median is the middle one of unequal repeats.
        pace = 1.0 if number == plan.world_size - 1 else 0.5

        def repeats(time_s: float) -> tuple[float, ...]:
            return (pace * time_s * 3, pace * time_s, pace * time_s * 0.9)

        return RankMeasurement(
            rank=number,
            stage=0,
            step_s=(step_s * 2, step_s, step_s * 0.9),
            reference_s=(constants.reference_s,) * 3,
            segments=tuple(
                Segment(name=name, forward_s=repeats(time_s), backward_s=repeats(backward_s[name]))
                for name, time_s in times_s.items()
            ),
            gradient_reduction_s=repeats(reduction_s),
            optimizer_s=repeats(optimizer_s),
            passes=tuple(
                PassTime(kind=kind, microbatch=i, chunk=0, wait_s=0.0, start_s=0.0, time_s=time_s)
                for i in range(plan.num_microbatches)
                for kind, time_s in (("forward", pace * layers_s), ("backward", pace * backward_s["layers"]))
            ),
            memory=RankMemory(
                parameters_bytes=constants.ends_bytes + layer_bytes,
                gradients_bytes=constants.ends_bytes + layer_bytes,
                optimizer_bytes=2 * (constants.ends_bytes + layer_bytes),
                peak_bytes=1,
                segments=tuple(
                    SegmentMemory(
                        name=name,
                        activation_bytes=held,
                        forward_workspace_bytes=constants.workspace_bytes // 2,
                        backward_workspace_bytes=constants.workspace_bytes,
                    )
                    for name, held in held_bytes.items()
                ),
                process_bytes=100 + number,
                peak_reserved_bytes=0,
                device_used_bytes=0,
                resident_bytes=1000 + number,
            ),
        )

    return PlanMeasurement(plan=plan, ranks=tuple(rank(number) for number in range(plan.world_size)))


def _measurement(plans: Sequence[Plan], constants: Constants, device: str = "cpu") -> Measurement:
    return Measurement(
        device=device,
        backend="gloo",
        date="2026-01-31",
        versions="torch 0",
        attention="sdpa",
        allocator="",
        plans=tuple(_measured_plan(plan, constants) for plan in plans),
    )


def _command(*arguments: object, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from shardwright_profile.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Model]:
    """A toy model: its layers' types, its sequence length."""
    return _model


@pytest.fixture(scope="session")
def make_cluster() -> Callable[..., Cluster]:
    """A cluster of CPU nodes: pairs of a number of nodes and of devices in each."""
    return _cluster


@pytest.fixture(scope="session")
def make_measurement() -> Callable[..., Measurement]:
    """What plans would take under `Constants`."""
    return _measurement


@pytest.fixture(scope="session")
def make_constants() -> Callable[..., Constants]:
    """A linear world, with some constants replaced."""

    def made(**replaced: Any) -> Constants:
        usual = Constants(1e-3, {"block": 2e-3}, {"block": 640}, 50, 3000, 4e-3, 1e-7, 5e-3)
        return usual._replace(**replaced)

    return made


@pytest.fixture(scope="session")
def command() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run `shardwright-profile` in a process of its own."""
    return _command


@pytest.fixture
def one_error_line() -> Callable[..., str]:
    """The only line that a refused command printed, after checking that it left no file behind."""

    def checked(finished: "subprocess.CompletedProcess[str]", exit_code: int, folder: Path, before: set[Path]) -> str:
        assert finished.returncode == exit_code, finished.stderr
        assert finished.stdout == ""
        (line,) = finished.stderr.splitlines()
        assert line.startswith("error: ")
        assert set(folder.iterdir()) == before
        return line

    return checked


@pytest.fixture(scope="session")
def plans(make_model, make_cluster):
    """Probes of a small model on two ranks."""
    return make_probes([make_model()], make_cluster((1, 2)), "cpu-2", probe_settings()).plans
