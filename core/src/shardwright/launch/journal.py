"""A journal of measurements, written as they finish, from which a killed run resumes."""

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from shardwright.io import BadInput, Value, canonical_json

_VERSION = 1

Identity = TypeVar("Identity", bound=Value)
Entry = TypeVar("Entry")
Decoded = TypeVar("Decoded")


class _Header(Value, Generic[Identity], frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    identity: Identity


@dataclass(frozen=True)
class Kept(Generic[Entry]):
    """The entries of a journal, and the number of bytes of its header and complete entries."""

    entries: tuple[Entry, ...] = ()
    good_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class JournalKind(Generic[Identity, Entry]):
    """A kind of journal: a header line that identifies the run, then one line for each entry."""

    format: str
    run: str
    """Name of the run in messages, such as `sweep`."""
    identity: type[Identity]
    entry: Any
    """Type of an entry, possibly a union."""
    key: Callable[[Entry], Hashable]
    """Function from an entry to the key that identifies it."""

    def read(self, path: Path, identity: Identity, *, anew: bool = False) -> Kept[Entry]:
        """Return the entries of a journal; empty if there is no file; an incomplete last line is ignored.

        Raises BadInput if the file is not a journal of this kind, or belongs to another run, unless `anew` is set: then
        another run's entries are ignored.
        """
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return Kept()
        except OSError as error:
            raise BadInput(path, error.strerror or str(error), "choose another --out") from None
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        if not lines:
            return Kept()
        if odd := self._differences(path, lines[0], identity):
            if anew:
                return Kept()
            raise BadInput(
                path, f"belongs to a killed {self.run} with another {', '.join(odd)}", "delete it to measure again"
            )
        decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(self.entry)
        entries = tuple(_decoded(path, number, line, decoder) for number, line in enumerate(lines[1:], start=2))
        return Kept(entries, sum(map(len, lines)))

    def header(self, identity: Identity) -> bytes:
        """Return the header line of a journal."""
        return canonical_json(_Header(format=self.format, version=_VERSION, identity=identity)) + b"\n"

    def _differences(self, path: Path, line: bytes, identity: Identity) -> list[str]:
        decoder = msgspec.json.Decoder(_Header[self.identity])  # type: ignore[name-defined]
        header: _Header[Identity] = _decoded(path, 1, line, decoder)
        if (header.format, header.version) != (self.format, _VERSION):
            raise BadInput(path, f"is not a journal of a {self.run} of this version", "delete it to measure again")
        names = self.identity.__struct_fields__
        return [name for name in names if getattr(header.identity, name) != getattr(identity, name)]


class Journal(Generic[Identity, Entry]):
    """The entries of a journal, the same on every rank; rank 0 also writes them to disk.

    `path` is None on the other ranks. With the first new entry, the file is created, or cut to the part that was
    readable.
    """

    def __init__(
        self, path: Path | None, kind: JournalKind[Identity, Entry], identity: Identity, kept: Kept[Entry]
    ) -> None:
        self._path, self._kind, self._identity = path, kind, identity
        self._good_bytes = kept.good_bytes
        self.kept_count = len(kept.entries)
        """Number of entries that a killed run left."""
        self.entries: dict[Hashable, Entry] = {kind.key(entry): entry for entry in kept.entries}

    def find(self, *key: Hashable) -> Entry | None:
        """Return the entry with this key; None if there is none."""
        return self.entries.get(key)

    def add(self, entries: Sequence[Entry]) -> bool:
        """Add entries and sync them to disk; return False if all of them were already recorded."""
        keyed = {self._kind.key(entry): entry for entry in entries}
        new = {key: entry for key, entry in keyed.items() if self.entries.get(key) != entry}
        self.entries.update(new)
        if new and self._path is not None:
            self._append(self._path, b"".join(canonical_json(entry) + b"\n" for entry in new.values()))
        return bool(new)

    def remove(self) -> None:
        """Remove the file, after its entries have been written elsewhere."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _append(self, path: Path, lines: bytes) -> None:
        if not self._good_bytes:
            lines = self._kind.header(self._identity) + lines
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


def journal_path(out: Path) -> Path:
    """Return the path of the journal of a run that writes `out`."""
    return out.with_name(f"{out.name}.journal")


def _decoded(path: Path, number: int, line: bytes, decoder: msgspec.json.Decoder[Decoded]) -> Decoded:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise BadInput(path, f"line {number} is not readable ({error})", "delete it to measure again") from None
