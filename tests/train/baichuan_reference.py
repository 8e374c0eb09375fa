"""Baichuan in plain PyTorch, as its authors' code computes it (Yang et al. 2023): transformers has no such model."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaRMSNorm

__all__ = ["BaichuanConfig", "BaichuanForCausalLM"]


class BaichuanConfig(PreTrainedConfig):
    """The keys of published files; 13B names no max_position_embeddings, and Baichuan 2 alone a weight of a z-loss."""

    model_type = "baichuan"


def interleaved_slopes(heads: int) -> list[float]:
    """Slopes of a power of two of heads, or of the next lower one and every second of the next higher."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return interleaved_slopes(closest) + interleaved_slopes(2 * closest)[0::2][: heads - closest]


def turned(x: Tensor) -> Tensor:
    """Queries or keys [b, heads, s, d] turned by their positions."""
    length, size = x.shape[-2:]
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2).float() / size))
    angles = torch.outer(torch.arange(length).float(), frequencies)
    cos, sin = (torch.cat([part, part], -1).to(x.dtype) for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.alibi = config.num_attention_heads, not hasattr(config, "max_position_embeddings")
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        samples, length, features = states.shape
        packed = self.W_pack(states).view(samples, length, 3, self.heads, features // self.heads)
        query, key, value = (packed[:, :, i].transpose(1, 2) for i in range(3))
        scores = torch.zeros(self.heads, length, length, dtype=states.dtype)
        if self.alibi:
            slopes = torch.tensor(interleaved_slopes(self.heads), dtype=torch.float32)
            positions = torch.arange(length)
            scores = (slopes[:, None, None] * (positions[None] - positions[:, None])).to(states.dtype)
        else:
            query, key = turned(query), turned(key)
        scores = scores + query @ key.transpose(2, 3) / math.sqrt(features // self.heads)
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        return self.o_proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(samples, length, features))


class FeedForward(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        shapes = {"gate_proj": (0, 1), "down_proj": (1, 0), "up_proj": (0, 1)}
        lengths = config.hidden_size, config.intermediate_size
        for name, (inputs, outputs) in shapes.items():
            self.add_module(name, nn.Linear(lengths[inputs], lengths[outputs], bias=False))

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(states)) * self.up_proj(states))


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states))
        return states + self.mlp(self.post_attention_layernorm(states))


class NormHead(nn.Module):
    def __init__(self, features: int, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, features) * 0.02)

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, nn.functional.normalize(self.weight))


class Stack(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embed_tokens(tokens)
        for block in self.layers:
            states = block(states)
        return self.norm(states)


class BaichuanForCausalLM(PreTrainedModel):
    config_class = BaichuanConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Stack(config)
        normed = getattr(config, "z_loss_weight", None) is not None
        self.lm_head = (
            NormHead(config.hidden_size, config.vocab_size)
            if normed
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.post_init()

    def forward(self, tokens: Tensor, **_masks: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(tokens)))
