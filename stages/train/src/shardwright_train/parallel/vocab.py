"""Embedding and cross entropy with a vocabulary sharded over a tensor-parallel group (Shoeybi et al. 2019)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.plan.communication import LOSS_ELEMENTS
from shardwright_train.parallel.fused import fused_cross_entropy
from shardwright_train.parallel.tensor import TensorParallel

IGNORED = -100
"""Label of a position that does not count, as in transformers."""


def token_embedding(embedding: nn.Embedding, tokens: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """Look up tokens [b, s] in this rank's rows and sum over the group: [b, this rank's positions, h]."""
    weight, padding = embedding.weight, embedding.padding_idx
    tokens = tokens[:, tensor_parallel.positions_inside(tokens.shape[1])]
    index = tokens - tensor_parallel.rank * weight.shape[0]
    mine = (index >= 0) & (index < weight.shape[0])
    if padding is not None:  # The row of padding has no gradient, as in a stock model.
        padding -= tensor_parallel.rank * weight.shape[0]
        padding = padding if 0 <= padding < weight.shape[0] else None
    rows = F.embedding(index.where(mine, torch.zeros_like(index)), weight, padding)
    return tensor_parallel.leave(rows * mine[..., None].to(rows.dtype))


def positions_of(tokens: Tensor, tensor_parallel: TensorParallel, given: Tensor | None = None) -> Tensor:
    """Return the position numbers of tokens [b, s] that this rank has between the matrix products.

    Positions count from 0 unless they are given [b, s] in the order in which ranks hold them.
    """
    held = tensor_parallel.positions(tokens.shape[1])
    if given is not None:
        return given[:, held]
    if tensor_parallel.order is not None:
        return tensor_parallel.order[held]
    return torch.arange(held.start, held.stop, device=tokens.device)


def loss_of_logits(logits: Tensor, labels: Tensor, classes: int, tensor_parallel: TensorParallel) -> Tensor:
    """Return the summed cross entropy of this rank's share [b, s, v/n] of `classes` logits; labels [b, s] are whole."""
    labels = labels[:, tensor_parallel.positions_inside(labels.shape[1])]
    if tensor_parallel.fused_loss:
        return fused_cross_entropy(logits, labels, IGNORED, tensor_parallel.group).sum()
    first = tensor_parallel.rank * -(-classes // tensor_parallel.size)
    return sum_of_cross_entropy(logits, labels, first, tensor_parallel.group)


def sum_of_cross_entropy(logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over [b, s] of the cross entropy of logits [b, s, v/n] sharded over a group; equal on each rank.

    Computed in float32 at least. This rank has the classes from `first` on; labels that are IGNORED do not count. The
    backward pass overwrites the logits.
    """
    total: Tensor = _CrossEntropy.apply(logits, labels, first, group)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy that saves the logits, overwrites them with their gradient, and widens some positions at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        loss, highest, total = _loss_of_rows(logits.flatten(0, -2), labels.flatten(), first, group)
        ctx.first = first
        ctx.save_for_backward(logits, labels, highest, total)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, highest, total = ctx.saved_tensors
        rows = logits.detach().flatten(0, -2)
        _overwrite_by_gradient(rows, labels.flatten(), ctx.first, highest, total, grad)
        return rows.view_as(logits), None, None, None


def loss_in_chunks(
    logits_of: Callable[[Tensor], Tensor],
    inputs: Tensor,
    parameters: Sequence[Tensor],
    labels: Tensor,
    classes: int,
    tensor_parallel: TensorParallel,
) -> Tensor:
    """Return the loss of inputs [b, s, h], with logits computed in chunks of positions, and again in the backward pass.

    `parameters`: all that `logits_of` computes with; their gradients are summed in at least float32.
    """
    labels = labels[:, tensor_parallel.positions_inside(labels.shape[1])]
    first = tensor_parallel.rank * -(-classes // tensor_parallel.size)
    given = logits_of, tensor_parallel.loss_chunks, labels, first, tensor_parallel.group
    total: Tensor = _ChunkedCrossEntropy.apply(inputs, given, *parameters)  # type: ignore[no-untyped-call]
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy that saves neither logits nor their gradient, but recomputes each chunk."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, given: Any, *parameters: Tensor) -> Tensor:
        logits_of, chunks, labels, first, group = given
        rows, losses, kept = inputs.flatten(0, -2), list[Tensor](), list[tuple[Tensor, Tensor]]()
        for part, wanted in zip(rows.chunk(chunks), labels.flatten().chunk(chunks), strict=True):
            loss, *found = _loss_of_rows(logits_of(part), wanted, first, group)
            losses.append(loss)
            kept.append((found[0], found[1]))
        ctx.given = given
        highest, total = (torch.cat(each) for each in zip(*kept, strict=True))
        ctx.save_for_backward(inputs, highest, total, *parameters)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, highest, total, *parameters = ctx.saved_tensors
        logits_of, chunks, labels, first, _ = ctx.given
        of_inputs, *of_parameters = (ctx.needs_input_grad[i] for i in (0, *range(2, 2 + len(parameters))))
        rows = inputs.detach().flatten(0, -2)
        trained = [p for p, is_trained in zip(parameters, of_parameters, strict=True) if is_trained]
        sums = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in trained]
        gradient = torch.empty_like(rows) if of_inputs else None
        parts = (each.chunk(chunks) for each in (rows, labels.flatten(), highest, total))
        begin = 0
        for part, wanted, *found in zip(*parts, strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_(of_inputs)
                logits = logits_of(part)
            of_logits = logits.detach()
            _overwrite_by_gradient(of_logits, wanted, first, found[0], found[1], grad)
            found_here = torch.autograd.grad(logits, [*([part] if of_inputs else []), *trained], of_logits)
            del logits, of_logits
            if gradient is not None:
                gradient[begin : begin + len(part)] = found_here[0]
            for together, one in zip(sums, found_here[of_inputs:], strict=True):
                together += one
            begin += len(part)
            del found_here
        summed = (together.to(p.dtype) for together, p in zip(sums, trained, strict=True))
        of_each = (next(summed) if is_trained else None for is_trained in of_parameters)
        return None if gradient is None else gradient.view_as(inputs), None, *of_each


def _loss_of_rows(rows: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss of logits [rows, v/n] over a group, and each row's maximum and sum of exponentials."""
    index, mine = _index(labels, first, rows.shape[-1])
    # A rank whose share of a padded vocabulary is empty takes part in the sums with zeros.
    highest = _wide(rows.new_full(index.shape, -torch.inf) if rows.shape[-1] == 0 else rows.amax(-1))
    if group.size() > 1:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    sums = highest.new_zeros(2, *index.shape)
    for part in _parts(rows):
        sums[0, part] = (_wide(rows[part]) - highest[part, None]).exp_().sum(-1)
    if rows.shape[-1]:
        chosen = _wide(rows.gather(-1, index[:, None])[:, 0]) - highest
        sums[1] = chosen.where(mine, sums[1])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return ((sums[0].log() - sums[1]) * (labels != IGNORED)).sum(), highest, sums[0].clone()


def _overwrite_by_gradient(
    rows: Tensor, labels: Tensor, first: int, highest: Tensor, total: Tensor, grad: Tensor
) -> None:
    """Overwrite the logits `rows` with the gradient of the summed loss, times `grad`."""
    index, mine = _index(labels, first, rows.shape[-1])
    scale = grad * (labels != IGNORED)
    for part in _parts(rows):
        gradient = (_wide(rows[part]) - highest[part, None]).exp_().div_(total[part, None])
        gradient.scatter_add_(-1, index[part, None], -mine[part, None].to(gradient.dtype))
        rows[part] = gradient.mul_(scale[part, None])


def _index(labels: Tensor, first: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return each label's index among a rank's classes, or 0, and whether it is one of them."""
    index = labels - first
    mine = (index >= 0) & (index < classes)
    return index.where(mine, torch.zeros_like(index)), mine


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _parts(rows: Tensor) -> Iterator[slice]:
    """Yield the slices of rows whose logits [rows, v] are widened together; none if a rank has no classes."""
    count, classes = rows.shape
    size = max(1, LOSS_ELEMENTS // max(1, classes))
    return (slice(i, i + size) for i in range(0, count if classes else 0, size))
