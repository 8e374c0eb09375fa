"""Options for which part of a model is trained."""

from pathlib import Path

from shardwright.estimate.runtimes import RuntimeOptions
from shardwright.models.adapter_config import read_adapter
from shardwright.models.frozen import FrozenPart, freeze
from shardwright.models.low_rank import adapt
from shardwright.types import Model


class TrainedParts(RuntimeOptions, frozen=True, kw_only=True):
    """The trained parts of a model: all of it, all but frozen parameters, or added low-rank matrices."""

    frozen: tuple[str, ...] = ()
    """Part that is not trained: embedding, head, layers, layers[2] or layers[0:8], and behind a dot which parameters,
    as in layers.mlp.*; may be repeated."""
    lora: Path | None = None
    """An adapter_config.json of peft, or its folder: the low-rank matrices that it names are trained, and no more."""

    def trained(self, model: Model) -> Model:
        """Return the description with these options applied; BadInput if they cannot be."""
        if self.frozen:
            model = freeze(model, tuple(map(FrozenPart.parse, self.frozen)))
        if self.lora is None:
            return model
        return adapt(model, *read_adapter(self.lora))
