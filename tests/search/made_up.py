"""Made-up models, clusters and profiles with round numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardwright.io.hdf5 import Provenance
from shardwright.io.table import Source, Table, columns_of
from shardwright.types.cluster import Cluster, NodeGroup, NodeType
from shardwright.types.hardware_profile import Collective, HardwareProfile, OverlapRow, PointRow, RepeatRow
from shardwright.types.model import BoundaryTensor, LayerType, Model, Parameter
from shardwright.types.model_profile import (
    FitMode,
    FitRow,
    LayerRow,
    ModelProfile,
    ProcessRow,
    ProfileOrigin,
    Quantity,
    StateRow,
)
from shardwright.types.strategy import Recompute, SequenceParallel
from shardwright_search.cost_model.profiles import Profiles, index_profiles
from shardwright_search.space.request import SearchRequest

HIDDEN, VOCABULARY, LENGTH = 64, 256, 32
_KIND = ("collective", "group_size", "ranks_per_node", "consecutive", "message_bytes")


def make_model(layers: int = 4, hidden: int = HIDDEN, tied: bool = False) -> Model:
    """A decoder of equal blocks: 4 hidden^2 parameters each, split over tensor-parallel ranks."""
    stream = (BoundaryTensor(name="hidden", sequence_length=LENGTH, features=hidden),)
    table, logits = (Parameter(name=name, shape=(VOCABULARY, hidden), tp_dim=0) for name in ("weight", "lm_head"))
    types = {
        "embedding": LayerType(parameters=(table,), forward_flops_per_sample=0, outputs=stream),
        "block": LayerType(
            parameters=(Parameter(name="mix", shape=(4 * hidden, hidden), tp_dim=0),),
            forward_flops_per_sample=8 * hidden * hidden * LENGTH,
            tp_must_divide={"heads": 8},
            outputs=stream,
        ),
        "head": LayerType(parameters=(logits,), forward_flops_per_sample=2 * hidden * VOCABULARY * LENGTH),
    }
    return Model(
        name="made-up",
        family="llama",
        config={},
        sequence_length=LENGTH,
        layers=("block",) * layers,
        types=types,
        tied=(("weight", "lm_head"),) if tied else (),
    )


def make_cluster(devices: int = 2, nodes: int = 1, memory_bytes: int = 1 << 30, device: str = "cpu") -> Cluster:
    """Equal nodes."""
    node = NodeType(device=device, devices_per_node=devices // nodes, memory_bytes=memory_bytes, usd_per_hour=3.6)
    return Cluster(name="some", nodes=(NodeGroup(node_type="n", count=nodes),), node_types={"n": node})


def make_mixed_cluster(**nodes: tuple[int, int, int]) -> Cluster:
    """Of each device so many nodes, of so many devices with so much memory each."""
    return Cluster(
        name="mixed",
        nodes=tuple(NodeGroup(node_type=device, count=count) for device, (count, _, _) in nodes.items()),
        node_types={
            device: NodeType(device=device, devices_per_node=each, memory_bytes=memory_bytes, usd_per_hour=3.6)
            for device, (_, each, memory_bytes) in nodes.items()
        },
    )


def make_hardware(
    cluster: Cluster,
    latency_s: float = 20e-6,
    bytes_per_s: float = 1e9,
    overlap: Sequence[tuple[Any, ...]] = (),
    device: str = "cpu",
) -> HardwareProfile:
    """Every kind of message at 1 KiB to 1 MiB: a latency, twice that across nodes, and a bandwidth.

    `overlap`: of a collective among so many ranks the slowdowns of compute and of the message, how many of the ranks
    share a node (all), of how many bytes, and in how many seconds alone.
    """
    widest = max(node.devices_per_node for node in cluster.node_types.values())
    rows = [
        (name, size, on_a_node, consecutive, message)
        for name in Collective
        for size in range(2, cluster.num_devices + 1)
        for on_a_node in sorted({size, *range(1, min(size, widest) + 1)})
        for consecutive in (0, 1)
        for message in (1 << 10, 1 << 15, 1 << 20)
        if name is not Collective.P2P or size == 2
    ]
    rounds = {name: 2 if name is Collective.ALL_REDUCE else 1 for name in Collective}
    times = [
        latency_s * (1 + (on_a_node < size)) + rounds[name] * message * (size - 1) / size / bytes_per_s
        for name, size, on_a_node, _, message in rows
    ]
    columns = list(zip(*rows, strict=True))
    return HardwareProfile(
        cluster=cluster.name,
        device=device,
        backend="gloo",
        provenance=Provenance(date="2026-01-31", versions="torch 0"),
        points=Table(
            PointRow,
            {
                **dict(zip(_KIND, columns, strict=True)),
                "interval": np.zeros(len(rows)),
                "source": ["measured"] * len(rows),
            },
        ),
        repeats=Table(RepeatRow, {"point": range(len(rows)), "time_s": times, "outlier": [0] * len(rows)}),
        overlap=Table.from_rows(OverlapRow, [_overlap_row(*row) for row in overlap]),
    )


def _overlap_row(
    collective: Collective,
    ranks: int,
    compute: float,
    message: float,
    on_a_node: int | None = None,
    size: int = 0,
    alone_s: float = 0.0,
) -> OverlapRow:
    return OverlapRow(
        collective=collective,
        group_size=ranks,
        ranks_per_node=on_a_node or ranks,
        collective_bytes=size,
        compute_s=0.0,
        collective_s=alone_s,
        compute_slowdown=compute,
        collective_slowdown=message,
        source=Source.MEASURED,
    )


def make_profile(
    model: Model,
    tp_sizes: tuple[int, ...] = (1, 2, 4, 8),
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8),
    slow: float = 1.0,
    precision: str = "float32/float32/float32",
    process_bytes: int = 1 << 20,
    communicator_bytes: int = 0,
    source: str = "measured",
    reduction_s_per_parameter: float = 0.0,
    zero_s_per_parameter: tuple[float, float] = (0.0, 0.0),
    device: str = "cpu",
) -> ModelProfile:
    """Times that grow with the samples; tensor parallelism adds a latency, recomputation a forward pass.

    What reducing gradients adds was measured over two ranks, or not at all; under ZeRO likewise, and gathering.
    """
    rows = []
    replays = {"none": 0, "full": 1, "mlp": 0.4, "selective": 0.2, "norms": 0.05, "norms+activations": 0.1}
    for name in ("embedding", *dict.fromkeys(model.layers), "head"):
        for tp_size in tp_sizes:
            for sequence_parallel in ("none", "megatron", "ulysses") if tp_size > 1 else ("none",):
                for recompute in tuple(replays) if name not in ("embedding", "head") else ("none",):
                    for samples in micro_batch_sizes:
                        work = {"embedding": 0.1, "head": 0.7, "other": 1.6}.get(name, 1.0) * slow
                        latency = {"none": 4e-5, "megatron": 4e-5, "ulysses": 3e-5}[sequence_parallel]
                        forward = 1e-4 * work * (0.2 + samples / tp_size) + latency * (tp_size > 1)
                        backward = (2 + replays[recompute]) * forward
                        tokens = samples * LENGTH * HIDDEN
                        kept = {"embedding": 4, "head": 24}.get(name, 120) * tokens
                        split = 1 + (tp_size - 1) / 2 if sequence_parallel == "none" else tp_size
                        resident, workspace = kept / split, 0.2 * kept / split
                        if recompute == "mlp":
                            resident, workspace = 0.6 * kept / split, 0.5 * kept / split
                        if recompute == "selective":
                            resident, workspace = 0.5 * kept / split, 0.6 * kept / split
                        if recompute.startswith("norms"):
                            resident, workspace = (0.9 - replays[recompute]) * kept / split, 0.3 * kept / split
                        if recompute == "full":
                            resident, workspace = 4 * tokens, 1.1 * kept / split
                        sharding = (name, tp_size, sequence_parallel, recompute, samples, LENGTH)
                        rows.append((*sharding, forward, backward, resident, workspace))
    values = [name for name in columns_of(LayerRow) if not name.endswith(("_source", "_error_s"))]
    named = [dict(zip(values, row, strict=True)) for row in rows]
    states = [(name, tp_size) for name in ("embedding", *dict.fromkeys(model.layers), "head") for tp_size in tp_sizes]
    counts = np.array([model.types[name].parameter_count(tp_size) for name, tp_size in states])
    origin = ProfileOrigin(
        model=model.name,
        architecture_sha256=model.architecture_sha256,
        device=device,
        backend="gloo",
        precision=precision,
        attention="sdpa",
    )
    measured = ["measured"] * len(states)
    return ModelProfile(
        origin=origin,
        provenance=Provenance(date="2026-01-31", versions="torch 0"),
        layers=Table(
            LayerRow,
            {
                name: np.array([source if name.endswith("_source") else of.get(name, 0) for of in named], spec.dtype)
                for name, spec in columns_of(LayerRow).items()
            },
        ),
        states=Table(
            StateRow,
            {
                "type": [name for name, _ in states],
                "tp_size": [tp_size for _, tp_size in states],
                "parameter_bytes": 4 * counts,
                "gradient_bytes": 4 * counts,
                "optimizer_bytes": 8 * counts,
                "optimizer_s": 3e-9 * counts,
                "reduction_s": reduction_s_per_parameter * counts,
                "reduction_ranks": np.full(len(states), 2 if reduction_s_per_parameter else 1),
                "scatter_s": zero_s_per_parameter[0] * counts,
                "gather_s": zero_s_per_parameter[1] * counts,
                "zero_ranks": np.full(len(states), 2 if any(zero_s_per_parameter) else 1),
                **dict.fromkeys(("bytes_source", "optimizer_source", "reduction_source", "zero_source"), measured),
            },
        ),
        process=Table(
            ProcessRow,
            {
                "process_bytes": [process_bytes],
                "communicator_bytes": [communicator_bytes],
                "resident_bytes": [1 << 28],
                "step_overhead_s": [5e-5],
                "reference_s": [0.5],
                **{
                    f"{name}_source": ["measured"]
                    for name in ("process", "communicator", "resident", "step_overhead", "reference")
                },
            },
        ),
        fits=Table.from_rows(FitRow, ()),
    )


def make_curve(constant: float, linear: float, quadratic: float, **changes: object) -> FitRow:
    """A curve of a block's forward time at 32 tokens, over the batch."""
    usual: dict[str, object] = {
        "type": "block",
        "tp_size": 1,
        "sequence_parallel": SequenceParallel.NONE,
        "recompute": Recompute.NONE,
        "quantity": Quantity.FORWARD_S,
        "mode": FitMode.BATCH,
        "micro_batch_size": 0,
        "sequence_length": 32,
        "points": 2,
        "left_out_points": 0,
        **dict.fromkeys(("typical_residual", "worst_residual", "left_out_error"), 0.0),
    }
    return FitRow(constant=constant, linear=linear, quadratic=quadratic, **(usual | changes))  # type: ignore[arg-type]


def make_profiles(
    model: Model, cluster: Cluster, hardware: HardwareProfile | None = None, **changes: object
) -> Profiles:
    """Both profiles, indexed as if read from `h.h5` and `m.h5`."""
    profile = make_profile(model, **changes)  # type: ignore[arg-type]
    return index_profiles(hardware or make_hardware(cluster), Path("h.h5"), profile, Path("m.h5"))


def make_request(**changes: object) -> SearchRequest:
    """A search over everything for a batch of 8."""
    return msgspec.convert({"name": "search", "global_batch_size": 8} | changes, SearchRequest)
