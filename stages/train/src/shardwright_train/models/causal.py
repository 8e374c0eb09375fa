"""What language models that predict the next token have in common: the embedding and the head."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwright_formats.types.plan import Attention
from shardwright_train.models.base import Batch, States
from shardwright_train.parallel.tensor import TensorParallel
from shardwright_train.parallel.vocab import loss_of_logits, token_embedding

__all__ = ["NextTokenHead", "TokenEmbedding", "causal_mask", "rotary_constants"]


class TokenEmbedding(nn.Module):
    """Tokens [b, s] to hidden states, in the layout of the embedding's strategy."""

    tensor_parallel: TensorParallel

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, batch: Batch) -> States:
        """Look up this rank's rows and sum over the group."""
        return (token_embedding(self.embed_tokens, batch["tokens"], self.tensor_parallel),)


class NextTokenHead(nn.Module):
    """A norm and a matrix: hidden states and labels [b, s] to the sum of cross entropy over the group's samples."""

    tensor_parallel: TensorParallel

    def __init__(self, config: Any, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.classes = config.vocab_size

    def forward(self, states: States, batch: Batch) -> Tensor:
        """The loss, summed; the same on each rank of the group (its own positions' part under Ulysses)."""
        logits = self.lm_head(self.tensor_parallel.enter(self.norm(states[0])))
        return loss_of_logits(logits, batch["labels"], self.classes, self.tensor_parallel)


def causal_mask(states: Tensor, tokens: Tensor, kernel: str) -> Tensor | None:
    """What the eager kernel must be told, to be added to scores [b, heads, s, s]; the others are causal unasked."""
    if kernel != Attention.EAGER.value:
        return None
    length = tokens.shape[1]
    after = torch.full((length, length), torch.finfo(states.dtype).min, dtype=states.dtype, device=states.device)
    return after.triu(1)[None, None]


def rotary_constants(rotary: nn.Module, positions: slice, example: Tensor) -> dict[str, Any]:
    """Rotary cosines and sines of some positions, in the dtype and on the device of `example`."""
    numbers = torch.arange(positions.start, positions.stop, device=example.device)[None]
    return {"position_embeddings": rotary.to(example.device)(example, numbers)}
