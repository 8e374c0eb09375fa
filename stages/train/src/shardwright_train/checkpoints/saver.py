"""Writing checkpoints atomically and, if requested, while the following steps run."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.display.units import bytes_text
from shardwright.io import BadInput, sha256_of_file, sync_path, write_document
from shardwright.launch.lock import HeldLock
from shardwright_train.checkpoints import folders
from shardwright_train.checkpoints.folders import RECORD, Beginning, Checkpoint, Identity, Progress, SavedFile
from shardwright_train.checkpoints.tensors import HostBuffer, TensorShard, files_of_rank, parts_to_save, write_tensors
from shardwright_train.parallel.world import Channel, GroupChannel

_ROOM = 1.05
"""Ratio of the disk space of files to their contents; an assumption."""


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
    """Experts along the first dim of tensors that have them in another order."""
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
        """Raise the error of an asynchronous save if one is known already."""
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
