"""GPT-2 (Radford et al. 2019)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config
from transformers.models.gpt2 import modeling_gpt2 as gpt2

from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_train.models.base import BLOCK, Batch, Family, States
from shardwright_train.models.causal import NextTokenHead, causal_mask
from shardwright_train.parallel.sharding_rules import COLUMN, ROW, VOCABULARY, Parts, Rule
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.parallel.vocab import token_embedding

__all__ = ["FAMILIES", "GPT2"]


class _Embedding(nn.Module):
    """Tokens [b, s] to hidden states: a vector of the token and one of the position, which is learned."""

    tensor_parallel: TensorParallel

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(self, batch: Batch) -> States:
        tokens = batch["tokens"]
        mine = self.tensor_parallel.positions(tokens.shape[1])
        positions = self.wpe(torch.arange(mine.start, mine.stop, device=tokens.device))
        return (self.drop(token_embedding(self.wte, tokens, self.tensor_parallel) + positions),)


class GPT2(Family):
    """Column-parallel query, key and value (side by side in one matrix) and c_fc; row-parallel c_proj."""

    config_class = GPT2Config
    pretrained_class = gpt2.GPT2PreTrainedModel
    block_class: type[nn.Module] = gpt2.GPT2Block
    other_keys = ("n_ctx",)
    rules = {
        "c_attn": Rule("column", fused=3),
        "c_fc": COLUMN,
        "c_proj": ROW,
        **dict.fromkeys(("wte", "lm_head"), VOCABULARY),
    }
    parts = {BLOCK: Parts(enter=("attn", "mlp"), attention=("attn",), mlp=("mlp",))}
    names = {
        EMBEDDING: {"wte": "transformer.wte", "wpe": "transformer.wpe"},
        BLOCK: "transformer.h.{}.",
        HEAD: {"norm": "transformer.ln_f", "lm_head": "lm_head"},
    }
    tied = (("transformer.wte.weight", "lm_head.weight"),)
    divided = ("n_head", "n_inner")
    divided_by_ulysses = {BLOCK: ("n_head",)}

    def check(self, config: Any, sequence_length: int) -> None:
        """Neither cross attention nor attention in another order of operations than the kernels'."""
        super().check(config, sequence_length)
        for key in ("add_cross_attention", "reorder_and_upcast_attn"):
            if getattr(config, key):
                raise ValueError(f"{key} cannot be trained")

    def make(self, kind: str, config: Any, index: int) -> nn.Module:
        """Stock blocks; embedding of tokens and positions; final norm and vocabulary matrix."""
        if kind == EMBEDDING:
            return _Embedding(config)
        if kind == HEAD:
            return NextTokenHead(config, nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon))
        return self.block_class(config, layer_idx=index)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """The attention remembers the width of query, key and value."""
        block.attn.split_size = config.n_embd // tensor_parallel.size  # type: ignore[union-attr]

    def constants(self, config: Any, kind: str, positions: slice, example: Tensor, kernel: str) -> dict[str, Any]:
        """Which kernel attention uses."""
        return {"kernel": kernel}

    def call(self, block: nn.Module, states: States, batch: Batch, constants: dict[str, Any]) -> States:
        """Causal attention and a feed-forward."""
        return (block(states[0], attention_mask=causal_mask(states[0], batch["tokens"], constants["kernel"])),)

    def dropout(self, config: Any) -> float:
        """Of the embedding's sum, of attention's weights and of what is added to the residual."""
        rate: float = max(config.embd_pdrop, config.attn_pdrop, config.resid_pdrop)
        return rate

    def replays_sum(self, config: Any) -> tuple[str, ...]:
        """Each part ends in a dropout, which keeps its mask."""
        return ("full", "attention", "mlp") if config.resid_pdrop > 0 else ()

    def _parsed(self, config: dict[str, Any]) -> Any:
        """The width of the feed-forward is four times that of the hidden states unless it is given."""
        parsed = super()._parsed(config)
        if parsed.n_inner is None:
            parsed.n_inner = 4 * parsed.n_embd
        return parsed


FAMILIES = {"gpt2": GPT2()}
