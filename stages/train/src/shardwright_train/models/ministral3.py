"""Ministral 3 (Mistral AI 2025), its language model."""

from functools import partial
from typing import Any

from torch import Tensor

from shardwright_formats.types import Model
from shardwright_train.data.share import POSITIONS, Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.llama import Llama
from shardwright_train.models.masks import Places


class Ministral3(Llama):
    """Llama whose stock blocks scale queries by their positions in a sample."""

    def constants(self, model: Model, kind: str, places: Places, example: Tensor, *others: Any) -> dict[str, Any]:
        """Return those of all families, and the positions [1, s] that this rank computes."""
        constants = super().constants(model, kind, places, example, *others)
        constants["arguments"]["position_ids"] = places.positions(example.device)[places.computed][None]
        return constants

    def call(self, block: Any, states: States, batch: Batch, constants: dict[str, Any]) -> Any:
        """Run a block with the positions in their documents, where a batch has them."""
        if POSITIONS in batch:
            block = partial(block, position_ids=batch[POSITIONS][:, constants["places"].computed])
        return super().call(block, states, batch, constants)
