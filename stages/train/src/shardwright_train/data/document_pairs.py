"""Visible pairs of positions if attention stays within documents, for each rank of a context-parallel group.

Zig-zag order balances causal attention to whole samples over ranks, but not attention within documents. The masks of
this runtime skip no pair, so that its ranks take equal time nevertheless; with kernels that skip pairs they would not.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.models.registry import facts_of
from shardwright.models.traits import Mask
from shardwright.plan.layout import position_order
from shardwright.types import Plan
from shardwright_train.data.objectives import TextBatches

_SAMPLES = 256
"""Largest number of samples that are counted."""


class DocumentShares(NamedTuple):
    """The visible pairs of the ranks over which samples are split."""

    samples: int
    """Number of samples that were counted."""
    ranks: int
    imbalance: float
    """Pairs of the rank with the most pairs of a sample, over the mean of all ranks: from 1 to `ranks`."""
    share: float
    """Visible pairs over the visible pairs of samples with one document each."""

    def __str__(self) -> str:
        return (
            f"documents of {self.samples} samples leave {self.share:.0%} of the pairs of positions, and of cp_size "
            f"{self.ranks} the fullest rank has {self.imbalance:.2f} times the mean's: masks skip no pair, so that "
            f"ranks take equal time; kernels that skip pairs would wait for the fullest"
        )


def document_shares(plan: Plan, batches: TextBatches) -> tuple[DocumentShares, ...]:
    """Return the visible pairs of some samples for each cp_size above 1 of a plan's layers, ascending."""
    causal = facts_of(plan.model).attention.mask is Mask.CAUSAL
    sizes = sorted({layer.cp_size for layer in plan.layers} - {1})
    if not sizes:
        return ()
    indices = np.arange(min(_SAMPLES, batches.per_epoch))
    documents = batches.samples.documents(indices)[:, :-1]
    order, whole = position_order(plan, causal), np.zeros_like(documents[:1])
    total = len(documents) * int(visible_pairs(whole, causal).sum())
    pairs = visible_pairs(documents, causal)
    return tuple(
        DocumentShares(len(documents), ranks, imbalance(of_ranks(pairs, order, ranks)), int(pairs.sum()) / total)
        for ranks in sizes
    )


def document_warnings(plan: Plan, batches: object) -> tuple[str, ...]:
    """Return a line for each cp_size of a plan; none if its samples are not packed text."""
    if not isinstance(batches, TextBatches):
        return ()
    return tuple(f"--reset-attention-mask: {shares}" for shares in document_shares(plan, batches))


def visible_pairs(documents: NDArray[np.int64], causal: bool) -> NDArray[np.int64]:
    """Return, for each position [n, s], the number of positions of its own document that it attends to.

    `documents` [n, s]: each position's document number, ascending in a sample.
    """
    places = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    new = np.diff(documents, axis=1) > 0
    begins = np.pad(new, ((0, 0), (1, 0)), constant_values=True)
    first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    if causal:
        return np.asarray(places - first + 1)
    ends = np.pad(new, ((0, 0), (0, 1)), constant_values=True)
    last = np.minimum.accumulate(np.where(ends, places, documents.shape[1])[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(last - first + 1)


def of_ranks(pairs: NDArray[np.int64], order: Sequence[int] | None, ranks: int) -> NDArray[np.int64]:
    """Return the pairs [n, ranks] of each rank's positions; `order` [s]: the order in which ranks hold positions."""
    held = pairs if order is None else pairs[:, np.array(order)]
    return np.asarray(held.reshape(len(held), ranks, -1).sum(axis=2))


def imbalance(pairs: NDArray[Any]) -> float:
    """Return the ratio of each sample's largest `pairs` [n, ranks] to its mean, both summed over samples.

    Ranks that attend to one sample at a time wait for the fullest: their attention takes longer by this ratio.
    """
    return float(pairs.max(axis=1).sum() / pairs.mean(axis=1).sum())
