"""The parts of a strategy that prices depend on: strategies that differ elsewhere are priced once."""

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.plan.expert_messages import shares_experts
from shardwright.types import DataParallel, LayerStrategy, Recompute, Strategy


def of_parameters(strategy: Strategy) -> Strategy:
    """Return a strategy without what does not concern parameters."""
    if isinstance(strategy, LayerStrategy) and shares_experts(strategy):
        return replace(strategy, recompute=Recompute.NONE)
    return Strategy(**{name: getattr(strategy, name) for name in Strategy.__struct_fields__})


def of_passes(strategy: Strategy) -> Strategy:
    """Return a strategy without its sharding of states, on which a microbatch's passes do not depend."""
    whole = {"data_parallel": DataParallel.DDP, "shard_size": 0}
    if isinstance(strategy, LayerStrategy) and strategy.experts is not UNSET:
        return replace(strategy, **whole, experts=replace(strategy.experts, **whole))
    return replace(strategy, **whole)
