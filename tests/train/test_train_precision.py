"""In 16 bits a family computes what its stock model does in the same format, whatever is recomputed."""

from typing import NamedTuple

import pytest
import torch
from compared_families import FAMILIES
from msgspec.structs import replace
from parity_worker import auxiliary_of, part_of_rank
from random_plans import random_plan
from rest_long import rest_long
from tiny_models import batch_of, engine_of, initial_stock, named_parameters, stock_logits, tiny
from torch import Tensor

from shardwright.types import Model, Plan, Precision, Recompute
from shardwright_train.data.share import Batch
from shardwright_train.parallel.data import local_tensor, torch_dtype
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.runner import Step
from shardwright_train.pipeline.stage import Stage

KINDS = (Recompute.FULL, Recompute.SELECTIVE, Recompute.ATTENTION, Recompute.MLP, Recompute.NONE)
MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")
HALF = Precision(parameters="float32", compute="float16", reduce="float32")
OTHERS = (
    HALF,
    Precision(parameters="float32", compute="bfloat16", reduce="bfloat16"),
    Precision(parameters="bfloat16", compute="bfloat16", reduce="float32"),
)
FIRST = (("olmo2", MIXED), ("bert", MIXED), ("gpt_oss", MIXED), ("t5", HALF))
"""Float32 angles, sums in an order, experts, and states with a bound behind the last sum."""
ROUNDED_ELSEWHERE = {
    *("baichuan", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "llama4_text"),
}
"""Experts weigh rows before the last product, stock behind it; Baichuan's reference is code of our own."""
SAMPLES = 4


class Pass(NamedTuple):
    """A forward and a backward pass over one batch."""

    loss: float
    gradients: Tensor
    """Gradients of all trained parameters, one behind the other."""

    def distance(self, other: "Pass") -> float:
        """How far these gradients are from others, as a part of them."""
        return ((self.gradients - other.gradients).norm() / other.gradients.norm()).item()


def _plan(model: Model, precision: Precision, turn: int) -> Plan:
    """A plan on one rank whose layers recompute in unlike ways; after five turns each has had all of them."""
    plan = random_plan(model, 0, 1)
    kinds = (KINDS[(number + turn) % len(KINDS)] for number in range(len(plan.layers)))
    layers = tuple(replace(layer, recompute=kind) for layer, kind in zip(plan.layers, kinds, strict=True))
    return replace(plan, precision=precision, num_microbatches=1, global_batch_size=SAMPLES, layers=layers)


def _pass(world: World, model: Model, precision: Precision, batch: Batch, turn: int) -> tuple[Pass, Stage]:
    engine = engine_of(_plan(model, precision, turn), world, Groups("cpu"))
    totals = engine.forward_backward(Step.of_batch(batch, engine.stage.context.share))
    gradients = _joined([local_tensor(p.grad) for p in engine.optimizer.parameters.values() if p.grad is not None])
    return Pass(engine.optimizer.step(1, totals, stop=False).loss, gradients), engine.stage


def _stock(model: Model, dtype: torch.dtype, batch: Batch, stage: Stage) -> Pass:
    stock = initial_stock(model, dtype)
    logits = stock_logits(stock, batch).float().flatten(0, -2)
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()) + auxiliary_of(stock) / SAMPLES
    loss.backward()
    named = named_parameters(stock, model)
    gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
    return Pass(loss.item(), _joined(part_of_rank(gradients, stage)))


def _joined(gradients: list[Tensor]) -> Tensor:
    return torch.cat([gradient.detach().double().flatten() for gradient in gradients])


_EACH = [(family, precision) for precision in (MIXED, *OTHERS) for family in FAMILIES]


@pytest.mark.parametrize(
    ("family", "precision"),
    rest_long(len(FIRST), dict.fromkeys((*FIRST, *_EACH))),
    ids=lambda value: value if isinstance(value, str) else value.text,
)
def test_a_family_computes_what_stock_does_in_the_same_format(
    one_rank: World, family: str, precision: Precision
) -> None:
    """With each way to recompute, of which none changes a bit."""
    model = tiny(family)
    batch = batch_of(model, SAMPLES, seed=0)
    turns = range(len(KINDS)) if precision is MIXED else (0, 2)
    (mine, stage), *others = (_pass(one_rank, model, precision, batch, turn) for turn in turns)
    assert all(torch.equal(mine.gradients, other.gradients) for other, _ in others)
    stock = _stock(model, torch_dtype(precision.compute), batch, stage)
    if family in ROUNDED_ELSEWHERE:
        exact = _stock(model, torch.float32, batch, stage)
        assert mine.distance(exact) < 1.5 * stock.distance(exact)
    else:
        assert mine.loss == pytest.approx(stock.loss, abs=1e-5)
        assert mine.distance(stock) < 1e-2
