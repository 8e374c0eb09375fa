"""Whole models whose routers are made to send positions to a few experts, or to those of some ranks alone."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import torch
from random_plans import random_plan
from shared_experts import MODELS, WEIGHTED_FIRST, with_shared_experts
from stock_experts import router_of, shares_of
from tiny_models import tiny
from torch import Tensor, nn

from shardwright.types import LayerStrategy, Model, Plan
from shardwright_train.parallel.data import local_tensor

SKEWS = ("one expert", "2 to 1", "idle ranks")
"""All positions choose the first expert; two of three choose in the first half of all experts; all choose in it."""
_PUSH, _PULL = 40.0, 1.0
_DAMPED = 0.3
"""Factor of what routers weigh other features by."""
_ON_TWO = (((2, 1), 1), ((1, 2), 1))
_ON_FOUR = (((2, 2), 1), ((2, 1), 1), ((1, 2), 1), ((2, 1), 2), ((4, 1), 1), ((1, 2), 2), ((1, 4), 1))
"""Parts that experts and the features of each are shared out in, in some block at least, and pipeline stages."""


def skewed_plans(world_size: int) -> list[Plan]:
    """Plans in which ranks share experts out, on four ranks of each model under each skew."""
    models = (*MODELS, WEIGHTED_FIRST, tiny("deepseek_v2"))
    grids = _ON_TWO if world_size == 2 else _ON_FOUR
    pairs = [(model, skew) for model in models for skew in SKEWS]
    if world_size == 2:
        pairs = [(model, SKEWS[i % len(SKEWS)]) for i, model in enumerate(models)]
    return [_skewed(model, world_size, skew, *grids[i % len(grids)]) for i, (model, skew) in enumerate(pairs)]


def _skewed(model: Model, world_size: int, skew: str, grid: tuple[int, int], stages: int) -> Plan:
    """The first plan that shares experts out in a grid."""
    drawn = (with_shared_experts(random_plan(model, n, world_size, stages=stages), n) for n in count(300))
    plan = next(plan for plan in drawn if grid in map(_grid_of, plan.layers))
    return msgspec.structs.replace(plan, name=f"skewed to {skew}: {plan.name}")


def _grid_of(layer: LayerStrategy) -> tuple[int, int] | None:
    return None if (grid := layer.expert_grid) is None else (grid.ep_size, grid.tp_size)


def skew_of(plan: Plan) -> str | None:
    """The skew of a plan's routing, by its name; None where none is forced."""
    skew = plan.name.removeprefix("skewed to ").partition(":")[0]
    return skew if skew in SKEWS else None


@torch.no_grad()
def skew_routing(stock: Any, skew: str) -> None:
    """Let the first feature of tokens outweigh the others, and routers choose by it."""
    table = stock.get_input_embeddings().weight
    table[:, 0] = _PUSH
    if skew == "2 to 1":
        table[::3, 0] = -_PUSH
    for part in _with_experts(stock):
        weight = router_of(part).weight
        weight *= _DAMPED
        weight[:, 0] = -_PULL
        weight[: 1 if skew == "one expert" else len(weight) // 2, 0] = _PULL


def check_skewed(stock: nn.Module, skew: str) -> None:
    """Raise AssertionError unless each layer of a stock model has just routed by a skew."""
    parts = len(list(_with_experts(stock)))
    for shares in torch.tensor(shares_of(stock), dtype=torch.float64).view(parts, -1):
        first, half = shares[0].item(), shares[: len(shares) // 2].sum().item()
        match skew:
            case "one expert":
                assert first == shares.max() >= 1 / 3 - 1e-12, (skew, shares)
            case "2 to 1":
                assert 0.6 < half < 0.73, (skew, shares)
            case "idle ranks":
                assert abs(half - 1) < 1e-12, (skew, shares)


@torch.no_grad()
def begin_with(parameters: dict[str, nn.Parameter], values: list[Tensor]) -> None:
    """Give the trained parameters of a rank their initial values."""
    trained = [local_tensor(p) for p in parameters.values() if p.requires_grad]
    for mine, value in zip(trained, values, strict=True):
        mine[tuple(slice(0, length) for length in value.shape)] = value


def _with_experts(stock: nn.Module) -> Iterator[Any]:
    return (part for part in stock.modules() if hasattr(part, "experts") and router_of(part) is not None)
