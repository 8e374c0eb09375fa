"""The parts of a checkpoint that each rank saves, derived on every rank from the tensors' layouts alone."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, Replicate

from shardwright_train.parallel.data import local_tensor

_ALIGNMENT = 16


class Part(NamedTuple):
    """The shard of a tensor that a rank holds, and its offset in that tensor."""

    name: str
    offsets: tuple[int, ...]
    local: Tensor


def parts_to_save(tensors: Mapping[str, Tensor]) -> tuple[Part, ...]:
    """Return the parts of its tensors that this rank saves: each element once over all ranks, balanced by bytes.

    No communication is needed: the ranks that hold replicas hold the same tensors in the same order, those of their
    pipeline stage. A tensor that is no DTensor belongs to this process alone.
    """
    mine = _chosen(tensors)
    planner = DefaultSavePlanner()
    planner.set_up_planner({name: x for name, x in tensors.items() if name in mine})
    return tuple(
        Part(item.index.fqn, tuple(item.tensor_data.chunk.offsets), local_tensor(tensors[item.index.fqn].detach()))
        for item in planner.create_local_plan().items
        if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel()
    )


def _chosen(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors that this rank saves: largest first, each by the rank with the least bytes."""
    chosen = {name for name, x in tensors.items() if not isinstance(x, DTensor)}
    spread = [(name, x) for name, x in tensors.items() if isinstance(x, DTensor)]
    if not spread:
        return chosen
    rank, laden = dist.get_rank(), np.zeros(dist.get_world_size())
    for name, x in sorted(spread, key=lambda pair: -pair[1].nbytes):
        replicas = _replicas(x)
        ranks = replicas[laden[replicas].max(1).argmin()]
        laden[ranks] += x.nbytes / len(ranks)
        if rank in ranks:
            chosen.add(name)
    return chosen


def _replicas(x: DTensor) -> NDArray[np.int64]:
    """Return the ranks [replicas, parts] that hold a tensor."""
    mesh: NDArray[np.int64] = x.device_mesh.mesh.numpy()
    axes = [axis for axis, placement in enumerate(x.placements) if isinstance(placement, Replicate)]
    count = math.prod(mesh.shape[axis] for axis in axes)
    return np.moveaxis(mesh, axes, range(len(axes))).reshape(count, -1)


class HostBuffer:
    """A host buffer for one rank's parts of a checkpoint, allocated once; pinned where they come from a GPU."""

    def __init__(self, parts: Sequence[Part]) -> None:
        ends = np.cumsum([0, *(-(-part.local.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts)]).tolist()
        self.memory = torch.empty(ends[-1], dtype=torch.uint8)
        self._places = [
            self.memory[start : start + part.local.nbytes].view(part.local.dtype).view(part.local.shape)
            for start, part in zip(ends, parts, strict=False)
        ]
        self._pinned = any(part.local.is_cuda for part in parts)
        if self._pinned:
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(self.memory.data_ptr(), self.memory.nbytes, 0))

    def copied(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return copies of the parts in this buffer, overwriting its previous contents."""
        for place, part in zip(self._places, parts, strict=True):
            place.copy_(part.local, non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return tuple(part._replace(local=place) for place, part in zip(self._places, parts, strict=True))

    def close(self) -> None:
        """Free the buffer."""
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr()))
        self._pinned, self._places, self.memory = False, [], torch.empty(0, dtype=torch.uint8)
