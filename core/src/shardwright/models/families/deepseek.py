"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): latent attention, routed and shared experts, first blocks dense."""

from typing import Any

from msgspec.structs import replace

from shardwright.models import traits
from shardwright.models.config_keys import is_length, not_a_length
from shardwright.models.families.llama import LLAMA, with_blocks
from shardwright.models.parameters import Parameters, gated, linear, norm
from shardwright.models.traits import DENSE, OLDER_NAMES, SPARSE, VALUES, Config, ExpertKeys, Only, Stack
from shardwright.types import Parameter

CORRECTION = "mlp.gate.e_score_correction_bias"
"""The buffer of a block that is added to routing scores when experts are chosen."""


def _block(layer: str, config: Config) -> Parameters:
    yield from _latent_attention(config)
    if layer == DENSE:
        yield from gated("mlp", config["hidden_size"], config["intermediate_size"])
    else:
        yield from _experts(config)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from norm(name, config["hidden_size"], bias=False)


def _latent_attention(config: Config) -> Parameters:
    hidden, heads, bias = config["hidden_size"], config["num_attention_heads"], config["attention_bias"]
    plain, rotated, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries, keys = config["q_lora_rank"], config["kv_lora_rank"]
    if queries is None:
        yield from linear("self_attn.q_proj", heads * (plain + rotated), hidden, "columns")
    else:
        yield from _latent("q_a_proj", "q_a_layernorm", queries, queries, hidden, bias)
        yield from linear("self_attn.q_b_proj", heads * (plain + rotated), queries, "columns")
    yield from _latent("kv_a_proj_with_mqa", "kv_a_layernorm", keys + rotated, keys, hidden, bias)
    yield from linear("self_attn.kv_b_proj", heads * (plain + values), keys, "columns")
    yield from linear("self_attn.o_proj", hidden, heads * values, "rows", bias)


def _latent(matrix: str, normed: str, outputs: int, features: int, hidden: int, bias: bool) -> Parameters:
    """Yield the matrix and the norm of a latent, which are replicated on each tensor-parallel rank."""
    matrices = linear(f"self_attn.{matrix}", outputs, hidden, bias=bias)
    for parameter in (*matrices, *norm(f"self_attn.{normed}", features, bias=False)):
        yield replace(parameter, inside=True)


def _experts(config: Config) -> Parameters:
    number, inner, hidden = config["n_routed_experts"], config["moe_intermediate_size"], config["hidden_size"]
    yield Parameter(name="mlp.experts.gate_up_proj", shape=(number, 2, inner, hidden), tp_dim=2, ep_dim=0)
    yield Parameter(name="mlp.experts.down_proj", shape=(number, hidden, inner), tp_dim=2, ep_dim=0)
    yield Parameter(name="mlp.gate.weight", shape=(number, hidden), inside=True)
    yield from gated("mlp.shared_experts", hidden, config["n_shared_experts"] * inner)


def _corrected(layer: str, config: Config) -> Parameters:
    for parameter in _block(layer, config):
        yield parameter
        if parameter.name == "mlp.gate.weight":
            yield Parameter(name=CORRECTION, shape=parameter.shape[:1], inside=True, buffer=True)


def _latents(config: Config) -> traits.Latents:
    return traits.Latents(config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"])


def _implied(config: Config) -> Config:
    heads = config["num_attention_heads"]
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return {"head_dim": width, "num_key_value_heads": heads, VALUES: config["v_head_dim"]}


def _wrong_v2(config: Config) -> str | None:
    method = config["topk_method"]
    if method not in (_GREEDY, _GROUPED):
        return f"topk_method {method!r} is neither {_GREEDY} nor {_GROUPED}"
    return _wrong_shapes(config) or (_wrong_groups(config, 1) if method == _GROUPED else None)


def _wrong_v3(config: Config) -> str | None:
    # The score of a group is the sum of its two best experts' scores.
    return _wrong_shapes(config) or _wrong_groups(config, 2)


def _wrong_shapes(config: Config) -> str | None:
    heads, rank, rotated = (config.get(key) for key in ("num_attention_heads", "q_lora_rank", "qk_rope_head_dim"))
    if config.get("num_key_value_heads") not in (heads, None):
        return f"num_key_value_heads {config['num_key_value_heads']} is not num_attention_heads {heads}"
    if rank is not None and not is_length(rank):
        return not_a_length("q_lora_rank", rank)
    if is_length(rotated) and rotated % 2:
        return f"qk_rope_head_dim {rotated} is odd: features are rotated in pairs"
    return _no_length(config, "num_experts_per_tok", "n_routed_experts", "n_shared_experts")


def _wrong_groups(config: Config, least: int) -> str | None:
    """Return what is wrong with the groups of experts, of which each position uses some, or None.

    `least`: the fewest experts that a group must have.
    """
    if (wrong := _no_length(config, "n_group", "topk_group")) is not None:
        return wrong
    number, groups, chosen = config["n_routed_experts"], config["n_group"], config["topk_group"]
    if number % groups or number // groups < least:
        return f"n_group {groups} makes no groups of {least} or more of n_routed_experts {number}"
    if chosen > groups:
        return f"topk_group {chosen} is over n_group {groups}"
    if config["num_experts_per_tok"] > (most := number // groups * chosen):
        return f"num_experts_per_tok {config['num_experts_per_tok']} is over the {most} experts of {chosen} groups"
    return None


def _no_length(config: Config, *keys: str) -> str | None:
    return next((not_a_length(key, config.get(key)) for key in keys if not is_length(config.get(key))), None)


_GREEDY, _GROUPED = "greedy", "group_limited_greedy"


def _routing_v2(config: Config) -> traits.Routing:
    groups = (config["n_group"], config["topk_group"]) if config["topk_method"] == _GROUPED else None
    return traits.Routing(normalized=False, scale=config.get("routed_scaling_factor", 1.0), groups=groups)


def _routing_v3(config: Config) -> traits.Routing:
    return traits.Routing(
        scores="sigmoid",
        normalized=config["norm_topk_prob"],
        scale=config["routed_scaling_factor"],
        groups=(config["n_group"], config["topk_group"]),
        best_of_group=2,
        corrected=True,
    )


_KEYS = ExpertKeys(
    number="n_routed_experts",
    features="moe_intermediate_size",
    balance="aux_loss_alpha",
    balance_of="layer",
    first="first_k_dense_replace",
    shared="n_shared_experts",
    older_names=OLDER_NAMES,
    routing=_routing_v2,
)
_LENGTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts_per_tok")
_DEFAULTS: dict[str, Any] = {
    **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    **{"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"tie_word_embeddings": False, "aux_loss_alpha": 0.0},
}
_ONLY = {
    "moe_layer_freq": Only(1, "all blocks after the first ones have experts"),
    "seq_aux": Only(True, "the balance loss is one of each sample"),
}
_TORCHTITAN = traits.Torchtitan(
    "deepseek_v3",
    {
        (2048, 27, 16, None, 10944, 102400, 64): "16B",
        (5120, 60, 128, None, 12288, 102400, 160): "236B",
        (7168, 61, 128, None, 18432, 129280, 256): "671B",
    },
    contexts=False,
)
_IGNORED = ("aux_loss_alpha", "ep_size", "moe_layer_freq", "scoring_func", "seq_aux")
_SIZES = "n_routed_experts", "n_shared_experts", "moe_intermediate_size"
DEEPSEEK_V2 = replace(
    LLAMA,
    model_type="deepseek_v2",
    stock=LLAMA.stock._replace(name="DeepseekV2ForCausalLM"),
    runtime="experts:DeepseekV2",
    keys=traits.Keys(
        _DEFAULTS
        | {"first_k_dense_replace": 0, "mlp_bias": False, "n_routed_experts": 64, "n_shared_experts": 2}
        | {"moe_intermediate_size": 1407, "norm_topk_prob": False}
        | {"topk_method": _GREEDY, "n_group": None, "topk_group": None},
        lengths=("vocab_size", *_LENGTHS, *_SIZES),
        aliases={"num_experts": "n_routed_experts"},
        implied=_implied,
        wrong=_wrong_v2,
        ignored=_IGNORED,
        only=_ONLY
        | {
            "mlp_bias": Only(False, "a sum over ranks would add biases of shared experts several times"),
            "norm_topk_prob": Only(False, "transformers does not divide weights by their sum"),
            "scoring_func": Only("softmax", "transformers has no other"),
        },
    ),
    parameters=with_blocks(_block),
    stacks=(Stack(types=(DENSE, SPARSE), type_at=_KEYS.type_at),),
    divided=traits.Divided(("num_attention_heads", "intermediate_size")),
    attention=LLAMA.attention._replace(latents=_latents, joins_features=True),
    experts=_KEYS,
    systems=traits.Systems("bridged", _TORCHTITAN),
    mtp_trained=("deepseek_v2", "deepseek_v3"),
)
# kimi_k25/configuration_kimi_k25.py of transformers 5.23 reads its text_config in this way.
KIMI_K2 = traits.OtherName("kimi_k2", "deepseek_v3")
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    model_type="deepseek_v3",
    stock=LLAMA.stock._replace(name="DeepseekV3ForCausalLM"),
    runtime="experts:DeepseekV3",
    keys=DEEPSEEK_V2.keys._replace(
        defaults=_DEFAULTS
        | {"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8, "topk_group": 4}
        | {"num_key_value_heads": 128, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
        | {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        wrong=_wrong_v3,
        ignored=(*_IGNORED, "topk_method"),
        only=_ONLY
        | {
            "scoring_func": Only("sigmoid", "transformers has no other"),
            "topk_method": Only("noaux_tc", "experts are chosen by corrected scores"),
        },
    ),
    parameters=with_blocks(_corrected),
    experts=_KEYS._replace(routing=_routing_v3),
)
