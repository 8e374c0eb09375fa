"""Which checkpoint a run goes on from: rank 0 decides, the others see that they find the same, and all look at it."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwright_formats.io.errors import BadInput, ShardwrightError, system_fault
from shardwright_formats.io.json import check_regular, read_document, sha256_of_file, write_bytes
from shardwright_train.checkpoints.folders import RECORD, complete_checkpoints, remove_unfinished, set_aside
from shardwright_train.checkpoints.record import Checkpoint, Identity
from shardwright_train.parallel.world import World

_VISIBLE_S = 20.0
"""How long another node's file system may take to show a new file: an assumption."""
_MAX_FILE = 2**60


class Resumed(NamedTuple):
    """A checkpoint that was found whole."""

    folder: Path
    record: Checkpoint


def check_shared(folder: Path, world: World) -> None:
    """Raise BadInput on all ranks unless each sees in a folder what rank 0 writes there."""
    problem: ShardwrightError | None = None
    name = world.first_says(lambda: f".seen-{os.getpid()}-{time.time_ns()}")
    try:
        if world.rank == 0:
            write_bytes(folder / name, b"")
    except BadInput as error:
        problem = error
    world.agree(problem)
    if not _appears(folder / name):
        what = f"rank {world.rank} does not see what rank 0 writes there"
        problem = BadInput(folder, what, "name a --checkpoints folder that all nodes share")
    world.agree(problem)
    if world.rank == 0:
        (folder / name).unlink()


def _appears(file: Path) -> bool:
    until = time.monotonic() + _VISIBLE_S
    while not (seen := file.name in os.listdir(file.parent) if file.parent.is_dir() else False):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return seen


def newest_whole(run: Path, world: World) -> Resumed | None:
    """The newest checkpoint of a run whose files are what they were; None where there is none at all.

    A damaged one is set aside, and said. Raises BadInput, on all ranks, where none is left.
    """
    if world.rank == 0:
        remove_unfinished(run)
    candidates = world.first_says(lambda: complete_checkpoints(run))
    for candidate in candidates:
        try:
            return read_whole(candidate, world)
        except BadInput as error:
            if world.rank == 0:
                aside = set_aside(candidate).name
                print(f"{error}: set aside as {aside}, going on from the one before", file=sys.stderr, flush=True)
    if candidates:
        raise BadInput(run, f"none of its {len(candidates)} checkpoints is whole", "start anew in another folder")
    return None


def read_whole(checkpoint: Path, world: World) -> Resumed:
    """A checkpoint's record, once all ranks found the same one and each of its files as it says.

    Raises BadInput on all ranks, naming the file.
    """
    record, problem = None, None
    try:
        record = read_record(checkpoint)
    except ShardwrightError as error:
        problem = error
    world.agree(problem)
    assert record is not None
    digest = sha256_of_file(checkpoint / RECORD)
    if world.first_says(lambda: digest) != digest:
        what = f"rank {world.rank} finds another record than rank 0 does"
        problem = BadInput(checkpoint / RECORD, what, "name a --checkpoints folder that all nodes share")
    world.agree(problem)
    world.agree(damage(checkpoint, record, range(world.rank, len(record.files), world.size)))
    return Resumed(checkpoint, record)


def read_record(checkpoint: Path) -> Checkpoint:
    """What a checkpoint says of itself; BadInput when it is none."""
    if not (checkpoint / RECORD).exists():
        raise BadInput(checkpoint, f"is no checkpoint: it has no {RECORD}", "name the folder of a step, step-…")
    return read_document(checkpoint / RECORD, Checkpoint)


def damage(checkpoint: Path, record: Checkpoint, share: Sequence[int]) -> ShardwrightError | None:
    """What is wrong with some of a checkpoint's files, by their numbers, or with what lies beside them."""
    strange = sorted({path.name for path in checkpoint.glob("*.safetensors")} - {file.name for file in record.files})
    if strange:
        return BadInput(checkpoint / strange[0], "is not one of the files that were saved", "take another checkpoint")
    for number in share:
        saved = record.files[number]
        file = checkpoint / saved.name
        try:
            check_regular(file, _MAX_FILE)
            size = file.stat().st_size
            if size != saved.bytes:
                return BadInput(file, f"has {size} bytes, {saved.bytes} were saved", "take another checkpoint")
            if sha256_of_file(file) != saved.sha256:
                return BadInput(file, "its SHA-256 is not what was saved", "take another checkpoint")
        except BadInput as error:
            return error
        except OSError as error:
            return system_fault(error, file)
    return None


def check_same_run(resumed: Resumed, asked: Identity) -> None:
    """Raise BadInput where a run's own checkpoint was saved under something else than is asked for now."""
    _check(
        resumed, asked, ("plan_sha256", "model_sha256", "data_sha256", "seed", "weights_sha256", "global_batch_size")
    )
    saved = msgspec.structs.asdict(resumed.record.identity.settings)
    for name, wanted in msgspec.structs.asdict(asked.settings).items():
        if saved[name] != wanted:
            raise BadInput(
                resumed.folder,
                f"was saved with {name} {saved[name]}, {wanted} is asked for",
                f"ask for what it was, or begin a branch with --resume-from {resumed.folder}",
            )


def check_branch(resumed: Resumed, asked: Identity, batch_may_change: bool) -> None:
    """Raise BadInput where a branch cannot begin from a checkpoint; it may have another plan and other settings."""
    same = ("model_sha256", "data_sha256", "seed")
    _check(resumed, asked, same if batch_may_change else (*same, "global_batch_size"))


_SAID = {
    "plan_sha256": "another plan",
    "model_sha256": "another model",
    "data_sha256": "other data",
    "seed": "another seed",
    "weights_sha256": "other weights to begin with",
    "global_batch_size": "another global batch size",
}
_REMEDY = {"global_batch_size": "plan for the same, or allow it with --allow-batch-change"}


def _check(resumed: Resumed, asked: Identity, names: Sequence[str]) -> None:
    for name in names:
        found, wanted = (getattr(identity, name) for identity in (resumed.record.identity, asked))
        if found != wanted:
            remedy = _REMEDY.get(name, "start anew in another --checkpoints folder")
            raise BadInput(resumed.folder, f"was saved under {_SAID[name]} ({found}, now {wanted})", remedy)
