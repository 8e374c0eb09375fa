"""The load of experts that a search or a grid says: a number, a file, or that of a run of the configuration."""

import os
from pathlib import Path

from configuration_types import Configuration, Imbalance
from shardwright_formats.io import BadInput, read_document, sha256_of_file
from shardwright_formats.types import ExpertLoad


def runs_of(config: Configuration, imbalance: Imbalance | None) -> list[str]:
    """Return the file that shows that the run of a load is done, in a list that is empty for other loads."""
    return [f"results/runs/{imbalance}/DONE.json"] if imbalance in config.runs else []


def load_options(config: Configuration, folder: Path, imbalance: Imbalance | None) -> list[str]:
    """Return the option of commands that price plans which says the load; none at even load."""
    if imbalance is None:
        return []
    if imbalance in config.runs:
        return ["--imbalance", f"results/runs/{imbalance}/load.json"]
    return ["--imbalance", str(imbalance if isinstance(imbalance, float) else _located(folder, imbalance))]


def load_sha256(config: Configuration, folder: Path, imbalance: Imbalance | None) -> str:
    """Return the hash of a file's load, so that another content reruns what rests on it; empty for other loads."""
    if not isinstance(imbalance, str) or imbalance in config.runs:
        return ""
    return sha256_of_file(_located(folder, imbalance))


def check_load(config: Configuration, folder: Path, imbalance: Imbalance | None, where: str, file: str) -> None:
    """Raise BadInput where a text is neither the name of a run nor a file with a load of experts."""
    if not isinstance(imbalance, str) or imbalance in config.runs:
        return
    if not (path := _located(folder, imbalance)).exists():
        problem = f"{where}: {imbalance!r} is neither a file nor under runs"
        raise BadInput(file, problem, "name a run, the load.json of one, or a ratio from 1")
    read_document(path, ExpertLoad)


def _located(folder: Path, name: str) -> Path:
    """Return the path of a file, which may stand beside the configuration where the working folder lacks it."""
    beside = folder / name
    return Path(os.path.relpath(beside)) if not Path(name).exists() and beside.exists() else Path(name)
