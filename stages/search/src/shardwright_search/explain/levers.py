"""What each lever on memory frees, and what it costs: recomputation, sharding and offloading of a stage's layers.

A lever is applied to, or taken from, as many layers of the stage as it takes to free or need a given amount, each time
with the full price of the plan: no share of a layer, and no sum of two levers, is assumed to be linear.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import GIB, DataParallel, LayerStrategy, Offload, Plan, Recompute
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.plan import Evaluation, evaluate

TARGET_BYTES = GIB
"""Bytes that the layers of a lever free or need together, if there are enough layers."""


class Lever(NamedTuple):
    """A lever applied to, or taken from, some layers of a pipeline stage."""

    name: str
    layers: tuple[int, ...]
    """The layers that change."""
    possible: int
    """Number of layers of the stage that could."""
    more_bytes: int
    """Bytes that a rank of the stage holds in addition; negative: it holds fewer."""
    slower: float
    """The share by which a step takes longer; negative: less long."""
    left_bytes: int | None
    """Bytes of the budget that are then left on a rank of the stage; negative: they exceed it. None: no budget."""


class _Change(NamedTuple):
    """Another value of a field of strategies, for the layers that have one of some values."""

    name: str
    field: str
    old: tuple[object, ...]
    new: object

    def applies(self, layer: LayerStrategy) -> bool:
        """Return whether the layer has one of the old values, and may have the new one."""
        if getattr(layer, self.field) not in self.old:
            return False
        if self.field == "offload":
            return self.new not in (Offload.ACTIVATIONS, Offload.BOTH) or layer.moves_activations
        on_device = replace(layer, offload=UNSET)
        return not layer.offloads_activations or self.made(on_device).moves_activations

    def made(self, layer: LayerStrategy) -> LayerStrategy:
        """Return the layer with the new value; without sharding there is no size of shards."""
        whole = {"shard_size": 0} if self.new is DataParallel.DDP else {}
        return replace(layer, **{self.field: self.new, **whole})


_DDP, _ZERO2, _ZERO3 = DataParallel.DDP, DataParallel.ZERO2, DataParallel.ZERO3
_RECOMPUTED = tuple(kind for kind in Recompute if kind is not Recompute.NONE)
_CHANGES = (
    # The ways back from levers that layers use.
    *(_Change(f"without recompute {kind}", "recompute", (kind,), Recompute.NONE) for kind in _RECOMPUTED),
    *(_Change(f"without offload {kind}", "offload", (kind,), UNSET) for kind in Offload if kind is not Offload.NONE),
    _Change("zero2 for zero3", "data_parallel", (_ZERO3,), _ZERO2),
    _Change("ddp for zero2", "data_parallel", (_ZERO2,), _DDP),
    # Levers that layers may still use.
    _Change("recompute norms+activations", "recompute", (Recompute.NONE,), Recompute.NORMS_ACTIVATIONS),
    _Change("recompute selective", "recompute", (Recompute.NONE,), Recompute.SELECTIVE),
    _Change("recompute full", "recompute", (Recompute.NONE, Recompute.SELECTIVE), Recompute.FULL),
    _Change("zero2 for ddp", "data_parallel", (_DDP,), _ZERO2),
    _Change("zero3 for zero2", "data_parallel", (_ZERO2,), _ZERO3),
    _Change("offload optimizer", "offload", (UNSET,), Offload.OPTIMIZER),
    _Change("offload activations", "offload", (UNSET,), Offload.ACTIVATIONS),
    _Change("offload both", "offload", (Offload.OPTIMIZER, Offload.ACTIVATIONS), Offload.BOTH),
)


def levers(
    plan: Plan, before: Evaluation, costs: CostModel, stage: int, budgets_bytes: Sequence[int] | None
) -> Iterator[Lever]:
    """Yield the levers of a stage's layers that change its memory: those in use first, then those that are not.

    Levers that the profiles or the cluster have no price for are left out.
    """
    layers = [i for low, high in plan.stages[stage].layers for i in range(low, high)]
    for change in _CHANGES:
        places = [i for i in layers if change.applies(plan.layers[i])]
        if places and (lever := _enough(change, places, plan, before, costs, stage, budgets_bytes)) is not None:
            yield lever


def _enough(
    change: _Change,
    places: Sequence[int],
    plan: Plan,
    before: Evaluation,
    costs: CostModel,
    stage: int,
    budgets_bytes: Sequence[int] | None,
) -> Lever | None:
    """Return the lever on as few of the places as change memory by the target, or on all of them.

    None if it has no effect on memory, or no price.
    """

    def on(count: int) -> Lever:
        changed = {i: change.made(plan.layers[i]) for i in places[:count]}
        layers = tuple(changed.get(i, layer) for i, layer in enumerate(plan.layers))
        after = evaluate(replace(plan, layers=layers), costs.profiles, costs, timeline=False)
        held = after.estimate.stages[stage].memory_bytes
        left = None if budgets_bytes is None else budgets_bytes[stage] - held
        more = held - before.estimate.stages[stage].memory_bytes
        slower = after.objective_ps / before.objective_ps - 1
        return Lever(change.name, tuple(changed), len(places), more, slower, left)

    try:
        low, best = 0, on(len(places))
        if best.more_bytes == 0:
            return None
        while len(best.layers) - low > 1 and abs(best.more_bytes) >= TARGET_BYTES:
            tried = on((low + len(best.layers)) // 2)
            if abs(tried.more_bytes) >= TARGET_BYTES:
                best = tried
            else:
                low = len(tried.layers)
    except BadInput:
        return None
    return best
