"""The low-rank matrices of a folder of peft (adapter_config.json and safetensors), read and written."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec import UNSET
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardwright.io import BadInput, sync_path
from shardwright.models.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter
from shardwright.models.low_rank import SECOND, adapter_config
from shardwright.plan.layout import Box
from shardwright.types import EMBEDDING, HEAD, LOW_RANK, Model, Parameter
from shardwright_train.checkpoints.tensors import read_tensors, saved_dtypes
from shardwright_train.models.base import Family
from shardwright_train.parallel.data import torch_dtype
from shardwright_train.weights.quantized import Stored
from shardwright_train.weights.stored import AGAIN, FLOATS, header

PREFIX = "base_model.model."
"""What peft puts before the stock model's names of modules."""
_REMEDY = "describe the model with --lora from this folder, and plan for that"


class AdapterTensor(NamedTuple):
    """A low-rank matrix in a file, and the parameter that it fills."""

    stored: Stored
    parameter: Parameter

    def read(self, window: Tensor, box: Box) -> None:
        """Fill a tensor with the part `box` of the parameter; raise BadInput if the file has changed since."""
        try:
            with safe_open(self.stored.file, "pt") as opened:
                values = from_file(opened.get_tensor(self.stored.key), self.parameter)
                window.copy_(values[tuple(slice(low, high) for low, high in box)])
        except (SafetensorError, OSError) as error:
            raise BadInput(self.stored.file, f"{self.stored.key} cannot be read ({error})", AGAIN) from None


def open_adapter(folder: Path, model: Model, family: Family) -> dict[str, AdapterTensor]:
    """Match the low-rank matrices of a folder with an adapted model's, by their full names.

    Raises BadInput in one line if they are others: by name, shape, format, scaling, or another file than the model
    was described with.
    """
    if model.low_rank is UNSET:
        raise BadInput(folder, "the plan's model has no low-rank matrices", _REMEDY)
    if not (file := folder / ADAPTER_WEIGHTS).is_file():
        raise BadInput(folder, f"has no {ADAPTER_WEIGHTS}", "pass a folder that peft or `convert` wrote")
    _check_configuration(folder, model)
    stored, found = header(file), dict[str, AdapterTensor]()
    for name, parameter in low_rank_parameters(model, family):
        if (tensor := stored.pop(f"{PREFIX}{name}", None)) is None:
            raise BadInput(file, f"{PREFIX}{name} is missing, but the plan's model trains it", _REMEDY)
        shape = tuple(as_in_file(torch.empty(parameter.shape, device="meta"), parameter).shape)
        if tensor.shape != shape or tensor.dtype not in FLOATS:
            held, wanted = f"{list(tensor.shape)} of {tensor.dtype}", f"{list(shape)} of {', '.join(FLOATS)}"
            raise BadInput(file, f"{tensor.key} is {held}, but the plan's model has {wanted}", _REMEDY)
        found[name] = AdapterTensor(tensor, parameter)
    others = [key for key in stored if not family.may_lack(model, key.removeprefix(PREFIX))]
    if others:
        raise BadInput(file, f"{others[0]} is not a parameter that the plan's model trains", _REMEDY)
    return found


def _check_configuration(folder: Path, model: Model) -> None:
    """Raise BadInput if an adapter's scaling or weights differ from those the model was described with."""
    (given, *_), file, wanted = *read_adapter(folder), model.low_rank
    assert wanted is not UNSET
    kept = {name: getattr(wanted, name) for name in ("targets", "starts_at_zero", "alphas")}
    if wanted.weights_sha256 not in (UNSET, given.weights_sha256):
        raise BadInput(folder / ADAPTER_WEIGHTS, "is not the adapter that the model was described with", _REMEDY)
    if replace(given, **kept, weights_sha256=wanted.weights_sha256) != wanted:
        raise BadInput(file, "r, lora_alpha or use_rslora differs from the plan's model", _REMEDY)


def low_rank_parameters(model: Model, family: Family) -> Iterator[tuple[str, Parameter]]:
    """Yield all low-rank matrices by their full names."""
    for layer in (EMBEDDING, *(f"layers[{number}]" for number in range(len(model.layers))), HEAD):
        for parameter in model.type_of(layer).parameters:
            if LOW_RANK in parameter.name:
                yield family.full_name(model, layer, parameter.name), parameter


def as_in_file(values: Tensor, parameter: Parameter) -> Tensor:
    """Return a low-rank matrix in peft's form: [rows, columns], with all experts' matrices in one.

    A of experts is [experts x rank, inputs], B is [outputs, rank x experts].
    """
    if parameter.ep_dim is not UNSET and parameter.name.endswith(SECOND):
        return values.flatten(1, -2).permute(1, 2, 0).flatten(1)
    return values.flatten(0, -2)


def from_file(values: Tensor, parameter: Parameter) -> Tensor:
    """A low-rank matrix of peft in the described shape."""
    if parameter.ep_dim is not UNSET and parameter.name.endswith(SECOND):
        experts, *_, rank = parameter.shape
        values = values.unflatten(1, (rank, experts)).permute(2, 0, 1)
    return values.reshape(parameter.shape)


def write_adapter(folder: Path, checkpoint: Path, model: Model, family: Family, dtype: str | None) -> None:
    """Write the low-rank matrices of a checkpoint into a folder, in a format or as they were saved."""
    config = adapter_config(model)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    saved, parameters = saved_dtypes(checkpoint), dict(low_rank_parameters(model, family))
    tensors = {
        name: torch.empty(parameter.shape, dtype=saved[name] if dtype is None else torch_dtype(dtype))
        for name, parameter in parameters.items()
    }
    read_tensors(checkpoint, dict(tensors))
    in_files = {f"{PREFIX}{name}": as_in_file(x, parameters[name]).contiguous() for name, x in tensors.items()}
    save_file(in_files, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    shutil.copymode(folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS)  # safetensors leaves it to its owner alone
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        sync_path(folder / name)
