"""Sends from each rank of a group to the next, round a ring."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Travelling(NamedTuple):
    """A tensor on its way to the next rank of the ring, and that of the rank before."""

    works: Sequence[dist.Work]
    sent: Tensor
    arriving: Tensor

    def wait(self) -> Tensor:
        """Return the tensor of the rank before, once it is here."""
        for work in self.works:
            work.wait()
        return self.arriving


def pass_on(x: Tensor, group: dist.ProcessGroup) -> Travelling:
    """Send a tensor to the next rank of a group, and return it on its way."""
    rank, size = group.rank(), group.size()
    sent, arriving = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    there, here = (dist.get_global_rank(group, (rank + i) % size) for i in (1, -1))
    ways = [dist.P2POp(dist.isend, sent, there, group), dist.P2POp(dist.irecv, arriving, here, group)]
    return Travelling(dist.batch_isend_irecv(ways), sent, arriving)
