"""Phi 3, 3.5 and 4 (Abdin et al. 2024)."""

from typing import Any

from torch import nn

from shardwright_train.models.llama import Llama
from shardwright_train.parallel.tensor import TensorParallel

_QUERIES_KEYS_VALUES = tuple(f"self_attn.qkv_proj.{name}_proj" for name in "qkv")
_GATE_UP = tuple(f"mlp.gate_up_proj.{name}_proj" for name in ("gate", "up"))


class Phi3(Llama):
    """Llama whose files hold queries, keys and values as one matrix, and gate and first matrix of the feed-forward."""

    stacked = {"self_attn.qkv_proj": _QUERIES_KEYS_VALUES, "mlp.gate_up_proj": _GATE_UP}
    plan = {
        **Llama.plan,
        **dict.fromkeys((*_QUERIES_KEYS_VALUES, *_GATE_UP), "colwise"),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise"),
    }
    counted_per_rank = ("num_key_value_heads",)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Correct the numbers of heads: the stock block reads that of queries in its configuration, a copy."""
        super().after_split(block, config, tensor_parallel)
        attention: Any = block.get_submodule("self_attn")
        attention.config.num_attention_heads //= tensor_parallel.size
