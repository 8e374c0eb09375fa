"""Random valid plans, drawn by number: other numbers give other plans, the same number the same."""

import random
from collections.abc import Sequence
from itertools import pairwise
from math import lcm

import msgspec

from shardwright.plan.axes import axes_of
from shardwright.types.cluster import Cluster, NodeGroup, NodeType
from shardwright.types.model import EMBEDDING, HEAD, Model
from shardwright.types.plan import GradientReduction, PipelineStage, Plan, Precision, Schedule, misfit
from shardwright.types.strategy import (
    RECOMPUTE_SETS,
    RECOMPUTE_WHOLE,
    DataParallel,
    LayerStrategy,
    SequenceParallel,
    Strategy,
)

_LOW = ("bfloat16", "float16")


def cluster_of(devices: int) -> Cluster:
    """Some devices of one node."""
    node = NodeType(device="cpu", devices_per_node=devices, memory_bytes=1 << 30)
    return Cluster(name="test", nodes=(NodeGroup(node_type="cpu", count=1),), node_types={"cpu": node})


UNEVEN = {4: ((3, 1), (1, 3), (1, 2, 1), (2, 1, 1)), 8: ((6, 2), (2, 6), (4, 3, 1), (1, 4, 3))}
"""Widths of pipeline stages, by the number of ranks."""
_BARE_RANGES = 4


def uneven_plan(model: Model, number: int, world_size: int) -> Plan:
    """A plan whose pipeline stages are of unequal width."""
    widths = UNEVEN[world_size]
    return random_plan(model, number, world_size, widths=widths[number % len(widths)])


def bare_plan(model: Model, number: int, world_size: int) -> Plan:
    """A plan whose embedding and head are alone: four pipeline stages, or two with two model chunks each."""
    return random_plan(model, number, world_size, stages=(4, 2)[number % 2], bare=True)


def random_plan(
    model: Model,
    number: int,
    world_size: int,
    dtype: str = "float64",
    stages: int | None = None,
    widths: Sequence[int] = (),
    bare: bool = False,
) -> Plan:
    """A plan drawn uniformly from what every field may say; `widths` of its pipeline stages, all equal if left out.

    `bare`: of its four layer ranges the first and the last are without blocks.
    """
    draw = random.Random(f"{model.name}/{number}/{world_size}")
    pp_size = len(widths) or stages or draw.choice([size for size in (1, 2, 4) if size <= world_size])
    chunks = draw.choice([1, 1, 2]) if len(model.layers) >= 2 * pp_size > 2 else 1
    chunks = _BARE_RANGES // pp_size if bare else chunks
    interleaved = chunks > 1
    size = "+".join(map(str, widths)) or world_size
    widths = widths or [world_size // pp_size] * pp_size
    whole = lcm(*widths)
    batch = 16 if len(set(widths)) == 1 else 4 * whole
    numbers = list(range(world_size))
    if draw.random() < 0.2:
        draw.shuffle(numbers)
    ends = (((0, 0),), ((len(model.layers),) * 2,)) if bare else ((), ())
    cuts = [*ends[0], *_cuts(len(model.layers), pp_size * chunks - 2 * bare, draw), *ends[1]]
    width_of = [widths[i % pp_size] for i, (low, high) in enumerate(cuts) for _ in range(low, high)]
    embedding = Strategy(**_spread(model, EMBEDDING, widths[0], draw))
    head = Strategy(**_spread(model, HEAD, widths[-1], draw))
    layers = tuple(
        LayerStrategy(type=kind, recompute=draw.choice(list(RECOMPUTE_WHOLE)), **_spread(model, kind, ranks, draw))
        for kind, ranks in zip(model.layers, width_of, strict=True)
    )
    # Of a generator of its own, as the sizes of shard groups are.
    layers = with_parts(layers, random.Random(f"parts {draw.getstate()}"))
    return Plan(
        name=f"{'bare ' if bare else ''}{model.family} {number} on {size} {dtype}",
        model=model,
        cluster=cluster_of(world_size),
        global_batch_size=batch,
        num_microbatches=draw.choice([m for m in (1, 2, 4) if (batch // m) % whole == 0]),
        schedule=Schedule.INTERLEAVED_1F1B if interleaved else draw.choice([Schedule.GPIPE, Schedule.ONE_F_ONE_B]),
        gradient_reduction=draw.choice(list(GradientReduction)),
        precision=precision_of(dtype),
        stages=tuple(
            PipelineStage(
                ranks=tuple(sorted(numbers[sum(widths[:i]) : sum(widths[: i + 1])])),
                layers=tuple(cuts[chunk * pp_size + i] for chunk in range(chunks)),
            )
            for i in range(pp_size)
        ),
        embedding=embedding,
        head=head,
        layers=layers,
    )


def with_parts(layers: Sequence[LayerStrategy], draw: random.Random) -> tuple[LayerStrategy, ...]:
    """Return the layers, a third of which recompute parts one by one."""
    kinds = [draw.choice((None, None, *RECOMPUTE_SETS[draw.randrange(len(RECOMPUTE_SETS)) :][:1])) for _ in layers]
    return tuple(
        layer if kind is None else msgspec.structs.replace(layer, recompute=kind)
        for layer, kind in zip(layers, kinds, strict=True)
    )


def precision_of(dtype: str) -> Precision:
    """Everything in one format, but master weights and reductions in float32 where compute has 16 bits."""
    stored = "float32" if dtype in _LOW else dtype
    return Precision(parameters=stored, compute=dtype, reduce=stored)  # type: ignore[arg-type]


def _spread(model: Model, kind: str, ranks: int, draw: random.Random) -> dict[str, object]:
    choices = [
        Strategy(tp_size=tp_size, dp_size=ranks // tp_size, sequence_parallel=split)
        for tp_size in (1, 2, 3, 4, 6, 8)
        if ranks % tp_size == 0
        for split in SequenceParallel
    ]
    # Every degree is as likely as another.
    fitting = [s for s in choices if misfit(model, kind, s) is None]
    tp_size = draw.choice(sorted({s.tp_size for s in fitting}))
    chosen = draw.choice([s for s in fitting if s.tp_size == tp_size])
    consecutive, data_parallel = draw.random() < 0.6, draw.choice(list(DataParallel))
    state_ranks = axes_of(chosen).dense.states.size
    shards = [0] if data_parallel is DataParallel.DDP else [0, *range(2, state_ranks)]
    return {
        "tp_size": tp_size,
        "dp_size": ranks // tp_size,
        "tp_consecutive": consecutive,
        "data_parallel": data_parallel,
        # Of a generator of its own: what else is drawn stays what it was before there were shard groups.
        "shard_size": random.Random(str(draw.getstate())).choice([s for s in shards if not s or not state_ranks % s]),
        "sequence_parallel": chosen.sequence_parallel,
    }


def _cuts(layers: int, parts: int, draw: random.Random) -> Sequence[tuple[int, int]]:
    """Ranges of at least one layer."""
    inner = sorted(draw.sample(range(1, layers), parts - 1))
    edges = [0, *inner, layers]
    return list(pairwise(edges))


def on_devices(plan: Plan, *devices: str) -> Plan:
    """The same plan on nodes of one rank each, with these devices."""
    types = {f"n{i}": NodeType(device=d, devices_per_node=1, memory_bytes=1 << 30) for i, d in enumerate(devices)}
    groups = tuple(NodeGroup(node_type=name, count=1) for name in types)
    return msgspec.structs.replace(plan, cluster=Cluster(name="apart", nodes=groups, node_types=types))
