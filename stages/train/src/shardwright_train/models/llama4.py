"""Llama 4 (Meta 2025), its language model."""

from typing import Any

from torch import Tensor

from shardwright_formats.io import BadInput
from shardwright_formats.types import Model, base_type
from shardwright_models.families.llama4 import ROTATED_DENSE, ROTATED_SPARSE, TYPES
from shardwright_train.models.experts import Sparse, Unseen
from shardwright_train.models.llama import Llama
from shardwright_train.models.masks import Places
from shardwright_train.models.routers import Choice, scored
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.experts import expert_products
from shardwright_train.parallel.sharding_rules import INSIDE, Parts, Rule


class Llama4(Sparse):
    """Experts that take in weighted positions, beside one that computes them all; heads are rotated in pairs."""

    parts = dict.fromkeys(TYPES, Parts("model.layers", attention=("self_attn",), mlp=("feed_forward",)))
    plan = {
        **Llama.plan,
        "feed_forward.router": INSIDE,
        "feed_forward.experts.gate_up_proj": Rule("cut", fused=2, dim=2, ep_dim=0),
        "feed_forward.experts.down_proj": Rule("cut", dim=1, ep_dim=0),
        # Summed over ranks together with the other experts' results.
        "feed_forward.shared_expert.down_proj": Rule("cut", dim=1),
    }
    part = "feed_forward"
    always = ("feed_forward.shared_expert",)
    returns_scores = True

    def choose(self, part: Any, x: Tensor) -> Choice:
        """Return the choice of a router, whose weights are sigmoids of the chosen experts' scores."""
        probabilities, scores, index = scored(x, part.router)
        return Choice(probabilities, index, scores.sigmoid())

    def compute_experts(
        self, experts: Any, rows: Tensor, weights: Unseen, counts: Tensor, recomputation: Recomputation
    ) -> Tensor:
        """Return the results of experts for rows that are weighted first."""
        rows = (rows * weights.tensor[:, None]).to(rows.dtype)
        first, last = experts.gate_up_proj.flatten(2).transpose(1, 2), experts.down_proj.transpose(1, 2)
        gate, up = expert_products(rows, first, counts).chunk(2, -1)
        return recomputation.product(expert_products, up * experts.act_fn(gate), last, counts)

    def constants(self, model: Model, kind: str, places: Places, *others: Any) -> dict[str, Any]:
        """Return those of all families; raise BadInput for parts of a sequence whose queries are scaled by position.

        Stock blocks that do not rotate count positions from the first that they are given.
        """
        config, rotates = self.configuration(model), base_type(kind) in (ROTATED_SPARSE, ROTATED_DENSE)
        scales = config.attn_temperature_tuning and model.sequence_length >= config.floor_scale and not rotates
        if scales and (places.computed != slice(0, model.sequence_length) or places.order is not None):
            problem = f"ulysses and cp_size above 1: queries of {kind} layers are scaled by their positions in a sample"
            raise BadInput(f"model {model.name}", problem, "use megatron there, or attn_temperature_tuning false")
        return super().constants(model, kind, places, *others)
