"""A made-up family: two types of block in one list, of which one has a second parameter group and an auxiliary loss.

Inside `registered` it is known, as `twofold`, with its facts, its runtime and its stock model.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from msgspec.structs import replace
from tiny_models import CONFIGS
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from shardwright.models.families.llama import LLAMA
from shardwright.models.parameters import Parameters, linear
from shardwright.models.registry import FAMILIES
from shardwright.models.traits import BLOCK, Config, Stack
from shardwright.types import DataParallel, Parameter, SequenceParallel, Strategy
from shardwright_train.data.share import Batch
from shardwright_train.models.llama import Llama
from shardwright_train.models.stock import States, WithLoss
from shardwright_train.parallel.sharding_rules import INSIDE, Rule
from shardwright_train.parallel.tensor import TensorParallel

NAME, DENSE, SPARSE = "twofold", "dense", "sparse"
_STRENGTH = 0.05
_OTHER = {
    DataParallel.DDP: DataParallel.ZERO3,
    DataParallel.ZERO2: DataParallel.DDP,
    DataParallel.ZERO3: DataParallel.ZERO2,
}


class TwofoldConfig(LlamaConfig):
    model_type = NAME
    mlp_layer_types: list[str] | None = None


class Extra(nn.Module):
    """The second group: matrices that are parameters of this very module, and a norm."""

    def __init__(self, config: TwofoldConfig) -> None:
        super().__init__()
        shape = config.intermediate_size, config.hidden_size
        self.up, self.down = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape[::-1]))
        # Llama's would round the gradient to float32, of which each rank has a part.
        self.norm = nn.RMSNorm(config.hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = nn.functional.silu(nn.functional.linear(self.norm(hidden_states), self.up))
        return nn.functional.linear(rows, self.down)


class Sparse(LlamaDecoderLayer):
    """A block that first adds what a second group computes, and says how large the gates are."""

    def __init__(self, config: TwofoldConfig, index: int) -> None:
        super().__init__(config, index)
        self.gate, self.extra = nn.Linear(config.hidden_size, 1, bias=False), Extra(config)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        gate = self.gate(hidden_states)
        self.auxiliary = _STRENGTH * (gate - 1).square().sum()
        return super().forward(hidden_states + gate.sigmoid() * self.extra(hidden_states), *args, **kwargs)


class TwofoldModel(LlamaModel):
    config_class = TwofoldConfig

    def __init__(self, config: TwofoldConfig) -> None:
        super().__init__(config)
        blocks = {DENSE: LlamaDecoderLayer, SPARSE: Sparse}
        self.layers = nn.ModuleList(blocks[kind](config, i) for i, kind in enumerate(config.mlp_layer_types or ()))
        self.post_init()


class TwofoldForCausalLM(LlamaForCausalLM):
    config_class = TwofoldConfig

    def __init__(self, config: TwofoldConfig) -> None:
        super().__init__(config)
        self.model = TwofoldModel(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, Extra):
            for parameter in (module.up, module.down):
                nn.init.normal_(parameter, 0.0, self.config.initializer_range)


_PARTS = {DENSE: Llama.parts[BLOCK], SPARSE: Llama.parts[BLOCK]._replace(mlp=("mlp", "extra"))}


class Twofold(Llama):
    """Llama's rules, and those of the second group, which other ranks share."""

    parts = _PARTS
    plan = Llama.plan | {"extra.up": Rule("cut", dim=0), "extra.down": Rule("cut", dim=1), "extra.norm": INSIDE}
    auxiliary_loss = True

    def units(self, kind: str, strategy: Strategy) -> dict[str, Strategy]:
        if kind != SPARSE:
            return {}
        width = strategy.tp_size * strategy.dp_size
        nested = strategy.tp_size == 1 and strategy.data_parallel is DataParallel.ZERO3
        if strategy.tp_size > 1 and strategy.sequence_parallel is SequenceParallel.NONE:
            tp_size, split = strategy.tp_size, SequenceParallel.NONE  # whose ranks have the same positions
        elif strategy.tp_size == 1:
            tp_size, split = min(2, width), SequenceParallel.MEGATRON
        else:
            tp_size = 1 if strategy.sequence_parallel is SequenceParallel.MEGATRON else width
            split = SequenceParallel.MEGATRON
        unit = Strategy(
            tp_size=tp_size,
            dp_size=width // tp_size,
            tp_consecutive=strategy.tp_consecutive if split is SequenceParallel.NONE else not strategy.tp_consecutive,
            data_parallel=strategy.data_parallel if nested else _OTHER[strategy.data_parallel],
            sequence_parallel=split,
        )
        return {"extra": unit}

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        block = super().block(stock, kind, index)
        if kind == SPARSE:
            block.register_forward_hook(lambda module, _, output: (output, module.auxiliary))
        return block

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States | WithLoss:
        (output,) = super().call(block, states, batch, constants)
        return WithLoss((output[0],), output[1]) if isinstance(output, tuple) else (output,)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        super().after_split(block, config, tensor_parallel)
        extra: Any = getattr(block, "extra", None)
        if extra is not None:
            split = extra.forward
            extra.forward = lambda *args, **kwargs: extra.tensor_parallel.leave(split(*args, **kwargs))


def _parameters(layer: str, config: Config) -> Parameters:
    yield from LLAMA.parameters(layer, config)
    if layer == SPARSE:
        shape = config["intermediate_size"], config["hidden_size"]
        yield from linear("gate", 1, shape[1])
        yield Parameter(name="extra.up", shape=shape, tp_dim=0)
        yield Parameter(name="extra.down", shape=shape[::-1], tp_dim=1)
        yield Parameter(name="extra.norm.weight", shape=shape[1:], inside=True)


FACTS = replace(
    LLAMA,
    model_type=NAME,
    stock=LLAMA.stock._replace(name=TwofoldForCausalLM.__name__),
    runtime=f"{NAME}:Twofold",
    parameters=_parameters,
    stacks=(Stack(types=(DENSE, SPARSE), typed_by="mlp_layer_types"),),
)
CONFIG = CONFIGS["llama"] | {"model_type": NAME, "mlp_layer_types": [DENSE, SPARSE, SPARSE, DENSE]}

runtime, stock = (
    ModuleType(f"shardwright_train.models.{NAME}"),
    ModuleType(f"transformers.models.{NAME}.modeling_{NAME}"),
)
runtime.Twofold = Twofold  # type: ignore[attr-defined]
stock.TwofoldForCausalLM = TwofoldForCausalLM  # type: ignore[attr-defined]
sys.modules |= {runtime.__name__: runtime, stock.__name__: stock}
AutoConfig.register(NAME, TwofoldConfig)
AutoModelForCausalLM.register(TwofoldConfig, TwofoldForCausalLM)


@contextmanager
def registered() -> Iterator[None]:
    """The family is among the others inside: tests of all families know nothing of it."""
    with patch.dict(FAMILIES, {NAME: FACTS}), patch.dict(CONFIGS, {NAME: CONFIG}):
        yield
