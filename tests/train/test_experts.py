"""What experts compute: what stock blocks do, whoever gets how many rows, and a loss that batches do not change."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from forked_ranks import run_worker
from shared_experts import shared_plans
from stock_experts import choice_of, router_of, sample_balance, with_balance
from tiny_models import tiny
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shardwright.plan.axes import axes_of
from shardwright.types import RECOMPUTE_WHOLE, DataParallel, SequenceParallel, Strategy
from shardwright_train.models.base import family_named
from shardwright_train.models.experts import balance
from shardwright_train.parallel import experts
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.torch_private import FakeTensorMode

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
SAMPLES, LENGTH, HIDDEN = 3, 16, 32
Ran = tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]


@pytest.fixture(params=FAMILIES)
def stock(request: pytest.FixtureRequest) -> nn.Module:
    """A stock model in float64 with random weights."""
    torch.manual_seed(0)
    described = tiny(request.param, **({"norm_topk_prob": True} if request.param == "qwen3_moe" else {}))
    family = family_named(request.param, "test")
    model: nn.Module = family.stock(family.configuration(described))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def part_of(stock: nn.Module, recomputation: Recomputation | None = None) -> Any:
    """What runs make of the last block's experts, on one rank."""
    held: Any = stock
    family = family_named(held.config.model_type, "test")
    part: Any = family.block(held, family.facts.layers(vars(held.config))[-1], len(held.model.layers) - 1).mlp
    recomputation = recomputation or Recomputation(keeps_last=False)
    part.experts.keeps_biases = 1.0
    part.tensor_parallel = SimpleNamespace(
        size=1,
        splits_everything=False,
        axes=axes_of(Strategy(tp_size=1, dp_size=1)),
        leave=lambda x: recomputation.sum(lambda y: y, x),
        recomputation=recomputation,
    )
    return part


def ran(part: Any, hidden: Tensor, call: Callable[..., Tensor] | None = None) -> Ran:
    """Result, balance loss, and gradients of input and parameters."""
    x = hidden.clone().requires_grad_()
    part.zero_grad()
    part.losses = []
    output = (call or part)(x)
    # Some stock parts return scores of their router, too.
    output = output[0] if isinstance(output, tuple) else output
    loss = part.losses[0][0] if part.losses else part.auxiliary
    part.losses = None
    (output.square().sum() + loss).backward()
    assert x.grad is not None
    return output.detach(), loss.detach(), x.grad, {name: p.grad for name, p in part.named_parameters()}


def same(first: Ran, second: Ran, tolerance: float) -> None:
    for one, other in zip((*first[:3], *first[3].values()), (*second[:3], *second[3].values()), strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def states(seed: int = 1) -> Tensor:
    return torch.randn(SAMPLES, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("crowd", ["even", "one hot expert", "experts without rows"])
def test_experts_compute_what_the_stock_block_does(stock: Any, crowd: str) -> None:
    part, wanted = part_of(stock), with_balance(stock).model.layers[-1].mlp  # type: ignore[operator]
    hidden = states()
    strength = {"even": 0.0, "one hot expert": 4.0, "experts without rows": 20.0}[crowd]
    hidden[..., 0] = strength
    for each in (part, wanted):
        with torch.no_grad():
            router_of(each).weight[:, 0] = 0.0
            router_of(each).weight[: 1 if strength < 20 else 4, 0] = 1.0
    same(ran(part, hidden), ran(wanted, hidden), 1e-12)
    gradient = part.experts.down_proj.grad
    idle = [expert for expert in range(len(gradient)) if not gradient[expert].any()]
    assert bool(idle) == (crowd == "experts without rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_choose_as_the_stock_ones_to_the_bit(stock: Any, dtype: torch.dtype) -> None:
    part = stock.to(dtype).model.layers[-1].mlp
    x = states().flatten(0, 1).to(dtype)
    logits, weights, index = router_of(part)(x)
    family: Any = family_named(model_type := stock.config.model_type, "test")
    choice = family.choose(part, x)
    assert torch.equal(choice.experts, index) and torch.equal(choice.weights.to(weights.dtype), weights)
    scores = logits.float().sigmoid()
    wanted = logits.float().softmax(-1) if model_type != "deepseek_v3" else scores / scores.sum(-1, keepdim=True)
    assert torch.equal(choice.probabilities, wanted)


def test_the_balance_loss_is_the_stock_functions_of_one_layer_and_sample(stock: Any) -> None:
    part, hidden = stock.model.layers[-1].mlp, states()
    stock.config.topk_method, stock.config.n_group, stock.config.topk_group = "greedy", 1, 1
    for sample in hidden:  # the stock function knows no groups, and no scores but probabilities
        router, logits = router_of(part), choice_of(part, stock.config, sample).probabilities.log().detach()
        stock_loss = load_balancing_loss_func((logits,), router.num_experts, router.top_k)
        loss = sample_balance(part, stock.config, sample).item()
        assert loss == pytest.approx(float(stock_loss), rel=1e-6)


def test_the_balance_loss_is_the_same_in_one_microbatch_and_in_many(stock: Any) -> None:
    part, hidden = part_of(stock), states()
    together = ran(part, hidden)[1]
    assert sum(ran(part, sample[None])[1] for sample in hidden) == pytest.approx(together.item(), rel=1e-14)
    probabilities, counts = torch.full((2, 4, 3), 1 / 3), torch.tensor([[4, 4, 0], [0, 4, 4]])
    assert balance(probabilities, counts, 4) == pytest.approx(2 * 2.0)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("grouped", [False, True])
def test_recomputed_experts_have_the_gradients_of_kept_ones(stock: Any, kind: str, grouped: bool) -> None:
    """Grouped products run on GPUs alone; PyTorch computes them on a processor, too, one after the other."""
    stock.to(torch.bfloat16 if grouped else torch.float64)
    recomputation = Recomputation(keeps_last=False)
    part, hidden = part_of(stock, recomputation), states().to(torch.bfloat16 if grouped else torch.float64)
    with patch.object(experts, "_has_grouped_products", lambda *_: grouped):
        kept = ran(part, hidden)
        run = partial(recomputation.full if kind == "full" else recomputation.selective, part.forward)
        same(ran(part, hidden, run), kept, 0.0)
    if grouped:
        same(ran(part, hidden), kept, 0.05)


def test_a_rank_without_any_rows_computes_no_grouped_product() -> None:
    """On fake tensors of a GPU, where PyTorch refuses an inner length of 0 in the gradients of matrices."""
    with FakeTensorMode():
        for rows, grouped in ((5, True), (0, False)):
            made = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((rows, 8), (3, 16, 8))]
            assert experts._has_grouped_products(*made) is grouped


def test_matrices_of_experts_without_rows_have_gradients_of_0_on_gpus_that_write_none() -> None:
    """On a stand-in for a Blackwell GPU and for its product, which leaves there what memory held."""
    weights, counts = torch.ones(3, 8, 8, dtype=torch.bfloat16, requires_grad=True), torch.tensor([4, 0, 2])
    rows, cuda = torch.ones(6, 8, dtype=torch.bfloat16), experts.torch.cuda

    def unwritten(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
        matrices.register_hook(lambda gradient: gradient.masked_fill((counts == 0)[:, None, None], torch.nan))
        return torch.nn.functional.grouped_mm(rows, matrices, offs=offs)

    with (
        patch.object(experts, "_has_grouped_products", lambda *_: True),
        patch.object(cuda, "is_available", lambda: True),
        patch.object(cuda, "get_device_capability", lambda _: (10, 3)),
        patch.object(experts, "grouped_mm", unwritten),
    ):
        experts.expert_products(rows, weights, experts.Counts(counts)).backward(torch.ones(6, 8, dtype=torch.bfloat16))
    assert weights.grad is not None and weights.grad[:, 0, 0].tolist() == [4, 0, 2]


def test_the_compared_plans_share_experts_out_in_every_way() -> None:
    layers = [layer for size in (2, 4) for plan in shared_plans(size) for layer in plan.layers]
    shared = [(layer, grid) for layer in layers if (grid := layer.expert_grid) is not None]
    assert {(grid.ep_size, grid.tp_size) for _, grid in shared} == {(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)}
    assert {grid.data_parallel for _, grid in shared if grid.dp_size > 1} == set(DataParallel)
    for axis in ("ep_size", "tp_size"):
        apart = [(layer, grid) for layer, grid in shared if getattr(grid, axis) > 1]
        assert {layer.recompute.half or layer.recompute for layer, _ in apart} >= set(RECOMPUTE_WHOLE)
        split = {layer.sequence_parallel for layer, _ in apart if layer.tp_size > 1}
        assert split >= {SequenceParallel.MEGATRON, SequenceParallel.ULYSSES}


def test_rows_go_to_the_ranks_of_their_experts_and_back_however_many_there_are() -> None:
    """Whatever is hot, idle or empty, and whether ranks share experts, their features or both; gradients, too."""
    run_worker("exchange_worker", [], 4)
