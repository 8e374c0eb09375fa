"""Encoders with a decoder: T5 (Raffel et al. 2020), and Whisper (Radford et al. 2022)."""

import copy
from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout, gelu
from transformers.models.whisper.modeling_whisper import sinusoids

from shardwright.types import EMBEDDING, Model
from shardwright_train.data.encoder_decoder import Prefix, SpanCorruption, Transcription
from shardwright_train.data.share import Batch
from shardwright_train.models.base import Family
from shardwright_train.models.initial_weights import Filling, Given
from shardwright_train.models.masks import causal_mask
from shardwright_train.models.stock import Pieces, States
from shardwright_train.parallel.sharding_rules import Parts
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.parallel.vocab import positions_of, token_embedding

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

        They are the position bias of the first block and, in the encoder, the norm after the last block. Only the last
        block applies that norm, inside its forward pass, because its parameters are not gathered elsewhere.
        """
        stack: Any = stock.get_submodule(kind)
        block: nn.Module = copy.deepcopy(stack.block[0])
        if kind == "encoder":
            block.final_layer_norm, block.dropout = copy.deepcopy((stack.final_layer_norm, stack.dropout))
        ends = kind == "encoder" and index == len(stack.block) - 1
        # Only the states: FSDP2 would watch over the bias, too.
        block.register_forward_hook(
            lambda last, _, out: last.dropout(last.final_layer_norm(out[0])) if ends else out[0]
        )
        return block

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """Return the decoder's normed output, scaled if the stock model does so."""
        config = pieces.config
        return super().normed(pieces, states) * (config.d_model**-0.5 if config.scale_decoder_outputs else 1.0)

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Run a block on its stack's hidden states, and pass the other stack's states through."""
        encoded, decoded = states
        if not block.is_decoder:
            return block(encoded), decoded
        mask = causal_mask(decoded, batch["tokens"], constants["kernel"])
        # Stock makes a bias of zeros for each pair of positions otherwise. A GPU's kernels want one for each key.
        zero = encoded.new_zeros(1, 1, 1, batch["tokens"].shape[1])
        return encoded, block(decoded, mask, encoder_hidden_states=encoded, encoder_decoder_position_bias=zero)

    def keeps_last_sum(self, kind: str, config: Any, compute: str) -> bool:
        """Return whether the backward pass needs a value after the last sum: float16 stock blocks end with a clamp."""
        return compute == "float16" or super().keeps_last_sum(kind, config, compute)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Restrict the position bias, which covers all keys, to the positions and heads that attend on this rank."""
        super().after_split(block, config, tensor_parallel)
        attention: Any = block.get_submodule(_ATTENTION)
        if tensor_parallel.attends_apart:
            axes, stock = tensor_parallel.axes, attention.compute_bias
            ranks = (axes.layout.sequence if axes.exchanges_heads else axes.context).size
            heads = tensor_parallel.heads(config.num_heads) if axes.exchanges_heads else slice(None)
            attention.compute_bias = lambda queries, keys, **more: stock(queries * ranks, keys * ranks, **more)[
                :, heads, tensor_parallel.attending(queries * ranks)
            ]


_MLP, _ATTENTIONS = ("feed_forward",), ("self_attn", "encoder_attn")
_DECODER = ("model.decoder.embed_tokens", "model.decoder.embed_positions")
_SINES = "model.encoder.embed_positions"


class Whisper(Family):
    """The Whisper family: column-parallel q, k, v and fc1, row-parallel out and fc2; convolutions, norms replicated."""

    embedding = (*_DECODER, "model.encoder.conv1", "model.encoder.conv2", _SINES)
    head = ("model.decoder.layer_norm", "proj_out")
    parts = {
        "encoder": Parts("model.encoder.layers", ("self_attn",), _MLP, ("self_attn", "fc1")),
        "decoder": Parts("model.decoder.layers", _ATTENTIONS, _MLP, (*_ATTENTIONS, "fc1")),
    }
    plan = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "fc1"), "colwise"),
        **dict.fromkeys(("out_proj", "fc2"), "rowwise"),
        **{"embed_tokens": "embedding_rowwise", "proj_out": "colwise_gather_output"},
    }
    shared = {f"layer_norm.{kind}": f"model.{{kind}}.layer_norm.{kind}" for kind in ("weight", "bias")}
    normed_behind = ("encoder",)
    objective = Transcription
    counted_per_rank = ("num_heads",)

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration, with as many decoder positions as a sample has."""
        configured = super().configured({key: x for key, x in config.items() if key != "max_position_embeddings"})
        configured.max_position_embeddings = configured.max_target_positions
        return configured

    def initialize(self, model: Model, module: nn.Module) -> None:
        """Fill a whole layer with its initial weights, the encoder's position table with sines."""
        super().initialize(model, module)
        for name, table in module.named_parameters():
            if name.startswith(_SINES) and not table.is_meta:
                table.data.copy_(sinusoids(*table.shape))

    def fillings(self, model: Model, layer: str) -> Mapping[str, tuple[Filling, ...]]:
        """Return how a layer's parameters are filled, the encoder's position table with sines."""
        filled = super().fillings(model, layer)
        if layer != EMBEDDING:
            return filled
        rows, features = self.stock_model(model).get_submodule(_SINES).weight.shape
        return {**filled, f"{_SINES}.weight": (Filling(Given(sinusoids(rows, features))),)}

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the embeddings of the spectrogram's frames, which every rank computes completely, and of tokens."""
        encoder: Any = pieces.get_submodule("model.encoder")
        decoder: Any = pieces.get_submodule("model.decoder")
        split, rate, sines = pieces.tensor_parallel, pieces.config.dropout, encoder.embed_positions.weight
        frames = gelu(encoder.conv2(gelu(encoder.conv1(batch["input_features"].to(sines.dtype))))).transpose(1, 2)
        encoded = (frames + sines)[:, split.positions(len(sines))].clone()
        rows = token_embedding(decoder.embed_tokens, batch["decoder_tokens"], split)
        decoded = rows + decoder.embed_positions.weight[positions_of(batch["decoder_tokens"], split)]
        return tuple(dropout(states, rate, pieces.training) for states in (encoded, decoded))

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a stock block whose feed-forward is a separate part; encoder blocks have replicas of the last norm."""
        stack: Any = stock.get_submodule(f"model.{kind}")
        block: Any = copy.deepcopy(stack.layers[index])
        if kind == "encoder":
            block.layer_norm = copy.deepcopy(stack.layer_norm)
        block.ends = kind == "encoder" and index == len(stack.layers) - 1
        block.feed_forward, block.forward = MethodType(_feed_forward, block), MethodType(_forward, block)
        return block  # type: ignore[no-any-return]

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Run a block on its stack's hidden states, and pass the other stack's states through."""
        encoded, decoded = states
        if not hasattr(block, "encoder_attn"):
            return block(encoded), decoded
        mask = causal_mask(decoded, batch["decoder_tokens"], constants["kernel"])
        return encoded, block(decoded, mask, encoded)


def _feed_forward(block: Any, states: Tensor) -> Tensor:
    fed: Tensor = block.fc2(block.activation_fn(block.fc1(states)))
    return fed


def _forward(block: Any, states: Tensor, mask: Tensor | None = None, encoded: Tensor | None = None) -> Tensor:
    """Run a stock block, whose own forward has no separate part that could be recomputed."""
    attended, _ = block.self_attn(block.self_attn_layer_norm(states), attention_mask=mask)
    states = states + dropout(attended, block.dropout, block.training)
    if encoded is not None:
        attended, _ = block.encoder_attn(block.encoder_attn_layer_norm(states), key_value_states=encoded)
        states = states + dropout(attended, block.dropout, block.training)
    fed = block.feed_forward(block.final_layer_norm(states))
    states = states + dropout(fed, block.dropout, block.training)
    return block.layer_norm(states) if block.ends else states
