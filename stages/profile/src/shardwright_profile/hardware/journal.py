"""What a sweep has measured already, on disk while it goes on: a killed sweep continues from it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import Value, canonical_json
from shardwright_profile.hardware.entries import Entry, Key
from shardwright_profile.hardware.job import SweepIdentity

__all__ = ["Journal", "Kept", "journal_path", "read_journal"]

_FORMAT = "shardwright.sweep_journal"


class _Header(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    identity: SweepIdentity


_HEADERS = msgspec.json.Decoder(_Header)
_ENTRIES: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)
_Decoded = TypeVar("_Decoded")


class Kept(NamedTuple):
    """The entries of a journal, and how many of its bytes they and its header take."""

    entries: tuple[Entry, ...]
    good_bytes: int


def journal_path(out: Path) -> Path:
    """Where the journal of a sweep lies that writes `out`."""
    return out.with_name(f"{out.name}.journal")


def read_journal(path: Path, identity: SweepIdentity) -> Kept:
    """The entries of a journal, none where there is no file; a last line that was torn by the kill is left out.

    Raises BadInput where it is of another sweep or is no journal.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Kept((), 0)
    except OSError as error:
        raise BadInput(path, error.strerror or str(error), "choose another --out") from None
    lines = content.splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    if not lines:
        return Kept((), 0)
    _check_header(path, lines[0], identity)
    entries = tuple(_decode(path, number, line, _ENTRIES) for number, line in enumerate(lines[1:], start=2))
    return Kept(entries, sum(map(len, lines)))


class Journal:
    """The entries that are known so far, the same on every rank; on rank 0 also on disk.

    `path` is None on the other ranks. The file is made with the first entry, cut to what was readable of it.
    """

    def __init__(self, path: Path | None, identity: SweepIdentity, kept: Kept) -> None:
        self._path, self._identity = path, identity
        self._good_bytes = kept.good_bytes
        self.kept_count = len(kept.entries)
        """How many entries a killed sweep left."""
        self._entries: dict[Key, Entry] = {entry.key: entry for entry in kept.entries}

    def find(self, *key: str | int | float) -> Entry | None:
        """The entry of this key, if it is known."""
        return self._entries.get(key)

    def holds_any(self, *kinds: str) -> bool:
        """Whether an entry of one of these kinds is known: the first word of a key."""
        return any(key[0] in kinds for key in self._entries)

    def add(self, entries: Sequence[Entry]) -> bool:
        """Keep these, on disk before this returns; False where all of them are there already."""
        new = [entry for entry in entries if self._entries.get(entry.key) != entry]
        self._entries.update({entry.key: entry for entry in new})
        if new and self._path is not None:
            self._append(self._path, b"".join(canonical_json(entry) + b"\n" for entry in new))
        return bool(new)

    def remove(self) -> None:
        """Remove the file: what is in it has been written elsewhere."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _append(self, path: Path, lines: bytes) -> None:
        if not self._good_bytes:
            header = _Header(format=_FORMAT, version=1, identity=self._identity)
            lines = canonical_json(header) + b"\n" + lines
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.truncate(self._good_bytes)
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BadInput(path, f"cannot be written ({error.strerror})", "choose another --out") from None
        self._good_bytes += len(lines)


def _check_header(path: Path, line: bytes, identity: SweepIdentity) -> None:
    header = _decode(path, 1, line, _HEADERS)
    if (header.format, header.version) != (_FORMAT, 1):
        raise BadInput(path, "is no journal of a sweep of this version", "delete it to measure anew")
    names = SweepIdentity.__struct_fields__
    if odd := [name for name in names if getattr(header.identity, name) != getattr(identity, name)]:
        raise BadInput(path, f"is of a killed sweep of another {', '.join(odd)}", "delete it to measure anew")


def _decode(path: Path, number: int, line: bytes, decoder: msgspec.json.Decoder[_Decoded]) -> _Decoded:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise BadInput(path, f"line {number} is not readable ({error})", "delete it to measure anew") from None
