"""Stock matrices with trained low-rank matrices beside them (LoRA, Hu et al. 2021), sharded or whole."""

from collections.abc import Iterator, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from shardwright_formats.types import LOW_RANK, Parameter
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.sharding_rules import INSIDE, Rule


class LowRankLinear(nn.Linear):
    """A matrix W with A and B beside it: y = W x + bias + scaling B A x.

    Its parameters are named as peft names them, but for W itself, which keeps its name in the stock model.
    """

    lora_A: nn.Linear
    lora_B: nn.Linear
    scaling: float
    recomputation: Recomputation | None = None
    """The selective recomputation of its layer, where it has one."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum of both products."""
        product = F.linear(input, self.weight, self.bias)
        added = self._added(input) if self.recomputation is None else self.recomputation.again(self._added, input)
        return product + added

    def _added(self, input: Tensor) -> Tensor:
        product: Tensor = self.lora_B(self.lora_A(input))
        return product * self.scaling


def add_low_rank(layer: nn.Module, parameters: Mapping[str, Parameter], scaling: float) -> None:
    """Give the matrices of a layer, on the default device, the low-rank matrices that are among its parameters.

    Raises ValueError, naming the module, where one is no Linear of torch.
    """
    for module_name, rank in _modules(parameters):
        linear = layer.get_submodule(module_name)
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"{module_name} is a {type(linear).__name__}, low-rank matrices stand beside a Linear alone"
            )
        linear.__class__ = LowRankLinear
        assert isinstance(linear, LowRankLinear)
        dtype = linear.weight.dtype
        linear.lora_A = nn.Linear(linear.in_features, rank, bias=False, dtype=dtype)
        linear.lora_B = nn.Linear(rank, linear.out_features, bias=False, dtype=dtype)
        linear.scaling = scaling


def low_rank_rules(parameters: Mapping[str, Parameter]) -> dict[str, Rule]:
    """Return the sharding rules of low-rank matrices by their names in a layer."""
    cut = {name: p for name, p in parameters.items() if LOW_RANK in name and (p.inside or p.tp_dim is not None)}
    return {name: INSIDE if p.inside else Rule("cut", dim=p.tp_dim) for name, p in cut.items()}


def _modules(parameters: Mapping[str, Parameter]) -> Iterator[tuple[str, int]]:
    """Yield the names of modules with low-rank matrices, with the rank."""
    for name, parameter in parameters.items():
        module, _, behind = name.partition(f"{LOW_RANK}A.")
        if behind == "weight":
            yield module, parameter.shape[0]
