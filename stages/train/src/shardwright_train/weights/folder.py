"""A folder of config.json and safetensors as the Hub has them: read as data, and never beyond the folder."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from shardwright_formats.io import BadInput, check_regular, read_object, system_fault

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")
_MAX_FILE = 2**60
_SHOWN = 8
_AGAIN = "fetch the folder again"


class Stored(NamedTuple):
    """A tensor of a file, as the file's header says; `dtype` in the words of safetensors, such as BF16."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder; raise BadInput where it is missing or names code to run."""
    if not folder.is_dir():
        raise BadInput(folder, "is no folder", "name one with config.json and safetensors files")
    file = inside(folder, CONFIG)
    config = read_object(file)
    refuse_code(file, config)
    return config


def refuse_code(file: Path, content: Mapping[str, Any]) -> None:
    """Raise BadInput where a configuration of the Hub names code that comes with it."""
    if "auto_map" in content:
        what = "auto_map names code that comes with the folder, which is not run here"
        raise BadInput(file, what, "take a model that transformers knows itself")


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a folder by key, from one file or those that its index names, reading none.

    Raises BadInput naming the file that is missing, lies outside, is no whole safetensors file, or lacks a key.
    """
    if (folder / SINGLE).exists():
        return _header(inside(folder, SINGLE))
    if not (folder / INDEX).exists():
        what = f"has neither {SINGLE} nor {INDEX}"
        raise BadInput(folder, what, "save the model with safetensors: pickled weights are not read")
    index = inside(folder, INDEX)
    named = _weight_map(index)
    headers = {name: _header(inside(folder, name)) for name in sorted(set(named.values()))}
    if absent := [key for key, name in named.items() if key not in headers[name]]:
        raise BadInput(index, f"says that {absent[0]} is in {named[absent[0]]}, which lacks it", _AGAIN)
    return {key: headers[name][key] for key, name in named.items()}


def inside(folder: Path, name: str) -> Path:
    """Return a file of a folder; raise BadInput where it is a link that leads elsewhere, or no regular file.

    The Hub's own cache may link to its blobs: `snapshots/REVISION/FILE` to `blobs/`, two folders up.
    """
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    file = folder / name
    try:
        found = file.resolve(strict=True)
    except (OSError, RuntimeError):
        raise BadInput(file, "is not there", _AGAIN) from None
    if found.parent not in (home, blobs):
        raise BadInput(file, "is a link that leads out of its folder", "put the file itself there")
    check_regular(found, _MAX_FILE)
    return file


def listed(names: Iterable[str]) -> str:
    """Return names in one line, only the first few of many."""
    every = sorted(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


def _weight_map(index: Path) -> dict[str, str]:
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise BadInput(index, "has no weight_map from tensors to files", _AGAIN)
    for key, name in found.items():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise BadInput(index, f"puts {key} in {name!r}, which is no safetensors file of its folder", _AGAIN)
    return found


def _header(file: Path) -> dict[str, Stored]:
    try:
        with safe_open(file, "numpy") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}
            return {key: Stored(file, key, tuple(x.get_shape()), x.get_dtype()) for key, x in slices.items()}
    except SafetensorError as error:
        raise BadInput(file, f"is no whole safetensors file ({error})", _AGAIN) from None
    except OSError as error:
        raise system_fault(error, file) from None
