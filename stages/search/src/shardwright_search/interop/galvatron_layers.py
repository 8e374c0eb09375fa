"""A layer of Galvatron's strategy file and a strategy of a plan, each as the other.

Its ranks lie as those of plans do: tensor-parallel or Ulysses ranks are neighbours, then context-parallel ones
(`gen_cp_group_dist` of its `comm_groups.py`), whose attention is a ring over a zig-zag order (`attention_impl.py`).
"""

from pathlib import Path

from shardwright_formats.io import BadInput
from shardwright_formats.semantics.axes import effective
from shardwright_formats.types import ContextParallel, DataParallel, Plan, Recompute, SequenceParallel, Strategy
from shardwright_search.interop.contexts import attention_obstacle
from shardwright_search.interop.galvatron_file import GalvatronLayer, GalvatronStrategy
from shardwright_search.interop.target import ExportTarget, strategies
from shardwright_search.options import GalvatronRun


def strategy_of(
    where: str, layer: GalvatronLayer, given: GalvatronStrategy, width: int, run: GalvatronRun, file: Path
) -> Strategy:
    """Return the sharding of one layer of the file on a stage of `width` ranks.

    Raises BadInput naming `where` for degrees that divide nothing, and for what the run has to say.
    """
    ranks = layer.tp_size * layer.cp_size
    if ranks < 1 or width % ranks:
        degrees = f"{layer.tp_size} x cp {layer.cp_size}" if layer.cp_size > 1 else layer.tp_size
        problem = f"{where}: {degrees} does not divide the {width} ranks of a pipeline stage"
        raise BadInput(file, problem, "pass the cluster it was made for")
    # Galvatron makes every group of Ulysses of neighbours, whatever the flag.
    consecutive = layer.tp_consecutive or layer.ulysses
    if layer.cp_size > 1 and not consecutive and layer.tp_size > 1:
        raise BadInput(file, f"{where}: strided groups beside cp {layer.cp_size}", "make them consecutive")
    sequence_parallel = SequenceParallel.ULYSSES if layer.ulysses else SequenceParallel.NONE
    if layer.tp_size > 1 and not layer.ulysses:
        if run.sequence_parallel is None:
            problem = f"{where} is {layer.tp_size}, and the file does not say whether such layers share the sequence"
            raise BadInput(file, problem, "say it: --sequence-parallel none or megatron")
        sequence_parallel = SequenceParallel(run.sequence_parallel)
    return effective(
        Strategy(
            tp_size=layer.tp_size,
            tp_consecutive=consecutive or layer.cp_size > 1,
            cp_size=layer.cp_size,
            dp_size=width // ranks,
            data_parallel=DataParallel.ZERO3 if layer.zero3 else DataParallel(given.default_dp_type),
            sequence_parallel=sequence_parallel,
        )
    )


def galvatron_layer(strategy: Strategy, recompute: Recompute) -> GalvatronLayer:
    """Return a layer of the file for what a layer of a plan does."""
    return GalvatronLayer(
        tp_size=strategy.tp_size,
        tp_consecutive=strategy.tp_consecutive,
        zero3=strategy.data_parallel is DataParallel.ZERO3,
        ulysses=strategy.sequence_parallel is SequenceParallel.ULYSSES,
        checkpoint=recompute is Recompute.FULL,
        cp_size=strategy.cp_size,
    )


def check_rings(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput naming the first layer whose positions attend to those of other ranks otherwise than it does."""
    shared = next((where for where, strategy in strategies(plan) if strategy.cp_size > 1), None)
    if shared is None:
        return
    obstacle = attention_obstacle(plan.model)
    target.demand(obstacle is None, f"{shared}: cp_size above 1 ({obstacle})", "choose cp_size 1")
    for i, layer in enumerate(plan.layers):
        ring = effective(layer).cp_size == 1 or layer.context is ContextParallel.RING
        target.demand(ring, f"layers[{i}]: context {layer.context}", "choose ring")
