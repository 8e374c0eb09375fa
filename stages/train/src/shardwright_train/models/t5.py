"""T5 (Raffel et al. 2020): an encoder, and a decoder whose blocks also attend to what the encoder made."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention, T5Block, T5LayerNorm

from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import Attention
from shardwright_train.data.objectives import Prefix
from shardwright_train.models.base import Batch, Family, States
from shardwright_train.models.masks import causal_mask
from shardwright_train.models.stock import Pieces
from shardwright_train.parallel.sharding_rules import Parts
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.parallel.vocab import token_embedding

__all__ = ["T5"]

_ENCODER, _DECODER = "encoder", "decoder"
_STATES = {_ENCODER: "encoder_states", _DECODER: "decoder_states"}
_BIAS, _NORM = "relative_attention_bias.weight", "final_layer_norm.weight"


class _Block(T5Block):  # type: ignore[no-untyped-call]
    """A stock block with replicas of what the stock model has once in a stack.

    They are the position bias of the first block and, in the encoder, the norm behind the last, which alone applies it.
    """

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, has_relative_attention_bias=True, layer_idx=index)
        self.last = not config.is_decoder and index == config.num_layers - 1
        if not config.is_decoder:
            self.final_layer_norm = T5LayerNorm(config.d_model, config.layer_norm_epsilon)  # type: ignore[no-untyped-call]
            self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The states alone."""
        states, *_ = super().forward(*args, **kwargs)
        return self.dropout(self.final_layer_norm(states)) if self.last else states


class T5(Family):
    """Column-parallel q, k, v, wi and position bias; row-parallel o and wo; norms replicated."""

    embedding = ("shared", "encoder.dropout")
    head = ("decoder.final_layer_norm", "decoder.dropout", "lm_head")
    parts = {
        _ENCODER: Parts(
            "encoder.block",
            attention=("layer.0.SelfAttention",),
            mlp=("layer.1.DenseReluDense",),
            counted_by="num_layers",
        ),
        _DECODER: Parts(
            "decoder.block",
            attention=("layer.0.SelfAttention", "layer.1.EncDecAttention"),
            mlp=("layer.2.DenseReluDense",),
            counted_by="num_decoder_layers",
        ),
    }
    plan = {
        "shared": "embedding_rowwise",
        **dict.fromkeys(("q", "k", "v", "wi", "wi_0", "wi_1", "relative_attention_bias"), "colwise"),
        **dict.fromkeys(("o", "wo"), "rowwise"),
        "lm_head": "colwise_gather_output",
    }
    states = (*_STATES.values(),)
    shared = (_BIAS, _NORM)
    objective = Prefix
    counted_per_rank = ("n_heads",)
    divided = ("num_heads", "d_ff")
    dropouts = ("dropout_rate",)
    own_keys = ("decoder_start_token_id", "n_positions")
    kernels = (Attention.SDPA, Attention.EAGER)

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """A block with the replicas."""
        with torch.device("meta"):
            return _Block(stock.get_submodule(kind).config, index)

    def keys(self, kind: str) -> tuple[str, ...]:
        """The decoder's second attention takes in the encoder's states."""
        return (_STATES[_ENCODER],) if kind == _ENCODER else (_STATES[_DECODER], _STATES[_ENCODER])

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """One table for the tokens of both stacks."""
        stock: Any = pieces
        tokens = (batch["tokens"], batch["decoder_tokens"])
        return tuple(stock.encoder.dropout(token_embedding(stock.shared, x, pieces.tensor_parallel)) for x in tokens)

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """What the decoder made, scaled where the stock model does."""
        stock: Any = pieces.decoder
        scale = pieces.config.d_model**-0.5 if pieces.config.scale_decoder_outputs else 1.0
        normed: Tensor = stock.dropout(stock.final_layer_norm(states[1]))
        return normed * scale

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """One stack's states go through its block; the other's are handed on."""
        encoder_states, decoder_states = states
        if not block.is_decoder:
            return block(encoder_states), decoder_states
        decoder_states = block(
            decoder_states,
            attention_mask=causal_mask(decoder_states, batch["tokens"], constants["kernel"]),
            encoder_hidden_states=encoder_states,
            # Stock makes a bias of zeros for each pair of positions otherwise.
            encoder_decoder_position_bias=encoder_states.new_zeros(1, 1, 1, 1),
        )
        return encoder_states, decoder_states

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """The bias is one of all positions, also where this rank holds but some."""
        super().after_split(block, config, tensor_parallel)
        for module in block.modules():
            if tensor_parallel.splits_everything and isinstance(module, T5Attention):
                module.compute_bias = _bias_of_whole_sequence(module, tensor_parallel)  # type: ignore[method-assign]

    def replays_sum(self, config: Any) -> tuple[str, ...]:
        """A block ends in a dropout, which keeps its mask."""
        return ("full",) if config.dropout_rate > 0 else ()

    def initialize(self, model: Model, module: nn.Module) -> None:
        """As stock, where the whole model's class gives the token table its weights."""
        super().initialize(model, module)
        if isinstance(shared := getattr(module, "shared", None), nn.Embedding):
            nn.init.normal_(shared.weight, std=self.configuration(model).initializer_factor)

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
