"""The low-rank matrices of a checkpoint as a folder that peft opens: adapter_config.json and safetensors."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec import UNSET
from safetensors.torch import save_file

from shardwright_formats.io import sync_path
from shardwright_formats.types import LOW_RANK, Model
from shardwright_models.low_rank import ADAPTER_CONFIG, adapter_config
from shardwright_train.checkpoints.tensors import read_tensors, saved_dtypes
from shardwright_train.models.base import Family
from shardwright_train.parallel.data import torch_dtype

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What peft puts before the stock model's names of modules."""


def write_adapter(folder: Path, checkpoint: Path, model: Model, family: Family, dtype: str | None) -> None:
    """Write the low-rank matrices of a checkpoint into a folder, in a format or as they were saved."""
    assert model.low_rank is not UNSET
    config = adapter_config(model.low_rank)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    saved = saved_dtypes(checkpoint)
    tensors = {
        name: torch.empty(shape, dtype=saved[name] if dtype is None else torch_dtype(dtype))
        for name, shape in _matrices(model, family)
    }
    read_tensors(checkpoint, dict(tensors))
    save_file({f"{_PREFIX}{name}": x for name, x in tensors.items()}, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    shutil.copymode(folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS)  # safetensors leaves it to its owner alone
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        sync_path(folder / name)


def _matrices(model: Model, family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of all low-rank matrices."""
    for number, kind in enumerate(model.layers):
        for parameter in model.types[kind].parameters:
            if LOW_RANK in parameter.name:
                yield family.full_name(model, f"layers[{number}]", parameter.name), parameter.shape
