"""A corpus of HDF5 files that must not be believed: each is answered by exactly one clear line."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from shardwright.io import BadInput, one_line_errors
from shardwright.types.hardware_profile import HardwareProfile, read_hardware_profile
from shardwright.types.model_profile import read_model_profile

EXAMPLES = Path(__file__).parents[2] / "core" / "examples"
FORMAT = HardwareProfile.FORMAT

Change = Callable[[h5py.File], object]


def _refusal(path: Path, capsys: pytest.CaptureFixture[str], read: Callable[[Path], object]) -> str:
    """The one line that a command would print."""
    with pytest.raises(SystemExit) as stop, one_line_errors():
        read(path)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {path}: ")
    assert line.isprintable()
    return line


def _replace(file: h5py.File, where: str, unit: str | None = None, **how: object) -> None:
    """Put another dataset, made as `how` says, in the place of one."""
    unit = file[where].attrs["unit"] if unit is None else unit
    del file[where]
    file.create_dataset(where, **how).attrs["unit"] = unit


def _set(file: h5py.File, where: str, row: int | slice, value: object) -> None:
    values = file[where][()]
    values[row] = value
    file[where][...] = values


def _virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout(shape=(6,), dtype="float64")
    layout[:] = h5py.VirtualSource("other.h5", "secret", shape=(6,))
    del file["repeats/time_s"]
    file.create_virtual_dataset("repeats/time_s", layout).attrs["unit"] = "s"


def _link(link: object) -> Change:
    def change(file: h5py.File) -> None:
        del file["repeats/time_s"]
        file["repeats/time_s"] = link

    return change


def _time(value: float) -> Change:
    return lambda file: _set(file, "repeats/time_s", 2, value)


CORPUS: dict[str, tuple[Change, str]] = {
    "NaN time": (_time(float("nan")), "table repeats: time_s is nan in row 2"),
    "infinite time": (_time(float("inf")), "table repeats: time_s is inf in row 2"),
    "negative time": (_time(-1e-3), "table repeats: time_s is -0.001 in row 2"),
    "zero time": (_time(0.0), "table repeats: time_s is 0.0 in row 2, not finite and > 0"),
    "zero ranks": (lambda f: _set(f, "points/group_size", 0, 0), "group_size is 0 in row 0"),
    "negative bytes": (lambda f: _set(f, "points/message_bytes", 1, -1), "message_bytes is -1 in row 1"),
    "more ranks on a node than there are": (
        lambda f: _set(f, "points/ranks_per_node", 0, 3),
        "groups with more ranks on a node than they have",
    ),
    "a flag of 2": (lambda f: _set(f, "points/consecutive", 1, 2), "consecutive is 2"),
    "unknown collective": (lambda f: _set(f, "points/collective", 1, b"broadcast"), "'broadcast' in row 1"),
    "unknown source": (lambda f: _set(f, "points/source", 1, b"guessed"), "'guessed' in row 1"),
    "name that is no ASCII": (lambda f: _set(f, "rates/name", 0, b"\xff\xfe"), "not ASCII"),
    "name that a terminal obeys": (lambda f: _set(f, "rates/name", 0, b"\x1b[31m"), "not ASCII that can be shown"),
    "text that a terminal obeys": (
        lambda f: f.attrs.modify("device", "\x1b[31m"),
        "'device' contains a control character",
    ),
    "a repeat of no point": (lambda f: _set(f, "repeats/point", 0, 7), "repeats without a point"),
    "a point without repeats": (lambda f: _set(f, "repeats/point", slice(4, 6), 0), "points without repeats"),
    "float32": (
        lambda f: _replace(f, "repeats/time_s", data=np.ones(6, "float32")),
        "repeats/time_s has dtype float32, not float64",
    ),
    "big-endian": (lambda f: _replace(f, "repeats/time_s", data=np.ones(6, ">f8")), "repeats/time_s has dtype >f8"),
    "texts of any length": (
        lambda f: _replace(f, "points/source", data=["measured"] * 3, dtype=h5py.string_dtype()),
        "points/source has dtype object",
    ),
    "references": (
        lambda f: _replace(f, "repeats/time_s", data=[f.ref] * 6, dtype=h5py.ref_dtype),
        "repeats/time_s has dtype object",
    ),
    "milliseconds": (lambda f: f["repeats/time_s"].attrs.modify("unit", "ms"), "unit 'ms', not 's'"),
    "no unit": (lambda f: f["repeats/time_s"].attrs.pop("unit"), "repeats/time_s has unit None"),
    "unit as a list": (lambda f: f["repeats/time_s"].attrs.create("unit", ["s", "s"]), "repeats/time_s has unit"),
    "unit as bytes": (lambda f: f["repeats/time_s"].attrs.create("unit", np.bytes_("s")), "repeats/time_s has unit"),
    "two dims": (lambda f: _replace(f, "repeats/time_s", data=np.ones((6, 1))), "shape (6, 1)"),
    "no dims": (lambda f: _replace(f, "repeats/time_s", data=1.0), "shape ()"),
    "null dataspace": (lambda f: _replace(f, "repeats/time_s", data=h5py.Empty("float64")), "shape None"),
    "too few rows": (lambda f: _replace(f, "repeats/time_s", data=np.ones(5)), "table repeats: columns of different"),
    "missing column": (lambda f: f["repeats"].pop("time_s"), "table repeats has missing or unknown columns ['time_s']"),
    "unknown column": (
        lambda f: f["repeats"].create_dataset("colour", data=[1]),
        "table repeats has missing or unknown columns ['colour']",
    ),
    "missing table": (lambda f: f.pop("rates"), "rates is missing"),
    "dataset for a table": (lambda f: (f.pop("rates"), f.create_dataset("rates", data=[1])), "rates is not a group"),
    "group for a column": (
        lambda f: (f["repeats"].pop("time_s"), f.create_group("repeats/time_s")),
        "repeats/time_s is not a dataset",
    ),
    "type for a column": (_link(np.dtype("float64")), "repeats/time_s is not a dataset"),
    "external link": (_link(h5py.ExternalLink("/etc/passwd", "/")), "repeats/time_s is a link to elsewhere"),
    "soft link": (_link(h5py.SoftLink("/points/message_bytes")), "repeats/time_s is a link to elsewhere"),
    "dangling soft link": (_link(h5py.SoftLink("/nothing")), "repeats/time_s is a link to elsewhere"),
    "table that is a soft link": (
        lambda f: (f.move("rates", "others"), f.__setitem__("rates", h5py.SoftLink("/others"))),
        "rates is a link to elsewhere",
    ),
    "external dataset": (
        lambda f: _replace(
            f, "repeats/time_s", shape=(6,), dtype="float64", external=[("/dev/zero", 0, h5py.h5f.UNLIMITED)]
        ),
        "repeats/time_s is stored in another file",
    ),
    "virtual dataset": (_virtual, "repeats/time_s is stored in another file"),
    "giant declared shape": (
        lambda f: _replace(f, "repeats/time_s", shape=(1 << 40,), dtype="float64", chunks=(1024,)),
        "repeats/time_s has shape (1099511627776,)",
    ),
    "values declared and not stored": (
        lambda f: _replace(f, "repeats/time_s", shape=(9_000_000,), dtype="float64", chunks=(1024,), fillvalue=1.0),
        "repeats/time_s declares 72000000 bytes and stores 0",
    ),
    "values declared and compressed": (
        lambda f: _replace(f, "repeats/time_s", data=np.ones(9_000_000), compression="gzip"),
        "repeats/time_s is compressed",
    ),
    "huge unit": (
        lambda f: f["repeats/time_s"].attrs.create("unit", np.full(1_000_000, 65, "uint8")),
        "attribute 'unit' is larger than 64 KiB",
    ),
    "huge cluster name": (
        lambda f: f.attrs.create("cluster", np.full(1_000_000, 65, "uint8")),
        "attribute 'cluster' is larger than 64 KiB",
    ),
    "long format": (lambda f: f.attrs.modify("format", "x" * 60_000), "format is 'xxx"),
    "no format": (lambda f: f.attrs.pop("format"), "format is None"),
    "another format": (
        lambda f: f.attrs.modify("format", "shardwright.model_profile"),
        "'shardwright.model_profile', not shardwright.hardware_profile",
    ),
    "format as a list": (lambda f: f.attrs.create("format", [FORMAT, FORMAT]), "format is"),
    "future version": (lambda f: f.attrs.modify("version", np.int64(9)), "version 9 of shardwright.hardware_profile"),
    "no version": (lambda f: f.attrs.pop("version"), "version None"),
    "version as text": (lambda f: f.attrs.create("version", "1"), "version '1'"),
    "version as a list": (lambda f: f.attrs.create("version", np.array([1, 1])), "version array([1, 1])"),
    "no cluster name": (lambda f: f.attrs.pop("cluster"), "attribute 'cluster' is absent"),
    "cluster name as a number": (lambda f: f.attrs.create("cluster", 3), "attribute 'cluster' is absent or not a text"),
    "cluster name of a type without a numpy equal": (
        lambda f: (
            h5py.h5a.create(f.attrs._id, b"device", h5py.h5t.STD_B8LE, h5py.h5s.create(h5py.h5s.SCALAR))
            if f.attrs.pop("device")
            else None
        ),
        "attribute 'device' is",
    ),
}


@pytest.mark.parametrize("case", CORPUS)
def test_a_hardware_profile_that_cannot_be_is_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, fault = CORPUS[case]
    path = tmp_path / "hardware.h5"
    shutil.copy(EXAMPLES / "hardware_profile.h5", path)
    read_hardware_profile(path)
    with h5py.File(path, "r+") as file:
        change(file)
    assert fault in _refusal(path, capsys, read_hardware_profile)


def _two_processes(file: h5py.File) -> None:
    for name in list(file["process"]):
        _replace(file, f"process/{name}", data=np.repeat(file["process"][name][()], 2))


BLOCK = "table layers: block tp_size 1 sequence_parallel none recompute none"
MODEL_CORPUS: dict[str, tuple[Change, str]] = {
    "two processes": (
        _two_processes,
        "table process has 2 rows",
    ),
    "unknown recompute": (lambda f: _set(f, "layers/recompute", 1, b"some"), "table layers: recompute is 'some'"),
    "unknown sequence parallelism": (
        lambda f: _set(f, "layers/sequence_parallel", 1, b"ring"),
        "table layers: sequence_parallel is 'ring'",
    ),
    "negative forward time": (lambda f: _set(f, "layers/forward_s", 0, -1.0), "table layers: forward_s is -1.0"),
    "a forward time that is not a number": (
        lambda f: _set(f, "layers/forward_s", 0, np.nan),
        "forward_s is nan in row 0",
    ),
    "a value that is absent": (
        lambda f: _set(f, "layers/workspace_bytes", 1, 5),
        "workspace_bytes is 5 in row 1, but workspace_source marks it absent",
    ),
    "unknown source": (lambda f: _set(f, "layers/forward_source", 0, b"guessed"), "forward_source is 'guessed'"),
    "a coefficient that is not a number": (lambda f: _set(f, "fits/constant", 0, np.inf), "constant is inf in row 0"),
    "a point twice": (
        lambda f: _set(f, "layers/type", 0, b"block"),
        f"{BLOCK} micro_batch_size 2 sequence_length 16 is there twice",
    ),
    "activations that shrink": (
        lambda f: (
            _set(f, "layers/type", 0, b"block"),
            _set(f, "layers/micro_batch_size", 0, 4),
            _set(f, "layers/activation_bytes", 0, 100),
        ),
        f"{BLOCK} micro_batch_size 4 sequence_length 16: activation_bytes fall from 4096 to 100 as the micro-batch",
    ),
    "a hardware profile": (lambda f: f.attrs.modify("format", FORMAT), "not shardwright.model_profile"),
}


@pytest.mark.parametrize("case", MODEL_CORPUS)
def test_a_model_profile_that_cannot_be_is_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, fault = MODEL_CORPUS[case]
    path = tmp_path / "model.h5"
    shutil.copy(EXAMPLES / "model_profile.h5", path)
    with h5py.File(path, "r+") as file:
        change(file)
    assert fault in _refusal(path, capsys, read_model_profile)


@pytest.mark.parametrize("length", [0, 4, 100, 1000, 5000, -1])
def test_a_truncated_profile_is_refused_in_one_line(
    length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hardware.h5"
    path.write_bytes((EXAMPLES / "hardware_profile.h5").read_bytes()[:length])
    assert "not a readable HDF5 file" in _refusal(path, capsys, read_hardware_profile)


def test_a_missing_file_a_folder_and_a_text_file_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No such file" in _refusal(tmp_path / "hardware.h5", capsys, read_hardware_profile)
    assert "is a folder" in _refusal(tmp_path, capsys, read_hardware_profile)
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", Path("/dev/zero")):
        assert "is not a regular file" in _refusal(odd, capsys, read_hardware_profile)
    with (tmp_path / "giant").open("wb") as file:
        file.truncate(2**30 + 1)
    assert "larger than 1024 MiB" in _refusal(tmp_path / "giant", capsys, read_hardware_profile)
    (tmp_path / "text").write_text("nothing of the kind")
    assert "not a readable HDF5 file" in _refusal(tmp_path / "text", capsys, read_hardware_profile)


def test_a_flipped_bit_in_stored_values_is_seen_by_the_checksum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray((EXAMPLES / "hardware_profile.h5").read_bytes())
    at = content.index(np.array([0.001, 0.0012]).tobytes())
    content[at] ^= 1
    path = tmp_path / "hardware.h5"
    path.write_bytes(content)
    assert "repeats/time_s is not readable" in _refusal(path, capsys, read_hardware_profile)


def test_flipping_any_byte_gives_one_line_or_a_valid_profile(tmp_path: Path) -> None:
    whole = (EXAMPLES / "hardware_profile.h5").read_bytes()
    path = tmp_path / "hardware.h5"
    refused = 0
    for at in range(0, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            read_hardware_profile(path)
        except BadInput as error:
            refused += 1
            assert str(error).startswith(f"{path}: ")
    assert refused > 20


def test_reading_a_declared_giant_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "hardware.h5"
    shutil.copy(EXAMPLES / "hardware_profile.h5", path)
    with h5py.File(path, "r+") as file:
        _replace(file, "repeats/time_s", shape=(9_999_999,), dtype="float64", chunks=(1024,), fillvalue=1.0)
        _replace(file, "repeats/point", shape=(9_999_999,), dtype="int64", chunks=(1024,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInput, match="stores 0"):
        read_hardware_profile(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024
