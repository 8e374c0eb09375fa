"""Writing checkpoints: complete or not at all, beside the steps that follow where that is asked for."""

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import sha256_of_file, sync_path, write_document
from shardwright_launch.lock import HeldLock
from shardwright_train.checkpoints.folders import RECORD, folder_of_step, make_empty, prune, unfinished_folder
from shardwright_train.checkpoints.parts import HostBuffer, Part, parts_to_save
from shardwright_train.checkpoints.record import Beginning, Checkpoint, Identity, Progress, SavedFile
from shardwright_train.checkpoints.tensors import files_of_rank, write_tensors
from shardwright_train.parallel.channel import Channel, GroupChannel

_ROOM = 1.05
"""What a file system takes for files, over their contents: an assumption."""


@dataclass(frozen=True)
class Saver:
    """Saves the state of all ranks, one checkpoint at a time."""

    folder: Path
    """That of the run."""
    identity: Identity
    parent: str | None
    keep_last: int
    """How many of the latest checkpoints stay."""
    keep_every: int
    """And those of every so many steps; 0: no others."""
    asynchronous: bool
    """Whether steps go on while what was copied to host memory is written."""
    group: dist.ProcessGroup
    """Of the whole world, with gloo, for this alone: another thread uses it."""
    bytes_in_all: int
    """Of a checkpoint's tensors."""
    began: Beginning = field(default_factory=Beginning)
    """Where the run's own global batches begin."""
    locks: tuple[HeldLock, ...] = ()
    """Those that must still be held when something is written or removed."""
    took_s: list[float] = field(default_factory=list)
    """Of each checkpoint that was written."""
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "saver"))
    _writing: "list[Future[Path]]" = field(default_factory=list)
    _buffer: list[HostBuffer] = field(default_factory=list)
    """What this rank saves is copied to before it is written beside the steps; taken by the first such save."""

    def save(self, tensors: dict[str, Tensor], progress: Progress, *, wait: bool = False) -> None:
        """Save from all ranks; what was not yet written of the checkpoint before is waited for.

        Raises BadInput, here or at the next call, where it cannot be written; those before it stay as they are.
        """
        self.finish()
        self._check_room()
        parts = parts_to_save(tensors)
        if self.asynchronous and not wait:
            if not self._buffer:
                self._buffer.append(HostBuffer(parts))
            self._writing.append(self._thread.submit(self._write, self._buffer[0].copied(parts), progress))
        else:
            self._write(parts, progress)

    def check(self) -> None:
        """Raise what has gone wrong with a checkpoint that is written beside the steps, if that is known already."""
        if self._writing and self._writing[0].done():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        while self._writing:
            self._writing.pop().result()

    def close(self) -> None:
        """Let the thread end, once it has written what it is writing."""
        self._thread.shutdown()
        while self._buffer:
            self._buffer.pop().close()

    def _write(self, parts: Sequence[Part], progress: Progress) -> Path:
        began, target = time.monotonic(), folder_of_step(self.folder, progress.step)
        unfinished = unfinished_folder(target)
        self._first(lambda: make_empty(unfinished))
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
        self._first(lambda: prune(self.folder, self.keep_last, self.keep_every, kept))
        self.took_s.append(time.monotonic() - began)
        return target

    def _files(self, folder: Path) -> tuple[SavedFile, ...]:
        """The files of all ranks, each looked at by the rank that wrote it, on the disk they will be read from."""
        mine = self._channel.together(lambda: tuple(map(_synced, files_of_rank(folder, self.group.rank()))), folder)
        return tuple(chain.from_iterable(self._channel.all_say(mine, tuple[SavedFile, ...])))

    @property
    def _channel(self) -> Channel:
        return GroupChannel(torch.device("cpu"), self.group)

    def _first(self, do: Callable[[], None]) -> None:
        """Do something on rank 0, which must hold the run's locks still; what fails there is raised on all."""

        def locked() -> None:
            for lock in self.locks:
                lock.check()
            do()

        self._channel.first_does(locked, self.folder)

    def _check_room(self) -> None:
        self._first(lambda: check_room(self.folder, self.bytes_in_all))


def check_room(folder: Path, tensor_bytes: int) -> None:
    """Raise BadInput unless a checkpoint of so many bytes has room beside those that are there."""
    free, wanted = shutil.disk_usage(folder).free, int(tensor_bytes * _ROOM)
    if free < wanted:
        raise BadInput(
            folder,
            f"{free / 2**30:.2f} GiB are free, a checkpoint takes {wanted / 2**30:.2f} GiB",
            "make room, keep fewer, or choose another --checkpoints folder; what was saved before is whole",
        )


def _synced(path: Path) -> SavedFile:
    sync_path(path)
    return SavedFile(name=path.name, bytes=path.stat().st_size, sha256=sha256_of_file(path))


def _commit(unfinished: Path, target: Path, record: Checkpoint) -> None:
    """Make a checkpoint complete: its record is the last thing that is written, then it takes its name."""
    write_document(unfinished / RECORD, record)
    unfinished.rename(target)
    sync_path(target.parent)
