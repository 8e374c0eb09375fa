"""The models of shared_layers.py, and their plans on two or four ranks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwright.types import (
    Cluster,
    ContextParallel,
    ExpertStrategy,
    LayerStrategy,
    Model,
    PipelineStage,
    Plan,
    Schedule,
    SequenceParallel,
    Strategy,
)

SETTINGS: Mapping[str, Any] = {
    "sequence_parallel": ["megatron"],
    "recompute": ["none"],
    "layers": [1, 3],
    "grid": "full",
}
_BASE = {"vocab_size": 1024, "num_hidden_layers": 4, "max_position_embeddings": 512, "tie_word_embeddings": False}


class Case(NamedTuple):
    """A model, how it is profiled, and the strategies of its layers by the name of the plan."""

    name: str
    config: Mapping[str, Any]
    """Its Hugging Face configuration but for its widths."""
    inner: float
    """Features of the inner layer, or of each expert, for each of a position."""
    batch: int
    """Samples of a step."""
    length: int
    """Tokens of a sample."""
    lengths: tuple[int, ...]
    """Lengths that are profiled."""
    sizes: tuple[int, ...]
    """Micro-batch sizes that are profiled, in samples."""
    strategies: Mapping[str, Mapping[str, Any]]
    """Fields of each plan's layers by name; embedding and head have those that are theirs."""

    def config_of(self, hidden_size: int) -> dict[str, Any]:
        """Return the configuration for so many features of a position, in heads of 32."""
        heads = {name: hidden_size // 32 for name in ("num_attention_heads", "num_key_value_heads")}
        inner = {"intermediate_size": int(self.inner * hidden_size)}
        return {**self.config, "hidden_size": hidden_size, **inner, **heads}

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the profile."""
        more = [length for length in self.lengths if length != self.length]
        etp_sizes = {fields["experts"].etp_size for fields in self.strategies.values() if "experts" in fields}
        tp_sizes = sorted(etp_sizes | {fields["tp_size"] for fields in self.strategies.values()})
        cp_sizes = sorted({fields["cp_size"] for fields in self.strategies.values()} - {1})
        sizes = {"tp_sizes": tp_sizes, "cp_sizes": cp_sizes, "micro_batch_sizes": self.sizes}
        return {**SETTINGS, **sizes, "sequence_lengths": more or None}

    def plans(self, model: Model, cluster: Cluster) -> tuple[Plan, ...]:
        """Return a plan of one pipeline stage and one microbatch for each strategy."""
        return tuple(_plan(name, model, cluster, self.batch, fields) for name, fields in self.strategies.items())


def cluster_of(ranks: int) -> dict[str, Any]:
    """Return the content of a cluster of one node, this machine, on which so many ranks run."""
    node = {"device": "cpu", "devices_per_node": ranks, "memory_bytes": 2 << 30}
    return {"name": "here", "nodes": [{"node_type": "cpu", "count": 1}], "node_types": {"cpu": node}}


def _plan(name: str, model: Model, cluster: Cluster, batch: int, fields: Mapping[str, Any]) -> Plan:
    kept = {key: fields[key] for key in ("tp_size", "dp_size", "cp_size", "sequence_parallel") if key in fields}
    return Plan(
        name=name,
        model=model,
        cluster=cluster,
        global_batch_size=batch,
        num_microbatches=1,
        schedule=Schedule.ONE_F_ONE_B,
        stages=(PipelineStage(ranks=tuple(range(cluster.num_devices)), layers=((0, len(model.layers)),)),),
        embedding=Strategy(**kept),
        head=Strategy(**kept),
        layers=tuple(LayerStrategy(type=kind, **fields) for kind in model.layers),
    )


def _shared(dp: int, tp: int = 1, cp: int = 1, **more: object) -> dict[str, Any]:
    kind = {"sequence_parallel": SequenceParallel.MEGATRON} if tp > 1 else {}
    return {"tp_size": tp, "dp_size": dp, "cp_size": cp, **kind, **more}


def _experts(ep: int, etp: int = 1) -> dict[str, Any]:
    return {"experts": ExpertStrategy(ep_size=ep, etp_size=etp)}


def cases(ranks: int) -> dict[str, Case]:
    """Return the cases on 2 or on 4 ranks by name; on 2, which are for a machine with little time, without tp."""
    return {"context": _context(ranks), "experts": _mixture(ranks)}


def _context(ranks: int) -> Case:
    ring = {"context": ContextParallel.RING}
    strategies = {"dp2": _shared(2), "cp2 gather": _shared(1, cp=2), "cp2 ring": _shared(1, cp=2, **ring)}
    if ranks == 4:
        strategies = {
            "dp4": _shared(4),
            "tp2 x dp2": _shared(2, tp=2),
            "cp2 gather x dp2": _shared(2, cp=2),
            "cp2 ring x dp2": _shared(2, cp=2, **ring),
            "cp2 gather x tp2": _shared(1, tp=2, cp=2),
            "cp2 ring x tp2": _shared(1, tp=2, cp=2, **ring),
            "cp4 gather": _shared(1, cp=4),
            "cp4 ring": _shared(1, cp=4, **ring),
        }
    return Case(
        name="context",
        config={**_BASE, "model_type": "llama"},
        inner=2.75,
        batch=ranks,
        length=512,
        lengths=(512, 256, 128)[: 1 + ranks // 2],
        sizes=(1, ranks),
        strategies=strategies,
    )


def _mixture(ranks: int) -> Case:
    strategies = {"dp2": _shared(2), "ep2": _shared(2, **_experts(2)), "etp2": _shared(2, **_experts(1, 2))}
    if ranks == 4:
        strategies = {
            "dp4": _shared(4),
            "tp2 x dp2": _shared(2, tp=2),
            "dp4, ep2": _shared(4, **_experts(2)),
            "dp4, ep4": _shared(4, **_experts(4)),
            "dp4, ep2 etp2": _shared(4, **_experts(2, 2)),
            "tp2 x dp2, ep2": _shared(2, tp=2, **_experts(2)),
            "tp2 x dp2, ep4": _shared(2, tp=2, **_experts(4)),
        }
    routed = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
    return Case(
        name="experts",
        config={**_BASE, "model_type": "mixtral", **routed},
        inner=2.0,
        batch=4 * ranks,
        length=128,
        lengths=(128,),
        sizes=(2, 4) if ranks == 2 else (4, 8),
        strategies=strategies,
    )
