"""Random plans in which positions attend to those of other ranks, over gathered keys and values or round a ring."""

import random
from typing import TypeVar

import msgspec
from random_plans import random_plan, uneven_plan
from shared_experts import with_shared_experts
from tiny_models import tiny

from shardwright.models.context import ring_obstacle
from shardwright.types import EMBEDDING, HEAD, ContextParallel, Model, Plan, Strategy, misfit

AnyStrategy = TypeVar("AnyStrategy", bound=Strategy)
FAMILIES = (
    *("llama", "qwen3", "gpt2", "bert", "t5", "vit", "olmo2", "gemma2", "gemma3_text", "cohere2", "baichuan"),
    *("mixtral", "phi3", "modernbert", "whisper", "gpt_oss", "ministral3", "deepseek_v2", "deepseek_v3"),
)
"""Every kind of mask, of positions and of heads."""
_BEFORE = {"original_max_position_embeddings": 8}
LONG = (
    {"rope_type": "yarn", "factor": 8.0, **_BEFORE},
    {"rope_type": "longrope", "long_factor": [2.0, 3.0], "short_factor": [1.0, 1.5], **_BEFORE},
)
"""Positions that look at the whole length."""


def context_plans(world_size: int) -> list[Plan]:
    """Plans of every family, of unequal widths, with documents, with experts that ranks share out, and long ones."""
    models = [tiny(family) for family in FAMILIES]
    plans = [_drawn(model, 200 + i, world_size) for i, model in enumerate(models)]
    few_heads = tiny("llama", num_key_value_heads=1, mlp_bias=False)
    models = [few_heads, *(tiny("llama", rope_scaling=scaling) for scaling in LONG)]
    plans += [_drawn(model, 220 + i, world_size) for i, model in enumerate(models)]
    packed = [_drawn(tiny(family), 240 + i, world_size) for i, family in enumerate(("qwen3", "gpt2", "bert"))]
    plans += [msgspec.structs.replace(plan, name=f"packed {plan.name}") for plan in packed]
    if world_size == 4:
        plans += [with_context(uneven_plan(tiny(family), 250, 4), 1) for family in ("llama", "t5")]
        plans += [with_shared_experts(with_context(random_plan(tiny("mixtral"), n, 4), n), n) for n in (260, 261)]
    plans = [with_rings(plan, number) for number, plan in enumerate(plans)]
    names = (f"context {number}: {plan.name.replace('+', ' and ')}" for number, plan in enumerate(plans))
    return [msgspec.structs.replace(plan, name=name) for plan, name in zip(plans, names, strict=True)]


def _drawn(model: Model, number: int, world_size: int) -> Plan:
    """A plan of one pipeline stage, or on four ranks of two as often."""
    stages = 1 if world_size == 2 or number % 2 else 2
    return with_context(random_plan(model, number, world_size, stages=stages), number)


def with_context(plan: Plan, number: int) -> Plan:
    """The same plan, in which ranks that had samples of their own share out positions where they can."""
    draw = random.Random(f"{plan.name}/{number}")
    return msgspec.structs.replace(
        plan,
        embedding=_shared(plan.model, EMBEDDING, plan.embedding, draw),
        layers=tuple(_shared(plan.model, layer.type, layer, draw) for layer in plan.layers),
        head=_shared(plan.model, HEAD, plan.head, draw),
    )


def with_rings(plan: Plan, number: int) -> Plan:
    """The same plan, in which keys go round a ring in every other layer that shares positions out, where they can."""
    turns = [layer.cp_size > 1 and (i + number) % 2 == 1 for i, layer in enumerate(plan.layers)]
    layers = [
        msgspec.structs.replace(layer, context=ContextParallel.RING) if turn else layer
        for layer, turn in zip(plan.layers, turns, strict=True)
    ]
    fits = all(misfit(plan.model, layer.type, layer) is None for layer in layers)
    known = ring_obstacle(plan.model, plan.attention) is None
    return msgspec.structs.replace(plan, layers=tuple(layers)) if fits and known else plan


def _shared(model: Model, kind: str, strategy: AnyStrategy, draw: random.Random) -> AnyStrategy:
    asked = [
        msgspec.structs.replace(strategy, cp_size=size, dp_size=strategy.dp_size // size, tp_consecutive=True)
        for size in (2, 4)
        if strategy.dp_size % size == 0
    ]
    fitting = [each for each in asked if misfit(model, kind, each) is None]
    return draw.choice([*fitting, strategy]) if draw.random() < 0.3 or not fitting else draw.choice(fitting)
