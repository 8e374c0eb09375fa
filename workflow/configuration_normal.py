"""The canonical form of a configuration: equal meaning gives equal files and commands, so that nothing reruns.

Keys at their defaults are left out, keys are in the order of their type's fields, and lists whose order has no meaning
are sorted. The names of the folders of runs and data are derived from that form, and so are the paths of the loads of
experts that runs write there.
"""

import os
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from configuration_types import RANDOM, Configuration, Imbalance
from shardwright.io import BadInput, read_document, sha256_of_file, sha256_of_value
from shardwright.types import ExpertLoad

UNORDERED = frozenset(
    "blend chunks_per_stage context cp_sizes data_parallel disable ep_sizes etp_sizes expert_data_parallel frozen "
    "global_batch_size log_to memory_gib micro_batch_sizes num_microbatches offload optimizer pp_sizes recompute "
    "schedules sequence_lengths sequence_parallel shard_sizes stage_widths tp_consecutive tp_sizes".split()
)
"""Keys of lists and mappings whose order has no meaning. In other lists it has one, such as pictures on a page."""
_EXACT = 2**53
"""Bound below which each whole number is represented exactly both as an integer and as a float."""


def normal(config: Mapping[str, Any], settings: Configuration) -> dict[str, Any]:
    """Return a configuration in canonical form, except a model's overrides of its preset, which stay as written."""
    overrides = {
        name: {key: value for key, value in config["models"][name].items() if key not in model.__struct_fields__}
        for name, model in settings.models.items()
    }
    models = {name: said(model) | overrides[name] for name, model in settings.models.items()}
    return said(settings) | {"models": models}


def said(value: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a value that differ from their defaults, in canonical form."""
    defaults = _defaults(type(value))
    spelled = {name: _spelled(name, getattr(value, name)) for name in defaults}
    return {name: inside for name, inside in spelled.items() if inside != defaults[name]}


# Cached, as msgspec evaluates a type's annotations at each call: that took half of Snakemake's start.
@cache
def _defaults(kind: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the defaults of a type's fields, in canonical form."""
    return {each.name: _spelled(each.name, _default(each)) for each in msgspec.structs.fields(kind)}


def _default(field: msgspec.structs.FieldInfo) -> Any:  # noqa: ANN401 (of whatever type the field is)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _spelled(key: str, value: Any) -> Any:  # noqa: ANN401 (whatever a configuration may hold)
    if isinstance(value, msgspec.Struct):
        return said(value)
    if isinstance(value, Mapping):
        keys = sorted(value) if key in UNORDERED else value
        return {name: _spelled(name, value[name]) for name in keys}
    if isinstance(value, tuple | list):
        return [_spelled("", each) for each in (sorted(value, key=_rank) if key in UNORDERED else value)]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value


def _rank(value: Any) -> tuple[bool, Any]:  # noqa: ANN401 (a number, a text, a list of numbers, or none)
    """Return a sort key: numbers by size, texts alphabetically, enumeration members in order, null last."""
    return value is None, list(type(value)).index(value) if isinstance(value, Enum) else value


# Folders of runs and data: a name and a hash of the settings, so that changed settings get another folder.


BESIDE = frozenset(
    "allow_batch_change allow_length_change checkpoint_async checkpoint_every checkpoint_minutes data eval_every "
    "eval_samples export grace_s hang_timeout_s keep_best keep_checkpoints keep_every log_to max_restarts max_time_s "
    "on_node_loss search trial valid_data".split()
)
"""Keys of a run that are not hashed as they are: its steps do not depend on them, or the hash has another form."""
_DIGITS = 8


def folder_of_run(config: Configuration, run: str) -> str:
    """Return the name of a run's folders, such as `demo-1a2b3c4d`; it does not depend on the plan."""
    return _folder(run, identity_of_run(config, run))


def folder_of_data(config: Configuration, name: str) -> str:
    """Return the name of the folder of an entry of `data`, such as `stdlib-1a2b3c4d`."""
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
    """Return all on which a run's steps depend, except its plan: its settings, and how its data are made."""
    entry = config.runs[run]
    settings = {key: value for key, value in said(entry).items() if key not in BESIDE}
    return {"settings": settings, "data": _data(config, entry.data)}


def _data(config: Configuration, name: str) -> Any:  # noqa: ANN401 (JSON: a text, an entry, or a list of entries)
    """Return the settings by which data are made, without the names of entries and the number of processes."""
    if name == RANDOM:
        return RANDOM
    if (blend := config.data[name].blend) is not None:
        return [[_data(config, part), weight] for part, weight in blend.items()]
    return {key: value for key, value in said(config.data[name]).items() if key != "workers"}


def located(folder: Path, name: str) -> str:
    """Return a path; if it exists only next to the configuration, the path there."""
    beside = folder / name
    return os.path.relpath(beside) if not Path(name).exists() and beside.exists() else name


# The expert load of a search or a grid: a number, a file, or the load of a run of the configuration.


def runs_of(config: Configuration, imbalance: Imbalance | None) -> list[str]:
    """Return a list with the DONE.json of the run that logs a load; empty for other loads."""
    return [f"results/runs/{folder_of_run(config, str(imbalance))}/DONE.json"] if imbalance in config.runs else []


def load_options(config: Configuration, folder: Path, imbalance: Imbalance | None) -> list[str]:
    """Return the option that gives the load of experts to commands that price plans; empty for even load."""
    if imbalance is None:
        return []
    if imbalance in config.runs:
        return ["--imbalance", f"results/runs/{folder_of_run(config, str(imbalance))}/load.json"]
    return ["--imbalance", str(imbalance if isinstance(imbalance, float) else _load_file(folder, imbalance))]


def load_sha256(config: Configuration, folder: Path, imbalance: Imbalance | None) -> str:
    """Return the hash of a load file, so that searches rerun when it changes; empty for other loads."""
    if not isinstance(imbalance, str) or imbalance in config.runs:
        return ""
    return sha256_of_file(_load_file(folder, imbalance))


def check_load(config: Configuration, folder: Path, imbalance: Imbalance | None, where: str, file: str) -> None:
    """Raise BadInput if a string names neither a run nor a file with a load of experts."""
    if not isinstance(imbalance, str) or imbalance in config.runs:
        return
    if not (path := _load_file(folder, imbalance)).exists():
        problem = f"{where}: {imbalance!r} is neither a file nor a run"
        raise BadInput(file, problem, "name a run, the load.json of one, or a ratio from 1")
    read_document(path, ExpertLoad)


def _load_file(folder: Path, name: str) -> Path:
    return Path(located(folder, name))
