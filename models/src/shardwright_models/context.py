"""The context parallelism that the runtime has for a model, by the facts of its family."""

from collections.abc import Iterator
from typing import NamedTuple

from shardwright_formats.semantics.axes import axes_of
from shardwright_formats.types import Attention, ContextParallel, Model, Plan
from shardwright_models.facts import Mask
from shardwright_models.registry import FAMILIES

WITHOUT_FLASH = "attends to no positions of other ranks, as cp_size asks for"
"""The reason why flash_attention_2 is not used beside context parallelism."""
_RING_MASKS = (Mask.CAUSAL, Mask.NONE)


class Obstacle(NamedTuple):
    """Why the runtime cannot share positions out as asked, and what to do instead."""

    problem: str
    remedy: str


def context_obstacle(model: Model, attention: Attention, compile: bool = False) -> Obstacle | None:
    """Return why no layer of a model can have a cp_size above 1 beside a kernel, or None.

    Nothing is known of families such as those of descriptions made from others' profiles: they have no obstacle.
    """
    return next(_context_obstacles(model, attention, compile), None)


def ring_obstacle(model: Model, attention: Attention) -> Obstacle | None:
    """Return why keys of a model cannot go round a ring beside a kernel, or None: its blocks mask documents alone.

    What only some types of layer lack, such as a window, `misfit` says of these.
    """
    return next(_ring_obstacles(model, attention), None)


def plan_obstacle(plan: Plan) -> Obstacle | None:
    """Return the first thing in a plan's context parallelism that the runtime does not do, or None."""
    if not any(axes_of(strategy).shares_context for strategy in (plan.embedding, *plan.layers, plan.head)):
        return None
    obstacle = context_obstacle(plan.model, plan.attention, plan.compile)
    rings = any(layer.context is ContextParallel.RING for layer in plan.layers)
    return ring_obstacle(plan.model, plan.attention) if obstacle is None and rings else obstacle


def _context_obstacles(model: Model, attention: Attention, compile: bool) -> Iterator[Obstacle]:
    if attention is Attention.FLASH_ATTENTION_2:
        yield Obstacle(f"attention {attention} {WITHOUT_FLASH}", "use auto, sdpa or eager")
    if compile:
        problem = "compile: blocks that attend to positions of other ranks (cp_size) are not compiled"
        yield Obstacle(problem, "leave it out")
    if (facts := FAMILIES.get(model.family)) is None:
        return
    key = facts.dropouts.attention
    if facts.configured(model.config).get(key):
        problem = f"cp_size above 1 drops nothing inside attention, for which {key} has a rate"
        yield Obstacle(problem, f"describe the model with {key} 0, or share positions out by sequence_parallel")
    if facts.joined_by is not None:
        problem = "cp_size above 1 is not for images among a text, which keep their order"
        yield Obstacle(problem, "use sequence_parallel")


def _ring_obstacles(model: Model, attention: Attention) -> Iterator[Obstacle]:
    facts = FAMILIES.get(model.family)
    if facts is not None and facts.mask not in _RING_MASKS:
        yield _no_ring(f"adds no {facts.mask} to scores, as {model.family} models do")
    if attention is Attention.EAGER or (facts is not None and Attention.SDPA not in facts.kernels):
        yield _no_ring("computes with the kernels of sdpa alone")
    heads = (region.attention for kind in model.types.values() for region in kind.regions)
    if any(each is not None and each.keys != each.queries for each in heads):
        yield _no_ring("attends to no other sequence than the queries'")


def _no_ring(lack: str) -> Obstacle:
    return Obstacle(f"context ring {lack}", "use gather")
