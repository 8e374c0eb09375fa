"""Reading configuration files strictly: without control characters in any text."""

from pathlib import Path
from typing import Any

from shardwright.io import BadInput, has_controls, read_bytes
from strict_yaml import MAX_BYTES, Unusable, check_keys, mapping, texts


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file whose outermost value is a mapping; raises BadInput with the line."""
    try:
        content = mapping(read_bytes(path, MAX_BYTES), path)
    except Unusable as error:
        raise BadInput(*error.args) from None
    check_texts(content, str(path))
    return content


def check_texts(content: object, file: str) -> None:
    """Raise BadInput naming the place of a key that is not text, or of a text with control characters."""
    try:
        check_keys(content, file)
    except Unusable as error:
        raise BadInput(*error.args) from None
    for place, key, text in texts(content):
        if _is_odd(f"{key or ''}{text}"):
            raise BadInput(file, f"{place} contains a line break or another control character", "write it without")


def _is_odd(text: str) -> bool:
    return "\n" in text or "\t" in text or has_controls(text)
