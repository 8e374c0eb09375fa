"""SmolLM 3 (Bakouch et al. 2025)."""

from collections.abc import Mapping
from typing import Any

from shardwright_models.facts import BLOCK
from shardwright_models.families.smollm3 import ROTATED, UNROTATED
from shardwright_train.models.llama import Llama


class SmolLM3(Llama):
    """Llama with two types of block; the stock ones know whether they rotate."""

    parts = dict.fromkeys((ROTATED, UNROTATED), Llama.parts[BLOCK])

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration; raise ValueError where a layer has a window, which it has by its type alone."""
        if "sliding_attention" in (config.get("layer_types") or ()):
            raise ValueError("layer_types 'sliding_attention' cannot be trained: attention is whole")
        return super().configured(config)
