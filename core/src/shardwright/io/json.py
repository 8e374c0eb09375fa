"""Reading files strictly and writing them atomically."""

import hashlib
import json
import math
import os
import re
import socket
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple, TypeVar
from zlib import crc32

import msgspec

from shardwright.io.errors import WRITE_AGAIN, BadInput, has_controls, system_fault

OWNER = r"(?P<host>[0-9a-f]{8})-(?P<pid>[1-9][0-9]*)-(?P<start>[0-9]+)"
"""Pattern of the part of a file name that identifies the process which owns the file."""
_START = 19
"""Index of a process's start time in /proc/*/stat, counted after the process name (proc(5))."""


def this_process() -> str:
    """Return the unique name of this process: its host, its process id, and its start time."""
    return f"{_host()}-{os.getpid()}-{_start_of(os.getpid())}"


def is_gone(path: Path, host: str, pid: str, start: str) -> bool:
    """Return whether a path belongs to this user and was created by a process of this host that has ended.

    Processes of other hosts and containers, which may share the folder, cannot be checked: then it is False.
    """
    return host == _host() and start != _start_of(int(pid)) and os.lstat(path).st_uid == os.geteuid()


def _host() -> str:
    """Return a name of this host and of its PID namespace, as each container has a separate one."""
    place = f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return f"{crc32(place.encode()):08x}"


def _start_of(pid: int) -> str | None:
    """Return when a process started, in clock ticks since the machine booted; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[_START]
    except (FileNotFoundError, ProcessLookupError):
        return None


_MAX_JSON_BYTES = 256 * 1024 * 1024
_ENDING = ".tmp"
_OWNED = re.compile(rf"(?:{OWNER}|[0-9]+){re.escape(_ENDING)}")
"""The suffix of a temporary file's name; some versions wrote only the process number."""
_PRINTABLE = b"\n\r\t" + bytes(range(0x20, 0x7F))
_ESCAPES = (b"\\b", b"\\f", b"\\r", b"\\u", b'\\"')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_LARGE_EXPONENT = re.compile(rb"[eE]\+?\d{3}")
_DIGITS_AS_ZERO = bytes.maketrans(b"123456789", b"000000000")
_PLAIN_DEPTH = 100
"""Nesting depth that no file of Shardwright comes near, and that every reader supports."""
_UNKNOWN_KEY = re.compile("Object contains unknown field `(.*?)`")
_SEAL = "sha256"
"""Key of a sealed document's SHA-256, which is computed over all its other keys and values."""


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of frozen values in files; unknown keys are refused when a file is read."""


class Removed(NamedTuple):
    """A key that files of earlier versions may contain, and that is not read any more."""

    remedy: str
    ignored: tuple[object, ...] | None = (None,)
    """Values that are ignored because they never had an effect; None if every value is ignored."""


class Document(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value stored as a JSON file, headed by the keys `format` and `version`."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1
    SEALED: ClassVar[bool] = False
    """True if the file contains the SHA-256 of its content, so that a changed file is refused."""
    REMOVED: ClassVar[Mapping[str, Removed]] = {}


DocumentType = TypeVar("DocumentType", bound=Document)
Headed = TypeVar("Headed")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary file name next to `path`; on success it is synced and renamed, on failure removed.

    Folders that were created for it are removed on failure, too. Temporary files of `path` that processes left which
    have ended are removed. Raises BadInput if the file cannot be created, at once or while it is written.
    """
    temporary = _temporary(path)
    with _removed_on_failure(path.parent):
        with _faults_of(path):
            _make_room(path)
        with _unlinked(temporary), _faults_of(path):
            _remove_leftovers(path)
            yield temporary
            sync_path(temporary)
            os.replace(temporary, path)
            sync_path(path.parent)


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """On failure, remove a folder and its parents, as far as they did not exist before."""
    new = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        yield
    except BaseException:
        for each in new:
            with suppress(OSError):
                each.rmdir()
        raise


@contextmanager
def _unlinked(temporary: Path) -> Iterator[None]:
    """Remove a temporary file when the block ends, if it still exists."""
    try:
        yield
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise BadInput if a file cannot be written at `path`: a check before long work, which leaves no trace.

    Missing folders are created only for the check, inside a temporary folder that no other process uses.
    """
    there = next(each for each in (path.parent, *path.parents) if os.path.lexists(each))
    try:
        if there == path.parent:
            _make_room(path)
        else:
            with TemporaryDirectory(prefix=".", suffix=_ENDING, dir=there) as folder:
                _make_room(Path(folder) / path.relative_to(there))
    except OSError as error:
        raise system_fault(error, path) from None


def check_new(folder: Path) -> None:
    """Raise BadInput if a folder already contains files, which new files would join or replace."""
    if folder.is_dir() and any(folder.iterdir()):
        raise BadInput(folder, "is not empty", "choose a new folder, or remove what is in it")


def _make_room(path: Path) -> None:
    """Create the folder of a file; raise BadInput or OSError if the file cannot be created there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        raise BadInput(path, "is a folder" if path.is_dir() else "is not a regular file", "choose another name")
    _temporary(path).touch()
    _temporary(path).unlink()


def _temporary(path: Path) -> Path:
    """Return a temporary name that is short enough for any file system and unique for path and process."""
    return path.parent / f"{_beginning(path)}{this_process()}{_ENDING}"


def _beginning(path: Path) -> str:
    return f".{path.name[:40]}.{crc32(os.fsencode(path.name)):08x}."


def remove_temporaries(path: Path) -> None:
    """Remove all temporary files of `path` that this user's processes left, on any host.

    Only call it while holding a lock without which nobody writes the file.
    """
    for leftover, _ in _temporaries(path):
        if leftover.lstat().st_uid == os.geteuid():
            leftover.unlink()


def _remove_leftovers(path: Path) -> None:
    for leftover, process in _temporaries(path):
        with suppress(FileNotFoundError):  # another process may be removing it
            if process["host"] and is_gone(leftover, **process.groupdict()):
                leftover.unlink()


def _temporaries(path: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the temporary files of a path, each with the match of its owner."""
    beginning = _beginning(path)
    names = (name for name in os.listdir(path.parent) if name.startswith(beginning))
    pairs = ((path.parent / name, _OWNED.fullmatch(name.removeprefix(beginning))) for name in names)
    return [(leftover, process) for leftover, process in pairs if process is not None]


@contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Convert OS errors about a file that is being written into a BadInput; errors about other files pass through."""
    try:
        yield
    except OSError as error:
        involved = {path, _temporary(path), *path.parents}
        if error.filename is not None and Path(os.fsdecode(error.filename)) not in involved:
            raise
        raise system_fault(error, path) from None


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: completely, or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(msgspec.to_builtins(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256_of_value(value: object) -> str:
    """Return the hexadecimal SHA-256 of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_document(path: Path, document: Document) -> None:
    """Write a document as indented JSON, atomically; the same document gives the same bytes."""
    write_bytes(path, document_text(document).encode())


def document_text(document: Document) -> str:
    """Return a document as indented JSON."""
    content = {"format": document.FORMAT, "version": document.VERSION} | msgspec.to_builtins(document)
    if document.SEALED:
        content[_SEAL] = sha256_of_value(content)
    # `json` does not indent it, as that does without its compiled encoder: this takes a fifth of the time.
    text = json.dumps(content, allow_nan=False)
    return msgspec.json.format(text, indent=1) + "\n"


def read_document(path: Path, kind: type[DocumentType]) -> DocumentType:
    """Read one document of a known kind.

    Raises BadInput with the file, the path to the offending value and the remedy.
    """
    return read_any_document(path, kind)


def read_any_document(path: Path, *kinds: type[DocumentType]) -> DocumentType:
    """Read a document of one of several kinds, which its `format` key distinguishes."""
    raw = read_object(path)
    kind = checked_header(path, raw.get("format"), raw.get("version"), {k.FORMAT: k for k in kinds})
    if kind.SEALED and raw.pop(_SEAL, None) != sha256_of_value(raw):
        raise BadInput(path, "its SHA-256 does not match its content: it was changed", "use another copy")
    del raw["format"], raw["version"]
    try:
        return msgspec.convert(without_ignored(raw, kind.REMOVED), kind)
    except msgspec.ValidationError as error:
        usual = BadInput(path, str(error), f"correct the file or {WRITE_AGAIN}")
        raise removed_key(error, kind.REMOVED, path) or usual from None


def without_ignored(raw: Mapping[str, Any], removed: Mapping[str, Removed]) -> dict[str, Any]:
    """Return the keys and values of a document, except for removed keys whose value never had an effect."""

    def is_ignored(key: str) -> bool:
        return key in removed and ((ignored := removed[key].ignored) is None or raw[key] in ignored)

    return {key: value for key, value in raw.items() if not is_ignored(key)}


def removed_key(
    error: msgspec.ValidationError, removed: Mapping[str, Removed], file: object, place: str = ""
) -> BadInput | None:
    """Return the BadInput for a key that was removed from a format; None if the error is about something else."""
    unknown = _UNKNOWN_KEY.match(str(error))
    if unknown is None or unknown[1] not in removed:
        return None
    return BadInput(file, f"{place}{unknown[1]} was removed", removed[unknown[1]].remedy)


def checked_header(path: Path, format_name: object, version: object, kinds: Mapping[str, type[Headed]]) -> type[Headed]:
    """Return the type for a file's format; raise BadInput if no type of `kinds` has this format and version."""
    if not isinstance(format_name, str) or format_name not in kinds:
        raise BadInput(path, f"format is {format_name!r}, not {' or '.join(kinds)}", "pass a file of that format")
    known: int = kinds[format_name].VERSION  # type: ignore[attr-defined]
    if type(version) is not int or version != known:
        raise BadInput(
            path,
            f"version {version!r} of {format_name} is unknown here, only {known} is read",
            WRITE_AGAIN,
        )
    return kinds[format_name]


def check_regular(path: Path, max_bytes: int) -> None:
    """Raise BadInput unless a path is a regular file of at most `max_bytes` bytes."""
    try:
        entry = path.stat()
    except OSError as error:
        raise system_fault(error, path) from None
    if not stat.S_ISREG(entry.st_mode):
        problem = "is a folder" if stat.S_ISDIR(entry.st_mode) else "is not a regular file"
        raise BadInput(path, problem, "pass a file")
    if entry.st_size > max_bytes:
        raise BadInput(path, f"larger than {max_bytes >> 20} MiB", "pass a file of the right kind")


def read_bytes(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file; raise BadInput if it is not one, is too large, or is unreadable."""
    check_regular(path, max_bytes)
    try:
        return path.read_bytes()
    except OSError as error:
        raise system_fault(error, path) from None


NOT_FINITE = "__float__"
"""The key of an object that represents a number that is not finite."""


def read_object(
    path: Path, max_bytes: int = _MAX_JSON_BYTES, *, any_text: bool = False, tagged: bool = False
) -> dict[str, Any]:
    """Read a JSON object with any keys; BadInput if it is too large, not JSON, repeats a key or contains NaN.

    Strings may not contain control characters, because they are displayed, unless `any_text` is set: tokens may be any
    text. `tagged`: NaN and Infinity are accepted, and read as transformers writes them today, {"__float__":
    "Infinity"}.
    """
    return object_of(read_bytes(path, max_bytes), path, any_text=any_text, tagged=tagged)


def object_of(content: bytes | str, path: object, *, any_text: bool = False, tagged: bool = False) -> dict[str, Any]:
    """Return the JSON object of a file's content; raise BadInput as `read_object` does."""
    try:
        constant = (lambda name: {NOT_FINITE: name}) if tagged else None
        raw = json.loads(content, object_pairs_hook=_without_repeats, parse_constant=constant)
        odd = None if _is_plain(content) else first_odd(raw, _is_no_text if any_text else has_controls)
    except RecursionError:
        raise BadInput(path, "nested too deeply", WRITE_AGAIN) from None
    except ValueError as error:
        raise BadInput(path, f"not valid JSON ({error})", WRITE_AGAIN) from None
    if not isinstance(raw, dict):
        raise BadInput(path, "the outermost value is not an object", WRITE_AGAIN)
    if odd is not None:
        raise BadInput(path, odd, "measure or enter that value again")
    return raw


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {repeated!r} appears twice")
    return unique


def _is_plain(content: bytes | str) -> bool:
    """Return whether a JSON text's characters alone show that `first_odd` would find nothing, without deep nesting.

    Nearly all texts are plain, and examining each value takes ten times as long as parsing the text.
    """
    encoded = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    if encoded.translate(None, _PRINTABLE) or any(escape in encoded for escape in _ESCAPES):
        return False
    outside = b"".join(encoded.split(b'"')[::2])  # text outside of strings: no string contains a quote here
    depth = accumulate(1 if bracket in b"[{" else -1 for bracket in outside.translate(None, _NO_BRACKETS))
    return (
        max(depth, default=0) < _PLAIN_DEPTH
        and b"N" not in outside
        and b"I" not in outside
        and _LARGE_EXPONENT.search(outside) is None
        and b"0" * 200 not in outside.translate(_DIGITS_AS_ZERO)
    )


def first_odd(value: object, is_odd: Callable[[str], bool] = has_controls, where: str = "$") -> str | None:
    """Return the description and path of the first number that is not finite, or odd string or key, or None."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f"not a finite number at `{where}`"
    if isinstance(value, str):
        return f"a control character in the text at `{where}`" if is_odd(value) else None
    children: Iterator[tuple[str, object]] = iter(())
    if isinstance(value, dict):
        if any(map(is_odd, value)):
            return f"a control character in a key at `{where}`"
        children = ((f"{where}.{key}", child) for key, child in value.items())
    elif isinstance(value, list):
        children = ((f"{where}[{i}]", child) for i, child in enumerate(value))
    return next((odd for path, child in children if (odd := first_odd(child, is_odd, path)) is not None), None)


def _is_no_text(text: str) -> bool:
    """Return whether a string contains half of a surrogate pair, which JSON can express and UTF-8 cannot."""
    return not text.isascii() and any(0xD800 <= ord(character) < 0xE000 for character in text)


def sync_path(path: Path) -> None:
    """Sync a file, or a folder's entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
