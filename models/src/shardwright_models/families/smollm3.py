"""SmolLM 3 (Bakouch et al. 2025): Llama's blocks, of which each fourth does not rotate queries and keys."""

from msgspec.structs import replace

from shardwright_models.facts import Config, Only, Stack
from shardwright_models.families.llama import LLAMA

ROTATED, UNROTATED = "rope", "no_rope"


def _type_at(config: Config, index: int) -> str:
    return UNROTATED if (index + 1) % config["no_rope_layer_interval"] == 0 else ROTATED


SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    stock="SmolLM3ForCausalLM",
    runtime="smollm3:SmolLM3",
    stacks=(
        Stack(
            types=(ROTATED, UNROTATED),
            type_at=_type_at,
            typed_by="no_rope_layers",
            written={ROTATED: 1, UNROTATED: 0},
        ),
    ),
    defaults={
        **{**LLAMA.defaults, "tie_word_embeddings": True, "num_key_value_heads": 4, "no_rope_layer_interval": 4},
        **{"max_position_embeddings": 32768, "use_sliding_window": False, "pad_token_id": 128004},
    },
    lengths=(*LLAMA.lengths, "no_rope_layer_interval"),
    megatron=None,
    torchtitan=None,
    ignored=("max_window_layers",),
    only={"use_sliding_window": Only(False, "attention is whole")},
)
