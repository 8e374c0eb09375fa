"""Strict reading of YAML files, before anything is made of them.

The profile of the workflow calls `check_configurations` before Snakemake reads the files that it was told of.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from shardwright.io import BadInput, has_controls, read_bytes

_MAX_BYTES = 2**20
_MAX_SPELLED_OUT = 2**21
"""Maximum number of values and characters of a file once its aliases are expanded."""
_TEMPLATE = "__use_yte__"
"""Key by which Snakemake takes a configuration for a template, and runs the Python in it."""


def check_configurations(files: Sequence[Path]) -> None:
    """Raise BadInput for a file of `--configfile` that is not a configuration."""
    for path in files:
        if not path.exists():
            remedy = "check the path; write targets before --configfile, which takes all words after it for files"
            raise BadInput(path, "there is no such configuration file", remedy)
        if _TEMPLATE in read_yaml(path):
            raise BadInput(path, f"{_TEMPLATE}: a configuration is not a template", "leave the key out")


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file whose outermost value is a mapping; raises BadInput with the line."""
    try:
        loader = yaml.SafeLoader(read_bytes(path, _MAX_BYTES))
        node = loader.get_single_node()
        if _weight(node) > _MAX_SPELLED_OUT:
            raise BadInput(path, "its aliases stand for more than 2 MiB", "write it without aliases")
        if (repeated := _repeated(node)) is not None:
            problem = f"key {repeated.value!r} appears twice, again in line {repeated.start_mark.line + 1}"
            raise BadInput(path, problem, "remove one of the two")
        content = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise BadInput(path, f"not valid YAML{where} ({problem})", "correct the file") from None
    if not isinstance(content, dict):
        raise BadInput(path, "holds no keys", "see config/README.md")
    check_texts(content, str(path))
    return content


def check_texts(content: object, file: str) -> None:
    """Raise BadInput naming the place of a key that is not text, or of a text with control characters."""
    for place, key, text in _texts(content, ""):
        if key is not None and not isinstance(key, str):
            raise BadInput(file, f"{place}: the key {key} is not a text", f"quote it: '{key}'")
        if _is_odd(f"{key or ''}{text}"):
            raise BadInput(file, f"{place} contains a line break or another control character", "write it without")


def _is_odd(text: str) -> bool:
    return "\n" in text or "\t" in text or has_controls(text)


def _texts(value: object, place: str, key: object = None) -> Iterator[tuple[str, object, str]]:
    """Yield the place of each value, with its key in a mapping and its text."""
    yield place, key, value if isinstance(value, str) else ""
    if isinstance(value, dict):
        for inner, child in value.items():
            yield from _texts(child, f"{place}.{inner}".strip("."), inner)
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from _texts(child, f"{place}.{i}".strip("."))


def _repeated(node: yaml.Node | None) -> yaml.ScalarNode | None:
    """A key that occurs twice in its mapping, of which YAML's loader silently takes the last one.

    What a mapping takes from another by `<<` is no key of its own.
    """
    open_nodes = [node]
    while open_nodes:
        following, seen = open_nodes.pop(), set[tuple[str, str]]()
        if isinstance(following, yaml.SequenceNode):
            open_nodes += following.value
        elif isinstance(following, yaml.MappingNode):
            for key, value in following.value:
                open_nodes.append(value)
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in seen:
                        return key
                    seen.add((key.tag, key.value))
    return None


def _weight(node: yaml.Node | None) -> int:
    """The number of values and characters of a node, counted up to the limit, since a node may contain itself."""
    total, open_nodes = 0, [node]
    while open_nodes and total <= _MAX_SPELLED_OUT:
        following = open_nodes.pop()
        total += 1
        if isinstance(following, yaml.ScalarNode):
            total += len(following.value)
        elif isinstance(following, yaml.SequenceNode):
            open_nodes += following.value
        elif isinstance(following, yaml.MappingNode):
            open_nodes += [each for pair in following.value for each in pair]
    return total
