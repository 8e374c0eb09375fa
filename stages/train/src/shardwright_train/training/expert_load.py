"""load.json: the load of experts over the steps of a run, of which search and prediction take imbalance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from shardwright_formats.io import BadInput, read_document, write_document
from shardwright_formats.semantics.expert_load import expert_slices, load_misfit
from shardwright_formats.types import ExpertLoad, GroupLoad, LayerLoad, Model

LOAD = "load.json"


@dataclass
class LoadLog:
    """The mean load of a model's experts over the steps that are counted; steps follow one another."""

    model: Model
    first_step: int = 0
    last_step: int = 0
    _sums: Mapping[int, "_LayerSums"] = field(init=False)

    def __post_init__(self) -> None:
        self._slices = expert_slices(self.model)
        self._sums = {layer: _LayerSums.of_experts(part.stop - part.start) for layer, part in self._slices.items()}

    def resume(self, folders: Sequence[Path], step: int) -> None:
        """Go on from the first of some folders' load.json that ends with a step.

        Raises BadInput for a damaged one, and for one that another model or program wrote.
        """
        for file in (folder / LOAD for folder in folders):
            load = read_document(file, ExpertLoad) if self._sums and file.is_file() else None
            if load is not None and load.last_step == step:
                if (problem := self._misfit(load)) is not None:
                    raise BadInput(file, problem, "move it away: the load is then counted from here on")
                self.first_step, self.last_step = load.first_step, step
                for one in load.layers:
                    self._sums[one.layer].add_mean(one, step - load.first_step + 1)
                return

    def _misfit(self, load: ExpertLoad) -> str | None:
        """Return why sums cannot go on from a load, or None where they can."""
        if (problem := load_misfit(load, self.model)) is not None:
            return problem
        groups = {one.layer: {group.ep_size for group in one.groups} for one in load.layers}
        lacking = (layer for layer, sums in self._sums.items() if groups.get(layer) != set(sums.imbalance))
        return next((f"it lacks groups of layer {layer}, which a run logs" for layer in lacking), None)

    def add(self, step: int, assignments: Sequence[float]) -> None:
        """Count a step, by how often each expert of each layer with experts was chosen, in order."""
        if not assignments:
            return
        self.first_step, self.last_step = self.first_step or step, step
        counts = np.asarray(assignments)
        for layer, part in self._slices.items():
            self._sums[layer].add(counts[part])

    def write(self, folder: Path) -> None:
        """Write load.json into a folder, if steps are counted."""
        if self.last_step:
            layers = tuple(sums.mean(layer, self.last_step - self.first_step + 1) for layer, sums in self._sums.items())
            load = ExpertLoad(
                model=self.model.name, first_step=self.first_step, last_step=self.last_step, layers=layers
            )
            write_document(folder / LOAD, load)


@dataclass
class _LayerSums:
    """Sums over steps of the shares of a layer's experts, and of the imbalance of each number of groups."""

    shares: NDArray[np.float64]
    imbalance: dict[int, float]

    @classmethod
    def of_experts(cls, number: int) -> "_LayerSums":
        return cls(np.zeros(number), {size: 0.0 for size in range(2, number + 1) if number % size == 0})

    def add(self, counts: NDArray[np.float64]) -> None:
        shares = counts / counts.sum()
        self.shares += shares
        for size in self.imbalance:
            self.imbalance[size] += group_imbalance(shares, size)

    def add_mean(self, load: LayerLoad, steps: int) -> None:
        self.shares += np.asarray(load.shares) * steps
        for group in load.groups:
            self.imbalance[group.ep_size] += group.imbalance * steps

    def mean(self, layer: int, steps: int) -> LayerLoad:
        groups = (GroupLoad(ep_size=size, imbalance=total / steps) for size, total in self.imbalance.items())
        return LayerLoad(layer=layer, shares=tuple((self.shares / steps).tolist()), groups=tuple(groups))


def group_imbalance(shares: NDArray[np.float64], groups: int) -> float:
    """Return the load of the fullest of equal groups of neighbours over the mean group's."""
    return float(groups * shares.reshape(groups, -1).sum(1).max())


def expert_imbalance(model: Model, assignments: Sequence[float]) -> float | UnsetType:
    """Return the load of the fullest expert over the mean one's, the mean over layers; UNSET without experts."""
    counts = np.asarray(assignments)
    parts = [counts[part] for part in expert_slices(model).values()] if assignments else []
    return float(np.mean([part.max() / part.mean() for part in parts])) if parts else UNSET
