"""Values of parameters as the runtime has them and as stock models do, which may stack some in one matrix."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwright_train.models.base import Family

__all__ = ["as_in_files", "as_in_runtime"]


def as_in_files(family: Family, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacked where the stock model has one matrix, by its names."""
    parts: dict[str, dict[int, Tensor]] = {}
    for name, x in values.items():
        file_name, place = family.file_name(name)
        parts.setdefault(file_name, {})[place] = x
    return {
        name: held[0] if len(held) == 1 else torch.cat([held[i] for i in range(len(held))])
        for name, held in parts.items()
    }


def as_in_runtime(
    family: Family, values: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Those of parameters of some shapes, by the runtime's names."""
    parts: dict[str, dict[int, str]] = {}
    for name in shapes:
        file_name, place = family.file_name(name)
        parts.setdefault(file_name, {})[place] = name
    taken: dict[str, Tensor] = {}
    for file_name, held in parts.items():
        names = [held[i] for i in range(len(held))]
        lengths = [shapes[name][0] for name in names]
        pieces = values[file_name].split(lengths) if len(names) > 1 else [values[file_name]]
        taken |= dict(zip(names, pieces, strict=True))
    return taken
