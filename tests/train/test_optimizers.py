"""Whatever optimizer a plan names, it trains as one process does, resumes under other plans, or is refused by name."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from forked_ranks import run_worker
from msgspec.structs import replace
from random_plans import random_plan
from run_parity import TOLERANCE
from run_resumes import TOLERANCE as RESUMED
from run_resumes import resumed, saved
from stock_optimizers import OTHERS, stock_optimizer, with_optimizers
from tiny_models import tiny
from torch import nn

from shardwright.io import BadInput
from shardwright.optimizers.registry import OPTIMIZERS, Optimizer, Shard, State
from shardwright.types import DataParallel, Plan
from shardwright.types.plan import OptimizerName
from shardwright_train.checkpoints.tensors import TensorShard, read_tensors, write_tensors
from shardwright_train.engine.homes import Held
from shardwright_train.engine.learning_rate import ANY
from shardwright_train.engine.optimizer import ShardedOptimizer
from shardwright_train.engine.updates import UPDATES, Blocks
from shardwright_train.models import support
from shardwright_train.models.support import OPTIMIZERS_RUN, check_supported
from shardwright_train.parallel.world import World

Errors = dict[str, dict[str, float]]
FAMILIES = "llama", "mixtral"
ALONE = "parts_of_matrices_orthogonalized_alone"
SHARED, SHARDED = 1, 2
"""Numbers of plans of one stage on two ranks."""
CLIPPED = dataclasses.replace(ANY, clip_norm=0.5, steps=10, learning_rate=1e-2)


def test_the_runtime_runs_what_it_says_and_plans_name_what_there_is() -> None:
    assert set(UPDATES) == set(OPTIMIZERS_RUN) == {"adamw", *OTHERS}
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS_RUN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_update_is_pytorchs_or_the_published_one_and_nothing_where_gradients_are_not_finite(
    one_rank: World, name: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = nn.Parameter(torch.randn(6, 40, dtype=dtype, generator=generator))
    theirs = nn.Parameter(ours.detach().clone())
    held = Held((6, 40), (0, 1), (((0, 6), (0, 40)),))
    optimizer = ShardedOptimizer({"weight": ours}, CLIPPED, optimizer=name, matrices={"weight": held})
    group = {"params": [theirs], "lr": 0.0, "weight_decay": CLIPPED.weight_decay, "matrices": [((6, 40), (0, 1))]}
    stock = stock_optimizer(name, [group], ANY.betas, ANY.eps)
    for step in range(1, 5):
        gradient = torch.randn(6, 40, dtype=dtype, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        if step == 3:
            before = [x.clone() for x in (ours, *optimizer.state().values())]
            ours.grad[2, 3] = torch.inf
            optimizer.step(step, torch.zeros((), dtype=torch.float64), False)
            assert all(map(torch.equal, before, (ours, *optimizer.state().values())))
            continue
        torch.nn.utils.clip_grad_norm_([theirs], CLIPPED.clip_norm)
        group["lr"] = CLIPPED.learning_rate_at(step)
        stock.step()
        optimizer.step(step, torch.zeros((), dtype=torch.float64), False)
    torch.testing.assert_close(ours, theirs, rtol=1e-12 if dtype is torch.float64 else 1e-6, atol=1e-9)
    shard = Shard(ours.numel(), tuple(ours.shape), 40)
    assert optimizer.state_bytes == OPTIMIZERS[name].held_bytes([shard], str(dtype).removeprefix("torch."))  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [(256, 256, 188), (512, 188), (234, 234, 232), (300, 300, 100, 0)])
def test_codes_are_the_same_however_columns_are_cut(lengths: tuple[int, ...]) -> None:
    x = torch.randn(5, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    row = Blocks(700, 256, 0, 700)
    scales = row.maxima(x)
    cut = any(length % 256 for length in lengths[:-1])
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    # Groups are only asked whether there are any.
    parts = [Blocks(700, 256, *each, groups=(None,) * cut) for each in zip(begins, lengths, strict=True)]  # type: ignore[arg-type]
    pieces = x.split(lengths, -1)
    maxima = [part.maxima(piece) for part, piece in zip(parts, pieces, strict=True)]
    held = [torch.stack(maxima).amax(0)] * len(parts) if cut else maxima
    assert torch.equal(held[0] if cut else torch.cat(held, -1), scales)
    filled = [each for each in zip(parts, pieces, held, strict=True) if each[1].numel()]
    codes = torch.cat([part.codes(piece, its, signed=True) for part, piece, its in filled], -1)
    assert torch.equal(codes, row.codes(x, scales, signed=True))
    near = row.unpacked(codes, scales, signed=True, dtype=x.dtype)
    found = [part.unpacked(codes[:, part.first :][:, : part.columns], its, True, x.dtype) for part, _, its in filled]
    assert torch.equal(torch.cat(found, -1), near)
    assert ((near - x).abs() <= 0.01 * scales.repeat_interleave(256, -1)[:, :700]).all()


@pytest.fixture(scope="module")
def two_ranks(compare: Callable[..., Errors]) -> Errors:
    return compare(_plans(), (ALONE,))


def _plans() -> list[Plan]:
    drawn = [random_plan(tiny(family), 40 + number, 2) for number in range(len(OTHERS)) for family in FAMILIES]
    return [plan for i, plan in enumerate(drawn) for plan in with_optimizers([plan], first=i // len(FAMILIES))]


@pytest.mark.parametrize("name", OTHERS)
def test_plans_with_an_optimizer_train_exactly_as_one_process(two_ranks: Errors, name: str) -> None:
    found = {plan: max(errors.values()) for plan, errors in two_ranks.items() if plan.startswith(f"{name} ")}
    assert len(found) == len(FAMILIES)
    assert {plan: error for plan, error in found.items() if not error <= TOLERANCE} == {}


def test_orthogonalizing_parts_of_matrices_would_be_seen(two_ranks: Errors) -> None:
    assert _plans()[-1].optimizer == "muon"
    assert two_ranks[ALONE]["parameters"] > 1e3 * TOLERANCE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("adamw-8bit", "muon") else pytest.mark.long) for name in OTHERS]
)
def test_what_a_plan_saves_of_its_optimizer_another_plan_goes_on_from(tmp_path: Path, name: str) -> None:
    """From ranks that cut columns, and so blocks of 8 bits, to ranks that shard rows."""
    drawn = [random_plan(tiny("llama"), number, 2) for number in (SHARED, SHARDED)]
    first, second = with_optimizers([replace(plan, global_batch_size=16) for plan in drawn], (name,))
    assert {layer.tp_size for layer in first.layers} >= {2} and len(first.stages) == len(second.stages) == 1
    assert any(layer.dp_size == 2 and layer.data_parallel is not DataParallel.DDP for layer in second.layers)
    told = saved(tmp_path, run_worker, [first])
    assert [one.error <= RESUMED for one in resumed(tmp_path, run_worker, [second], told)] == [True]


def test_states_of_another_optimizer_are_refused_by_name(tmp_path: Path) -> None:
    write_tensors(tmp_path, [TensorShard("optim.w.momentum_buffer", (0,), torch.zeros(3))], 0)
    with pytest.raises(BadInput, match=r"has no optim\.w\.exp_avg: another optimizer keeps other states"):
        read_tensors(tmp_path, {"optim.w.exp_avg": torch.zeros(3)})


def test_an_optimizer_that_is_entered_updates_and_its_plans_run(
    one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/architecture.md: its states, its update and its name among those that run are all that the runtime needs."""
    made_up = Optimizer("made-up", (State("momentum_buffer"),))
    plan = replace(random_plan(tiny("llama"), 0, 2), optimizer=made_up.name)
    monkeypatch.setitem(OPTIMIZERS, made_up.name, made_up)
    monkeypatch.setitem(UPDATES, made_up.name, lambda groups, _: torch.optim.SGD(groups, momentum=0.5, fused=True))
    with pytest.raises(BadInput, match="optimizer"):
        check_supported(plan, "plan.json")
    monkeypatch.setattr(support, "OPTIMIZERS_RUN", (*OPTIMIZERS_RUN, made_up.name))
    check_supported(plan, "plan.json")
    ours = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = ShardedOptimizer({"bias": ours}, ANY, optimizer=made_up.name)
    expected, kept = ours.detach().clone(), torch.zeros(4, dtype=torch.float64)
    for step in (1, 2):
        ours.grad = torch.full_like(ours, step / 8)
        optimizer.step(step, torch.zeros((), dtype=torch.float64), False)
        kept = 0.5 * kept + step / 8
        expected -= ANY.learning_rate_at(step) * kept
    torch.testing.assert_close(ours.detach(), expected)
    (state,) = optimizer.state().values()
    torch.testing.assert_close(state, kept)
    assert optimizer.state_bytes == made_up.held_bytes([Shard(4, (4,))], "float64")


def test_an_optimizer_without_an_update_is_refused_by_name() -> None:
    plan = random_plan(tiny("llama"), 0, 2)
    check_supported(replace(plan, optimizer="lion"), "plan.json")
    with pytest.raises(BadInput, match="optimizer: the runtime does not support it"):
        check_supported(replace(plan, optimizer="made-up"), "plan.json")  # type: ignore[arg-type]
