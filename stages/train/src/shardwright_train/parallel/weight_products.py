"""Split backward passes: the products that make gradients of a layer's matrices, each left to a pass of its own.

Of y = x W the backward pass makes the gradient of x, and keeps x and the gradient g of y; the weight pass makes that of
W, x^T g. Sums over microbatches are those of a joint pass, to the bit: products are the same, and are added in the same
order.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from transformers.pytorch_utils import Conv1D

from shardwright_train.torch_private import direct_parameters


class _Product(NamedTuple):
    """What the gradient of a matrix needs: the places of its gradient, and rows of inputs and gradients of outputs."""

    owner: nn.Module
    weight: GradientEdge
    x: Tensor
    gradient: Tensor


class _Kept(torch.autograd.Function):
    """A product's output, unchanged, whose backward pass keeps what the gradient of the matrix needs."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor, keep: Callable[[Tensor, Tensor], None]) -> Tensor:
        # What saves tensors elsewhere, as recomputation does, does so with x. The matrix is not saved: recomputation
        # would hand out an alias, whose gradient nobody reads.
        ctx.save_for_backward(x)
        ctx.keep = keep
        return y.detach()  # autograd would make a view of y itself

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.keep(x, gradient)
        return gradient, None, None, None


class WeightProducts:
    """The products of one layer's matrices that its backward passes have left, for each pass in order."""

    def __init__(self) -> None:
        self._now: list[_Product] = []
        self._left: deque[list[_Product]] = deque()

    def take_from(self, block: nn.Module) -> None:
        """Make a block leave the products of its matrices; others, as experts' grouped ones, stay joint.

        A matrix that several modules share stays joint, too.
        """
        modules = [module for module in block.modules() if type(module) in (nn.Linear, Conv1D)]
        owners = [module.weight for module in block.modules() if isinstance(getattr(module, "weight", None), Tensor)]
        for module in modules:
            if sum(weight is module.weight for weight in owners) == 1:
                module.forward = self._leaving(module, module.forward)

    def end_of_pass(self) -> None:
        """End a backward pass through the layer."""
        self._left.append(self._now)
        self._now = []

    def make(self) -> None:
        """Make the gradients that the oldest backward pass has left."""
        products = self._left.popleft()
        while products:
            # Autograd first sums what several calls of a module add to one matrix.
            same = [product for product in products if product.owner is products[0].owner]
            products = [product for product in products if product.owner is not same[0].owner]
            with torch.no_grad():
                gradients = [_gradient(product) for product in same]
            edges: Any = [product.weight for product in same]
            del same
            torch.autograd.backward(edges, gradients)

    def _leaving(self, module: nn.Module, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor) -> Tensor:
            direct = direct_parameters(module)
            weight = direct["weight"]
            assert weight is not None
            if not (torch.is_grad_enabled() and weight.requires_grad):
                return stock(x)
            try:
                direct["weight"] = weight.detach()  # type: ignore[assignment]
                y = stock(x)
            finally:
                direct["weight"] = weight
            edge = get_gradient_edge(weight)

            def keep(x: Tensor, gradient: Tensor) -> None:
                self._now.append(_Product(module, edge, x, gradient))

            kept: Tensor = _Kept.apply(y, x, weight, keep)  # type: ignore[no-untyped-call]
            return kept

        return forward


def _gradient(product: _Product) -> Tensor:
    """Return the gradient of a matrix, computed as autograd does."""
    x, gradient = product.x.flatten(0, -2), product.gradient.flatten(0, -2)
    return x.t().mm(gradient) if isinstance(product.owner, Conv1D) else gradient.t().mm(x)
