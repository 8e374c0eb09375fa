"""gpt-oss (OpenAI 2025): attention sinks, and experts with a SwiGLU of clamped inputs that adds 1 to the linear one."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardwright.models.traits import BLOCK, FULL, SINK_FEATURES, SLIDING
from shardwright.types import FUSED_SDPA, Attention
from shardwright_train.models.experts import Choice, Sparse, Unseen, scored
from shardwright_train.models.llama import Llama
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.experts import Counts, expert_products, with_biases
from shardwright_train.parallel.sharding_rules import INSIDE, Rule
from shardwright_train.parallel.tensor import TensorParallel

# Sinks: a learned score for each head, which takes probability from all keys.


SINK_ATTENTION = "shardwright_sinks"
"""Name under which transformers' modules find the attention below."""
_HELD = WeakTensorKeyDictionary()
"""Masks extended by one key and query, by the original masks."""
_SPACE = (0, SINK_FEATURES, 1, 0)
"""Padding of queries, keys and values [b, heads, s, d]: features after the others, and a position before them."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    s_aux: Tensor,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention [b, s, heads, d] of a module; causal if there is no mask [b or 1, heads or 1, s, s]."""
    features, causal = query.shape[-1], attention_mask is None
    sinks = (s_aux / scaling).to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
    query = pad(torch.cat([query, pad(sinks, (0, SINK_FEATURES - 1))], -1), (0, 0, 1, 0))
    first = pad(key.new_ones(()).view(1, 1, 1, 1), (features, SINK_FEATURES - 1))
    key = torch.cat([first.expand(*key.shape[:2], 1, -1), pad(key, (0, SINK_FEATURES))], 2)
    value = pad(value, _SPACE)
    if attention_mask is not None:
        # Kernels that add a mask support no groups of heads. The further query sees all keys; its result is dropped.
        attention_mask = _padded(attention_mask)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    result = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=query.shape[1] > key.shape[1]
    )
    return result[:, :, 1:, :features].transpose(1, 2).contiguous(), None


def _padded(mask: Tensor) -> Tensor:
    """Return a mask with a further key and a further query; the same one for all layers, as long as the mask exists."""
    if mask not in _HELD:
        _HELD[mask] = pad(mask, (1, 0, 1, 0))
    padded: Tensor = _HELD[mask]
    return padded


ALL_ATTENTION_FUNCTIONS.register(SINK_ATTENTION, _attention)


# The family.


def clamped_swiglu(gate_up: Tensor, weights: Tensor, limit: float, alpha: float) -> Tensor:
    """Return gated activations [rows, features] times `weights` [rows].

    In `gate_up` [rows, 2 features] columns of the gate and of the gated values alternate; it is clamped at `limit`.
    `alpha`: the factor inside the sigmoid.
    """
    inner: Tensor = _Gated.apply(gate_up, weights, limit, alpha)  # type: ignore[no-untyped-call]
    return inner


class _Gated(torch.autograd.Function):
    """A gated activation that saves only its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.numbers = limit, alpha
        return _gated(gate_up, weights, limit, alpha)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            of_input, of_weights = torch.autograd.grad(_gated(*inputs, *ctx.numbers), inputs, gradient)
        return of_input, of_weights, None, None


def _gated(gate_up: Tensor, weights: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return ((up + 1) * (gate * (gate * alpha).sigmoid()) * weights[:, None]).to(gate_up.dtype)


_PUBLISHED_LIMIT = 7.0


class GptOss(Sparse):
    """Experts in all blocks, with biases; in their first matrices columns of gate and values alternate."""

    kernel_names = dict.fromkeys((kernel.value for kernel in (*FUSED_SDPA, Attention.SDPA_MATH)), SINK_ATTENTION)
    parts = dict.fromkeys((BLOCK, SLIDING, FULL), Llama.parts[BLOCK])
    plan = {
        **Llama.plan,
        **dict.fromkeys((f"self_attn.{name}_proj" for name in "qkv"), "colwise"),
        **{"self_attn.o_proj": "rowwise", "self_attn.sinks": Rule("cut", dim=0), "mlp.router": INSIDE},
        # No shard cuts a pair of columns: `tp_size` divides the experts' features.
        "mlp.experts.gate_up_proj": Rule("cut", dim=2, ep_dim=0),
        "mlp.experts.gate_up_proj_bias": Rule("cut", dim=1, ep_dim=0),
        "mlp.experts.down_proj": Rule("cut", dim=1, ep_dim=0),
        "mlp.experts.down_proj_bias": Rule("inside", ep_dim=0),
    }

    returns_scores = True

    def block(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return a stock block; before transformers 5.20 its experts clamp at 7.0, regardless of the configuration."""
        block = super().block(stock, kind, index)
        experts: Any = block.get_submodule("mlp.experts")
        experts.limit = getattr(stock.config, "swiglu_limit", _PUBLISHED_LIMIT)
        return block

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the choice of a router, whose weights are a softmax over only the chosen experts."""
        probabilities, scores, index = scored(x, part.router)
        return Choice(probabilities, index, scores.softmax(-1))

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Make only the first rank add the biases of matrix products that are summed over ranks."""
        super().after_split(block, config, tensor_parallel)
        experts: Any = block.get_submodule("mlp.experts")
        experts.keeps_biases = float((experts.tensor_parallel or tensor_parallel).rank == 0)

    def compute_experts(
        self, experts: Any, rows: Tensor, weights: Unseen, counts: Counts, recomputation: Recomputation
    ) -> Tensor:
        """Return the weighted results of experts: the rows of the last matrix product and its biases are weighted."""
        products = expert_products(rows, experts.gate_up_proj.transpose(1, 2), counts)
        gate_up = with_biases(products, experts.gate_up_proj_bias, counts)
        activation = partial(clamped_swiglu, limit=experts.limit, alpha=experts.alpha)
        inner = recomputation.of_experts(activation, gate_up, weights.tensor)
        results = recomputation.product(expert_products, inner, experts.down_proj.transpose(1, 2), counts)
        biases = experts.down_proj_bias * getattr(experts, "keeps_biases", 1.0)
        return with_biases(results, biases, counts, weights.tensor)
