"""Estimated profiles of a processor that is as fast as a GPU, and what plans hold by them."""

from pathlib import Path

from shardwright.devices.table import read_devices
from shardwright.estimate.machines import Efficiencies, rates_of
from shardwright.estimate.profile import hardware_profile, model_profile
from shardwright.estimate.settings import Grid, ProfileSettings
from shardwright.types import (
    Attention,
    Cluster,
    Model,
    NodeGroup,
    NodeType,
    Plan,
    Precision,
    Recompute,
    SequenceParallel,
)
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles, index_profiles

__all__ = ["CLUSTER", "FLOAT32", "MIXED", "estimated_profiles", "held_bytes"]

MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")
FLOAT32 = Precision(parameters="float32", compute="float32", reduce="float32")
_NODE = NodeType(device="cpu", devices_per_node=4, memory_bytes=1 << 34)
CLUSTER = Cluster(name="c", nodes=(NodeGroup(node_type="n", count=1),), node_types={"n": _NODE})


def estimated_profiles(precision: Precision, micro_batch_sizes: tuple[int, ...], *models: Model) -> Profiles:
    """Profiles of all strategies of tp_size 1 and 2, of one model at each of its lengths."""
    table = read_devices()
    rates = rates_of(table, "NVIDIA H100 80GB HBM3")._replace(name="cpu")
    settings = ProfileSettings(
        tp_sizes=(1, 2), sequence_parallel=tuple(SequenceParallel), recompute=tuple(Recompute),
        micro_batch_sizes=micro_batch_sizes, precision=precision, attention=Attention.SDPA, grid=Grid.FULL,
    )  # fmt: skip
    made = model_profile(
        [(Path("m"), model) for model in models], settings, rates, Efficiencies(), table.revised
    ).profile
    hardware = hardware_profile(CLUSTER, [rates], Efficiencies(), None, table.revised)
    return index_profiles(hardware, Path("h.h5"), made, Path("m.h5"))


def held_bytes(plan: Plan, profiles: Profiles) -> int:
    """Predicted memory of the plan's one stage, the process apart."""
    (stage,) = evaluate(plan, profiles, timeline=False).estimate.stages
    return sum(size for name, size in stage.memory_terms_bytes.items() if name not in ("process", "communicators"))
