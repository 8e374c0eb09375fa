"""GLM 4 (GLM team 2024)."""

from shardwright_train.models.llama import Llama


class Glm4(Llama):
    """Llama whose files hold the gate and the first matrix of the feed-forward as one, each sharded by itself."""

    stacked = {"mlp.gate_up_proj": ("mlp.gate_up_proj.gate_proj", "mlp.gate_up_proj.up_proj")}
    plan = {
        **Llama.plan,
        **dict.fromkeys(("mlp.gate_up_proj", "gate_proj", "up_proj"), "colwise"),
        "mlp.down_proj": "rowwise",
    }
