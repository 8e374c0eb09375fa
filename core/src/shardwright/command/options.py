"""Options of a command: a struct whose fields define type, limits, default and meaning once."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from shardwright.io import BadInput, has_controls


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a command; its docstring is the command's help."""


class Off(NamedTuple):
    """A flag that switches a bool off, instead of `--no-x`."""

    flag: str


class _Positional(NamedTuple):
    """The type of `POSITIONAL`, which marks an argument without a name."""


POSITIONAL = _Positional()
"""Marks an argument that is given by its position, without a name."""


class Option(NamedTuple):
    """An option of the command line, made from a field of an options struct."""

    field: str
    spelling: str
    """The field's name, or its name on the command line if that differs."""
    type: Any
    """The option's type without None and limits; the type of one value if the option may be repeated."""
    metas: tuple[msgspec.Meta, ...]
    """The option's limits and description."""
    is_required: bool
    default: Any
    is_positional: bool
    repeats: bool
    off: str | None
    """The flag that switches a bool off."""
    description: str
    """Description that the option's type provides."""

    @property
    def name(self) -> str:
        """Return the option's name, as shown on the command line and in error messages."""
        return self.spelling.upper() if self.is_positional else f"--{self.spelling.replace('_', '-')}"

    @property
    def is_switch(self) -> bool:
        """Return whether the option is a switch, which takes no value."""
        return self.type is bool

    @property
    def is_written(self) -> bool:
        """Return whether the option names a file or folder that the command writes, judging by the option's name."""
        return (self.field in _WRITTEN or self.field.endswith("_out")) and not self.is_positional

    @property
    def placeholder(self) -> str:
        """Return the placeholder of the option's value in the help text."""
        return f"{{{','.join(self.choices)}}}" if self.choices else _PLACEHOLDERS.get(self.type, "TEXT")

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the accepted values if the option has a fixed set of them, else nothing."""
        if get_origin(self.type) is Literal:
            return tuple(map(str, get_args(self.type)))
        is_enum = isinstance(self.type, type) and issubclass(self.type, Enum)
        return tuple(str(member.value) for member in self.type) if is_enum else ()

    @property
    def limits(self) -> str:
        """Return the limits of a number in words; empty for other types."""
        return " and ".join(filter(None, _bounds(self.metas)))

    def value(self, text: str) -> object:
        """Convert a string to the option's value; raise BadInput, naming the option, if the string is invalid."""
        if not text or "\n" in text or has_controls(text):
            raise BadInput(self.name, f"{text!r} is empty, not UTF-8 or contains a control character", "give another")
        if self.type is Path:
            return self._path(Path(text))
        try:
            return msgspec.convert(text, Annotated[(self.type, *self.metas)] if self.metas else self.type, strict=False)
        except msgspec.ValidationError:
            among = ", ".join(self.choices)
            wanted = f"one of {among}" if among else f"{_NOUNS[self.type]} {self.limits}".rstrip()
            raise BadInput(self.name, f"{text!r} is out of range or not a value", f"give {wanted}") from None

    def _path(self, path: Path) -> Path:
        """Return a path with a name from which other file names can be made: for `.`, the folder's absolute path."""
        named = path if path.name else path.absolute()
        if not named.name:
            raise BadInput(self.name, f"{str(path)!r} has no name", "name a file or a folder in it")
        return named


_WRITTEN = frozenset(("certificate", "html", "out", "picture", "svg", "trace"))
"""Names of options for files that a command writes; positional arguments are files to read."""
_NOUNS = {int: "a whole number", float: "a number", str: "a text"}
_PLACEHOLDERS = {Path: "PATH", int: "INT", float: "NUMBER"}


def options_of(kind: type[Options]) -> Iterator[Option]:
    """Yield the options of a struct, in its order.

    Raises TypeError if a number has no limits, so that no command can accept a number without limits.
    """
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        bare, notes = _unwrapped(hints[field.name])
        repeats = get_origin(bare) is tuple
        if repeats:
            bare, inner = _unwrapped(get_args(bare)[0])
            notes += inner
        metas = tuple(note for note in notes if isinstance(note, msgspec.Meta))
        option = Option(
            field=field.name,
            spelling=field.encode_name,
            type=bare,
            metas=metas,
            is_required=field.required,
            default=None if field.required else field.default,
            is_positional=POSITIONAL in notes,
            repeats=repeats,
            off=next((note.flag for note in notes if isinstance(note, Off)), None),
            description=next((meta.description for meta in metas if meta.description), ""),
        )
        if bare in (int, float) and not all(_bounds(metas)):
            raise TypeError(f"{kind.__name__}.{field.name} has no limits: take a type of types.limits")
        yield option


def _unwrapped(hint: object) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without None, and its annotations; Annotated may be outside or inside of `| None`."""
    notes: tuple[Any, ...] = ()
    while True:
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            notes += tuple(more)
        elif get_origin(hint) in (Union, UnionType):
            (hint,) = (each for each in get_args(hint) if each is not NoneType)
        else:
            return hint, notes


def _bounds(metas: tuple[msgspec.Meta, ...]) -> tuple[str, str]:
    """Return the lower and the upper limit in words: the tightest of each, since a type may narrow another type."""
    lows = [(meta.ge, "at least") for meta in metas if meta.ge is not None]
    lows += [(meta.gt, "above") for meta in metas if meta.gt is not None]
    highs = [(meta.le, "at most") for meta in metas if meta.le is not None]
    highs += [(meta.lt, "below") for meta in metas if meta.lt is not None]
    return _worded(max(lows, default=None)), _worded(min(highs, default=None))


def _worded(bound: tuple[float, str] | None) -> str:
    return "" if bound is None else f"{bound[1]} {bound[0]:,.10g}"
