"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): attention from latents, shared experts, and experts chosen in groups."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from shardwright_formats.types import Model
from shardwright_train.models.experts import Choice, Sparse
from shardwright_train.parallel.sharding_rules import BUFFER, INSIDE, Rule
from shardwright_train.parallel.tensor import TensorParallel

_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
_LEAST = 1e-20
"""Number that V3 adds to the sum that it divides weights by."""


class _FromLatents(Sparse):
    """Blocks whose heads have their keys and values from one latent, which each rank has whole."""

    plan = {
        **Sparse.plan,
        **dict.fromkeys((f"self_attn.{name}" for name in _LATENT), INSIDE),
        **dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"), "colwise"),
        "self_attn.o_proj": "rowwise",
        # Summed over ranks together with the other experts' results.
        "mlp.shared_experts.down_proj": Rule("cut", dim=1),
    }
    always = ("mlp.shared_experts",)

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Note that nothing but a sum needs the last product of shared experts."""
        super().after_split(block, config, tensor_parallel)
        if (shared := getattr(block.mlp, "shared_experts", None)) is not None:
            last = shared.down_proj
            last.forward = partial(tensor_parallel.recomputation.product, last.forward)


class DeepseekV2(_FromLatents):
    """Blocks whose router takes the experts of the highest probabilities."""

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the choice of a router by probabilities, in the best groups where there are groups."""
        config, probabilities = part.config, _logits(part.gate, x).softmax(-1)
        allowed = probabilities
        if config.topk_method == "group_limited_greedy":
            best = probabilities.unflatten(-1, (config.n_group, -1)).max(-1).values
            allowed = probabilities.masked_fill(~_in_best_groups(best, config.topk_group, probabilities), 0.0)
        weights, index = allowed.topk(config.num_experts_per_tok, -1, sorted=False)
        return Choice(probabilities, index, weights * config.routed_scaling_factor)

    def angles(self, rotary: nn.Module, kind: str, example: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return the rotations [1, s, features / 2], complex numbers."""
        return (rotary(example, positions),)

    def rotation(self, angles: tuple[Tensor, ...]) -> Tensor:
        """Return these."""
        return angles[0]


class DeepseekV3(_FromLatents):
    """Blocks whose router scores by a sigmoid, and chooses by scores that biases correct."""

    plan = {**_FromLatents.plan, "mlp.gate.e_score_correction_bias": BUFFER}

    def skeleton(self, config: Any) -> Any:
        """Return the stock model whose biases of routers, which are buffers, are parameters without gradients."""
        stock = super().skeleton(config)
        for gate in (module for name, module in stock.named_modules() if name.endswith("mlp.gate")):
            bias = gate.e_score_correction_bias
            del gate.e_score_correction_bias
            gate.e_score_correction_bias = nn.Parameter(_wide(bias), requires_grad=False)
        return stock

    def may_lack(self, model: Model, name: str) -> bool:
        """Return whether a parameter of a file is of the layers behind the last, which predict further tokens."""
        number = name.removeprefix("model.layers.").partition(".")[0]
        return number.isdigit() and int(number) >= len(model.layers)

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the choice of a router by corrected scores, in the best groups; scores alone weigh the results."""
        config, scores = part.config, _logits(part.gate, x).sigmoid()
        corrected = scores.detach() + part.gate.e_score_correction_bias
        best = corrected.unflatten(-1, (config.n_group, -1)).topk(2, -1).values.sum(-1)
        allowed = corrected.masked_fill(~_in_best_groups(best, config.topk_group, corrected), float("-inf"))
        index = allowed.topk(config.num_experts_per_tok, -1, sorted=False).indices
        weights = scores.gather(1, index)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST)
        return Choice(scores / scores.sum(-1, keepdim=True), index, weights * config.routed_scaling_factor)


def _logits(gate: Any, x: Tensor) -> Tensor:
    """Return the scores of a router, in float32 or wider."""
    logits: Tensor = _Widened.apply(x, gate.weight)  # type: ignore[no-untyped-call]
    return logits


class _Widened(torch.autograd.Function):
    """A product in float32 or wider, which keeps its inputs as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        return linear(_wide(x), _wide(matrix))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, matrix = ctx.saved_tensors
        return (gradient @ _wide(matrix)).to(x.dtype), (gradient.T @ _wide(x)).to(matrix.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(torch.float32, x.dtype))


def _in_best_groups(best: Tensor, number: int, scores: Tensor) -> Tensor:
    """Return which experts [positions, experts] are in the `number` groups with the best scores [positions, groups]."""
    index = best.topk(number, -1, sorted=False).indices
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, index, True)
    return chosen.repeat_interleave(scores.shape[-1] // best.shape[-1], -1)
