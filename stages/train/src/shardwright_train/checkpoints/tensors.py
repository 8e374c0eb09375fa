"""A run's tensors as safetensors files, which torch.distributed.checkpoint's reader reads: nothing is pickled.

Each element is stored once, whichever ranks have it; any other plan's ranks read the parts that they need.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from shardwright_formats.io import BadInput, system_fault
from shardwright_train.checkpoints.parts import Part
from shardwright_train.checkpoints.writing import write_parts
from shardwright_train.parallel.channel import GroupChannel
from shardwright_train.parallel.data import local_tensor


def write_tensors(folder: Path, parts: Sequence[Part], rank: int) -> None:
    """Write a rank's parts into its file in a folder; raise OSError where the system refuses it."""
    if parts:
        write_parts(folder / f"{_prefix(rank)}model-00001-of-00001.safetensors", parts)


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill the tensors of every rank, in place; BadInput, on all ranks, where what they need is not there.

    Outside a world, only this process's tensors. Each rank reads by itself, as all see the same file headers.
    """

    def read() -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), planner=_AnyPadding(), no_dist=True)
        except CheckpointException as error:
            raise _cause(error, folder) from None

    if dist.is_initialized():
        device = local_tensor(next(iter(tensors.values()))).device
        GroupChannel(device, None).together(read, folder)
    else:
        read()


def saved_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor in a checkpoint."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: one.properties.dtype for name, one in found.items() if isinstance(one, TensorStorageMetadata)}


def files_of_rank(folder: Path, rank: int) -> tuple[Path, ...]:
    """Return the files that a rank has written into a checkpoint's folder."""
    return tuple(sorted(folder.glob(f"{_prefix(rank)}*.safetensors")))


def _prefix(rank: int) -> str:
    return f"shard-{rank + 1:05d}-"


def total_bytes(tensors: dict[str, Tensor]) -> int:
    """Return the bytes of all ranks' tensors, each element counted once; collective over the world."""
    shares = [x.nbytes / (x.device_mesh.size() if isinstance(x, DTensor) else 1) for x in tensors.values()]
    found = torch.tensor(sum(shares), dtype=torch.float64, device=local_tensor(next(iter(tensors.values()))).device)
    dist.all_reduce(found)
    return int(found)


class _AnyPadding(DefaultLoadPlanner):
    """A reader of vocabulary matrices padded for any number of ranks, whose first dims may differ from the file's.

    The padding is zero under every plan, and stays so: no rank reads it.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        found = dict(metadata.state_dict_metadata)
        for name, tensor in state_dict.items():
            saved = found.get(name)
            if not isinstance(saved, TensorStorageMetadata) or saved.size == tensor.size():
                continue
            if saved.size[1:] == tensor.size()[1:]:
                found[name] = dataclasses.replace(saved, size=tensor.size())
                local_tensor(tensor.detach()).zero_()
        super().set_up_planner(state_dict, dataclasses.replace(metadata, state_dict_metadata=found), is_coordinator)


def _cause(error: CheckpointException, folder: Path) -> BadInput:
    """Return a one-line error for tensors that this rank could not read; raise any other error unchanged."""
    cause, _ = next(iter(error.failures.values()))
    if isinstance(cause, OSError):
        return system_fault(cause, folder)
    if isinstance(cause, ValueError | SafetensorError):
        return BadInput(folder, str(cause), "take another checkpoint, or another plan")
    raise cause
