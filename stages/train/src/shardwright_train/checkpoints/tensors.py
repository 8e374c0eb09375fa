"""A run's tensors as safetensors files, written and read by torch.distributed.checkpoint: nothing is pickled.

Each element is stored once, whichever ranks have it; any other plan's ranks read the parts that they need.
"""

import dataclasses
import warnings
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
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from shardwright_formats.io.errors import BadInput, system_fault
from shardwright_train.checkpoints.writing import ShardWriter
from shardwright_train.parallel.data import local_tensor


def write_tensors(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write the tensors of all ranks into a folder; collective over a group of the whole world."""
    try:
        save(tensors, storage_writer=ShardWriter(str(folder), save_distributed=True), process_group=group)
    except CheckpointException as error:
        raise _cause(error, folder) from None


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill the tensors of every rank, in place; BadInput, on all ranks, where what they need is not there.

    Outside a world, those of this process.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), planner=_AnyPadding())
    except CheckpointException as error:
        raise _cause(error, folder) from None


def saved_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The format that each tensor of a checkpoint was saved in."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: one.properties.dtype for name, one in found.items() if isinstance(one, TensorStorageMetadata)}


def files_of_rank(folder: Path, rank: int) -> tuple[Path, ...]:
    """The files that a rank has written into a checkpoint's folder."""
    return tuple(sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors")))


def total_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of the tensors of all ranks, each element once; collective over the world."""
    shares = [x.nbytes / (x.device_mesh.size() if isinstance(x, DTensor) else 1) for x in tensors.values()]
    found = torch.tensor(sum(shares), dtype=torch.float64, device=local_tensor(next(iter(tensors.values()))).device)
    dist.all_reduce(found)
    return int(found)


class _AnyPadding(DefaultLoadPlanner):
    """Reads matrices over a vocabulary whatever the number of ranks that it was padded for: first dims may differ.

    What is past the vocabulary is zero on every plan, and stays so: it is read by none.
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


def _cause(error: CheckpointException, folder: Path) -> BaseException:
    """One line for what a rank could not write or read; what else went wrong there as it is."""
    causes = [pair[0] for pair in error.failures.values()]
    for cause in causes:
        if isinstance(cause, OSError):
            return system_fault(cause, folder)
        if isinstance(cause, ValueError | SafetensorError):
            return BadInput(folder, str(cause), "take another checkpoint, or another plan")
    return causes[0]
