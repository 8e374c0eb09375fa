"""Multi-token prediction written from the paper over a stock model's own modules, in one process.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2. As the published files' programs (vLLM's deepseek_mtp, Megatron-LM) do, it
reads the states after the final norm, and puts the embeddings first into the projection.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.models.mtp import mtp_layers
from shardwright.types import Model
from shardwright_train.data.share import Batch


def with_mtp_modules(stock: Any, model: Model) -> Any:
    """A stock model that was built with blocks for all layers: the last ones become MTP modules, and are not called."""
    depths = mtp_layers(model.layers)
    main, hidden = len(model.layers) - depths, stock.config.hidden_size
    stock.config.num_hidden_layers = main
    stock.mtp_blocks = []
    for block in stock.model.layers[main:]:
        for name in ("enorm", "hnorm"):
            block.add_module(name, copy.deepcopy(stock.model.norm))
        block.shared_head = nn.Module()
        block.shared_head.norm = copy.deepcopy(stock.model.norm)
        block.eh_proj = nn.Linear(2 * hidden, hidden, bias=False, dtype=stock.lm_head.weight.dtype)
        stock.mtp_blocks.append(block)
    # Stock models call as many of their blocks as their configuration says.
    stock.model.norm.register_forward_hook(lambda _, __, output: setattr(stock, "normed_states", output))
    return stock


def mtp_losses(stock: Any, batch: Batch) -> list[Tensor]:
    """The mean cross entropy of each depth, after a pass through the main model."""
    if "documents" in batch:
        return _of_documents(stock, batch)
    sums, counts = _sums(stock, batch["tokens"], batch["labels"], stock.normed_states)
    return [total / count for total, count in zip(sums, counts, strict=True)]


def _of_documents(stock: Any, batch: Batch) -> list[Tensor]:
    """Each document by itself."""
    sums = [0.0] * len(stock.mtp_blocks)
    counts = [0] * len(stock.mtp_blocks)
    for sample in range(len(batch["documents"])):
        lengths = batch["documents"][sample].unique_consecutive(return_counts=True)[1].tolist()
        parts = zip(*(batch[name][sample, None].split(lengths, 1) for name in ("tokens", "labels")), strict=True)
        for tokens, labels in parts:
            stock(tokens)
            some, found = _sums(stock, tokens, labels, stock.normed_states)
            sums = [a + b for a, b in zip(sums, some, strict=True)]
            counts = [a + b for a, b in zip(counts, found, strict=True)]
    return [total / count for total, count in zip(sums, counts, strict=True)]


def _sums(stock: Any, tokens: Tensor, labels: Tensor, states: Tensor) -> tuple[list[Tensor], list[int]]:
    sums, counts = [], []
    length = tokens.shape[1]
    positions = torch.arange(length)[None]
    angles = stock.model.rotary_emb(states, positions)
    mask = torch.full((length, length), -torch.inf, dtype=states.dtype).triu(1)[None, None]
    for depth, block in enumerate(stock.mtp_blocks, start=1):
        # t_{i+k}: the last k positions, which have none in the sample, see token 0 and have no label.
        ahead = torch.cat([tokens[:, depth:], torch.zeros_like(tokens[:, :depth])], 1)[:, :length]
        targets = labels[:, depth:]
        joined = block.eh_proj(torch.cat([block.enorm(stock.model.embed_tokens(ahead)), block.hnorm(states)], -1))
        states = block.shared_head.norm(block(joined, attention_mask=mask, position_embeddings=angles))
        logits = stock.lm_head(states[:, : targets.shape[1]])
        sums.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"))
        counts.append(int((targets != -100).sum()))
    return sums, counts
