"""Llama (Touvron et al. 2023) on the stock modules of transformers."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from shardwright_formats.model import EMBEDDING, HEAD, BoundaryTensor, LayerType, Model, Parameter
from shardwright_train.families.base import TensorDims
from shardwright_train.parallel.tensor_parallel import (
    TensorParallel,
    compute_locally,
    local_tensor,
    make_row_parallel,
    shard_parameters,
)
from shardwright_train.parallel.vocabulary import sum_of_cross_entropy, vocabulary_embedding

__all__ = ["Llama"]

_Args = tuple[Any, ...]

_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW = ("o_proj", "down_proj")
_PREFIX = {
    EMBEDDING: {"embed_tokens": "model.embed_tokens"},
    HEAD: {"norm": "model.norm", "lm_head": "lm_head"},
}


class LlamaEmbedding(nn.Module):
    """Tokens [b, s] to hidden states, in the layout of the embedding's strategy."""

    tensor_parallel: TensorParallel

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up this rank's rows and sum over the group."""
        weight = local_tensor(self.embed_tokens.weight)
        return self.tensor_parallel.leave(vocabulary_embedding(tokens, weight, self.tensor_parallel.rank))


class LlamaHead(nn.Module):
    """Hidden states and labels [b, s] to the sum of cross entropy over the group's samples."""

    tensor_parallel: TensorParallel

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss, summed; the same on each rank of the group."""
        logits = self.lm_head(self.tensor_parallel.enter(self.norm(x)))
        return sum_of_cross_entropy(logits, labels, self.tensor_parallel.group)


class Llama:
    """The Llama family."""

    def describe(self, config: dict[str, Any], name: str, sequence_length: int) -> Model:
        """Read shapes off the stock modules on the meta device."""
        if unknown := sorted(set(config) - set(LlamaConfig().to_dict()) - {"model_type"}):
            raise ValueError(f"unknown key {unknown[0]!r} for a llama model")
        parsed = _parse(config)
        if sequence_length > parsed.max_position_embeddings:
            raise ValueError(f"sequence length {sequence_length} is over {parsed.max_position_embeddings} positions")
        with torch.device("meta"):
            modules = {
                EMBEDDING: LlamaEmbedding(parsed),
                "block": LlamaDecoderLayer(parsed, 0),
                HEAD: LlamaHead(parsed),
            }
        hidden = BoundaryTensor(name="hidden_states", sequence_length=sequence_length, features=parsed.hidden_size)
        vocabulary = {"vocab_size": parsed.vocab_size}
        heads = {
            "num_attention_heads": parsed.num_attention_heads,
            "num_key_value_heads": parsed.num_key_value_heads or parsed.num_attention_heads,
        }
        width = {"intermediate_size": parsed.intermediate_size}
        divisors: dict[str, dict[str, int]] = {
            EMBEDDING: vocabulary,
            "block": heads | width,
            HEAD: vocabulary,
        }
        return Model(
            name=name,
            family="llama",
            config={key: value for key, value in config.items() if key != "num_hidden_layers"},
            sequence_length=sequence_length,
            layers=("block",) * parsed.num_hidden_layers,
            types={
                kind: LayerType(
                    parameters=_parameters(self, kind, module),
                    forward_flops_per_sample=_forward_flops(kind, module, parsed, sequence_length),
                    tp_must_divide=divisors[kind],
                    ulysses_must_divide={"num_attention_heads": parsed.num_attention_heads} if kind == "block" else {},
                    outputs=() if kind == HEAD else (hidden,),
                )
                for kind, module in modules.items()
            },
            tied=(("model.embed_tokens.weight", "lm_head.weight"),) if parsed.tie_word_embeddings else (),
        )

    def build(self, model: Model, element: str, attention: str) -> nn.Module:
        """A stock block, or the embedding or head around stock modules, initialised as transformers does."""
        config = _parse(model.config)
        config._attn_implementation = attention
        if element == EMBEDDING:
            module: nn.Module = LlamaEmbedding(config)
        elif element == HEAD:
            module = LlamaHead(config)
        else:
            module = LlamaDecoderLayer(config, int(element[len("layers[") : -1]))
        initialise = LlamaPreTrainedModel(config)._init_weights
        with torch.no_grad():
            module.apply(initialise)
        return module

    def split(self, module: nn.Module, element: str, tp_dims: TensorDims, tensor_parallel: TensorParallel) -> None:
        """Column-parallel q, k, v, gate, up and vocabulary; row-parallel o and down; norms whole."""
        shard_parameters(module, tp_dims, tensor_parallel.axis)
        for name, child in module.named_modules():
            last = name.rpartition(".")[2]
            if isinstance(child, LlamaRMSNorm):
                compute_locally(child, {"weight": tensor_parallel.outside_gradient})
            elif last in _COLUMN or last == "lm_head":
                compute_locally(child)
            elif last in _ROW:
                assert isinstance(child, nn.Linear)
                make_row_parallel(child, tensor_parallel)
        if isinstance(module, LlamaDecoderLayer):
            _enter_before(module.self_attn, tensor_parallel)
            _enter_before(module.mlp, tensor_parallel)
        else:
            assert isinstance(module, LlamaEmbedding | LlamaHead)
            module.tensor_parallel = tensor_parallel

    def block_inputs(self, model: Model, x: Tensor) -> dict[str, Any]:
        """Rotary cosines and sines of all positions."""
        positions = torch.arange(model.sequence_length, device=x.device)[None]
        rotary = LlamaRotaryEmbedding(_parse(model.config)).to(x.device)
        return {"position_embeddings": rotary(x, positions)}

    def full_name(self, element: str, parameter: str) -> str:
        """`model.layers.3.mlp.up_proj.weight` and the like."""
        if element in _PREFIX:
            child, _, rest = parameter.partition(".")
            return f"{_PREFIX[element][child]}.{rest}"
        return f"model.layers.{element[len('layers[') : -1]}.{parameter}"


def _parse(config: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"})


def _enter_before(module: nn.Module, tensor_parallel: TensorParallel) -> None:
    def hook(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (tensor_parallel.enter(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": tensor_parallel.enter(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _parameters(family: Llama, kind: str, module: nn.Module) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(
            name=name if kind == "block" else family.full_name(kind, name),
            shape=tuple(parameter.shape),
            tp_dim=_tp_dim(name),
        )
        for name, parameter in module.named_parameters()
    )


def _tp_dim(name: str) -> int | None:
    owner, _, kind = name.rpartition(".")
    last = owner.rpartition(".")[2]
    if last in _COLUMN or last in ("embed_tokens", "lm_head"):
        return 0
    return 1 if last in _ROW and kind == "weight" else None


def _forward_flops(kind: str, module: nn.Module, config: LlamaConfig, length: int) -> int:
    """2 per weight of a matrix and token, and 4 s per hidden feature of the attention's query heads and token."""
    products = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
    width = config.num_attention_heads * (config.head_dim or 0) if kind == "block" else 0
    return (2 * products + 4 * length * width) * length
