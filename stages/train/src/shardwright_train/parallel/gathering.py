"""Inputs of matrix products, gathered again for the backward pass instead of kept (Korthikanti et al. 2022)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright_train.parallel.collectives import gather_sequence, with_transpose


@contextmanager
def gathered_again(inputs: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[list[Tensor]]:
    """Yield tensors [b, s/n, h] of each rank as [b, s, h] on all, for the products called inside.

    The products' backward passes keep only this rank's share of the gathered tensors, and gather it again, once. The
    gradients are summed and scattered.
    """
    shares = [_Share(x.detach(), group) for x in inputs]
    gathered = [share.gathered(x) for share, x in zip(shares, inputs, strict=True)]
    # Storages stand for tensors: products keep views.
    owners = {id(x.untyped_storage()): share for x, share in zip(gathered, shares, strict=True)}

    def pack(x: Tensor) -> "Tensor | _View":
        share = owners.get(id(x.untyped_storage()))
        return x if share is None else _View(share, x.size(), x.stride(), x.storage_offset())

    with saved_tensors_hooks(pack, lambda kept: kept.tensor() if isinstance(kept, _View) else kept):
        yield gathered


class _Share:
    """This rank's shard of a gathered tensor, gathered from its first use in the backward pass to its last."""

    def __init__(self, share: Tensor, group: dist.ProcessGroup) -> None:
        self._share, self._group = share, group
        self._again: Tensor | None = None

    def gathered(self, x: Tensor) -> Tensor:
        """Return the tensor itself, gathered; differentiable."""
        return with_transpose(gather_sequence(x, self._group), _same, self._used)

    def again(self) -> Tensor:
        if self._again is None:
            with torch.no_grad():
                self._again = gather_sequence(self._share, self._group)
        return self._again

    def _used(self, gradient: Tensor) -> Tensor:
        """Note that the gradient of the gathered tensor exists, so that it is not needed any more, and return it."""
        self._again = None
        return gradient


class _View(NamedTuple):
    """A view of a gathered tensor."""

    share: _Share
    size: Any
    stride: Any
    offset: Any

    def tensor(self) -> Tensor:
        return self.share.again().as_strided(self.size, self.stride, self.offset)


def _same(x: Tensor) -> Tensor:
    return x
