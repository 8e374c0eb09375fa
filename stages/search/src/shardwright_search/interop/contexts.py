"""Context parallelism in the words of other systems: what of it their attention computes, and in which way."""

from shardwright_formats.types import Attention, ContextParallel, LayerStrategy, Model, Plan, misfit
from shardwright_models.context import context_obstacle, ring_obstacle
from shardwright_search.interop.target import ExportTarget
from shardwright_search.space.uniform import UniformStrategy


def attention_obstacle(model: Model, drops: bool = False) -> str | None:
    """Return why attention of a model does not go across ranks there, or None: it takes causal and full attention.

    `drops`: whether attention may drop some of what it adds.
    """
    masked = ring_obstacle(model, Attention.AUTO)
    if masked is not None:
        return masked.problem
    for name in dict.fromkeys(model.layers):
        ring = LayerStrategy(type=name, tp_size=1, cp_size=2, dp_size=1, context=ContextParallel.RING)
        if (problem := misfit(model, name, ring)) is not None:
            return problem
    dropping = None if drops else context_obstacle(model, Attention.AUTO)
    return None if dropping is None else dropping.problem


def contexts_of(model: Model, drops: bool = False) -> tuple[ContextParallel, ...]:
    """Return the ways in which positions of a model attend across ranks there; none where they do not."""
    return tuple(ContextParallel) if attention_obstacle(model, drops) is None else ()


def check_context(plan: Plan, uniform: UniformStrategy, target: ExportTarget, drops: bool = False) -> None:
    """Raise BadInput where layers share positions out and the system's attention does not take the model's masks."""
    if uniform.shares_context:
        obstacle = attention_obstacle(plan.model, drops)
        feature = f"layers[0]: cp_size {uniform.cp_size} ({obstacle})"
        target.demand(obstacle is None, feature, "choose cp_size 1")
