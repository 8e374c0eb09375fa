"""Plans of four ranks that share experts out, of a model whose activations are most of its memory, and their prices."""

from pathlib import Path
from typing import Any

from msgspec import UNSET

from shardwright_estimate.devices import Efficiencies, rates_of, read_devices
from shardwright_estimate.profile import hardware_profile, model_profile
from shardwright_estimate.settings import ProfileSettings
from shardwright_formats.types import (
    Attention,
    Cluster,
    DataParallel,
    ExpertStrategy,
    LayerStrategy,
    NodeGroup,
    NodeType,
    PipelineStage,
    Plan,
    Precision,
    Recompute,
    Schedule,
    SequenceParallel,
    Strategy,
)
from shardwright_models.description import model_of_config
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles, index_profiles

__all__ = ["FLOAT32", "MIXED", "held_bytes", "plan_of", "profiles_of"]

MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")
FLOAT32 = Precision(parameters="float32", compute="float32", reduce="float32")
CONFIG = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
MODEL = model_of_config(CONFIG, "m", 64, "config.json")
NODE = NodeType(device="cpu", devices_per_node=4, memory_bytes=1 << 34)
CLUSTER = Cluster(name="c", nodes=(NodeGroup(node_type="n", count=1),), node_types={"n": NODE})


def plan_of(
    experts: tuple[int, int] | None,
    kinds: tuple[DataParallel, DataParallel] = (DataParallel.DDP, DataParallel.DDP),
    precision: Precision = MIXED,
    recompute: Recompute = Recompute.NONE,
    tp_size: int = 1,
    split: SequenceParallel = SequenceParallel.NONE,
) -> Plan:
    """Three microbatches of 32 samples; `experts`: ep_size and etp_size, `kinds`: of the layer and of its experts."""
    sharding: dict[str, Any] = {"tp_size": tp_size, "dp_size": 4 // tp_size, "sequence_parallel": split}
    sharding["data_parallel"] = kinds[0]
    shared = UNSET
    if experts is not None:
        shared = ExpertStrategy(ep_size=experts[0], etp_size=experts[1], data_parallel=kinds[1])
    block = LayerStrategy(type="sparse", recompute=recompute, **sharding, experts=shared)
    outer = Strategy(**sharding)
    return Plan(
        name="p", model=MODEL, cluster=CLUSTER, global_batch_size=96, num_microbatches=3,
        schedule=Schedule.ONE_F_ONE_B, precision=precision, attention=Attention.SDPA,
        stages=(PipelineStage(ranks=(0, 1, 2, 3), layers=((0, 3),)),), embedding=outer, head=outer,
        layers=(block,) * 3,
    )  # fmt: skip


def profiles_of(precision: Precision) -> Profiles:
    """Estimated profiles of a processor that is as fast as a GPU."""
    table = read_devices()
    rates = rates_of(table, "NVIDIA H100 80GB HBM3")._replace(name="cpu")
    settings = ProfileSettings(
        tp_sizes=(1, 2), sequence_parallel=tuple(SequenceParallel), recompute=tuple(Recompute),
        micro_batch_sizes=(8, 16), precision=precision, attention=Attention.SDPA,
    )  # fmt: skip
    made = model_profile([(Path("m"), MODEL)], settings, rates, Efficiencies(), table.revised).profile
    hardware = hardware_profile(CLUSTER, [rates], Efficiencies(), None, table.revised)
    return index_profiles(hardware, Path("h.h5"), made, Path("m.h5"))


def held_bytes(plan: Plan, profiles: Profiles) -> int:
    """Predicted memory of the plan's one stage, the process apart."""
    (stage,) = evaluate(plan, profiles, timeline=False).estimate.stages
    return sum(size for name, size in stage.memory_terms_bytes.items() if name not in ("process", "communicators"))
