"""The load of experts under expert parallelism: as logged by a run, or a stated ratio."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shardwright.io import BadInput, read_document
from shardwright.plan.expert_placement import imbalances, load_misfit
from shardwright.types import MAX_DEVICES, ExpertLoad, Model


class LoadFile(NamedTuple):
    """A load of experts that a run logged, and its file."""

    path: Path
    load: ExpertLoad

    def imbalance(self, model: Model, type_name: str, ep_size: int) -> float:
        """Return the rows of the fullest of `ep_size` groups of experts over the mean group's."""
        return imbalances(self.load, model, ep_size)[type_name]

    def placed_imbalance(self, layer: int, groups: Sequence[Sequence[int]]) -> float:
        """Return the same of the given groups of one layer's experts; raise BadInput if no run logged that layer."""
        for one in self.load.layers:
            if one.layer == layer:
                return one.placed_imbalance(groups)
        problem = f"has no load of layer {layer}, whose experts the plan places"
        raise BadInput(self.path, problem, "give the load of a run that logged every layer")

    def check(self, model: Model) -> None:
        """Raise BadInput if the load belongs to other experts than a model's."""
        if (problem := load_misfit(self.load, model)) is not None:
            raise BadInput(self.path, f"does not fit: {problem}", "give the load of a run of this model")


class StatedLoad(NamedTuple):
    """A load of experts that is stated as one number for all layers."""

    ratio: float
    """Rows of the fullest group over the mean group's, from 1."""

    def imbalance(self, _model: Model, _type_name: str, ep_size: int) -> float:
        """Return the ratio, limited to `ep_size`, at which one group has all rows."""
        return min(self.ratio, float(ep_size))

    def placed_imbalance(self, _layer: int, groups: Sequence[Sequence[int]]) -> float:
        """Return the ratio, which holds for experts wherever they are."""
        return min(self.ratio, float(len(groups)))

    def check(self, _model: Model) -> None:
        """Accept any model: a ratio does not depend on it."""


Load = LoadFile | StatedLoad


def read_load(text: str) -> Load:
    """Return the load given by `--imbalance`; raise BadInput if it is neither a ratio nor a load file."""
    try:
        ratio = float(text)
    except ValueError:
        return LoadFile(Path(text), read_document(Path(text), ExpertLoad))
    if not 1 <= ratio <= MAX_DEVICES:
        remedy = f"give a ratio from 1 to {MAX_DEVICES}, or the load.json of a run"
        raise BadInput("--imbalance", f"{text} is not a ratio of the fullest rank's load to the mean", remedy)
    return StatedLoad(ratio)
