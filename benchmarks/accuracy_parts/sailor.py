"""Sailor's measured plans, priced with its layer profiles and link tables through this project's formulas.

Its layer times include tensor-parallel traffic. The step time is predicted by this project's simulation of 1F1B and by
its closed form, over stages that are as slow as their slowest replica. DeepSpeed's PipelineEngine sends each rank's
share of the hidden states (is_pipe_partitioned, is_grad_partitioned) and gathers them in the receiving node; it reduces
gradients after the last backward pass. Gathers and the all_reduces of gradients and of tied embeddings are rings
(Patarasuk and Yuan 2009: n-1 messages of 1/n, twice for an all_reduce). Every message has the link's bandwidth at its
own size; GPUs of a node that send at the same time share it. Memory is that of DDP in float32 (`parameter_memory`),
with Sailor's count of activations for each microbatch in flight. Nothing is fitted.

What cannot be expressed: memory outside of tensors (nvidia-smi counts it, but no profile says how much; for GH200 it is
given: 3 GiB for CUDA's context and NCCL's buffers, 2 GiB that the allocator keeps), and the optimizer's time of a whole
stage: a profile has one number for it, taken once a step, as in Sailor.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil, log2
from pathlib import Path
from typing import Any, NamedTuple

from accuracy_parts.figures import Compared

from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import LayerType, Parameter, Precision, Schedule, Strategy
from shardwright_search.cost_model.parameters import parameter_memory
from shardwright_search.simulation.simulator import StageTimes, simulate

OUTLIERS = {
    "OPT-350/N4/plan_config_N4_D4": "time",
    "mit/N2/plan_config_N2_D2": "time",
    "GPT-NEO/N8/plan_config_N8_D2": "memory",
}
"""Plans that the reference's README calls outliers, with the quantity that is odd."""
SEQUENCE_LENGTH = 2048
HIDDEN = {"OPT-350": 1024, "GPT-Neo-2.7": 2560}
TIED = ("GPT-Neo-2.7",)
FLOAT32_BYTES = 4
SMALLEST_BYTES, LARGEST_BYTES = 64 * 1024, 1024**3
"""Range of sizes at which the links were measured; their curves have no meaning outside it."""
ZONE = "us-central1-a"

Layers = list[tuple[float, float, float]]
"""Seconds of forward, backward and update of each layer."""


class Tables(NamedTuple):
    """The content of Sailor's files."""

    profiles: Any
    layers: Any
    homogeneous: Any
    mixed: Any
    inside: Any


class Replica(NamedTuple):
    """The GPUs of one data-parallel replica of a pipeline stage: one node, one tensor-parallel group."""

    device: str
    devices: int


class SailorPlan(NamedTuple):
    """The content of one plan file, with the model that its folder names."""

    name: str
    model: str
    stages: tuple[tuple[int, int], ...]
    """First layer of each stage, and the one after its last."""
    replicas: tuple[tuple[Replica, ...], ...]
    micro_batch_size: int
    num_microbatches: int
    measured_s: float
    measured_bytes: int


def compared(folder: Path, variant: str, process_gib: float) -> Iterator[Compared]:
    """Yield step time in s and memory of the fullest GPU in bytes for each plan, with and without outliers.

    For GH200 also the memory plus `process_gib`, what a process takes in addition to its tensors: given, not predicted.

    `variant`: `validation` for the profiles with which Sailor's simulator is validated, of which one has entries that
    look written by hand; or `planner` for its planner's copy of that one.
    """
    tables = _read(folder, variant)
    for plan in _plans(folder):
        odd = next((what for name, what in OUTLIERS.items() if plan.name.endswith(name)), None)
        place = "RTX" if plan.name.startswith("mit") else "GH200"
        ranges, tensors_bytes = _ranges(plan, tables), memory_bytes(plan, tables)
        rows = [
            ("time", "time, simulated", plan.measured_s, simulated_s(plan, ranges)),
            ("time", "time, closed form", plan.measured_s, closed_form_s(plan, ranges)),
            ("memory", "memory", plan.measured_bytes, tensors_bytes),
        ]
        if place == "GH200":
            given = f"memory with {process_gib:g} GiB of process given"
            rows.append(("memory", given, plan.measured_bytes, tensors_bytes + process_gib * 2**30))
        for kind, how, measured, predicted in rows:
            yield Compared(f"Sailor ({variant}) {how}", plan.name, measured, predicted)
            if odd != kind:
                yield Compared(f"Sailor ({variant}) {how}, no outliers", plan.name, measured, predicted)
            yield Compared(f"Sailor ({variant}) {how}, {place} {plan.model}", plan.name, measured, predicted)


def simulated_s(plan: SailorPlan, ranges: Sequence[StageTimes]) -> float:
    """Return the seconds of a simulated step."""
    return simulate(ranges, Schedule.ONE_F_ONE_B, plan.num_microbatches).step_ps / 1e12


def closed_form_s(plan: SailorPlan, ranges: Sequence[StageTimes]) -> float:
    """Return the seconds that a search would minimise: stage times with sends at both ends, and the end of the step."""
    sends = [0, *(here.send_ps for here in ranges)]
    stages = [
        here.forward_ps + here.backward_ps + before + after
        for here, (before, after) in zip(ranges, pairwise(sends), strict=True)
    ]
    end = max(here.gradient_sync_ps + here.optimizer_ps for here in ranges)
    (form,) = schedule_of(Schedule.ONE_F_ONE_B).closed_forms(plan.num_microbatches)
    return form.time(sum(stages), max(stages), end) / 1e12


def _ranges(plan: SailorPlan, tables: Tables) -> list[StageTimes]:
    """Return the times of each stage; the first and the last one also reduce tied embeddings, after their gradients."""
    sends = [_send_s(plan, tables, here, after) for here, after in pairwise(plan.replicas)]
    tie_s, last = _tie_s(plan, tables), len(plan.stages) - 1
    found = []
    for index, send_s in enumerate([*sends, 0.0]):
        times = [_layers(plan, tables, index, replica) for replica in plan.replicas[index]]
        forward_s, backward_s = (max(sum(layer[i] for layer in own) for own in times) for i in (0, 1))
        update_s = max(own[0][2] for own in times)
        sync_s = _reduction_s(plan, tables, index) + (tie_s if index in (0, last) else 0.0)
        found.append(
            StageTimes(
                forward_ps=_picoseconds(forward_s),
                backward_ps=_picoseconds(backward_s),
                send_ps=_picoseconds(send_s),
                gradient_sync_ps=_picoseconds(sync_s),
                optimizer_ps=_picoseconds(update_s),
            )
        )
    return found


def memory_bytes(plan: SailorPlan, tables: Tables) -> int:
    """Return the bytes of the fullest GPU: float32 parameters, gradients, Adam's moments, and activations in flight."""
    return max(
        _states_bytes(_parameters(plan, tables, index, replica)) + _activation_bytes(plan, tables, index, replica)
        for index, replicas in enumerate(plan.replicas)
        for replica in replicas
    )


def _states_bytes(parameters: int) -> int:
    kind = LayerType(parameters=(Parameter(name="all", shape=(parameters,)),), forward_flops_per_sample=0)
    whole, precision = Strategy(tp_size=1, dp_size=1), Precision()
    held = parameter_memory(kind, whole, precision, deferred=True)
    return held.parameters + held.optimizer + held.gradients


def _activation_bytes(plan: SailorPlan, tables: Tables, index: int, replica: Replica) -> int:
    held = schedule_of(Schedule.ONE_F_ONE_B).in_flight(len(plan.stages), plan.num_microbatches, index)
    floats = sum(layer["act_mem_floats"] for layer in _layer_info(plan, tables, index, replica))
    return held * plan.micro_batch_size * int(floats) * FLOAT32_BYTES


def _picoseconds(time_s: float) -> int:
    """Return seconds as whole picoseconds."""
    return round(time_s * 1e12)


def _send_s(plan: SailorPlan, tables: Tables, here: Sequence[Replica], after: Sequence[Replica]) -> float:
    """Return the seconds to send one microbatch's hidden states to the next stage, for the slowest pair of replicas."""
    size = plan.micro_batch_size * SEQUENCE_LENGTH * HIDDEN[plan.model] * FLOAT32_BYTES
    return max(_handed_over_s(tables, a, b, size) for a, b in zip(here, after, strict=True))


def _handed_over_s(tables: Tables, here: Replica, there: Replica, size: int) -> float:
    piece = ceil(size / here.devices)
    sent_s = piece / _bytes_per_s(tables, here, there, piece)
    # All GPUs of a ring inside a node send at once; half as many pairs were measured together.
    curve = tables.inside[there.device][str(there.devices)]
    return sent_s + (there.devices - 1) * piece / (bytes_per_s_together(curve, piece) / (there.devices / 2))


def _reduction_s(plan: SailorPlan, tables: Tables, index: int) -> float:
    """Return the seconds of the gradients' all_reduce over a stage's replicas: a ring as fast as its slowest link."""
    ring = plan.replicas[index]
    size = max(_parameters(plan, tables, index, replica) for replica in ring) * FLOAT32_BYTES
    return _ring_s(tables, ring, size)


def _tie_s(plan: SailorPlan, tables: Tables) -> float:
    """Return the seconds of the all_reduce of tied embeddings' gradients, between the first and the last stage."""
    if plan.model not in TIED or len(plan.stages) == 1:
        return 0.0
    rings = zip(plan.replicas[0], plan.replicas[-1], strict=True)
    return max(_ring_s(tables, ring, _tied_parameters(plan, tables, ring[0]) * FLOAT32_BYTES) for ring in rings)


def _ring_s(tables: Tables, ring: Sequence[Replica], size: int) -> float:
    """Return the seconds of 2 (n-1) successive messages of 1/n, each as slow as the slowest link of the ring."""
    if len(ring) == 1:
        return 0.0
    piece = ceil(size / len(ring))
    slowest = min(_bytes_per_s(tables, a, b, piece) for a, b in pairwise([*ring, ring[0]]))
    return 2 * (len(ring) - 1) * piece / slowest


def _bytes_per_s(tables: Tables, here: Replica, there: Replica, message_bytes: int) -> float:
    """Return one GPU's share of the link between two nodes, in bytes per second, if all their GPUs send at once."""
    table = tables.homogeneous if here.device == there.device else tables.mixed
    curve = table[ZONE][here.device][str(here.devices)][ZONE][there.device][str(there.devices)]
    return bytes_per_s_together(curve, message_bytes) / here.devices


def bytes_per_s_together(curve: Any, message_bytes: int) -> float:  # noqa: ANN401
    """Return bytes per second of all senders together, by a link's curve, within the sizes at which it was measured."""
    (a, b, c), most = curve
    x = log2(min(max(message_bytes, SMALLEST_BYTES), LARGEST_BYTES) / 1e6)
    bytes_per_s = min(1e9 * (a * x * x + b * x + c), most)
    if bytes_per_s <= 0:
        raise ValueError(f"a link without bandwidth at {message_bytes} bytes")
    return float(bytes_per_s)


def _layers(plan: SailorPlan, tables: Tables, index: int, replica: Replica) -> Layers:
    every = tables.profiles[plan.model][replica.device][str(plan.micro_batch_size)][str(replica.devices)]
    return [every[str(layer)] for layer in range(*plan.stages[index])]


def _layer_info(plan: SailorPlan, tables: Tables, index: int, replica: Replica) -> list[dict[str, float]]:
    every = tables.layers[plan.model][str(replica.devices)]
    return [every[str(layer)] for layer in range(*plan.stages[index])]


def _parameters(plan: SailorPlan, tables: Tables, index: int, replica: Replica) -> int:
    """Return the number of parameters of one GPU; a last stage that is not the first has a copy of tied embeddings."""
    count = sum(int(layer["params_floats"]) for layer in _layer_info(plan, tables, index, replica))
    copied = plan.model in TIED and 0 < index == len(plan.stages) - 1
    return count + (_tied_parameters(plan, tables, replica) if copied else 0)


def _tied_parameters(plan: SailorPlan, tables: Tables, replica: Replica) -> int:
    """Return the number of embedding parameters without the table of positions, which every rank holds whole."""
    every = int(tables.layers[plan.model][str(replica.devices)]["0"]["params_floats"])
    return every - SEQUENCE_LENGTH * HIDDEN[plan.model]


def _read(folder: Path, variant: str) -> Tables:
    profiles = _json(folder / "profiles_tmp.json")
    if variant == "planner":
        profiles["OPT-350"]["GH-96"] = _json(folder / "profile_OPT-350_GH-96_planner.json")
    network = folder / "network"
    return Tables(
        profiles,
        _json(folder / "llm_info.json"),
        _json(network / "multizone_bandwidths.json"),
        _json(network / "multizone_bandwidths_het.json"),
        _json(network / "intra_node_bandwidths.json"),
    )


def _plans(folder: Path) -> Iterator[SailorPlan]:
    for path in sorted((folder / "plans").rglob("*.json")):
        content = _json(path)
        (pipeline,) = content["pipeline_list"]
        sizes = [len(layers) for layers in pipeline["layers_per_stage"]]
        bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        replicas = tuple(
            tuple(Replica(device, tp_size) for ((device, _, _),), tp_size in stage)
            for stage in pipeline["tmp_per_stage"]
        )
        yield SailorPlan(
            path.relative_to(folder / "plans").with_suffix("").as_posix(),
            "GPT-Neo-2.7" if "GPT-NEO" in path.parts else "OPT-350",
            tuple(pairwise(bounds)),
            replicas,
            content["mbs"],
            ceil(content["gbs"] / (content["mbs"] * len(replicas[0]))),
            content["real"],
            content["max_mem"],
        )


def _json(path: Path) -> Any:  # noqa: ANN401
    return json.loads(path.read_text(encoding="utf-8"))
