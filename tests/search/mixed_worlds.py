"""Made-up clusters of several node types, what they are priced with, and plans on them."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from made_up import make_hardware, make_mixed_cluster, make_profile, make_request
from msgspec.structs import replace
from random_requests import random_model

from shardwright.types import GIB, Cluster, LayerStrategy, Model, PipelineStage, Plan, Schedule, Strategy
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles, index_profiles, together
from shardwright_search.search import Infeasible, SearchAnswer, find_best
from shardwright_search.solver.problem import Position
from shardwright_search.space.placements import Placements
from shardwright_search.space.request import SearchRequest

MIB = 1 << 20
SLOWNESS = {"a": 1.0, "b": 2.5, "c": 0.6}


def profiles_of(model: Model, cluster: Cluster, rates: dict[str, float], **changes: object) -> Profiles:
    """Of each device; `rates`: bytes/s of its links."""
    return together(
        [
            index_profiles(
                make_hardware(cluster, bytes_per_s=rate, device=device),
                Path(f"{device}-links.h5"),
                make_profile(model, device=device, slow=SLOWNESS[device], **changes),
                Path(f"{device}.h5"),
            )
            for device, rate in rates.items()
        ]
    )


def mixed_world(seed: int, spans: bool = False) -> tuple[SearchRequest, Model, Cluster, Profiles]:
    """Two or three types of 1 or 2 nodes with 1, 2 or 4 devices each."""
    rng = np.random.default_rng(seed)
    devices = list("abc")[: int(rng.integers(2, 4))]
    rng.shuffle(devices)
    cluster = make_mixed_cluster(
        **{name: (int(rng.integers(1, 3)), int(rng.choice([1, 2, 4])), GIB) for name in devices}
    )
    model = random_model(rng, int(rng.integers(2, 6)), bool(rng.random() < 0.5))
    rates = {name: float(rng.choice([1e8, 1e9, 4e9])) for name in devices}
    profiles = profiles_of(model, cluster, rates, tp_sizes=(1, 2, 4), process_bytes=int(rng.integers(1, 4)) * MIB)
    request = make_request(
        global_batch_size=int(rng.choice([4, 8])),
        schedules=["1f1b", "gpipe"] if rng.random() < 0.5 else ["1f1b"],
        data_parallel=["ddp", "zero2", "zero3"],
        stage_widths="any" if rng.random() < 0.7 else "equal",
        max_pp_size=5,
        span_node_types=spans,
    )
    return request, model, cluster, profiles


def plain(model: Model, cluster: Cluster, ranks: list[tuple[int, ...]]) -> Plan:
    """Plain data parallelism in every stage, the blocks shared out evenly, two microbatches."""
    layers = len(model.layers)
    bounds = list(pairwise(layers * i // len(ranks) for i in range(len(ranks) + 1)))
    widths = [len(own) for own, (low, high) in zip(ranks, bounds, strict=True) for _ in range(low, high)]
    return Plan(
        name="plain",
        model=model,
        cluster=cluster,
        global_batch_size=8,
        num_microbatches=2,
        schedule=Schedule.ONE_F_ONE_B,
        stages=tuple(PipelineStage(ranks=own, layers=(b,)) for own, b in zip(ranks, bounds, strict=True)),
        embedding=Strategy(tp_size=1, dp_size=len(ranks[0])),
        head=Strategy(tp_size=1, dp_size=len(ranks[-1])),
        layers=tuple(LayerStrategy(type=t, tp_size=1, dp_size=w) for t, w in zip(model.layers, widths, strict=True)),
    )


def walks(placed: Placements) -> Iterator[tuple[int, ...]]:
    """The device groups of the stages of every plan."""
    ways: list[tuple[tuple[int, ...], Position]] = [((), next(iter(placed.moves[0])))]
    for moves in placed.moves:
        ways = [((*groups, group), behind) for groups, at in ways for group, behind in moves[at]]
    yield from (groups for groups, _ in ways)


def check_best(
    plans: Iterable[Plan],
    request: SearchRequest,
    model: Model,
    cluster: Cluster,
    profiles: Profiles,
    rng: np.random.Generator,
) -> None:
    """The searched plan is the best of all plans, within memory of each type that the more frugal of them need."""
    prices = []
    for plan in plans:
        found = evaluate(plan, profiles, timeline=False)
        held: dict[str, int] = {}
        for stage, own in zip(plan.stages, found.estimate.stages, strict=True):
            for name in {cluster.node_type_of_rank[rank] for rank in stage.ranks}:
                held[name] = max(held.get(name, 0), own.memory_bytes)
        prices.append((found.objective_ps, held))
    tightest = {
        name: sorted(held[name] for _, held in prices)[int(len(prices) * rng.choice([0.2, 0.6]))]
        for name in cluster.node_types
    }
    budgets = {name: need / GIB for name, need in tightest.items()}
    fitting = [time for time, held in prices if all(held[name] <= tightest[name] for name in tightest)]
    asked = replace(request, memory_gib=budgets)
    searched = find_best(asked, model, cluster, profiles, Path("s.json"), lambda _: None)
    if not fitting:
        assert isinstance(searched, Infeasible)
        return
    assert isinstance(searched, SearchAnswer)
    assert searched.optimum_s * 1e12 == pytest.approx(min(fitting), rel=1e-12)
    assert searched.bound_s == searched.optimum_s and not searched.stopped
