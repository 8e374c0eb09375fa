"""Initial weights are those of transformers in kind, and of seed, parameter and place alone in value."""

import math
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import random_plan
from test_train_traffic import uniform
from tiny_models import CONFIGS, initial_layer, tiny
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.plan.layout import parameter_box
from shardwright.types import DataParallel, Plan, Recompute, SequenceParallel
from shardwright_train.models import initial_weights
from shardwright_train.models.base import family_named
from shardwright_train.models.initial_weights import (
    Constant,
    Distribution,
    Filling,
    Normal,
    TruncatedNormal,
    Uniform,
    fill,
)
from shardwright_train.models.stock import stock_fillings
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.pipeline import layer as layer_module
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.stage import Stage, build_stage

DISTRIBUTIONS = (Normal(0.5, 2.0), Uniform(-1.0, 3.0), TruncatedNormal(0.1, 1.0, -0.5, 2.0), Constant(7.0))


def _filled(fillings: list[Filling], shape: tuple[int, ...], box: list[tuple[int, int]], *key: object) -> Tensor:
    found = torch.full([high - low for low, high in box], math.nan)
    fill(found, fillings, shape, box, *key)
    return found


def _whole(distribution: Distribution, count: int, *key: object) -> Tensor:
    return _filled([Filling(distribution)], (count,), [(0, count)], *key)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(DISTRIBUTIONS), st.lists(st.integers(1, 40), min_size=1, max_size=3))
def test_a_part_is_drawn_as_it_is_in_the_whole(
    data: st.DataObject, distribution: Distribution, shape: list[int]
) -> None:
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    row = data.draw(st.integers(0, shape[0] - 1))
    fillings = [Filling(distribution), Filling(Constant(0.0), (row, row + 1))]
    whole = _filled(fillings, tuple(shape), [(0, n) for n in shape], 0, "name")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial_weights, "_BLOCK", data.draw(st.sampled_from([8, 24, 1 << 18])))
        part = _filled(fillings, tuple(shape), [(low, high) for low, high in bounds], 0, "name")
    assert torch.equal(part, whole[tuple(slice(low, high) for low, high in bounds)])


def test_seeds_and_parameters_have_numbers_of_their_own() -> None:
    drawn = [_whole(Normal(0.0, 1.0), 100, seed, name) for seed in range(3) for name in ("a.weight", "b.weight")]
    values = torch.cat(drawn)
    assert len(values.unique()) == len(values)


@pytest.mark.parametrize(
    ("distribution", "share_below"),
    [
        (Normal(0.5, 2.0), lambda x: math.erfc((0.5 - x) / 2.0 / math.sqrt(2)) / 2),
        (Uniform(-1.0, 3.0), lambda x: min(max((x + 1) / 4, 0.0), 1.0)),
    ],
    ids=["normal", "uniform"],
)
def test_numbers_are_distributed_as_they_should_be(distribution: Distribution, share_below: Any) -> None:
    values = _whole(distribution, 1 << 18, 3, "x").double().sort().values
    wanted = torch.tensor([share_below(x) for x in values[::64].tolist()])
    found = torch.arange(len(values))[::64] / len(values)
    # Kolmogorov & Smirnov: beyond 2 / sqrt(n) once in 1,500 draws.
    assert (found - wanted).abs().max() < 2 / math.sqrt(len(values))
    # Pairs of a count, and of one count and the next.
    centred = _whole(distribution, 1 << 18, 3, "x").double()
    centred -= centred.mean()
    for lag in (1, 2, 7, 8):
        assert abs((centred[lag:] * centred[:-lag]).mean() / centred.var()) < 5 / math.sqrt(len(values))


def test_a_truncated_normal_is_a_normal_within_its_bounds() -> None:
    values = _whole(TruncatedNormal(0.1, 1.0, -0.5, 2.0), 1 << 16, 0, "x")
    assert -0.5 <= values.min() < -0.499 and 1.99 < values.max() <= 2.0
    normal = _whole(Normal(0.1, 1.0), 1 << 18, 0, "y")
    inside = normal[(normal >= -0.5) & (normal <= 2.0)]
    assert values.mean().item() == pytest.approx(inside.mean().item(), abs=0.02)
    assert values.std().item() == pytest.approx(inside.std().item(), abs=0.02)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_distributed_as_transformers_distributes_them(name: str) -> None:
    model, family = tiny(name), family_named(name, "test")
    kinds = [f"layers[{model.layers.index(kind)}]" for kind in dict.fromkeys(model.layers)]
    torch.manual_seed(0)  # one normal number in some 2**24 is 0
    for layer in ("embedding", *kinds, "head"):
        stock = family.build(model, layer)
        family.initialize(model, stock)
        ours = initial_layer(model, layer)
        assert ours.keys() == dict(stock.named_parameters()).keys()
        for parameter, wanted in stock.named_parameters():
            found, wanted = ours[parameter], wanted.detach()
            if wanted.numel() < 2 or wanted.std() == 0:
                assert torch.equal(found, wanted), parameter
            else:
                tolerance = 6 * wanted.std() / math.sqrt(2 * wanted.numel())
                assert abs(found.std() - wanted.std()) < 2 * tolerance, parameter
                assert abs(found.mean() - wanted.mean()) < 3 * tolerance, parameter
                assert torch.equal(found == 0, wanted == 0), parameter  # the row of padding


def test_what_nothing_initializes_is_named() -> None:
    module = nn.Linear(2, 3, device="meta")
    with pytest.raises(RuntimeError, match=r"^bias of Linear: has no initial values"):
        stock_fillings(module, lambda: nn.init.normal_(module.weight))
    with pytest.raises(RuntimeError, match=r"initial weights by aten::exponential_ are not known"):
        stock_fillings(module, lambda: module.weight.detach().exponential_())


@contextmanager
def stage_of(plan: Plan, rank: int, resumes: bool = False) -> Iterator[Stage]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        yield build_stage(_context(plan, rank, resumes))
    finally:
        dist.destroy_process_group()


def _context(plan: Plan, rank: int, resumes: bool) -> RankContext:
    groups = Groups("cpu")
    groups.prepare(plan)
    family = family_named(plan.model.family, "test")
    return RankContext(
        plan=plan,
        family=family,
        rank=rank,
        groups=groups,
        attention="sdpa",
        device=torch.device("cpu"),
        seed=5,
        resumes=resumes,
    )


@pytest.mark.parametrize(("name", "number"), [("llama", 1), ("llama", 2), ("gpt2", 3), ("vit", 4), ("bert", 5)])
def test_every_rank_of_any_plan_holds_its_part_of_the_same_weights(name: str, number: int) -> None:
    plan = random_plan(tiny(name), number, 8, "float32")
    whole_layer = cache(lambda layer: initial_layer(plan.model, layer, seed=5))
    for rank in range(8):
        with stage_of(plan, rank) as stage:
            for layer, described, parameter in stage.parameters():
                if (layer.name, described) in stage.tied.replicas:
                    continue  # the owner's values come by a message
                local = {layer.described_name(own): own for own in layer.parallel.parameters}[described]
                whole = whole_layer(layer.name)[local]
                description = next(p for p in plan.model.types[layer.kind].parameters if p.name == described)
                box = parameter_box(description, layer.strategy, stage.context.me)
                wanted = whole.view(description.shape)[tuple(slice(low, high) for low, high in box)]
                held = local_tensor(parameter.detach())
                assert torch.equal(held[tuple(slice(0, length) for length in wanted.shape)], wanted), described
                assert held.abs().sum() == pytest.approx(wanted.abs().sum().item(), rel=1e-6), "padding is zeros"


class _Largest(TorchDispatchMode):
    """The most numbers that a tensor with data was made for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # A DTensor has a shard, which another operation made.
        tensors = [x for x in tree_leaves(made) if isinstance(x, Tensor) and not isinstance(x, DTensor)]
        sizes = [x.numel() for x in tensors if x.device.type != "meta"]
        self.numel = max([self.numel, *sizes])
        return made


def _sharded() -> Plan:
    model = tiny("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=1, vocab_size=4096)
    sharding = {"tp_size": 4, "dp_size": 2, "data_parallel": DataParallel.ZERO3}
    return uniform(model, "sharded", False, Recompute.NONE, sequence_parallel=SequenceParallel.MEGATRON, **sharding)


def test_no_rank_of_a_sharded_plan_makes_more_than_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_weights, "_BLOCK", 1 << 12)
    plan = _sharded()
    largest = _Largest()
    tracemalloc.start()
    with largest, stage_of(plan, 3) as stage:
        _, peak = tracemalloc.get_traced_memory()
        held = max(local_tensor(p).numel() for _, _, p in stage.parameters())
    tracemalloc.stop()
    # A matrix is 2^20 numbers, the table twice that.
    assert largest.numel <= held == 4096 * 512 // 8
    assert peak < 8 << 20, "NumPy's blocks, and what the modules themselves are"


def test_a_run_that_is_resumed_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_module, "fill", lambda *_: pytest.fail("drawn"))
    with stage_of(_sharded(), 3, resumes=True) as stage:
        assert all(local_tensor(p).count_nonzero() == 0 for _, _, p in stage.parameters())
