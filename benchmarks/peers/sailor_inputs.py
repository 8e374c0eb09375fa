"""Profiles of OPT-350M from Sailor's own layer times, memory and link tables, read where they are.

Its times hold tensor-parallel traffic. Its one time of the optimizer is a whole stage's, whatever the layers are, which
a profile of layers cannot say: it is left out, as is what a process takes. Messages are priced as those of Sailor's
measured plans are (accuracy_parts/sailor.py): each has the link's bandwidth at its own size, and each GPU of a node
that sends at once its share of it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from accuracy_parts.sailor import SMALLEST_BYTES, ZONE, bytes_per_s_together

from shardwright.estimate.messages import steps
from shardwright.io import read_document, sha256_of_file
from shardwright.io.hdf5 import Provenance
from shardwright.io.table import Source, Sourced
from shardwright.key import LayerKey
from shardwright.plan.sweep_plan import SIZE_STEP, collective_kinds
from shardwright.types import EMBEDDING, HEAD, Cluster, Model, Strategy
from shardwright.types.hardware_profile import Collective, CollectiveKey, write_hardware_profile
from shardwright.types.model_profile import LayerFigures, LayerRow, ProfileOrigin, write_model_profile
from shardwright_profile.importers.documents import (
    ABSENT,
    HardwarePoint,
    hardware_profile,
    noted,
    profile_of,
    state_row,
)

__all__ = ["OPT_350M", "PRECISION", "write_hardware", "write_profile"]

OPT_350M = {
    **{"model_type": "gpt2", "tie_word_embeddings": False, "vocab_size": 50304},
    **{"n_layer": 24, "n_embd": 1024, "n_head": 16, "n_positions": 2048},
}
"""The Hugging Face configuration of a model with the parameters that Sailor counts, layer by layer."""
PRECISION = {"parameters": "float32", "compute": "float32", "reduce": "float32"}
_NAME = "OPT-350"
_GPUS = {"NVIDIA A100-SXM4-40GB": "A100-40", "Tesla V100-SXM2-16GB": "V100-16"}
_LARGEST_BYTES = 4 * 1024**3
_SMALLEST_INSIDE_BYTES = 1024**2
"""Sailor's curves of links inside a node fall below zero at small sizes."""


def write_profile(tables: Path, device: str, model_file: Path, out: Path) -> None:
    """Times and memory on one device. ValueError where the model has other parameters than Sailor counts."""
    model = read_document(model_file, Model)
    times_file, layers_file = tables / "profiles_tmp.json", tables / "llm_info.json"
    times, layers = _json(times_file)[_NAME][_GPUS[device]], _json(layers_file)[_NAME]
    by_type = _by_type(model)
    for name, members in by_type.items():
        if {layers["1"][layer]["params_floats"] for layer in members} != {model.types[name].parameter_count()}:
            raise ValueError(f"{layers_file}: {name} has other parameters than the model")
    rows = [
        _row(model, name, int(tp_size), int(size), [of_size[tp_size][layer] for layer in members], counted)
        for size, of_size in times.items()
        for tp_size in of_size.keys() & layers.keys()
        for name, members in by_type.items()
        for counted in [fmean(layers[tp_size][layer]["act_mem_bytes"] for layer in members)]
    ]
    states = [
        state_row(name, int(tp_size), Sourced(fmean(of[layer]["params_bytes"] for layer in members), Source.DERIVED))
        for tp_size, of in layers.items()
        for name, members in by_type.items()
    ]
    origin = ProfileOrigin(
        model=model.name,
        architecture_sha256=model.architecture_sha256,
        device=device,
        backend="nccl",
        precision="/".join(PRECISION.values()),
        attention="auto",
    )
    notes = noted(_notes(times_file, layers_file))
    provenance = Provenance(date="unknown", versions="not published", notes=notes)
    write_model_profile(out, profile_of(origin, provenance, rows, states))


def write_hardware(tables: Path, device: str, cluster_file: Path, out: Path) -> None:
    """Messages on a cluster of one node type."""
    cluster, gpu = read_document(cluster_file, Cluster), _GPUS[device]
    files = [tables / f"network/{name}_bandwidths.json" for name in ("multizone", "intra_node")]
    between, inside = (_json(file) for file in files)
    (devices_per_node,) = {cluster.node_types[group.node_type].devices_per_node for group in cluster.nodes}

    def points(key: CollectiveKey) -> Iterator[HardwarePoint]:
        senders = _senders(key, devices_per_node)
        if not key.group.across_nodes:
            return _points(key, inside[gpu][str(key.group_size)], senders)
        return _points(key, between[ZONE][gpu][str(senders)][ZONE][gpu][str(senders)], senders)

    found = [point for kind in collective_kinds(cluster) for point in points(kind.key)]
    write_hardware_profile(out, hardware_profile(cluster.name, device, list(_notes(*files)), found, None))


def _by_type(model: Model) -> dict[str, list[str]]:
    """Sailor's layers of each type: 0 is the embedding, the last one the head."""
    (block,) = set(model.layers)
    behind = len(model.layers) + 1
    return {EMBEDDING: ["0"], block: [str(layer) for layer in range(1, behind)], HEAD: [str(behind)]}


def _row(model: Model, name: str, tp_size: int, size: int, times: list[list[float]], one_sample: float) -> LayerRow:
    forward_s, backward_s = (Sourced(fmean(layer[part] for layer in times), Source.MEASURED) for part in (0, 1))
    held = Sourced(size * one_sample, Source.DERIVED)
    strategy = Strategy(tp_size=tp_size, dp_size=1)
    key = LayerKey.from_strategy(name, strategy, micro_batch_size=size, sequence_length=model.sequence_length)
    return LayerRow.from_figures(key, LayerFigures(forward_s, backward_s, held, ABSENT))


def _senders(key: CollectiveKey, devices_per_node: int) -> int:
    """GPUs of a node that send at once.

    Of a ring one for each group that leaves the node, in an all_to_all all; inside the node one of each pair.
    """
    if not key.group.across_nodes:
        return max(1, key.group_size // 2)
    if key.collective is Collective.ALL_TO_ALL:
        return devices_per_node
    return 1 if key.consecutive else devices_per_node // key.ranks_per_node


def _points(key: CollectiveKey, curve: Any, senders: int) -> Iterator[HardwarePoint]:  # noqa: ANN401
    """Each rank's messages follow one another, each a part of the whole; in an all_to_all some stay in the node."""
    parts = 1 if key.collective is Collective.P2P else key.group_size
    leave_node = key.collective is Collective.ALL_TO_ALL and key.group.across_nodes
    times = key.group_size - key.ranks_per_node if leave_node else steps(key.collective, key.group_size)
    message_bytes = parts * (SMALLEST_BYTES if key.group.across_nodes else _SMALLEST_INSIDE_BYTES)
    while message_bytes <= _LARGEST_BYTES:
        piece = message_bytes // parts
        time_s = times * piece * senders / bytes_per_s_together(curve, piece)
        yield HardwarePoint(key, message_bytes, time_s, Source.DERIVED)
        message_bytes *= SIZE_STEP


def _notes(*files: Path) -> Iterator[str]:
    yield from (f"Made from {file.name}, SHA-256 {sha256_of_file(file)}." for file in files)
    yield "Sailor (github.com/eth-easl/sailor, MIT, ETH Zurich): its layer times, sizes and link tables."


def _json(path: Path) -> Any:  # noqa: ANN401
    return json.loads(path.read_text(encoding="utf-8"))
