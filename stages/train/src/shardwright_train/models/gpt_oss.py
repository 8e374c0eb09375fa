"""gpt-oss (OpenAI 2025)."""

from typing import Any

from torch import Tensor, nn

from shardwright_models.facts import BLOCK, FULL, SLIDING
from shardwright_train.models.clamped_swiglu import clamped_swiglu
from shardwright_train.models.experts import Sparse, Unseen
from shardwright_train.models.llama import Llama
from shardwright_train.models.routers import Choice, scored
from shardwright_train.models.sinks import SINK_ATTENTION
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.experts import expert_products, with_biases
from shardwright_train.parallel.sharding_rules import INSIDE, Rule
from shardwright_train.parallel.tensor import TensorParallel


class GptOss(Sparse):
    """Experts in all blocks, with biases; in their first matrices columns of gate and values alternate."""

    kernel_names = dict.fromkeys(("sdpa", "sdpa_math"), SINK_ATTENTION)
    parts = dict.fromkeys((BLOCK, SLIDING, FULL), Llama.parts[BLOCK])
    plan = {
        **Llama.plan,
        **dict.fromkeys((f"self_attn.{name}_proj" for name in "qkv"), "colwise"),
        **{"self_attn.o_proj": "rowwise", "self_attn.sinks": Rule("cut", dim=0), "mlp.router": INSIDE},
        # A share of pairs is whole: `tp_size` divides the experts' features.
        "mlp.experts.gate_up_proj": Rule("cut", dim=2, ep_dim=0),
        "mlp.experts.gate_up_proj_bias": Rule("cut", dim=1, ep_dim=0),
        "mlp.experts.down_proj": Rule("cut", dim=1, ep_dim=0),
        "mlp.experts.down_proj_bias": Rule("inside", ep_dim=0),
    }

    returns_scores = True

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the choice of a router, whose weights are a softmax over those of the chosen experts alone."""
        probabilities, scores, index = scored(x, part.router)
        return Choice(probabilities, index, scores.softmax(-1))

    def after_split(self, block: nn.Module, config: Any, tensor_parallel: TensorParallel) -> None:
        """Let the first rank alone add biases behind products that are summed over ranks."""
        super().after_split(block, config, tensor_parallel)
        experts: Any = block.get_submodule("mlp.experts")
        experts.keeps_biases = float((experts.tensor_parallel or tensor_parallel).rank == 0)

    def compute_experts(
        self, experts: Any, rows: Tensor, weights: Unseen, counts: Tensor, recomputation: Recomputation
    ) -> Tensor:
        """Return the weighted results of experts: their last product is of weighted rows, and so are its biases."""
        products = expert_products(rows, experts.gate_up_proj.transpose(1, 2), counts)
        gate_up = with_biases(products, experts.gate_up_proj_bias, counts)
        inner = clamped_swiglu(gate_up, weights.tensor, experts.limit, experts.alpha)
        results = recomputation.product(expert_products, inner, experts.down_proj.transpose(1, 2), counts)
        biases = experts.down_proj_bias * getattr(experts, "keeps_biases", 1.0)
        return with_biases(results, biases, counts, weights.tensor)
