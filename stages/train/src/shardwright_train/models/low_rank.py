"""Layers of a described model with their low-rank matrices (LoRA): added to stock modules, and initial weights."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from msgspec import UNSET
from torch import nn

from shardwright_formats.types import LOW_RANK, Model
from shardwright_train.models.initial_weights import Constant, Distribution, Filling, Uniform
from shardwright_train.parallel.low_rank import add_low_rank


def with_low_rank(module: nn.Module, model: Model, layer: str) -> nn.Module:
    """Return a layer's stock module with the low-rank matrices that the model says, on the meta device.

    Raises ValueError, naming the module, where one cannot have them.
    """
    if model.low_rank is not UNSET:
        with torch.device("meta"):
            add_low_rank(module, {p.name: p for p in model.type_of(layer).parameters}, model.low_rank.scaling)
    return module


def low_rank_fillings(module: nn.Module, model: Model) -> Mapping[str, tuple[Filling, ...]]:
    """Return how peft fills low-rank matrices, by their names in a layer's module.

    A has what a Linear of torch has, uniform in +-1/sqrt(inputs) (He et al. 2015, with a = sqrt(5)). B is zeros.
    """
    return {
        name: (Filling(_distribution(name, parameter.shape[1], model), None),)
        for name, parameter in module.named_parameters()
        if LOW_RANK in name
    }


def _distribution(name: str, inputs: int, model: Model) -> Distribution:
    assert model.low_rank is not UNSET
    if model.low_rank.starts_at_zero and f"{LOW_RANK}B." in name:
        return Constant(0.0)
    return Uniform(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs))


def check_low_rank(family: Any, model: Model) -> None:
    """Raise ValueError where a stock module that is to have low-rank matrices has another form, or is a part of one."""
    for layer in _first_layers(model):
        with torch.device("meta"):
            module = family.build(model, layer)
        for name in (name for name, _ in module.named_parameters() if LOW_RANK in name):
            matrix = f"{family.full_name(model, layer, name.partition(LOW_RANK)[0])}.weight"
            if (stored := family.file_name(matrix)[0]) != matrix:
                raise ValueError(f"target_modules: {matrix} is a part of {stored}, which has one pair in peft's files")


def _first_layers(model: Model) -> Iterable[str]:
    """Return the names of the first block of each type."""
    return (f"layers[{model.layers.index(kind)}]" for kind in dict.fromkeys(model.layers))
