"""Folders of runs and data: a name and a hash of the settings, so that changed settings get another folder."""

from typing import Any

from configuration_normal import said
from configuration_types import RANDOM, Configuration
from shardwright.io import sha256_of_value

BESIDE = frozenset(
    "allow_batch_change allow_length_change checkpoint_async checkpoint_every checkpoint_minutes data eval_every "
    "eval_samples export grace_s hang_timeout_s keep_best keep_checkpoints keep_every log_to max_restarts max_time_s "
    "on_node_loss search trial valid_data".split()
)
"""Keys of a run on which its steps do not depend, or that are in its hash in another form."""
_DIGITS = 8


def folder_of_run(config: Configuration, run: str) -> str:
    """Return the name of a run's folders, such as `demo-1a2b3c4d`; it does not depend on the plan."""
    return _folder(run, identity_of_run(config, run))


def folder_of_data(config: Configuration, name: str) -> str:
    """The name of the folder of an entry of `data`, such as `stdlib-1a2b3c4d`."""
    return _folder(name, _data(config, name))


def runs_by_folder(config: Configuration) -> dict[str, str]:
    """Return the names of the runs by folder."""
    return {folder_of_run(config, run): run for run in config.runs}


def data_by_folder(config: Configuration) -> dict[str, str]:
    """Return the names of the data by folder."""
    return {folder_of_data(config, name): name for name in config.data}


def files_of_run(config: Configuration, run: str) -> list[str]:
    """Return the files of a finished run: its result and, if it is exported, its model."""
    folder = f"results/runs/{folder_of_run(config, run)}"
    return [f"{folder}/DONE.json", *([f"{folder}/model"] if config.runs[run].export else [])]


def _folder(name: str, identity: object) -> str:
    return f"{name}-{sha256_of_value(identity)[:_DIGITS]}"


def identity_of_run(config: Configuration, run: str) -> dict[str, Any]:
    """Everything except its plan on which a run's steps depend: its settings, and how its data are made."""
    entry = config.runs[run]
    settings = {key: value for key, value in said(entry).items() if key not in BESIDE}
    return {"settings": settings, "data": _data(config, entry.data)}


def _data(config: Configuration, name: str) -> Any:  # noqa: ANN401 (JSON: a text, an entry, or a list of entries)
    """Return the settings from which data are made, without names and numbers of processes."""
    if name == RANDOM:
        return RANDOM
    if (blend := config.data[name].blend) is not None:
        return [[_data(config, part), weight] for part, weight in blend.items()]
    return {key: value for key, value in said(config.data[name]).items() if key != "workers"}
