"""Ministral (Mistral AI 2024)."""

from collections.abc import Mapping
from typing import Any

from shardwright_train.models.llama import Llama


class Ministral(Llama):
    """Llama whose stock class needs to be told the features of a head."""

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration; heads have their share of the hidden states' features by default."""
        configured = super().configured(config)
        configured.head_dim = configured.head_dim or configured.hidden_size // configured.num_attention_heads
        return configured
