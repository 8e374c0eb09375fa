"""OLMo 2 (OLMo team 2024)."""

from shardwright_train.models.llama import Llama


class Olmo2(Llama):
    """Llama with blocks whose heads cannot be sharded."""

    plan = {
        **Llama.plan,
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise"),
        "self_attn.o_proj": "rowwise",
    }
