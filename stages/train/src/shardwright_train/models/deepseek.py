"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): attention from latents, shared experts, and experts chosen in groups."""

from typing import Any

from torch import Tensor, nn

from shardwright_formats.types import Model
from shardwright_train.models.experts import Sparse
from shardwright_train.models.routers import Choice, in_best_groups, wide, wide_logits
from shardwright_train.parallel.sharding_rules import BUFFER, INSIDE, Rule

_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
_LEAST = 1e-20
"""Number that V3 adds to the sum that it divides weights by."""


class DeepseekV2(Sparse):
    """Blocks whose heads share a latent, which each rank has whole; routers choose the highest probabilities."""

    plan = {
        **Sparse.plan,
        **dict.fromkeys((f"self_attn.{name}" for name in _LATENT), INSIDE),
        **dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"), "colwise"),
        "self_attn.o_proj": "rowwise",
        # Summed over ranks together with the other experts' results.
        "mlp.shared_experts.down_proj": Rule("cut", dim=1),
    }
    always = ("mlp.shared_experts",)

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the choice of a router by probabilities, in the best groups where there are groups."""
        config, probabilities = part.config, wide_logits(x, part.gate.weight).softmax(-1)
        allowed = probabilities
        if config.topk_method == "group_limited_greedy":
            best = probabilities.unflatten(-1, (config.n_group, -1)).max(-1).values
            allowed = probabilities.masked_fill(~in_best_groups(best, config.topk_group, probabilities), 0.0)
        weights, index = allowed.topk(config.num_experts_per_tok, -1, sorted=False)
        return Choice(probabilities, index, weights * config.routed_scaling_factor)


class DeepseekV3(DeepseekV2):
    """Blocks whose router scores by a sigmoid, and chooses by scores that biases correct."""

    plan = {**DeepseekV2.plan, "mlp.gate.e_score_correction_bias": BUFFER}

    def skeleton(self, config: Any) -> Any:
        """Return the stock model whose biases of routers, which are buffers, are parameters without gradients."""
        stock = super().skeleton(config)
        for gate in (module for name, module in stock.named_modules() if name.endswith("mlp.gate")):
            bias = gate.e_score_correction_bias
            del gate.e_score_correction_bias
            gate.e_score_correction_bias = nn.Parameter(wide(bias), requires_grad=False)
        return stock

    def may_lack(self, model: Model, name: str) -> bool:
        """Return whether a parameter of a file is of the layers behind the last, which predict further tokens."""
        number = name.removeprefix("model.layers.").partition(".")[0]
        return number.isdigit() and int(number) >= len(model.layers)

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the choice of a router by corrected scores, in the best groups; scores alone weigh the results."""
        config, scores = part.config, wide_logits(x, part.gate.weight).sigmoid()
        corrected = scores.detach() + part.gate.e_score_correction_bias
        best = corrected.unflatten(-1, (config.n_group, -1)).topk(2, -1).values.sum(-1)
        allowed = corrected.masked_fill(~in_best_groups(best, config.topk_group, corrected), float("-inf"))
        index = allowed.topk(config.num_experts_per_tok, -1, sorted=False).indices
        weights = scores.gather(1, index)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST)
        return Choice(scores / scores.sum(-1, keepdim=True), index, weights * config.routed_scaling_factor)
