"""T5 (Raffel et al. 2020): an encoder, and a decoder whose blocks also attend to what the encoder made."""

import copy
from typing import Any

from torch import Tensor, nn

from shardwright_train.data.encoder_decoder import Prefix, SpanCorruption
from shardwright_train.data.share import Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.base import Family
from shardwright_train.models.masks import causal_mask
from shardwright_train.models.stock import Pieces
from shardwright_train.parallel.sharding_rules import Parts
from shardwright_train.parallel.tensor import TensorParallel

_ATTENTION = "layer.0.SelfAttention"
_BOTH = (_ATTENTION, "layer.1.EncDecAttention")
_BIAS = f"{_ATTENTION}.relative_attention_bias.weight"


class T5(Family):
    """The T5 family: column-parallel q, k, v, wi and position bias; row-parallel o and wo; norms replicated."""

    embedding = ("shared", "encoder.dropout")
    head = ("decoder.final_layer_norm", "decoder.dropout", "lm_head")
    parts = {
        "encoder": Parts("encoder.block", (_ATTENTION,), ("layer.1.DenseReluDense",)),
        "decoder": Parts("decoder.block", _BOTH, ("layer.2.DenseReluDense",)),
    }
    plan = {
        **dict.fromkeys(("q", "k", "v", "wi", "wi_0", "wi_1", "relative_attention_bias"), "colwise"),
        **dict.fromkeys(("o", "wo"), "rowwise"),
        **{"shared": "embedding_rowwise", "lm_head": "colwise_gather_output"},
    }
    tokens = ("tokens", "decoder_tokens")
    shared = {_BIAS: f"{{kind}}.block.0.{_BIAS}", "final_layer_norm.weight": "{kind}.final_layer_norm.weight"}
    objective = Prefix
    objectives = {"span-corruption": SpanCorruption, "prefix": Prefix}
    counted_per_rank = ("n_heads",)
    normed_behind = ("encoder",)

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a stock block with replicas of the parameters that the stock model has once in a stack.

        They are the position bias of the first block and, in the encoder, the norm behind the last, which alone applies
        it, inside the block: its parameters are whole nowhere else.
        """
        stack: Any = stock.get_submodule(kind)
        block: nn.Module = copy.deepcopy(stack.block[0])
        if kind == "encoder":
            block.final_layer_norm, block.dropout = copy.deepcopy((stack.final_layer_norm, stack.dropout))
        ends = kind == "encoder" and index == len(stack.block) - 1
        # The states alone: FSDP2 would watch over the bias, too.
        block.register_forward_hook(
            lambda last, _, out: last.dropout(last.final_layer_norm(out[0])) if ends else out[0]
        )
        return block

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """Return the decoder's output, scaled where the stock model does."""
        config = pieces.config
        return super().normed(pieces, states) * (config.d_model**-0.5 if config.scale_decoder_outputs else 1.0)

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Run a block on its stack's states, and pass the other stack's states through."""
        encoded, decoded = states
        if not block.is_decoder:
            return block(encoded), decoded
        mask = causal_mask(decoded, batch["tokens"], constants["kernel"])
        # Stock makes a bias of zeros for each pair of positions otherwise.
        zero = encoded.new_zeros(1, 1, 1, 1)
        return encoded, block(decoded, mask, encoder_hidden_states=encoded, encoder_decoder_position_bias=zero)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Correct the position bias: it covers all keys, of the positions and heads that attend on this rank."""
        super().after_split(block, config, tensor_parallel)
        attention: Any = block.get_submodule(_ATTENTION)
        if tensor_parallel.attends_apart:
            axes, stock = tensor_parallel.axes, attention.compute_bias
            ranks = (axes.layout.sequence if axes.exchanges_heads else axes.context).size
            heads = tensor_parallel.heads(config.num_heads) if axes.exchanges_heads else slice(None)
            attention.compute_bias = lambda queries, keys, **more: stock(queries * ranks, keys * ranks, **more)[
                :, heads, tensor_parallel.attending(queries * ranks)
            ]
