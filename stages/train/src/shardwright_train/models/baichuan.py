"""Baichuan and Baichuan 2 (Yang et al. 2023), on the modules of Llama; none of the code published with them runs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright_formats.types import Model
from shardwright_train.models.llama import Llama
from shardwright_train.models.masks import Places

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class NormedHead(nn.Linear):
    """A matrix whose rows are made unit vectors before they are multiplied."""

    def forward(self, states: Tensor) -> Tensor:
        """Return the products with the rows."""
        return nn.functional.linear(states, nn.functional.normalize(self.weight))


class Baichuan(Llama):
    """Llama whose files hold queries, keys and values as one; ALiBi in place of rotations in 13B."""

    stacked = {"self_attn.W_pack": _ATTENTION}

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return Llama's configuration, with the positions of 13B under the usual name."""
        parsed, read = super().configured(config), self.facts.implied(config)
        parsed.alibi, parsed.max_position_embeddings = read["alibi"], read["max_position_embeddings"]
        return parsed

    def skeleton(self, config: Any) -> Any:
        """Return Llama's stock model, with Baichuan 2's head where the configuration has it."""
        stock = super().skeleton(config)
        if self.facts.normed_head(vars(config)):
            rows, features = stock.lm_head.weight.shape
            stock.lm_head = NormedHead(features, rows, bias=False, device="meta", dtype=stock.lm_head.weight.dtype)
        return stock

    def constants(
        self,
        model: Model,
        kind: str,
        places: Places,
        example: Tensor,
        kernel: str,
        heads: Callable[[int], slice] = slice,
    ) -> dict[str, Any]:
        """Return those of Llama; under ALiBi by angles of 0, for positions show in the mask."""
        constants = super().constants(model, kind, places, example, kernel, heads)
        if model.types[kind].alibi_heads:
            cos, sin = constants["arguments"]["position_embeddings"]
            constants["arguments"] = {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
            del constants["every_angle"]
        return constants
