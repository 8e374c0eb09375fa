"""Values as YAML that people read and edit: blocks, with every text quoted as JSON or a literal block.

A text in double quotes of JSON means the same in YAML 1.1 and 1.2, but for characters beyond the printable ones, which
are escaped here as YAML has it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

Yaml = str | int | bool | None | Sequence["Yaml"] | Mapping[str, "Yaml"]

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
"""Words that YAML 1.1 takes for something else than a text."""


def yaml_text(value: Mapping[str, Yaml], *comments: str) -> str:
    """Return a document, below comments of one line each."""
    notes = (f"# {''.join(c if c.isprintable() else ' ' for c in comment)}" for comment in comments)
    return "\n".join((*notes, *_lines(value))) + "\n"


def _lines(value: Mapping[str, Yaml]) -> Iterator[str]:
    for key, each in value.items():
        is_plain = _PLAIN.fullmatch(key) and key.lower() not in _WORDS
        yield from _entry(f"{key if is_plain else _scalar(key)}:", each)


def _entry(lead: str, value: Yaml) -> Iterator[str]:
    if isinstance(value, str) and _is_block(value):
        yield f"{lead} |"
        yield from _indented(value[:-1].split("\n"))
    elif isinstance(value, Mapping) and value:
        yield lead
        yield from _indented(_lines(value))
    elif _is_list(value):
        yield lead
        yield from _items(value)
    else:
        yield f"{lead} {_scalar(value)}"


def _items(values: Sequence[Yaml]) -> Iterator[str]:
    """Yield the entries of a list; a nested entry's first line follows its dash."""
    for value in values:
        if (isinstance(value, Mapping) and value) or _is_list(value):
            first, *rest = _lines(value) if isinstance(value, Mapping) else _items(value)
            yield f"- {first}"
            yield from _indented(rest)
        else:
            yield from _entry("-", value)


def _is_list(value: Yaml) -> TypeGuard[Sequence[Yaml]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" if line else "" for line in lines)


def _is_block(text: str) -> bool:
    """Return whether a text is the same as a literal block: printable lines, of which the first is not indented."""
    lines = text.split("\n")
    return (
        len(lines) > 2
        and lines[-1] == ""
        and lines[-2] != ""
        and lines[0][:1] not in ("", " ")
        and all(line.isprintable() for line in lines)
    )


def _scalar(value: Yaml) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else _escaped(ord(c)) for c in quoted)


def _escaped(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
