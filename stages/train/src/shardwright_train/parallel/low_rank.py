"""LoRA (Hu et al. 2021): y = W x + s B (A x) with trained low-rank A and B, sharded or replicated."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import UNSET
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from shardwright.models.low_rank import SECOND, Pair
from shardwright.types import LOW_RANK, Parameter
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.experts import Counts, expert_products
from shardwright_train.parallel.sharding_rules import INSIDE, VOCABULARY, Rule


class LowRankLinear(nn.Linear):
    """A matrix W with low-rank matrices A and B: y = W x + bias + scaling B A x.

    Its parameters have peft's names, except for W itself, which keeps its name in the stock model.
    """

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float
    recomputation: Recomputation | None = None
    """The selective recomputation of its layer, if it has one."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum of the matrix products with W and with the low-rank matrices."""
        # In this order: a replay ends with the last tensor that it needs, which is A x, before the product with W.
        return added(self, input) + F.linear(input, self.weight, self.bias)


class LowRankConv1D(Conv1D):
    """`LowRankLinear` for a matrix [inputs, outputs], as in GPT-2."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float
    recomputation: Recomputation | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum of the matrix products with W and with the low-rank matrices."""
        more = added(self, input)
        product: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
        return more + product


def added(matrix: LowRankLinear | LowRankConv1D, x: Tensor) -> Tensor:
    """Return scaling B A x, the contribution of a matrix's low-rank matrices, to be added to its own product W x."""

    def product(x: Tensor) -> Tensor:
        low_rank: Tensor = matrix.lora_B(matrix.lora_A(x))
        return low_rank * matrix.scaling

    return product(x) if matrix.recomputation is None else matrix.recomputation.again(product, x)


class ExpertMatrices(nn.Module):
    """The low-rank matrices A, or B, of all experts."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))


def with_rows_of_pair(
    products: Tensor, experts: Any, name: str, rows: Tensor, counts: Counts, recomputation: Recomputation
) -> Tensor:
    """Return matrix products of sorted rows with the experts' parameter `name`, plus its low-rank matrices' part."""
    if (pair := getattr(experts, "low_rank", {}).get(name)) is None:
        return products

    def product(rows: Tensor) -> Tensor:
        inner = expert_products(rows, pair.lora_A.weight, counts)
        low_rank = expert_products(inner, pair.lora_B.weight.flatten(1, -2), counts)
        return low_rank * float(pair.scaling)

    return products + recomputation.again(product, rows)


def routing_matrix(router: Any) -> Tensor:
    """Return the matrix of a router, with its low-rank matrices added."""
    matrix: Tensor = router.weight
    if not hasattr(router, "lora_A"):
        return matrix
    low_rank: Tensor = router.lora_B.weight @ router.lora_A.weight
    return matrix + low_rank * float(router.scaling)


def add_low_rank(layer: nn.Module, pair: Pair, first: Parameter, second: Parameter, scaling: float) -> None:
    """Add low-rank matrices A and B to a matrix of a layer, as described, on the default device.

    Raises ValueError, naming the module, if its class is not the one that the family's facts imply.
    """
    dtype = layer.get_parameter(pair.matrix).dtype
    if first.ep_dim is not UNSET:
        *path, name = pair.matrix.split(".")
        experts: Any = layer.get_submodule(".".join(path))
        if pair.module != ".".join(path):
            experts.base_layer = nn.Module()
        owner: Any = layer.get_submodule(pair.module)
        owner.lora_A = ExpertMatrices(first.shape, dtype)
        owner.lora_B = ExpertMatrices((second.shape[0], prod(second.shape[1:-1]), second.shape[-1]), dtype)
        experts.low_rank = {**getattr(experts, "low_rank", {}), name: owner}
    else:
        owner = layer.get_submodule(pair.module)
        if not pair.is_parameter:
            _change_class(owner, pair.module)
        outputs, (rank, inputs) = prod(second.shape[:-1]), first.shape
        owner.lora_A = nn.Linear(inputs, rank, bias=False, dtype=dtype)
        owner.lora_B = nn.Linear(rank, outputs, bias=False, dtype=dtype)
    owner.scaling = scaling


def _change_class(matrix: nn.Module, name: str) -> None:
    adapted = {nn.Linear: LowRankLinear, Conv1D: LowRankConv1D}.get(type(matrix))
    if adapted is None:
        raise ValueError(f"{name} is a {type(matrix).__name__}, but low-rank matrices need a Linear or a Conv1D")
    matrix.__class__ = adapted


def low_rank_rules(parameters: Mapping[str, Parameter], of_head: bool) -> dict[str, Rule]:
    """Return the sharding rules of a layer's low-rank matrices, by name; `of_head`: whether the layer is the head."""
    of_low_rank = {name: p for name, p in parameters.items() if LOW_RANK in name}
    return {name: _rule(name, p, of_head) for name, p in of_low_rank.items() if p.inside or p.tp_dim is not None}


def _rule(name: str, parameter: Parameter, of_head: bool) -> Rule:
    of_experts = None if parameter.ep_dim is UNSET else parameter.ep_dim
    if parameter.tp_dim is None:
        return replace(INSIDE, ep_dim=of_experts)
    if not name.endswith(SECOND):
        return Rule("cut", dim=parameter.tp_dim, ep_dim=of_experts)
    if of_head:
        return VOCABULARY
    # Matrices side by side have a separate dim before the one that is cut.
    fused, dim = parameter.shape[parameter.tp_dim - 1], parameter.tp_dim - 1
    if of_experts is not None:
        return Rule("cut", fused=fused, dim=dim, ep_dim=of_experts)
    return Rule("column", fused=fused if dim == 0 else 1)
