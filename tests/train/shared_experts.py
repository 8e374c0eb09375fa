"""Random plans in which ranks share experts out, as a whole or their features."""

import random
from collections.abc import Iterator
from itertools import product

import msgspec
from random_plans import random_plan
from tiny_models import tiny

from shardwright.types import DataParallel, Experts, ExpertStrategy, LayerStrategy, Model, Plan, SequenceParallel

MODELS = (tiny("mixtral", num_local_experts=8), tiny("qwen3_moe"), tiny("gpt_oss"), tiny("deepseek_v3"))
PLACED_BUT_EVERY = 7
"""Plans have placed experts but for one in so many."""
WEIGHTED_FIRST = tiny("llama4_text")
"""A model whose experts take in weighted positions."""


def shared_plans(world_size: int) -> list[Plan]:
    """Ranks share experts out, whatever the rest of the layers does; on four ranks in every way that there is."""
    on_four = [(model, number) for number in range(130, 134) for model in MODELS]
    on_two = [(MODELS[0], 111), (MODELS[1], 143), (MODELS[3], 120), (MODELS[2], 7), (WEIGHTED_FIRST, 18)]
    drawn = on_two if world_size == 2 else [*on_four, (WEIGHTED_FIRST, 134)]
    return [with_shared_experts(random_plan(model, number, world_size), number) for model, number in drawn]


def with_shared_experts(plan: Plan, number: int) -> Plan:
    """The same plan, in which ranks share out the experts of every layer whose ranks have positions of their own."""
    draw = random.Random(f"{plan.name}/{number}")
    layers = tuple(_experts_shared(plan.model, layer, draw) for layer in plan.layers)
    shared = msgspec.structs.replace(plan, name=f"shared {plan.name}", layers=layers)
    return with_placed_experts(shared, number) if number % PLACED_BUT_EVERY else shared


def with_placed_experts(plan: Plan, number: int) -> Plan:
    """The same plan, in which ranks have experts of any numbers, in any order; most layers of those that can."""
    draw, entries = random.Random(f"placed {plan.name}/{number}"), list[tuple[tuple[int, ...], ...]]()
    for layer in plan.layers:
        ep_size, experts = layer.experts.ep_size if layer.experts else 1, plan.model.types[layer.type].experts
        size = experts.number // ep_size if experts else 0
        order = draw.sample(range(size * ep_size), size * ep_size)
        placed = ep_size > 1 and order != sorted(order) and draw.random() < 0.8
        entries.append(tuple(tuple(order[i * size :][:size]) for i in range(ep_size)) if placed else ())
    return msgspec.structs.replace(plan, expert_placement=tuple(entries)) if any(entries) else plan


def _experts_shared(model: Model, layer: LayerStrategy, draw: random.Random) -> LayerStrategy:
    experts, width = model.types[layer.type].experts, layer.tp_size * layer.dp_size
    if experts is msgspec.UNSET or (layer.tp_size > 1 and layer.sequence_parallel is SequenceParallel.NONE):
        return layer
    ep_size, etp_size = draw.choice(sorted(_grids(experts, width)))
    kind, replicas = draw.choice(list(DataParallel)), width // (ep_size * etp_size)
    shards = [0] if kind is DataParallel.DDP else [0, *(size for size in range(2, replicas) if replicas % size == 0)]
    shared = ExpertStrategy(ep_size=ep_size, etp_size=etp_size, data_parallel=kind, shard_size=draw.choice(shards))
    return msgspec.structs.replace(layer, experts=shared)


def _grids(experts: Experts, width: int) -> Iterator[tuple[int, int]]:
    """Parts that experts, and the features of each, can be shared out in over a stage of a width."""
    for ep_size, etp_size in product(range(1, width + 1), repeat=2):
        if width % (ep_size * etp_size) == experts.number % ep_size == experts.features % etp_size == 0:
            yield ep_size, etp_size
