"""Parameters cut over a tensor-parallel axis, and the sums that join what is computed with them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwright_formats.types.strategy import SequenceParallel
from shardwright_train.parallel.collectives import copy_to_group, gather_sequence, scatter_sequence, sum_over_group
from shardwright_train.parallel.rng import Randomness

__all__ = ["TensorParallel", "change_parameters", "cut_parameter", "make_row_parallel"]


@dataclass(frozen=True)
class TensorParallel:
    """How the ranks that one sample is spread over share a layer.

    `axis` is the mesh axis that cuts parameters (of one rank under Ulysses), `sequence_axis` the one of tp_size ranks.
    `fused_loss` says that the head's cross entropy is flash-attn's.
    """

    axis: DeviceMesh
    sequence_axis: DeviceMesh
    sequence_parallel: SequenceParallel
    randomness: Randomness
    fused_loss: bool = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share the layer's matrices."""
        return self.axis.get_group()

    @property
    def size(self) -> int:
        """Number of ranks that share the layer's matrices."""
        return self.axis.size()

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.axis.get_local_rank()

    @property
    def splits_sequence(self) -> bool:
        """Whether each rank holds its own part of the sequence between the matrix products."""
        return self.sequence_parallel is SequenceParallel.MEGATRON

    @property
    def splits_everything(self) -> bool:
        """Whether each rank holds its own part of the sequence in the matrix products too (Ulysses)."""
        return self.sequence_parallel is SequenceParallel.ULYSSES

    def enter(self, x: Tensor) -> Tensor:
        """Before a column-parallel product: all positions, on every rank."""
        self.randomness.inside()
        return gather_sequence(x, self.group) if self.splits_sequence else copy_to_group(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """After a row-parallel product: the sum over the ranks, split again where the sequence is."""
        x = scatter_sequence(x, self.group) if self.splits_sequence else sum_over_group(x, self.group)
        self.randomness.outside()
        return x

    def positions(self, length: int) -> slice:
        """The positions, of `length` in all, that this rank holds between the matrix products."""
        if not (self.splits_sequence or self.splits_everything):
            return slice(0, length)
        share = length // self.sequence_axis.size()
        first = self.sequence_axis.get_local_rank() * share
        return slice(first, first + share)

    def positions_inside(self, length: int) -> slice:
        """The positions that this rank works on in the matrix products: all of them, but under Ulysses."""
        return self.positions(length) if self.splits_everything else slice(0, length)

    @property
    def sums_outside(self) -> bool:
        """Whether the gradient of a whole parameter that is used outside the products is a sum over the ranks."""
        return self.splits_sequence and self.size > 1


def cut_parameter(whole: Tensor, tp_dim: int | None, size: int) -> nn.Parameter:
    """Room for one rank's share of a parameter: of `tp_dim`, or all of it.

    A length that the number of ranks does not divide is padded; what is in the padding is nowhere used.
    """
    shape = list(whole.shape)
    if tp_dim is not None:
        shape[tp_dim] = -(-shape[tp_dim] // size)
    return nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=whole.device))


def change_parameters(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Make a module compute with its own (not its children's) parameters as `change` makes them, given the name."""
    stock = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        stored = dict(module._parameters)
        try:
            for name, parameter in stored.items():
                if parameter is not None:
                    module._parameters[name] = change(name, parameter)  # type: ignore[assignment]
            return stock(*args, **kwargs)
        finally:
            module._parameters.update(stored)

    module.forward = forward


def make_row_parallel(module: nn.Module, tensor_parallel: TensorParallel) -> None:
    """Make a matrix product compute its share of a sum over the group; its bias is added by the first rank alone."""
    keep = float(tensor_parallel.rank == 0)

    if tensor_parallel.size > 1:
        change_parameters(module, lambda name, local: local * keep if name == "bias" else local)
    product = module.forward
    module.forward = lambda *args, **kwargs: tensor_parallel.leave(product(*args, **kwargs))
