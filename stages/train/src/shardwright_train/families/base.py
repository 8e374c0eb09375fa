"""What the runtime asks of a model family."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from shardwright_formats.model import Model
from shardwright_train.parallel.tensor_parallel import TensorParallel

__all__ = ["Family"]

TensorDims = Mapping[str, int | None]


class Family(Protocol):
    """One file per family: how stock modules are built, cut and called, under their Hugging Face names."""

    def describe(self, config: dict[str, Any], name: str, sequence_length: int) -> Model:
        """The model as the planner sees it, from its Hugging Face configuration alone.

        Raises ValueError saying what in the configuration cannot be trained.
        """

    def build(self, model: Model, element: str, attention: str) -> nn.Module:
        """The embedding (`embedding`), the head (`head`) or a block (`layers[i]`) with its initial weights."""

    def split(self, module: nn.Module, element: str, tp_dims: TensorDims, tensor_parallel: TensorParallel) -> None:
        """Cut an element's parameters over a tensor-parallel group and place its collectives."""

    def block_inputs(self, model: Model, x: Tensor) -> dict[str, Any]:
        """What every block gets besides the hidden states: as for whole sequences, in the dtype and device of `x`."""

    def full_name(self, element: str, parameter: str) -> str:
        """The Hugging Face name of an element's parameter."""
