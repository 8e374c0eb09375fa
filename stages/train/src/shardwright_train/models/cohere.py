"""Command R (Cohere 2024) and Command R7B."""

from torch import Tensor

from shardwright_train.models.llama import Llama
from shardwright_train.models.stock import Pieces
from shardwright_train.parallel.sharding_rules import Rule


class Cohere(Llama):
    """Llama with scaled logits, and norms of heads with weights of their own for each head."""

    plan = Llama.plan | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), Rule("cut", dim=0))

    def logits(self, pieces: Pieces, inputs: Tensor) -> Tensor:
        """Return the logits, scaled as the configuration says."""
        scale: float = pieces.config.logit_scale
        return super().logits(pieces, inputs) * scale
