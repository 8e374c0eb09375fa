"""Plans of four ranks that share experts out, of a model whose activations are most of its memory."""

from typing import Any

from estimated_memory import CLUSTER, MIXED
from msgspec import UNSET

from shardwright.models.description import model_of_config
from shardwright.types import (
    Attention,
    DataParallel,
    ExpertStrategy,
    LayerStrategy,
    PipelineStage,
    Plan,
    Precision,
    Recompute,
    Schedule,
    SequenceParallel,
    Strategy,
)

__all__ = ["MODEL", "plan_of"]

CONFIG = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
MODEL = model_of_config(CONFIG, "m", 64, "config.json")


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
