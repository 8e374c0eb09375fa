"""Checkpoints written and read: safetensors files, which torch.distributed.checkpoint's reader reads, too.

Nothing is pickled. Each element is stored once, whichever ranks have it: every rank derives the parts that it saves
from only the tensors' layouts, and ranks of any other plan read the parts that they need.
"""

import dataclasses
import json
import math
import shutil
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Replicate

from shardwright.display.units import bytes_text
from shardwright.io import BadInput, sha256_of_file, sync_path, system_fault, write_document
from shardwright.launch.backend import on_accelerator
from shardwright.launch.lock import HeldLock
from shardwright.plan.expert_placement import neighbours
from shardwright_train.checkpoints import folders
from shardwright_train.checkpoints.folders import RECORD, Beginning, Checkpoint, Identity, Progress, SavedFile
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.world import Channel, GroupChannel

_ALIGNMENT = 16
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
_HEADER_ALIGNMENT = 8
_STAGES = 2
_STAGE_BYTES = 2**25
"""Bytes of a staging buffer: 32 MiB, which a GPU is assumed to copy at 25 GB/s or more, as fast as larger ones."""


class TensorShard(NamedTuple):
    """The shard of a tensor that a rank holds, and its offset in that tensor."""

    name: str
    offsets: tuple[int, ...]
    local: Tensor


ExpertOrders = Mapping[str, Sequence[int]]
"""Experts along the first dim, by name, of tensors that have them in another order than checkpoints."""


def parts_to_save(tensors: Mapping[str, Tensor], orders: ExpertOrders | None = None) -> tuple[TensorShard, ...]:
    """Return the parts of its tensors that this rank saves: each element once over all ranks, balanced by bytes.

    No communication is needed: the ranks that hold replicas hold the same tensors of their pipeline stage in the
    same order. A tensor that is no DTensor belongs only to this process. Experts in another order are separate parts;
    consecutive ones share a part.
    """
    mine = _chosen(tensors)
    held = _shards({name: x for name, x in tensors.items() if name in mine})
    return tuple(part for shard in held for part in _in_order(shard, orders or {}))


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[TensorShard]:
    """Yield this rank's shard of each tensor that has elements here."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors))
    for item in planner.create_local_plan().items:
        if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel():
            name, offsets = item.index.fqn, tuple(item.tensor_data.chunk.offsets)
            yield TensorShard(name, offsets, local_tensor(tensors[name].detach()))


def _in_order(shard: TensorShard, orders: ExpertOrders) -> Iterator[TensorShard]:
    """Yield the parts of a shard with consecutive experts; the whole shard if its tensor does not reorder experts."""
    if (order := orders.get(shard.name)) is None:
        yield shard
        return
    (low, *others), local = shard.offsets, shard.local
    for here, (first, _) in neighbours(order, low, low + len(local)):
        yield TensorShard(shard.name, (first, *others), local[here])


def _chosen(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors that this rank saves: largest first, each by the replica with the least bytes."""
    chosen = {name for name, x in tensors.items() if not isinstance(x, DTensor)}
    sharded = [(name, x) for name, x in tensors.items() if isinstance(x, DTensor)]
    if not sharded:
        return chosen
    rank, load_bytes = dist.get_rank(), np.zeros(dist.get_world_size())
    for name, x in sorted(sharded, key=lambda pair: -pair[1].nbytes):
        replicas = _replicas(x)
        ranks = replicas[load_bytes[replicas].max(1).argmin()]
        load_bytes[ranks] += x.nbytes / len(ranks)
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
    """A host buffer for one rank's parts of a checkpoint, allocated once.

    Data from a GPU passes through two stages of pinned memory, one of which is filled while the other is emptied, so
    little memory is pinned, whatever the size of the state. `stage_bytes`: size of each stage; None: 32 MiB for a GPU,
    no stages on CPU.
    """

    def __init__(self, parts: Sequence[TensorShard], stage_bytes: int | None = None) -> None:
        ends = np.cumsum([0, *(-(-part.local.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts)]).tolist()
        self.memory = torch.empty(ends[-1], dtype=torch.uint8)
        self._places = [
            self.memory[start : start + part.local.nbytes].view(part.local.dtype).view(part.local.shape)
            for start, part in zip(ends, parts, strict=False)
        ]
        from_gpu = any(on_accelerator(part.local.device) for part in parts)
        stage_bytes = (_STAGE_BYTES if from_gpu else 0) if stage_bytes is None else stage_bytes
        count = _STAGES if stage_bytes else 0
        self.stages = [torch.empty(stage_bytes, dtype=torch.uint8, pin_memory=from_gpu) for _ in range(count)]

    def copied(self, parts: Sequence[TensorShard]) -> tuple[TensorShard, ...]:
        """Return copies of the parts in this buffer, overwriting its previous contents."""
        if self.stages:
            self._copy_through_stages([part.local for part in parts])
        else:
            for place, part in zip(self._places, parts, strict=True):
                place.copy_(part.local)
        return tuple(part._replace(local=place) for place, part in zip(self._places, parts, strict=True))

    def _copy_through_stages(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors through pinned memory, piece by piece: one stage is emptied while the other is filled."""
        step, on_its_way = len(self.stages[0]), deque[tuple[Tensor, Tensor, Any]]()
        source = next((x.device for x in tensors if on_accelerator(x.device)), tensors[0].device)
        events = torch.get_device_module(source)
        for number, (place, piece) in enumerate(_pieces(self._places, tensors, step)):
            if len(on_its_way) == _STAGES:
                _empty(*on_its_way.popleft())
            stage, event = self.stages[number % _STAGES][: len(piece)], events.Event()
            stage.copy_(piece, non_blocking=True)
            event.record()
            on_its_way.append((place, stage, event))
        while on_its_way:
            _empty(*on_its_way.popleft())

    def close(self) -> None:
        """Free the buffer."""
        self.stages, self._places, self.memory = [], [], torch.empty(0, dtype=torch.uint8)


def _pieces(places: Sequence[Tensor], tensors: Sequence[Tensor], most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the places for pieces of at most `most` bytes of the tensors, and the pieces."""
    for place, tensor in zip(places, tensors, strict=True):
        there, here = (x.reshape(-1).view(torch.uint8) for x in (place, tensor))
        yield from zip(there.split(most), here.split(most), strict=True)


def _empty(place: Tensor, stage: Tensor, filled: Any) -> None:
    """Copy a stage's content to its place, once the device has filled it."""
    filled.synchronize()
    place.copy_(stage)


def write_tensors(folder: Path, parts: Sequence[TensorShard], rank: int) -> None:
    """Write a rank's parts into its files in a folder; raise OSError if the system refuses it.

    A file has at most one part of each tensor: for experts in another order there are several files.
    """
    files = list[list[TensorShard]]()
    counts = Counter[str]()
    for part in parts:
        if counts[part.name] == len(files):
            files.append([])
        files[counts[part.name]].append(part)
        counts[part.name] += 1
    for number, each in enumerate(files, start=1):
        write_parts(folder / f"{_prefix(rank)}model-{number:05d}-of-{len(files):05d}.safetensors", each)


def read_tensors(folder: Path, tensors: dict[str, Tensor], orders: ExpertOrders | None = None) -> None:
    """Fill the tensors of all ranks in place; raise BadInput on all ranks if the parts that they need are missing.

    Outside a world, only this process's tensors are filled. Each rank reads by itself, as all see the same file
    headers. `orders`: as in `ExpertOrders`.
    """

    def read() -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                reader, planner = HuggingFaceStorageReader(str(folder)), _AnyLayout(orders or {})
                load(tensors, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise _cause(error, folder) from None

    if dist.is_initialized():
        device = local_tensor(next(iter(tensors.values()))).device
        GroupChannel(device, None).together(read, folder)
    else:
        read()


def saved_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor in a checkpoint."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: one.properties.dtype for name, one in metadata.items() if isinstance(one, TensorStorageMetadata)}


def files_of_rank(folder: Path, rank: int) -> tuple[Path, ...]:
    """Return the files that a rank has written into a checkpoint's folder."""
    return tuple(sorted(folder.glob(f"{_prefix(rank)}*.safetensors")))


def _prefix(rank: int) -> str:
    return f"shard-{rank + 1:05d}-"


def total_bytes(tensors: dict[str, Tensor]) -> int:
    """Return the bytes of all ranks' tensors, each element counted once; collective over the world."""
    shares = [x.nbytes / (x.device_mesh.size() if isinstance(x, DTensor) else 1) for x in tensors.values()]
    total = torch.tensor(sum(shares), dtype=torch.float64, device=local_tensor(next(iter(tensors.values()))).device)
    dist.all_reduce(total)
    return int(total)


class _AnyLayout(DefaultLoadPlanner):
    """A load planner that accepts vocabulary matrices padded differently in the file, and experts in another order.

    Padding is zero under every plan: it is zeroed here and never read from the file.
    """

    def __init__(self, orders: ExpertOrders) -> None:
        super().__init__()
        self._orders, self._parts = orders, dict[str, list[TensorShard]]()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        padded = dict(metadata.state_dict_metadata)
        if (lacking := next((name for name in state_dict if name not in padded), None)) is not None:
            raise ValueError(f"it has no {lacking}: another optimizer keeps other states")
        for name, tensor in state_dict.items():
            saved = padded.get(name)
            if not isinstance(saved, TensorStorageMetadata) or saved.size == tensor.size():
                continue
            if saved.size[1:] == tensor.size()[1:]:
                padded[name] = dataclasses.replace(saved, size=tensor.size())
                local_tensor(tensor.detach()).zero_()
        super().set_up_planner(state_dict, dataclasses.replace(metadata, state_dict_metadata=padded), is_coordinator)
        for shard in _shards({name: x for name, x in state_dict.items() if name in self._orders}):
            self._parts[shard.name] = list(_in_order(shard, self._orders))

    def create_local_plan(self) -> LoadPlan:
        """Plan to read each tensor's shard; with experts in another order, each part of the shard."""
        assert self.metadata is not None
        items = [item for item in super().create_local_plan().items if item.dest_index.fqn not in self._orders]
        for name, parts in self._parts.items():
            chunks = [ChunkStorageMetadata(torch.Size(part.offsets), part.local.size()) for part in parts]
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor that an item is read into."""
        if index.fqn not in self._orders:
            return super().lookup_tensor(index)
        return next(part.local for part in self._parts[index.fqn] if part.offsets == tuple(index.offset or ()))


def _cause(error: CheckpointException, folder: Path) -> BadInput:
    """Return a one-line error for tensors that this rank could not read; raise any other error unchanged."""
    cause, _ = next(iter(error.failures.values()))
    if isinstance(cause, OSError):
        return system_fault(cause, folder)
    if isinstance(cause, ValueError | SafetensorError):
        return BadInput(folder, str(cause), "take another checkpoint, or another plan")
    raise cause


def write_parts(file: Path, parts: Sequence[TensorShard]) -> None:
    """Write parts of tensors in the given order; contiguous host tensors are not copied, others one by one.

    The format is described at https://huggingface.co/docs/safetensors: the header's length in 8 bytes, the header in
    JSON, the bytes. The header also states, for torch.distributed.checkpoint's reader, where parts begin in their
    tensors.
    """
    offsets = {part.name: {"saved_offsets": part.offsets} for part in parts}
    about = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, _, x in parts:
        start, end = end, end + x.nbytes
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            stream.write(part.local.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


# Writing checkpoints atomically and, if requested, while the following steps run.


_ROOM = 1.05
"""Ratio of the disk space of files to the bytes of their contents; an assumption."""


@dataclass(frozen=True)
class Saver:
    """A writer of the state of all ranks, one checkpoint at a time."""

    folder: Path
    """Checkpoint folder of the run."""
    identity: Identity
    parent: str | None
    keep_last: int
    """Number of latest checkpoints to keep."""
    keep_every: int
    """Interval, in steps, of the checkpoints to keep in addition; 0: none."""
    asynchronous: bool
    """Whether steps continue while the copy in host memory is written."""
    group: dist.ProcessGroup
    """Gloo group of the whole world, reserved for the writer thread."""
    bytes_in_all: int
    """Bytes of a checkpoint's tensors over all ranks."""
    expert_orders: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Experts along the first dim, by name, of tensors that have them in another order."""
    began: Beginning = field(default_factory=Beginning)
    """Origin of the run's own global batches."""
    locks: tuple[HeldLock, ...] = ()
    """Locks that must still be held when a file is written or removed."""
    took_s: list[float] = field(default_factory=list)
    """Seconds that each written checkpoint took."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "saver"))
    _writing: "list[Future[Path]]" = field(default_factory=list)
    _buffer: list[HostBuffer] = field(default_factory=list)
    """Host buffer of this rank's parts for asynchronous saves, allocated by the first one."""

    def save(self, tensors: dict[str, Tensor], progress: Progress, *, wait: bool = False) -> None:
        """Save the state of all ranks, after waiting for the previous checkpoint to be written.

        Raises BadInput, here or at the next call, if it cannot be written; earlier checkpoints are unchanged.
        """
        self.finish()
        self._first(lambda: check_room(self.folder, self.bytes_in_all))
        parts = parts_to_save(tensors, self.expert_orders)
        if self.asynchronous and not wait:
            if not self._buffer:
                self._buffer.append(HostBuffer(parts))
            self._writing.append(self._thread.submit(self._write, self._buffer[0].copied(parts), progress))
        else:
            self._write(parts, progress)

    def check(self) -> None:
        """Raise the error of an asynchronous save if it has already failed."""
        if self._writing and self._writing[0].done():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        while self._writing:
            self._writing.pop().result()

    def close(self) -> None:
        """End the writer thread once its current checkpoint is written."""
        self._thread.shutdown()
        while self._buffer:
            self._buffer.pop().close()

    def _write(self, parts: Sequence[TensorShard], progress: Progress) -> Path:
        began, target = time.monotonic(), folders.folder_of_step(self.folder, progress.step)
        unfinished = folders.unfinished_folder(target)
        self._first(lambda: folders.make_empty(unfinished))
        self._channel.together(lambda: write_tensors(unfinished, parts, self.group.rank()), unfinished)
        record = Checkpoint(
            identity=self.identity,
            began=self.began,
            progress=progress,
            world_size=self.group.size(),
            parent=self.parent,
            files=self._files(unfinished),
        )
        self._first(lambda: _commit(unfinished, target, record))
        kept = {progress.step} | ({progress.best.step} if progress.best is not None else set())
        self._first(lambda: folders.prune(self.folder, self.keep_last, self.keep_every, kept))
        self.took_s.append(time.monotonic() - began)
        return target

    def _files(self, folder: Path) -> tuple[SavedFile, ...]:
        """Return the records of all ranks' files, each read back from disk by the rank that wrote it."""
        mine = self._channel.together(lambda: tuple(map(_synced, files_of_rank(folder, self.group.rank()))), folder)
        return tuple(chain.from_iterable(self._channel.all_say(mine, tuple[SavedFile, ...])))

    @property
    def _channel(self) -> Channel:
        return GroupChannel(torch.device("cpu"), self.group)

    def _first(self, do: Callable[[], None]) -> None:
        """Call `do` on rank 0, which must still hold the run's locks; raise its error on all ranks."""

        def locked() -> None:
            for lock in self.locks:
                lock.check()
            do()

        self._channel.first_does(locked, self.folder)


def check_room(folder: Path, tensor_bytes: int) -> None:
    """Raise BadInput unless the file system has room for one more checkpoint of this size."""
    free, wanted = shutil.disk_usage(folder).free, int(tensor_bytes * _ROOM)
    if free < wanted:
        whole = "; earlier checkpoints are intact" if folders.latest_checkpoint(folder) is not None else ""
        raise BadInput(
            folder,
            f"{bytes_text(free)} are free, a checkpoint takes {bytes_text(wanted)}",
            f"make room, keep fewer, or choose another --checkpoints folder{whole}",
        )


def _synced(path: Path) -> SavedFile:
    sync_path(path)
    return SavedFile(name=path.name, bytes=path.stat().st_size, sha256=sha256_of_file(path))


def _commit(unfinished: Path, target: Path, record: Checkpoint) -> None:
    """Complete a checkpoint: write its record as the last file, then rename its folder."""
    write_document(unfinished / RECORD, record)
    unfinished.rename(target)
    sync_path(target.parent)
