"""T5 (Raffel et al. 2020): an encoder, and a decoder whose blocks also attend to what the encoder made."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.models.t5 import modeling_t5 as t5

from shardwright_formats.types.model import EMBEDDING, HEAD, BoundaryTensor, Model, Region
from shardwright_formats.types.plan import Attention
from shardwright_train.models.base import Batch, Family, States, heads_of
from shardwright_train.models.causal import NextTokenHead, causal_mask
from shardwright_train.parallel.sharding_rules import COLUMN, ROW, VOCABULARY, Parts
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.parallel.vocab import token_embedding

__all__ = ["FAMILIES", "T5"]

_ENCODER, _DECODER = "encoder", "decoder"
_STATES = {_ENCODER: "encoder_states", _DECODER: "decoder_states"}
_BIAS = "relative_attention_bias.weight"
_NORM = "final_layer_norm.weight"


class _Embedding(nn.Module):
    """Tokens [b, s] of the encoder and of the decoder to the states of both, by one table."""

    tensor_parallel: TensorParallel

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, batch: Batch) -> States:
        tokens = (batch["tokens"], batch["decoder_tokens"])
        return tuple(self.dropout(token_embedding(self.shared, x, self.tensor_parallel)) for x in tokens)


class _FinalNorm(t5.T5LayerNorm):
    """The norm behind a stack, and what follows it there."""

    def __init__(self, config: Any, scale: float = 1.0) -> None:
        super().__init__(config.d_model, eps=config.layer_norm_epsilon)  # type: ignore[no-untyped-call]
        self.dropout = nn.Dropout(config.dropout_rate)
        self.scale = scale

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed: Tensor = self.dropout(super().forward(hidden_states))  # type: ignore[no-untyped-call]
        return normed * self.scale


class _Block(t5.T5Block):  # type: ignore[no-untyped-call]
    """A stock block with copies of what the stock model has once in a stack.

    They are the position bias of the first block and, in the encoder, the norm behind the last, which alone applies it.
    """

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, has_relative_attention_bias=True, layer_idx=index)
        self.last = not config.is_decoder and index == config.num_layers - 1
        if not config.is_decoder:
            self.final_layer_norm = _FinalNorm(config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The states alone."""
        states, *_ = super().forward(*args, **kwargs)
        return self.final_layer_norm(states) if self.last else states


class _Head(NextTokenHead):
    """That of a language model, behind the decoder."""

    def forward(self, states: States, batch: Batch) -> Tensor:
        return super().forward(states[1:], batch)


class T5(Family):
    """Column-parallel q, k, v, wi and position bias; row-parallel o and wo; norms whole."""

    config_class = T5Config
    pretrained_class = t5.T5PreTrainedModel
    counts = ("num_layers", "num_decoder_layers")
    other_keys = ("decoder_start_token_id", "n_positions", "output_past")
    rules = {
        **dict.fromkeys(("q", "k", "v", "wi", "wi_0", "wi_1", "relative_attention_bias"), COLUMN),
        **dict.fromkeys(("o", "wo"), ROW),
        **dict.fromkeys(("shared", "lm_head"), VOCABULARY),
    }
    parts = {
        _ENCODER: Parts(
            enter=("layer.0.SelfAttention", "layer.1.DenseReluDense"),
            attention=("layer.0.SelfAttention",),
            mlp=("layer.1.DenseReluDense",),
        ),
        _DECODER: Parts(
            enter=("layer.0.SelfAttention", "layer.1.EncDecAttention", "layer.2.DenseReluDense"),
            attention=("layer.0.SelfAttention", "layer.1.EncDecAttention"),
            mlp=("layer.2.DenseReluDense",),
        ),
    }
    names = {
        EMBEDDING: {"shared": "shared"},
        _ENCODER: "encoder.block.{}.",
        _DECODER: "decoder.block.{}.",
        HEAD: {"norm": "decoder.final_layer_norm", "lm_head": "lm_head"},
    }
    tied = (("shared.weight", "lm_head.weight"),)
    divided = ("num_heads", "d_ff")
    divided_by_ulysses = {_ENCODER: ("num_heads",), _DECODER: ("num_heads",)}
    shared = (_BIAS, _NORM)
    kernels = (Attention.SDPA, Attention.EAGER)

    def check(self, config: Any, sequence_length: int) -> None:
        """Both stacks must be there; relative positions have no end."""
        if min(config.num_layers, config.num_decoder_layers) < 1:
            raise ValueError("num_layers and num_decoder_layers must be 1 or more")
        if _first_token(config) is None:
            raise ValueError("there is no pad_token_id for the decoder to start with")

    def make(self, kind: str, config: Any, index: int) -> nn.Module:
        """One token table for both stacks; blocks; the decoder's last norm and the vocabulary matrix."""
        if kind == EMBEDDING:
            return _Embedding(config)
        if kind == HEAD:
            return _Head(config, _FinalNorm(config, config.d_model**-0.5 if config.scale_decoder_outputs else 1.0))
        config = copy.deepcopy(config)
        config.is_decoder = kind == _DECODER
        return _Block(config, index)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Attention has this rank's heads; the bias is one of all positions, also where this rank holds but some."""
        for module in block.modules():
            if isinstance(module, t5.T5Attention):
                module.n_heads = config.num_heads // tensor_parallel.size
                if tensor_parallel.splits_everything:
                    module.compute_bias = _bias_of_whole_sequence(module, tensor_parallel)  # type: ignore[method-assign]

    def constants(self, config: Any, kind: str, positions: slice, example: Tensor, kernel: str) -> dict[str, Any]:
        """Which kernel attention uses."""
        return {"kernel": kernel}

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """One stack's states go through its block; the other's are handed on."""
        encoder_states, decoder_states = states
        if not block.is_decoder:
            return block(encoder_states), decoder_states
        mask = causal_mask(decoder_states, batch["tokens"], constants["kernel"])
        # Stock makes a bias of zeros for each pair of positions otherwise.
        unbiased = encoder_states.new_zeros(1, 1, 1, 1)
        decoder_states = block(
            decoder_states,
            attention_mask=mask,
            encoder_hidden_states=encoder_states,
            encoder_decoder_position_bias=unbiased,
        )
        return encoder_states, decoder_states

    def dropout(self, config: Any) -> float:
        """One rate for all."""
        rate: float = config.dropout_rate
        return rate

    def outputs(self, config: Any, sequence_length: int) -> tuple[BoundaryTensor, ...]:
        """The states of both stacks, everywhere."""
        return tuple(
            BoundaryTensor(name=name, sequence_length=sequence_length, features=config.d_model)
            for name in _STATES.values()
        )

    def attention_positions(self, kind: str, sequence_length: int) -> int:
        """A decoder block attends to the decoder's positions and to the encoder's."""
        return 2 * sequence_length if kind == _DECODER else sequence_length

    def regions(self, kind: str, config: Any) -> tuple[Region, ...]:
        """One look into the table for each stack; the decoder's second attention takes in both."""
        if kind == EMBEDDING:
            return tuple(Region(name="lookup", leaves=states) for states in _STATES.values())
        own = _STATES[_DECODER if kind == HEAD else kind]
        if kind == HEAD:
            return (Region(name="logits", enters=(own,)),)
        attended = (own,) if kind == _ENCODER else (own, _STATES[_ENCODER])
        replays: Any = self.replays_sum(config)
        attention = [
            Region(
                name="attention",
                enters=tuple(dict.fromkeys((own, keys))),
                leaves=own,
                attention=heads_of(config, own, keys),
                replays_sum=replays,
            )
            for keys in attended
        ]
        return (*attention, Region(name="mlp", enters=(own,), leaves=own, replays_sum=replays))

    def replays_sum(self, config: Any) -> tuple[str, ...]:
        """A block ends in a dropout, which keeps its mask."""
        return ("full",) if config.dropout_rate > 0 else ()

    def stream_tokens(self, sequence_length: int) -> int:
        """What the encoder reads and what the decoder predicts."""
        return 2 * sequence_length

    def batch(self, model: Model, samples: Tensor, generator: torch.Generator) -> Batch:
        """Prefix language modelling (Raffel et al. 2020, section 3.2.3): the encoder reads, the decoder goes on."""
        length = model.sequence_length
        labels = samples[:, length : 2 * length]
        start = torch.full_like(labels[:, :1], _first_token(self.configuration(model)))
        return {
            "tokens": samples[:, :length],
            "decoder_tokens": torch.cat((start, labels[:, :-1]), 1),
            "labels": labels,
        }

    def initialize(self, model: Model, module: nn.Module) -> None:
        """As stock, where the whole model's class gives the token table its weights."""
        super().initialize(model, module)
        if isinstance(module, _Embedding):
            nn.init.normal_(module.shared.weight, std=self.configuration(model).initializer_factor)

    def hugging_face_name(self, model: Model, layer: str, parameter: str) -> str:
        """The stock model has one bias in each stack, in its first block, and one norm behind the encoder."""
        name = self.full_name(model, layer, parameter)
        stack, block, _ = name.partition(".block.")
        if block and parameter.endswith(_BIAS):
            return f"{stack}.block.0.{parameter}"
        return f"{stack}.{parameter}" if block and parameter == _NORM else name


def _bias_of_whole_sequence(attention: Any, tensor_parallel: TensorParallel) -> Any:
    """What computes the position bias under Ulysses: [1, this rank's heads, s, s]."""
    stock, ranks = attention.compute_bias, tensor_parallel.sequence_axis.size()

    def compute_bias(query_length: int, key_length: int, **kwargs: Any) -> Tensor:
        bias: Tensor = stock(query_length * ranks, key_length * ranks, **kwargs)
        # The ranks share out the heads in the order in which they share out the positions.
        return bias[:, tensor_parallel.positions(bias.shape[1])]

    return compute_bias


def _first_token(config: Any) -> Any:
    """What the decoder starts with."""
    given = getattr(config, "decoder_start_token_id", None)
    return config.pad_token_id if given is None else given


FAMILIES = {"t5": T5()}
