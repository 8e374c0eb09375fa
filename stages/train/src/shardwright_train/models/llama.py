"""Llama (Touvron et al. 2023), and Mistral and Qwen2, whose blocks are built alike."""

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig, Qwen2Config
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2

from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_train.models.base import BLOCK, Batch, Family, States
from shardwright_train.models.causal import NextTokenHead, TokenEmbedding, causal_mask, rotary_constants
from shardwright_train.parallel.sharding_rules import COLUMN, ROW, VOCABULARY, Parts

__all__ = ["FAMILIES", "Llama"]


class Llama(Family):
    """Column-parallel q, k, v, gate and up; row-parallel o and down; norms whole."""

    config_class: Any = LlamaConfig
    pretrained_class: Any = llama.LlamaPreTrainedModel
    block_class: type[nn.Module] = llama.LlamaDecoderLayer
    norm_class: type[nn.Module] = llama.LlamaRMSNorm
    rotary_class: type[nn.Module] = llama.LlamaRotaryEmbedding

    rules = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), COLUMN),
        **dict.fromkeys(("o_proj", "down_proj"), ROW),
        **dict.fromkeys(("embed_tokens", "lm_head"), VOCABULARY),
    }
    parts = {BLOCK: Parts(enter=("self_attn", "mlp"), attention=("self_attn",), mlp=("mlp",))}
    names = {
        EMBEDDING: {"embed_tokens": "model.embed_tokens"},
        BLOCK: "model.layers.{}.",
        HEAD: {"norm": "model.norm", "lm_head": "lm_head"},
    }
    tied = (("model.embed_tokens.weight", "lm_head.weight"),)
    divided = ("num_attention_heads", "num_key_value_heads", "intermediate_size")

    def check(self, config: Any, sequence_length: int) -> None:
        """A sliding window must not be shorter than the sequence."""
        super().check(config, sequence_length)
        window = getattr(config, "sliding_window", None)
        if window is not None and window < sequence_length:
            raise ValueError(f"sequence length {sequence_length} is over the sliding window {window}")

    def make(self, kind: str, config: Any, index: int) -> nn.Module:
        """Stock blocks; token embedding; final norm and vocabulary matrix."""
        if kind == EMBEDDING:
            return TokenEmbedding(config)
        if kind == HEAD:
            return NextTokenHead(config, self.norm_class(config.hidden_size, eps=config.rms_norm_eps))
        return self.block_class(config, index)

    def constants(self, config: Any, kind: str, positions: slice, example: Tensor, kernel: str) -> dict[str, Any]:
        """Rotary cosines and sines, and which kernel attention uses."""
        return {"kernel": kernel} | rotary_constants(self.rotary_class(config), positions, example)

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Causal attention and a gated feed-forward."""
        mask = causal_mask(states[0], batch["tokens"], constants["kernel"])
        return (block(states[0], attention_mask=mask, position_embeddings=constants["position_embeddings"]),)

    def dropout(self, config: Any) -> float:
        """Of the attention's weights."""
        rate: float = config.attention_dropout
        return rate


class Mistral(Llama):
    """Mistral (Jiang et al. 2023), without its sliding window."""

    config_class = MistralConfig
    pretrained_class = mistral.MistralPreTrainedModel
    block_class = mistral.MistralDecoderLayer
    norm_class = mistral.MistralRMSNorm
    rotary_class = mistral.MistralRotaryEmbedding


class Qwen2(Llama):
    """Qwen2 (Yang et al. 2024): biases on query, key and value."""

    config_class = Qwen2Config
    pretrained_class = qwen2.Qwen2PreTrainedModel
    block_class = qwen2.Qwen2DecoderLayer
    norm_class = qwen2.Qwen2RMSNorm
    rotary_class = qwen2.Qwen2RotaryEmbedding


FAMILIES = {"llama": Llama(), "mistral": Mistral(), "qwen2": Qwen2()}
