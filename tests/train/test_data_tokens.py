"""Token files, against bytes written out by hand from Megatron-LM's indexed_dataset.py."""

import struct
import tracemalloc
from collections.abc import Callable
from cProfile import Profile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import write_tokens

from shardwright.io import BadInput
from shardwright_train.data.tokens import open_index, read_tokens, token_dtype, write_index

# Two documents: tokens 7, 300, 0 and tokens 65535, 1.
GOLDEN_BIN = bytes([7, 0, 44, 1, 0, 0, 255, 255, 1, 0])
GOLDEN_INDEX = (
    b"MMIDIDX\x00\x00"
    + bytes([1, 0, 0, 0, 0, 0, 0, 0])  # version
    + bytes([8])  # dtype code: uint16
    + bytes([2, 0, 0, 0, 0, 0, 0, 0])  # sequences
    + bytes([3, 0, 0, 0, 0, 0, 0, 0])  # length of the document list
    + bytes([3, 0, 0, 0, 2, 0, 0, 0])  # lengths, int32
    + bytes([0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0])  # first bytes, int64
    + bytes([0] * 8 + [1] + [0] * 7 + [2] + [0] * 7)  # document list, int64
)
DOCUMENTS = [np.array([7, 300, 0]), np.array([65535, 1])]


def _golden(folder: Path) -> tuple[Path, Path]:
    (folder / "t.bin").write_bytes(GOLDEN_BIN)
    (folder / "t.idx").write_bytes(GOLDEN_INDEX)
    return folder / "t.bin", folder / "t.idx"


def test_documents_are_written_as_megatron_writes_them(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.bin", tmp_path / "t.idx", DOCUMENTS, 65536)
    assert (tmp_path / "t.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "t.idx").read_bytes() == GOLDEN_INDEX
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin", "t.idx"]


def test_the_golden_files_are_read(tmp_path: Path) -> None:
    read = read_tokens(*_golden(tmp_path))
    assert read.tokens.tolist() == [7, 300, 0, 65535, 1]
    assert read.index.lengths.tolist() == [3, 2]
    assert read.index.documents.tolist() == [0, 1, 2]


def test_tokens_are_mapped_and_not_read(tmp_path: Path) -> None:
    tokens = read_tokens(*_golden(tmp_path)).tokens
    assert isinstance(tokens, np.memmap)
    assert not tokens.flags.writeable


def test_a_vocabulary_beyond_uint16_is_written_in_int32(tmp_path: Path) -> None:
    assert (token_dtype(65536), token_dtype(65537)) == (np.dtype("<u2"), np.dtype("<i4"))
    write_tokens(tmp_path / "t.bin", tmp_path / "t.idx", [np.array([65536, 2])], 65537)
    assert (tmp_path / "t.bin").read_bytes() == bytes([0, 0, 1, 0, 2, 0, 0, 0])
    assert (tmp_path / "t.idx").read_bytes()[17] == 4
    assert read_tokens(tmp_path / "t.bin", tmp_path / "t.idx").tokens.tolist() == [65536, 2]


@pytest.mark.parametrize(("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_dtype_of_megatron_is_read(code: int, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(np.array([3, 100], dtype).tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 1, 2)
    (tmp_path / "t.idx").write_bytes(header + struct.pack("<iqqq", 2, 0, 0, 1))
    assert read_tokens(tmp_path / "t.bin", tmp_path / "t.idx").tokens.tolist() == [3, 100]


@settings(max_examples=40, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 99_999), max_size=9), max_size=9), vocab_size=st.just(100_000))
def test_documents_come_back_as_they_were_written(
    documents: list[list[int]], vocab_size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder / "t.bin", folder / "t.idx", (np.array(d, np.int64) for d in documents), vocab_size)
    read = read_tokens(folder / "t.bin", folder / "t.idx")
    ends = np.cumsum(read.index.lengths)
    assert [read.tokens[e - n : e].tolist() for e, n in zip(ends, read.index.lengths, strict=True)] == documents


def _patched(at: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda index: index[:at] + value + index[at + len(value) :]


INDICES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "does not begin with"),
    "another magic": (_patched(0, b"MMIDIDY"), "does not begin with"),
    "cut in the header": (lambda index: index[:20], "ends inside its header"),
    "future version": (_patched(9, b"\x02"), "version 2"),
    "floats": (_patched(17, b"\x07"), "dtype code 7"),
    "no such dtype": (_patched(17, b"\x63"), "dtype code 99"),
    "cut at the end": (lambda index: index[:-1], "has 81 bytes, but its header announces 82"),
    "more than announced": (lambda index: index + b"\x00", "has 83 bytes, but its header announces 82"),
    "giant number of sequences": (_patched(18, b"\xff" * 8), "but its header announces"),
    "negative length": (_patched(34, struct.pack("<i", -3)), "do not follow one another"),
    "lengths that do not add up": (_patched(34, struct.pack("<i", 4)), "do not follow one another"),
    "pointer elsewhere": (_patched(50, struct.pack("<q", 4)), "do not follow one another"),
    "documents that start late": (_patched(58, struct.pack("<q", 1)), "do not cover the sequences"),
    "documents out of order": (_patched(66, struct.pack("<q", 5)), "do not cover the sequences"),
    "documents beyond the end": (_patched(74, struct.pack("<q", 3)), "do not cover the sequences"),
    "last sequence too long": (_patched(38, struct.pack("<i", 3)), "has 10 bytes, but t.idx announces 12"),
    "wider tokens": (lambda index: _patched(50, struct.pack("<q", 12))(_patched(17, b"\x04")(index)), "announces 20"),
}


@pytest.mark.parametrize("case", INDICES)
def test_a_damaged_index_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    change, fault = INDICES[case]
    bin_path, index_path = _golden(tmp_path)
    index_path.write_bytes(change(GOLDEN_INDEX))
    with pytest.raises(BadInput) as refused:
        read_tokens(bin_path, index_path)
    assert fault in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_a_truncated_or_missing_bin_is_refused(tmp_path: Path) -> None:
    bin_path, index_path = _golden(tmp_path)
    bin_path.write_bytes(GOLDEN_BIN[:-1])
    with pytest.raises(BadInput, match=r"t\.bin: has 9 bytes, but t\.idx announces 10"):
        read_tokens(bin_path, index_path)
    bin_path.unlink()
    with pytest.raises(BadInput, match=r"t\.bin: No such file"):
        read_tokens(bin_path, index_path)
    with pytest.raises(BadInput, match=r"none\.idx: No such file"):
        read_tokens(bin_path, tmp_path / "none.idx")


# The same two documents, before Megatron's index had the form above: all numbers are int64.
OLD_INDEX = b"TNTIDX\x00\x00" + struct.pack(
    "<17q",
    *(1, 8, 2, 2, 2, 3),  # version, dtype code, bytes of a token, sequences, their dims, length of the document list
    *(0, 1, 2),  # first dim of each sequence, and the number of dims
    *(0, 3, 5),  # first token of each sequence, and the number of tokens
    *(3, 2),  # lengths
    *(0, 1, 2),  # document list
)


def test_the_older_index_is_read(tmp_path: Path) -> None:
    bin_path, index_path = _golden(tmp_path)
    index_path.write_bytes(OLD_INDEX)
    read = read_tokens(bin_path, index_path)
    assert read.tokens.tolist() == [7, 300, 0, 65535, 1]
    assert (read.index.lengths.tolist(), read.index.documents.tolist()) == ([3, 2], [0, 1, 2])
    assert [read.index.document_start(document) for document in range(3)] == [0, 3, 5]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda index: index[:30], "ends inside its header"),
        (lambda index: index[:-8], "but its header announces"),
        (_patched(24, b"\x04"), "2 dims of 4 bytes for 2 sequences of uint16 tokens"),
        (_patched(88, b"\x02"), "do not follow one another"),
    ],
)
def test_a_damaged_older_index_is_refused_in_one_line(
    change: Callable[[bytes], bytes], fault: str, tmp_path: Path
) -> None:
    bin_path, index_path = _golden(tmp_path)
    index_path.write_bytes(change(OLD_INDEX))
    with pytest.raises(BadInput, match=fault):
        read_tokens(bin_path, index_path)


def test_documents_of_several_sequences_are_found_by_their_tokens(tmp_path: Path) -> None:
    lengths, documents = np.array([2, 0, 3, 4, 1]), np.array([0, 2, 2, 4, 5])
    write_index(tmp_path / "t.idx", lengths, np.dtype("<i4"), documents)
    index = open_index(tmp_path / "t.idx")
    assert index.num_documents == 4
    assert [index.document_start(document) for document in range(5)] == [0, 2, 2, 9, 10]
    assert [index.first_document_from(token) for token in (0, 1, 2, 3, 9, 10, 11)] == [0, 1, 1, 3, 3, 4, 4]


def test_ten_million_documents_open_without_a_step_for_each_and_stay_in_their_file(tmp_path: Path) -> None:
    lengths = np.arange(10_000_000, dtype=np.int32) % 7
    write_index(tmp_path / "t.idx", lengths, np.dtype("<u2"))
    tracemalloc.start()
    with Profile() as calls:
        index = open_index(tmp_path / "t.idx")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (index.num_documents, index.total) == (len(lengths), int(lengths.sum()))
    assert index.first_document_from(index.total // 2) in range(4_990_000, 5_010_000)
    assert sum(each.callcount for each in calls.getstats()) < len(lengths) / 100
    assert peak < 16 << 20
    assert all(isinstance(array.base, np.memmap) for array in (index.lengths, index.starts, index.documents))
