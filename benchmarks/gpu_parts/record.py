"""What is done so far: a file for each part, with what it was measured on."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpu_parts.setting import Setting, today

from shardwright_formats.io import write_bytes

Result = dict[str, Any]


def keep(setting: Setting, part: str, result: Result, seconds: float) -> None:
    """Write a part's result down, whole or not at all."""
    entry = {"identity": setting.identity(), "date": today(), "seconds": round(seconds, 1), "result": result}
    path = _file(setting, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, (json.dumps(entry, indent=1, allow_nan=False) + "\n").encode())


def kept(setting: Setting, part: str) -> Result | None:
    """What was written down, where it was found with the same device, versions and sources; else None."""
    path = _file(setting, part)
    if not path.is_file():
        return None
    entry: Result = json.loads(path.read_bytes())
    own = setting.identity()
    # A commit of other files alone changes no result; it is noted, not compared.
    same = all(entry["identity"].get(key) == value for key, value in own.items() if key != "commit")
    return entry if same else None


def together(setting: Setting, parts: Iterable[str]) -> Result:
    """Everything that is done, in the order of the parts."""
    done = {name: entry for name in parts if (entry := kept(setting, name)) is not None}
    dates = [entry["date"] for entry in done.values()]
    whole = {
        name: {"date": entry["date"], "seconds": entry["seconds"], "commit": entry["identity"]["commit"]}
        | {"result": entry["result"]}
        for name, entry in done.items()
    }
    return {**setting.identity(), "date": max(dates, default=today()), "parts": whole}


def _file(setting: Setting, part: str) -> Path:
    return setting.work / setting.slug / f"{part}.json"
