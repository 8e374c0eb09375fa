"""The expert load of a search or a grid: a number, a file, or the load of a run of the configuration."""

import os
from pathlib import Path

from configuration_types import Configuration, Imbalance
from result_folders import folder_of_run
from shardwright.io import BadInput, read_document, sha256_of_file
from shardwright.types import ExpertLoad


def runs_of(config: Configuration, imbalance: Imbalance | None) -> list[str]:
    """The file that shows that the run of a load is done, in a list that is empty for other loads."""
    return [f"results/runs/{folder_of_run(config, str(imbalance))}/DONE.json"] if imbalance in config.runs else []


def load_options(config: Configuration, folder: Path, imbalance: Imbalance | None) -> list[str]:
    """The load option of commands that price plans; empty at even load."""
    if imbalance is None:
        return []
    if imbalance in config.runs:
        return ["--imbalance", f"results/runs/{folder_of_run(config, str(imbalance))}/load.json"]
    return ["--imbalance", str(imbalance if isinstance(imbalance, float) else _located(folder, imbalance))]


def load_sha256(config: Configuration, folder: Path, imbalance: Imbalance | None) -> str:
    """Return the hash of a load file, so that searches rerun when it changes; empty for other loads."""
    if not isinstance(imbalance, str) or imbalance in config.runs:
        return ""
    return sha256_of_file(_located(folder, imbalance))


def check_load(config: Configuration, folder: Path, imbalance: Imbalance | None, where: str, file: str) -> None:
    """Raise BadInput if a text is neither the name of a run nor a file with a load of experts."""
    if not isinstance(imbalance, str) or imbalance in config.runs:
        return
    if not (path := _located(folder, imbalance)).exists():
        problem = f"{where}: {imbalance!r} is neither a file nor a run"
        raise BadInput(file, problem, "name a run, the load.json of one, or a ratio from 1")
    read_document(path, ExpertLoad)


def _located(folder: Path, name: str) -> Path:
    """Return the path of a file; if it does not exist, the one next to the configuration."""
    beside = folder / name
    return Path(os.path.relpath(beside)) if not Path(name).exists() and beside.exists() else Path(name)
