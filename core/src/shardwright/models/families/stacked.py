"""Families like Llama whose files store several matrices as one: Baichuan, GLM 4, Phi 3.

Baichuan (Yang et al. 2023): the code published with it has one class per model size. The keys of a configuration show
which class it is for: 13B has ALiBi's slopes and no max_position_embeddings, and only Baichuan 2 has a weight for an
additional loss, or its larger vocabulary. GLM 4 (GLM team 2024): norms before and after each part, rotary positions for
a share of the features. Phi 3, 3.5 and 4 (Abdin et al. 2024): dropouts, and in some models rotary positions for a share
of the features.
"""

from msgspec.structs import replace

from shardwright.models.families.llama import LLAMA, grouped_attention, in_all, with_blocks
from shardwright.models.parameters import Parameters, linear, norm
from shardwright.models.traits import Config, Dropouts, Keys, Only, Systems

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
    stock=LLAMA.stock._replace(
        module="llama",
        architecture="BaichuanForCausalLM",
        stacked={"self_attn.W_pack": tuple(f"self_attn.{name}_proj" for name in "qkv")},
    ),
    runtime="llama:Baichuan",
    keys=LLAMA.keys._replace(
        implied=_implied,
        ignored=("model_max_length", "z_loss_weight", "_from_model_config"),
        only={
            "z_loss_weight": Only(0, "the loss is only cross entropy"),
            "tie_word_embeddings": Only(False, "the head has a separate matrix"),
            "attention_bias": Only(False, "no part has a bias"),
            "mlp_bias": Only(False, "no part has a bias"),
            "num_key_value_heads": Only(None, "each head has separate keys and values"),
        },
    ),
    attention=LLAMA.attention._replace(alibi=lambda config: _implied(config)["alibi"]),
    norm=LLAMA.norm._replace(of_head=_normed_head),
    systems=Systems(),
)

_GATED = tuple(f"mlp.gate_up_proj.{name}_proj" for name in ("gate", "up"))


def _gated(config: Config) -> Parameters:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for name in _GATED:
        yield from linear(name, inner, hidden, "columns")
    yield from linear("mlp.down_proj", hidden, inner, "rows")


def _glm4_block(_layer: str, config: Config) -> Parameters:
    # Only queries, keys and values have biases.
    yield from (p for p in grouped_attention(config) if p.name != "self_attn.o_proj.bias")
    yield from _gated(config)
    for name in ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"):
        yield from norm(name, config["hidden_size"], bias=False)


GLM4 = replace(
    LLAMA,
    model_type="glm4",
    stock=LLAMA.stock._replace(name="Glm4ForCausalLM", stacked={"mlp.gate_up_proj": _GATED}),
    runtime="llama:Glm4",
    keys=Keys(
        {
            **{"attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu"},
            **{"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "tie_word_embeddings": False},
        },
        lengths=LLAMA.keys.lengths,
    ),
    parameters=with_blocks(_glm4_block),
    attention=LLAMA.attention._replace(joins_features=True),
    norm=LLAMA.norm._replace(of_part=2, ends=("full",)),
    systems=Systems(),
)


def _phi3_block(_layer: str, config: Config) -> Parameters:
    hidden, size = config["hidden_size"], config["head_dim"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    yield from linear("self_attn.o_proj", hidden, heads["q"] * size, "rows")
    for name, count in heads.items():
        yield from linear(f"self_attn.qkv_proj.{name}_proj", count * size, hidden, "columns")
    yield from _gated(config)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from norm(name, hidden, bias=False)


PHI3 = replace(
    LLAMA,
    model_type="phi3",
    stock=LLAMA.stock._replace(
        name="Phi3ForCausalLM",
        stacked={
            "self_attn.qkv_proj": tuple(f"self_attn.qkv_proj.{name}_proj" for name in "qkv"),
            "mlp.gate_up_proj": _GATED,
        },
    ),
    runtime="llama:Phi3",
    keys=Keys(
        {
            **{"attention_dropout": 0.0, "hidden_act": "silu", "resid_pdrop": 0.0, "rms_norm_eps": 1e-5},
            **{"max_position_embeddings": 4096, "sliding_window": None, "tie_word_embeddings": False},
        },
        lengths=LLAMA.keys.lengths,
        # Keys in Phi 4's files that the class does not read.
        ignored=("attention_bias", "full_attn_mod", "interpolate_factor", "lm_head_bias", "mlp_bias"),
        only={
            **dict.fromkeys(("attention_bias", "lm_head_bias", "mlp_bias"), Only(False, "matrices have no biases")),
            **dict.fromkeys(("full_attn_mod", "interpolate_factor"), Only(1, "transformers has no others")),
        },
    ),
    parameters=with_blocks(_phi3_block),
    attention=LLAMA.attention._replace(joins_features=True, keeps_unrotated=True, window=in_all),
    dropouts=Dropouts(attention="attention_dropout", hidden="resid_pdrop", ends=("full",)),
    systems=Systems(),
)
