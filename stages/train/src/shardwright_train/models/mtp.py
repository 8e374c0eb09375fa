"""Multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2): what a batch and a block need in addition.

A layer of depth k is a stock block with additional modules, listed in `shardwright.models.mtp`. The stock model has
them under their published names, as they are read from and written to files. The last k positions of a sample, whose
further token is not in the sample, see token 0, as in Megatron-LM, and have no label.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.models.mtp import FINAL_NORM, NORMS, PROJECTION, TABLE
from shardwright_train.data.share import DOCUMENTS, Batch
from shardwright_train.models.stock import States, WithLoss
from shardwright_train.parallel.vocab import IGNORED, token_embedding

FURTHER_TOKENS, FURTHER_LABELS = "further_tokens", "further_labels"
"""Keys of the tensors [samples, positions, depths] of a batch: tokens 1, 2, ... positions ahead, and their labels."""
Call = Callable[[nn.Module, States, Batch, dict[str, Any]], States | WithLoss]


def with_further(batch: Batch, depths: int, *, embeds: bool) -> Batch:
    """Return a batch with the further tokens, if this rank `embeds` them, and the further labels, if it has labels.

    Positions are in the order of the sample. A label in another document than its position is ignored.
    """
    batch = dict(batch)
    if embeds:
        batch[FURTHER_TOKENS] = torch.stack([_ahead(batch["tokens"], k, 0) for k in range(1, depths + 1)], -1)
    if "labels" in batch:
        batch[FURTHER_LABELS] = further_labels(batch, depths)
    return batch


def further_labels(batch: Batch, depths: int) -> Tensor:
    """Return the labels [samples, positions, depths] of the tokens 2, 3, ... positions after each."""
    found = []
    for depth in range(1, depths + 1):
        labels = _ahead(batch["labels"], depth, IGNORED)
        if DOCUMENTS in batch:
            labels = labels.masked_fill(_ahead(batch[DOCUMENTS], depth, -1) != batch[DOCUMENTS], IGNORED)
        found.append(labels)
    return torch.stack(found, -1)


def _ahead(x: Tensor, number: int, filling: int) -> Tensor:
    """Return x [samples, positions] shifted: at each position the element `number` positions ahead, else `filling`."""
    return F.pad(x[:, number:], (0, min(number, x.shape[1])), value=filling)


def add_modules(block: nn.Module, table: nn.Embedding, norm: nn.Module, depth: int) -> None:
    """Add to the stock block of a depth its additional modules, made like the stock model's `table` and last `norm`."""
    for path in (*NORMS, *([FINAL_NORM] if depth == 1 else [])):
        owner, _, name = path.rpartition(".")
        if owner and not hasattr(block, owner):
            block.add_module(owner, nn.Module())
        block.get_submodule(owner).add_module(name, copy.deepcopy(norm))
    width, weight = table.embedding_dim, table.weight
    product = nn.Linear(2 * width, width, bias=False, device=weight.device, dtype=weight.dtype)
    block.add_module(PROJECTION, product)
    block.add_module(TABLE, plain_table(table))


def plain_table(table: nn.Embedding) -> nn.Embedding:
    """Return a plain table without weights, in the shape of a stock table, which may scale its rows."""
    (rows, features), weight = table.weight.shape, table.weight
    return nn.Embedding(rows, features, table.padding_idx, device=weight.device, dtype=weight.dtype)


def join_modules(block: nn.Module, scaled: Callable[[Tensor], Tensor]) -> None:
    """Make a block with these modules compute from the previous states and the further tokens [samples, positions].

    `scaled`: the function by which the model's embedding scales the rows of its table.
    """
    block.forward = partial(_forward, block, block.forward, scaled)


def _forward(
    block: Any, stock: Callable[..., Tensor], scaled: Callable[[Tensor], Tensor], states: Tensor, **given: Any
) -> Tensor:
    rows = scaled(token_embedding(block.embed_tokens, given.pop(FURTHER_TOKENS), block.tensor_parallel))
    before = block.final_norm(states) if hasattr(block, FINAL_NORM) else states
    joined = block.eh_proj(torch.cat([block.enorm(rows), block.hnorm(before)], -1))
    normed: Tensor = block.shared_head.norm(stock(joined, **given))
    return normed


def call_depth(
    call: Call, block: nn.Module, depth: int, states: States, batch: Batch, constants: Mapping[str, Any]
) -> States | WithLoss:
    """Run the block of a depth, with the family's `call`, on the last of the states; append its states to them."""
    arguments = {**constants["arguments"], FURTHER_TOKENS: batch[FURTHER_TOKENS][..., depth - 1]}
    output = call(block, states[-1:], batch, {**constants, "arguments": arguments})
    if isinstance(output, WithLoss):
        return output._replace(states=(*states, *output.states))
    return *states, *output
