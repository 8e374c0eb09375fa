"""Strict reading of YAML files, and a placeholder for an unread one, with Snakemake's own dependencies only.

The profile of the workflow calls `check_configurations` before Snakemake reads its configuration files. It may run in
any environment, so this module imports nothing of the product.
"""

import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

MAX_BYTES = 2**20
_MAX_SPELLED_OUT = 2**21
"""Maximum number of values and characters of a file after its aliases are expanded."""
_TEMPLATE = "__use_yte__"
"""Key that makes Snakemake treat a configuration as a template and run the Python in it."""


class Unusable(Exception):
    """A file that cannot be used: the file, what is wrong with it, and what to do."""

    def __init__(self, file: object, problem: str, remedy: str) -> None:
        super().__init__(str(file), problem, remedy)

    def __str__(self) -> str:
        """Return `FILE: problem: remedy` in one line."""
        return ": ".join("".join(c if c.isprintable() else "?" for c in " ".join(part.split())) for part in self.args)


def check_configurations(files: Sequence[Path]) -> None:
    """Exit with a message in one line and code 2 if a file of `--configfile` is not a configuration."""
    try:
        for path in files:
            _check(path)
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _check(path: Path) -> None:
    if not path.exists():
        remedy = "check the path; write targets before --configfile, which takes all words after it for files"
        raise Unusable(path, "there is no such configuration file", remedy)
    content = mapping(_content(path), path)
    if _TEMPLATE in content:
        raise Unusable(path, f"{_TEMPLATE}: a configuration is not a template", "leave the key out")
    check_keys(content, path)


def _content(path: Path) -> bytes:
    """Return the content of a regular file."""
    entry = path.stat()
    if not stat.S_ISREG(entry.st_mode):
        problem = "is a folder" if stat.S_ISDIR(entry.st_mode) else "is not a regular file"
        raise Unusable(path, problem, "pass a file")
    if entry.st_size > MAX_BYTES:
        raise Unusable(path, f"larger than {MAX_BYTES >> 20} MiB", "pass a file of the right kind")
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unusable(path, error.strerror or str(error), "check its permissions") from None


def mapping(text: bytes, path: Path) -> dict[Any, Any]:
    """Return the mapping in YAML text; raise Unusable naming the line of an error."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if _weight(node) > _MAX_SPELLED_OUT:
            raise Unusable(path, "its aliases expand to more than 2 MiB", "write it without aliases")
        if (repeated := _repeated(node)) is not None:
            problem = f"key {repeated.value!r} appears twice, again in line {repeated.start_mark.line + 1}"
            raise Unusable(path, problem, "remove one of the two")
        content = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise Unusable(path, f"not valid YAML{where} ({problem})", "correct the file") from None
    if not isinstance(content, dict):
        raise Unusable(path, "contains no keys", "see config/README.md")
    return content


def check_keys(content: object, file: object) -> None:
    """Raise Unusable naming the place of a key that is not text."""
    for place, key, _ in texts(content):
        if key is not None and not isinstance(key, str):
            raise Unusable(file, f"{place}: the key {key} is not a text", f"quote it: '{key}'")


def texts(value: object, place: str = "", key: object = None) -> Iterator[tuple[str, object, str]]:
    """Yield the place of each value, with its key in a mapping, and its text; empty if it is not text."""
    yield place, key, value if isinstance(value, str) else ""
    if isinstance(value, dict):
        for inner, child in value.items():
            yield from texts(child, f"{place}.{inner}".strip("."), inner)
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield from texts(child, f"{place}.{i}".strip("."))


def _repeated(node: yaml.Node | None) -> yaml.ScalarNode | None:
    """Return a key that occurs twice in its mapping, or None; YAML's loader would silently take the last one.

    Keys that a mapping takes from another by `<<` do not count.
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
    """Return the number of values and characters of a node, up to the limit, since a node may contain itself."""
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


# A placeholder configuration, to read the rules without planning jobs, as in `snakemake --lint`.


RUN_MIN = 1440
"""Minutes of a run's job if no node type sets runtime_min."""
_NOTHING = "(?!)"


def any_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches these names and nothing else."""
    return "|".join(map(re.escape, names)) or _NOTHING


class Unread:
    """A placeholder for a configuration and its files, without any entries."""

    settings = SimpleNamespace(
        searches={}, runs={}, pictures=(), rerun_on_upgrade=False, validate=SimpleNamespace(steps=0, warmup_steps=0)
    )

    def pattern(self, _kind: str = "") -> str:
        """Return a regular expression that matches nothing."""
        return _NOTHING

    analytic_models = analytic_clusters = data_pattern = pattern

    def names(self) -> tuple[str, ...]:
        """Return no names."""
        return ()

    configs = described = imported = measured_searches = profiled_pairs = resource_names = names


UNREAD = Unread()
