"""A damaged checkpoint is never loaded, and none is lost."""

import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from saved_steps import saved_steps, shard_of, tensors_of

from shardwright.io import BadInput
from shardwright_train.checkpoints.choice import check_files, newest_whole, read_record, read_whole
from shardwright_train.checkpoints.folders import RECORD, Checkpoint, complete_checkpoints
from shardwright_train.checkpoints.tensors import read_tensors
from shardwright_train.parallel.world import World


@pytest.fixture
def run(tmp_path: Path, one_rank: World) -> Path:
    return saved_steps(tmp_path / "run")


def _flipped(place: float) -> Callable[[Path], None]:
    def flip(checkpoint: Path) -> None:
        content = bytearray(shard_of(checkpoint).read_bytes())
        content[min(len(content) - 1, int(place * len(content)))] ^= 1
        shard_of(checkpoint).write_bytes(content)

    return flip


def _cut(share: float) -> Callable[[Path], None]:
    return lambda checkpoint: os.truncate(shard_of(checkpoint), int(share * shard_of(checkpoint).stat().st_size))


def _record_cut(share: float) -> Callable[[Path], None]:
    return lambda checkpoint: os.truncate(checkpoint / RECORD, int(share * (checkpoint / RECORD).stat().st_size))


def _record(change: Callable[[dict], object], sealed: bool = True) -> Callable[[Path], None]:  # type: ignore[type-arg]
    """Change a record; sealed, by one who makes its own hash anew."""

    def write(checkpoint: Path) -> None:
        record = json.loads((checkpoint / RECORD).read_bytes())
        change(record)
        if sealed:
            record.pop("sha256", None)
            content = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
            record["sha256"] = sha256(content).hexdigest()
        (checkpoint / RECORD).write_text(json.dumps(record))

    return write


def _in(*path: str | int, value: object, sealed: bool = True) -> Callable[[Path], None]:
    def change(record: object) -> None:
        *outer, last = path
        for key in outer:
            record = record[key]  # type: ignore[index]
        record[last] = value  # type: ignore[index]

    return _record(change, sealed)


def _step_4(checkpoint: Path) -> Path:
    return checkpoint.with_name("step-00000004")


def _replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(checkpoint: Path) -> None:
        shutil.rmtree(checkpoint)
        make(checkpoint)

    return replace


DAMAGES = {
    **{f"bit flipped at {place}": _flipped(place) for place in (0.0, 0.001, 0.01, *(i / 10 for i in range(1, 11)))},
    **{f"shard cut to {share}": _cut(share) for share in (0.0, 0.01, 0.1, 0.5, 0.9, 0.999)},
    **{f"record cut to {share}": _record_cut(share) for share in (0.0, 0.01, 0.3, 0.5, 0.9, 0.99)},
    "shard missing": lambda checkpoint: shard_of(checkpoint).unlink(),
    "shard of another step": lambda checkpoint: shutil.copy(
        shard_of(checkpoint.with_name("step-00000004")), shard_of(checkpoint)
    ),
    "shard is a folder": lambda checkpoint: (
        shard_of(checkpoint).rename(checkpoint / "aside") and (checkpoint / "shard-00001-x.safetensors").mkdir()
    ),
    "surplus shard": lambda checkpoint: shutil.copy(shard_of(checkpoint), checkpoint / "shard-00002-x.safetensors"),
    "record is binary": lambda checkpoint: (checkpoint / RECORD).write_bytes(bytes(range(256))),
    "record is a pickle": lambda checkpoint: (checkpoint / RECORD).write_bytes(pickle.dumps({"step": 6})),
    "record is a list": lambda checkpoint: (checkpoint / RECORD).write_text("[]"),
    "record of a later version": _in("version", value=Checkpoint.VERSION + 1),
    "record of another format": _in("format", value="shardwright.plan"),
    "step is a text": _in("progress", "step", value="6"),
    "step is negative": _in("progress", "step", value=-6),
    "step is infinite": _in("progress", "step", value=math.inf),
    "loss is nan": _in("progress", "last_loss", value=math.nan),
    "loss is infinite": _in("progress", "first_loss", value=-math.inf),
    "loss scale is 0": _in("progress", "loss_scale", value=0.0),
    "loss scale is huge": _in("progress", "loss_scale", value=1e300),
    "samples are negative": _in("progress", "samples", value=-1),
    "wall time is negative": _in("progress", "wall_s", value=-1.0),
    "seed is a list": _in("identity", "seed", value=[]),
    "plan is no hash": _in("identity", "plan_sha256", value="x"),
    "hash of another file": _in("files", 0, "sha256", value="0" * 64),
    "size of another file": _in("files", 0, "bytes", value=1),
    "file outside": _in("files", 0, "name", value="../../secret"),
    "file by its whole path": _in("files", 0, "name", value="/etc/passwd"),
    "key missing": _record(lambda record: record.pop("files")),
    "key unknown": _in("surprise", value=1),
    "record missing": lambda checkpoint: (checkpoint / RECORD).unlink(),
    "record is a dangling link": lambda checkpoint: (
        (checkpoint / RECORD).unlink() or (checkpoint / RECORD).symlink_to("nowhere")
    ),
    "record without its hash": _record(lambda record: record.pop("sha256"), sealed=False),
    "record with another hash": _in("sha256", value="0" * 64, sealed=False),
    "another loss, not sealed": _in("progress", "last_loss", value=1.0, sealed=False),
    "more samples than steps": _in("progress", "samples", value=49),
    "fewer steps than samples": _in("progress", "step", value=5),
    "began elsewhere": _in("began", value={"step": 2, "samples": 8}),
    "began after its end": _in("began", value={"step": 7, "samples": 56}),
    "another batch": _in("identity", "global_batch_size", value=4),
    "record of the version before": _in("version", value=3),
    "file named twice": _record(lambda record: record["files"].append(record["files"][0])),
    "folder of another step": _replaced_by(lambda checkpoint: shutil.copytree(_step_4(checkpoint), checkpoint)),
    "link to another step": _replaced_by(lambda checkpoint: checkpoint.symlink_to(_step_4(checkpoint))),
    "link to nothing": _replaced_by(lambda checkpoint: checkpoint.symlink_to("nowhere")),
    "folder is a file": _replaced_by(lambda checkpoint: checkpoint.write_text("")),
    "folder is empty": _replaced_by(lambda checkpoint: checkpoint.mkdir()),
}


def test_there_are_enough_damages() -> None:
    assert len(DAMAGES) >= 67


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(
    run: Path, one_rank: World, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    newest = run / "step-00000006"
    DAMAGES[damage](newest)
    resumed = newest_whole(run, one_rank)
    assert resumed is not None and resumed.folder.name == "step-00000004"
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and str(newest) in told and "step-00000006.damaged" in told
    assert os.path.lexists(run / "step-00000006.damaged") and not os.path.lexists(newest)
    found = {name: torch.zeros_like(x) for name, x in tensors_of(4).items()}
    read_tensors(resumed.folder, found)
    assert all(torch.equal(found[name], x) for name, x in tensors_of(4).items())


@pytest.mark.parametrize("damage", ["shard missing", "record cut to 0.5"])
def test_a_damaged_checkpoint_that_was_asked_for_is_one_line(run: Path, one_rank: World, damage: str) -> None:
    DAMAGES[damage](run / "step-00000006")
    with pytest.raises(BadInput, match="step-00000006"):
        read_whole(run / "step-00000006", one_rank)
    assert (run / "step-00000006").is_dir()


def test_a_run_is_not_begun_anew_where_all_its_checkpoints_are_damaged(run: Path, one_rank: World) -> None:
    for checkpoint in complete_checkpoints(run):
        _cut(0.5)(checkpoint)
    before = sorted(run.rglob("*"))
    for _ in range(2):  # and not when it is started once more
        with pytest.raises(BadInput, match=r"none of its 3 checkpoints is undamaged \(.*step-00000006/shard.*bytes"):
            newest_whole(run, one_rank)
    assert sorted(run.rglob("*")) == before


def test_a_run_whose_records_a_tool_has_dropped_is_left_as_it_is(run: Path, one_rank: World) -> None:
    """As tools do that leave out *.json; what they left out may be brought back."""
    records = {file: file.read_bytes() for file in run.rglob("*.json")}
    for file in records:
        file.unlink()
    before = sorted(run.rglob("*"))
    for _ in range(2):
        with pytest.raises(
            BadInput, match=r"none of its 3 checkpoints is undamaged \(.*no checkpoint.json\): restore what is missing"
        ):
            newest_whole(run, one_rank)
    assert sorted(run.rglob("*")) == before and len(list(run.rglob("*.safetensors"))) == len(records) == 3
    for file, content in records.items():
        file.write_bytes(content)
    resumed = newest_whole(run, one_rank)
    assert resumed is not None and resumed.record.progress.step == 6


def test_a_run_that_has_nothing_but_what_was_set_aside_is_not_begun_anew(run: Path, one_rank: World) -> None:
    DAMAGES["record missing"](run / "step-00000006")
    newest_whole(run, one_rank)
    for step in (2, 4):
        shutil.rmtree(run / f"step-0000000{step}")
    with pytest.raises(
        BadInput, match=r"no checkpoints but 1 damaged ones, such as .*step-00000006.damaged: restore what is missing"
    ):
        newest_whole(run, one_rank)


def _flip(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("flips", [200, pytest.param(2000, marks=pytest.mark.long)])
def test_a_flipped_bit_is_refused_or_changes_nothing(run: Path, flips: int) -> None:
    """In each file of a checkpoint, its record above all; harmless is what spells the same values."""
    checkpoint, draw = run / "step-00000006", random.Random(flips)
    before = read_record(checkpoint)
    files = {file: file.read_bytes() for file in checkpoint.iterdir()}
    assert len(files) == 2
    refused = 0
    for file, content in files.items():
        for bit in draw.sample(range(8 * len(content)), flips // 2):
            file.write_bytes(_flip(content, bit))
            try:
                record = read_record(checkpoint)
                check_files(checkpoint, record, range(len(record.files)))
                assert record == before, (file, bit)
            except BadInput:
                refused += 1
        file.write_bytes(content)
    assert refused >= 0.99 * flips
