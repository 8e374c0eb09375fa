"""Mixtral (Jiang et al. 2024) and Qwen3-MoE (Qwen team 2025): Mistral and Qwen3, with experts."""

from msgspec.structs import replace

from shardwright.models import traits
from shardwright.models.facts import Family
from shardwright.models.families.llama import MISTRAL, QWEN3
from shardwright.models.parameters import Parameters, linear
from shardwright.models.traits import DENSE, OLDER_NAMES, SPARSE, Config, ExpertKeys, Layers, Only, Stack
from shardwright.types import EMBEDDING, HEAD, Parameter


def _with_experts(dense: Family, experts: ExpertKeys, **facts: object) -> Family:
    """Return the facts of a family with the blocks of `dense`, some of which have experts."""
    return replace(
        dense,
        runtime="experts:Sparse",
        parameters=_parameters(dense.parameters, experts),
        stacks=(Stack(types=(DENSE, SPARSE), type_at=experts.type_at),),
        experts=experts,
        **facts,
    )


def _parameters(dense: Layers, keys: ExpertKeys) -> Layers:
    """Return the function of a family's parameters in which experts and a router replace the feed-forward matrices."""

    def parameters(layer: str, config: Config) -> Parameters:
        for parameter in dense(layer, config):
            if layer in (EMBEDDING, HEAD, DENSE) or not parameter.name.startswith("mlp."):
                yield parameter
            elif parameter.name == "mlp.gate_proj.weight":
                yield from _expert_parameters(config, keys)

    return parameters


def _expert_parameters(config: Config, keys: ExpertKeys) -> Parameters:
    number, inner, hidden = config[keys.number], config[keys.features], config["hidden_size"]
    (scores,) = linear(keys.router, number, hidden)
    router = replace(scores, inside=True)
    if keys.router_first:
        yield router
    yield Parameter(name="mlp.experts.gate_up_proj", shape=(number, 2, inner, hidden), tp_dim=2, ep_dim=0)
    yield Parameter(name="mlp.experts.down_proj", shape=(number, hidden, inner), tp_dim=2, ep_dim=0)
    if not keys.router_first:
        yield router


_NUMBER = "num_local_experts"
_MIXTRAL = ExpertKeys(
    number=_NUMBER, features="intermediate_size", router_first=True, older_names=("gate", "w1", "w3", "w2")
)
MIXTRAL = _with_experts(
    MISTRAL,
    _MIXTRAL,
    model_type="mixtral",
    stock=MISTRAL.stock._replace(name="MixtralForCausalLM"),
    keys=traits.Keys(
        {**MISTRAL.keys.defaults, "rms_norm_eps": 1e-5, "sliding_window": None}
        | {_NUMBER: 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0},
        lengths=(*MISTRAL.keys.lengths, _NUMBER, _MIXTRAL.top_k),
        aliases={"num_experts": _NUMBER},
        only={"router_jitter_noise": Only(0.0, "what routers see is not disturbed")},
    ),
    systems=traits.Systems("alone"),
    mtp_trained=("mixtral",),
)
_QWEN3 = ExpertKeys(
    number=_NUMBER,
    features="moe_intermediate_size",
    without="mlp_only_layers",
    step="decoder_sparse_step",
    older_names=OLDER_NAMES,
    routing=lambda config: traits.Routing(normalized=config["norm_topk_prob"]),
)
QWEN3_MOE = _with_experts(
    QWEN3,
    _QWEN3,
    model_type="qwen3_moe",
    stock=QWEN3.stock._replace(name="Qwen3MoeForCausalLM"),
    keys=traits.Keys(
        {key: value for key, value in QWEN3.keys.defaults.items() if key != "head_dim"}
        | {_NUMBER: 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
        | {"intermediate_size": 6144, "num_key_value_heads": 4, "norm_topk_prob": False, "router_aux_loss_coef": 0.001}
        | {"use_sliding_window": False},
        lengths=(*QWEN3.keys.lengths, _NUMBER, _QWEN3.top_k, _QWEN3.features, "decoder_sparse_step"),
        aliases={"num_experts": _NUMBER},
        # Published files say how wide heads are, which the configuration of transformers does not list.
        ignored=("head_dim", "max_window_layers"),
    ),
    attention=QWEN3.attention._replace(
        window=lambda _layer, config: config.get("sliding_window", 4096) if config["use_sliding_window"] else None
    ),
)
