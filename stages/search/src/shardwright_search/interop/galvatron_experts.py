"""Experts in Galvatron's strategy file: degrees for each layer, beside those of the rest of it.

Its ranks of experts lie as those of plans do: those that share features are neighbours, then those that share experts
out (`gen_ep_group_dist` of its `comm_groups.py`). Their states are shared as those of the layer.
"""

from pathlib import Path

from msgspec import UNSET

from shardwright_formats.io import BadInput
from shardwright_formats.semantics.axes import axes_of, effective
from shardwright_formats.types import (
    ContextParallel,
    DataParallel,
    ExpertStrategy,
    LayerStrategy,
    Model,
    Plan,
    Recompute,
    Strategy,
)
from shardwright_search.interop.galvatron_file import DataParallelType, GalvatronLayer
from shardwright_search.space.uniform import layer_of


def layer_with_experts(
    sharding: Strategy, layer: GalvatronLayer, default: DataParallelType, model: Model, number: int, file: Path
) -> LayerStrategy:
    """Return the strategy of a layer of the model; `default` is the kind of data parallelism that is not ZeRO-3.

    Raises BadInput for degrees of experts in a layer without, and ValueError where they divide nothing.
    """
    kind, experts = model.layers[number], None
    if model.types[kind].experts is UNSET:
        if layer.experts not in (None, (1, 1)):
            problem = f"ep_sizes_enc or tp_of_ep_sizes_enc of layer {number}, which has no experts, is not 1"
            raise BadInput(file, problem, "pass the model it was made for")
    elif layer.experts not in (None, (1, axes_of(sharding).dense.tensor.size)):
        (ep_size, etp_size), data_parallel = layer.experts, DataParallel.ZERO3 if layer.zero3 else DataParallel(default)
        experts = ExpertStrategy(ep_size=ep_size, etp_size=etp_size, data_parallel=data_parallel)
    context = ContextParallel.RING if axes_of(sharding).shares_context else ContextParallel.GATHER
    return layer_of(sharding, kind, Recompute.FULL if layer.checkpoint else Recompute.NONE, context, experts)


def told_of_experts(layer: GalvatronLayer, plan: Plan, number: int) -> GalvatronLayer:
    """Return a layer of the file with the degrees of its experts, where a plan's has any."""
    strategy = plan.layers[number]
    if plan.model.types[strategy.type].experts is UNSET:
        return layer
    axes = axes_of(strategy.expert_grid or effective(strategy)).dense
    return layer._replace(experts=(axes.experts.size, axes.tensor.size))
