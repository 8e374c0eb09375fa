"""Averages in 8 bits: codes, and a scale for each block of a parameter's row, independent of sharding.

Blocks lie along rows, so that cutting rows cuts no block. If columns are cut through blocks, their ranks agree on
each block's largest value: every plan keeps the same codes. The 256 values of a code are those of Dettmers et al. 2022
("8-bit optimizers via block-wise quantization"): seven decades, the largest with the most values. A positive square is
never rounded to 0, by which its average would be divided.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.nn.functional import pad

from shardwright_train.parallel.process_groups import Groups
from shardwright_train.torch_private import StridedShard

_DECADES = 7


@cache
def values(signed: bool) -> tuple[float, ...]:
    """The 256 values of a code, ascending, from -1 or 0 to 1."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (decade + (not signed))
        means = (0.1 + 0.9 * (i + 0.5) / count for i in range(count))
        found += [10.0 ** (decade + 1 - _DECADES) * mean for mean in means]
    return tuple(sorted(found + [-value for value in found if signed and 0 < value < 1]))


class Blocks(NamedTuple):
    """The blocks of a parameter's rows of which a rank holds parts."""

    row: int
    """Length of a whole row."""
    size: int
    """Numbers of a block; the last of a row has fewer where they do not divide it."""
    first: int = 0
    """Number of the first column that the rank holds."""
    columns: int = 0
    """How many it holds."""
    groups: tuple[Callable[[], dist.ProcessGroup], ...] = ()
    """What finds the ranks that hold other columns of the same blocks: each has the scales of whole rows."""

    @classmethod
    def of(cls, parameter: Tensor, size: int, groups: Groups | None) -> "Blocks":
        """The blocks of a parameter, which may be cut over some of a plan's groups."""
        row = parameter.shape[-1]
        if not isinstance(parameter, DTensor):
            return cls(row, size, 0, row)
        first, columns, cuts, place = 0, row, _cuts(parameter), parameter.device_mesh.get_coordinate()
        assert place is not None
        whole = all(length % size == 0 for _, length in cuts)
        for axis, length in cuts:
            begin = min(length * place[axis], columns)
            first, columns = first + begin, min(length, columns - begin)
        cut = (
            ()
            if whole or groups is None
            else tuple(partial(groups.along, parameter.device_mesh, axis) for axis, _ in cuts)
        )
        return cls(row, size, first, columns, cut)

    @property
    def scales(self) -> int:
        """Return how many scales of a row the rank holds."""
        return -(-(self.row if self.groups else self.columns) // self.size)

    def placed(self, parameter: Tensor, scales: Tensor) -> Tensor:
        """Scales with the layout of their parameter, except that whole rows are on each rank of `groups`."""
        if not isinstance(parameter, DTensor):
            return scales
        axes = {axis for axis, _ in _cuts(parameter)} if self.groups else set[int]()
        placements = [Replicate() if axis in axes else placed for axis, placed in enumerate(parameter.placements)]
        shape = torch.Size((*parameter.shape[:-1], -(-self.row // self.size)))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            scales, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def unpacked(self, codes: Tensor, scales: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
        """Return the numbers that codes and scales represent."""
        table = torch.tensor(values(signed), dtype=dtype, device=codes.device)
        blocks = self._blocks(table[codes.int()]) * self._mine(scales).to(dtype).unsqueeze(-1)
        return self._whole(blocks)

    def maxima(self, x: Tensor) -> Tensor:
        """The largest absolute value of each block of the numbers that the rank holds, in float32."""
        found = torch.zeros((*x.shape[:-1], self.scales), dtype=torch.float32, device=x.device)
        if x.numel():
            self._mine(found).copy_(self._blocks(x.abs()).amax(-1))
        return found

    def codes(self, x: Tensor, scales: Tensor, signed: bool) -> Tensor:
        """Return the nearest code of each number; of two equally near ones the lower."""
        table = torch.tensor(values(signed), dtype=x.dtype, device=x.device)
        divisors = self._mine(scales).to(x.dtype)
        shares = self._blocks(x) / torch.where(divisors == 0, 1, divisors).unsqueeze(-1)
        found: Tensor = torch.bucketize(shares, (table[1:] + table[:-1]) / 2, out_int32=True)
        found = found if signed else torch.where(shares > 0, found.clamp(min=1), found)
        return self._whole(found).to(torch.uint8)

    def _blocks(self, x: Tensor) -> Tensor:
        """Numbers by block [..., blocks, size], padded where the rank holds a part of one."""
        left = self.first % self.size
        blocks: Tensor = pad(x, (left, -(left + self.columns) % self.size)).unflatten(-1, (-1, self.size))
        return blocks

    def _whole(self, blocks: Tensor) -> Tensor:
        left = self.first % self.size
        whole: Tensor = blocks.flatten(-2)[..., left : left + self.columns]
        return whole.contiguous()  # as fused kernels take it to be

    def _mine(self, scales: Tensor) -> Tensor:
        """The scales of the blocks of which the rank holds a part."""
        if not self.groups:
            return scales
        low = self.first // self.size
        return scales[..., low : -(-(self.first + self.columns) // self.size)]


def _cuts(parameter: DTensor) -> list[tuple[int, int]]:
    """Return the mesh axes that shard a parameter's last dim, each with the largest shard's columns, in order."""
    last, length = parameter.dim() - 1, parameter.shape[-1]
    cutting = [(axis, placed) for axis, placed in enumerate(parameter.placements) if placed.is_shard(last)]
    found = []
    for axis, _ in sorted(cutting, key=lambda pair: _later(pair[1])):
        length = -(-length // parameter.device_mesh.size(axis))
        found.append((axis, length))
    return found


def _later(placement: Placement) -> bool:
    """Return whether a placement shards what other placements have left (strided sharding)."""
    return isinstance(placement, StridedShard)
