"""Random plans on a few ranks, drawn by seed from everything that a plan may say."""

import random
from collections.abc import Sequence
from itertools import pairwise

from shardwright.types.cluster import Cluster
from shardwright.types.model import EMBEDDING, HEAD, Model
from shardwright.types.plan import GradientReduction, PipelineStage, Plan, Schedule, misfit
from shardwright.types.strategy import RECOMPUTE_WHOLE, DataParallel, LayerStrategy, SequenceParallel, Strategy

__all__ = ["random_plan"]

_MOST_RUNS = 4
"""Neighbouring layers of one strategy: at most so many runs of them in a plan."""


def random_plan(model: Model, cluster: Cluster, global_batch_size: int, draw: random.Random, name: str) -> Plan:
    """A plan that can be run, though not always priced: every degree and kind is as likely as another.

    So is every schedule of joint backward passes.
    """
    devices, layers = cluster.num_devices, len(model.layers)
    pp_size = draw.choice([d for d in _divisors(devices) if d <= layers])
    width = devices // pp_size
    # Results name plans by their seeds: split backward passes came after them.
    joint = [s for s in Schedule if not s.splits]
    schedule = draw.choice([s for s in joint if pp_size > 1 or s is Schedule.ONE_F_ONE_B])
    chunks = 2 if schedule is Schedule.INTERLEAVED_1F1B and layers >= 2 * pp_size else 1
    counts = [m for m in _divisors(global_batch_size) if (global_batch_size // m) % width == 0]
    if schedule is Schedule.INTERLEAVED_1F1B:
        counts = [m for m in counts if m % pp_size == 0]
    edges = [0, *sorted(draw.sample(range(1, layers), pp_size * chunks - 1)), layers]
    ranges = list(pairwise(edges))
    return Plan(
        name=name,
        model=model,
        cluster=cluster,
        global_batch_size=global_batch_size,
        num_microbatches=draw.choice(counts),
        schedule=schedule if chunks > 1 or schedule is not Schedule.INTERLEAVED_1F1B else Schedule.ONE_F_ONE_B,
        gradient_reduction=draw.choice(list(GradientReduction)),
        stages=tuple(
            PipelineStage(
                ranks=tuple(range(i * width, (i + 1) * width)),
                layers=tuple(ranges[chunk * pp_size + i] for chunk in range(chunks)),
            )
            for i in range(pp_size)
        ),
        embedding=_shardings(model, EMBEDDING, width, draw),
        head=_shardings(model, HEAD, width, draw),
        layers=_layers(model, width, draw),
    )


def _layers(model: Model, width: int, draw: random.Random) -> tuple[LayerStrategy, ...]:
    """Runs of equal neighbours: layers of one type that follow one another share a strategy until a run ends."""
    count = len(model.layers)
    ends = sorted(draw.sample(range(1, count), draw.randint(0, min(_MOST_RUNS, count) - 1)))
    found: list[LayerStrategy] = []
    for number, kind in enumerate(model.layers):
        if found and number not in ends and found[-1].type == kind:
            found.append(found[-1])
            continue
        spread = _shardings(model, kind, width, draw)
        fields = {name: getattr(spread, name) for name in Strategy.__struct_fields__}
        found.append(LayerStrategy(**fields, type=kind, recompute=draw.choice(list(RECOMPUTE_WHOLE))))
    return tuple(found)


def _shardings(model: Model, kind: str, width: int, draw: random.Random) -> Strategy:
    tp_sizes = [
        tp_size for tp_size in _divisors(width) if misfit(model, kind, Strategy(tp_size=tp_size, dp_size=1)) is None
    ]
    tp_size = draw.choice(tp_sizes)
    dp_size = width // tp_size
    ways = [
        Strategy(tp_size=tp_size, dp_size=dp_size, data_parallel=sharded, sequence_parallel=split)
        for split in (SequenceParallel if tp_size > 1 else (SequenceParallel.NONE,))
        # Under Ulysses parameters are shared by all ranks of the stage.
        for sharded in (DataParallel if dp_size > 1 or split is SequenceParallel.ULYSSES else (DataParallel.DDP,))
    ]
    return draw.choice([way for way in ways if misfit(model, kind, way) is None])


def _divisors(number: int) -> Sequence[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
