"""Baichuan and Baichuan 2 (Yang et al. 2023): Llama with fused queries, keys and values; 13B has ALiBi's slopes.

The code published with them has one class a size. Which one a configuration is for shows in its keys: 13B has no
max_position_embeddings, and Baichuan 2 alone has a weight of a further loss, or its larger vocabulary.
"""

from msgspec.structs import replace

from shardwright_models.facts import Config, Only
from shardwright_models.families.llama import LLAMA

_VOCABULARY_OF_2 = 125696


def _implied(config: Config) -> Config:
    positions = config.get("max_position_embeddings")
    return {
        "alibi": config.get("alibi", positions is None),
        "max_position_embeddings": positions or config.get("model_max_length"),
    }


def _normed_head(config: Config) -> bool:
    return config.get("z_loss_weight") is not None or config["vocab_size"] == _VOCABULARY_OF_2


BAICHUAN = replace(
    LLAMA,
    model_type="baichuan",
    modeling="llama",
    architecture="BaichuanForCausalLM",
    runtime="baichuan:Baichuan",
    implied=_implied,
    alibi=lambda config: _implied(config)["alibi"],
    normed_head=_normed_head,
    megatron=None,
    torchtitan=None,
    ignored=("model_max_length", "z_loss_weight", "_from_model_config"),
    only={
        "z_loss_weight": Only(0, "the loss is cross entropy alone"),
        "tie_word_embeddings": Only(False, "the head has a matrix of its own"),
        "attention_bias": Only(False, "no part has a bias"),
        "mlp_bias": Only(False, "no part has a bias"),
        "num_key_value_heads": Only(None, "each head has its own keys and values"),
    },
)
