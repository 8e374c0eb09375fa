"""The language model of Llama 4 (Meta 2025): routed and shared experts; every fourth block has no rotary positions."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from shardwright.models.families.llama import LLAMA, grouped_attention, with_blocks
from shardwright.models.parameters import Parameters, gated, linear, norm
from shardwright.models.traits import Config, Divided, ExpertKeys, Keys, Only, Stack, Systems, Torchtitan
from shardwright.types import Attention, Parameter, base_type

ROTATED_SPARSE, ROTATED_DENSE = "rope_sparse", "rope_dense"
SPARSE, DENSE = "no_rope_sparse", "no_rope_dense"
TYPES = (ROTATED_SPARSE, ROTATED_DENSE, SPARSE, DENSE)
_ROTATED, _WITH_EXPERTS = (ROTATED_SPARSE, ROTATED_DENSE), (ROTATED_SPARSE, SPARSE)
_ROTATING, _EXPERT_BLOCKS = "no_rope_layers", "moe_layers"
"""Keys with a list of which blocks rotate, and a list of the numbers of blocks with experts."""
_EXPERTS = ExpertKeys(
    number="num_local_experts",
    features="intermediate_size",
    router="feed_forward.router",
    router_is_linear=True,
    types=_WITH_EXPERTS,
    # Two matrix products, the activation and the gated product.
    kept=4,
    rows=2,
    shared="shared_experts",
)


class _Blocks(Stack):
    """Blocks for which one key lists those with rotary positions, and another those with experts."""

    def counted(self, layers: Sequence[str], config: Config) -> dict[str, Any]:
        """Return the number of blocks, and both lists."""
        inside = [base for layer in layers if self.has(base := base_type(layer))]
        rotating = [int(kind in _ROTATED) for kind in inside]
        experts = [index for index, kind in enumerate(inside) if kind in _WITH_EXPERTS]
        return {self.counted_by: len(inside), _ROTATING: rotating, _EXPERT_BLOCKS: experts}


def _type_at(config: Config, index: int) -> str:
    rotating, experts = config.get(_ROTATING), config.get(_EXPERT_BLOCKS)
    rotates = rotating[index] if rotating else (index + 1) % config["no_rope_layer_interval"]
    step = config["interleave_moe_layer_step"]
    sparse = (index + 1) % step == 0 if experts is None else index in experts
    kinds = _ROTATED if rotates else (SPARSE, DENSE)
    return kinds[not sparse]


def _block(layer: str, config: Config) -> Parameters:
    yield from grouped_attention(config)
    if layer in _WITH_EXPERTS:
        yield from _expert_parameters(config)
    else:
        yield from gated("feed_forward", config["hidden_size"], config["intermediate_size_mlp"])
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from norm(name, config["hidden_size"], bias=False)


def _expert_parameters(config: Config) -> Parameters:
    number, inner, hidden = config[_EXPERTS.number], config[_EXPERTS.features], config["hidden_size"]
    yield Parameter(name="feed_forward.experts.gate_up_proj", shape=(number, hidden, 2, inner), tp_dim=3, ep_dim=0)
    yield Parameter(name="feed_forward.experts.down_proj", shape=(number, inner, hidden), tp_dim=1, ep_dim=0)
    for parameter in linear(_EXPERTS.router, number, hidden):
        yield replace(parameter, inside=True)
    yield from gated("feed_forward.shared_expert", hidden, inner)


def _wrong(config: Config) -> str | None:
    """Return a message if a list of blocks is not a list of numbers, or too short; otherwise None."""
    for key, least in ((_ROTATING, config.get("num_hidden_layers")), (_EXPERT_BLOCKS, 0)):
        listed = config.get(key)
        if listed is not None and not (isinstance(listed, list | tuple) and all(isinstance(x, int) for x in listed)):
            return f"{key} {listed!r} is not a list of numbers"
        if listed and isinstance(least, int) and len(listed) < least:
            return f"{key} lists {len(listed)} of {least} layers"
    return None


_DEFAULTS: Mapping[str, Any] = {
    **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-5},
    **{"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 202048, "max_position_embeddings": 131072},
    **{_EXPERTS.number: 16, _EXPERTS.top_k: 1, _EXPERTS.balance: 0.001, "router_jitter_noise": 0.0},
    **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1},
    **{"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "use_qk_norm": True, "tie_word_embeddings": False},
}
LLAMA4 = replace(
    LLAMA,
    model_type="llama4_text",
    stock=LLAMA.stock._replace(name="Llama4ForCausalLM", module="llama4"),
    runtime="experts:Llama4",
    keys=Keys(
        {**_DEFAULTS, "mlp_bias": False},
        lengths=(
            *("vocab_size", _EXPERTS.number, _EXPERTS.top_k, "intermediate_size"),
            *("interleave_moe_layer_step", "no_rope_layer_interval"),
        ),
        implied=lambda _: {"shared_experts": 1},
        wrong=_wrong,
        ignored=("cache_implementation", "for_llm_compressor"),
        only={"router_jitter_noise": Only(0.0, "what routers see is not disturbed")},
    ),
    parameters=with_blocks(_block),
    stacks=(_Blocks(types=TYPES, type_at=_type_at, lists=(_ROTATING, _EXPERT_BLOCKS, "layer_types")),),
    divided=Divided(("num_attention_heads", "num_key_value_heads", "intermediate_size_mlp")),
    attention=LLAMA.attention._replace(
        normed_heads=lambda layer, config: layer in _ROTATED and config["use_qk_norm"],
        without=(Attention.FLASH_ATTENTION_2,),
    ),
    experts=_EXPERTS,
    systems=Systems(
        torchtitan=Torchtitan(
            "llama4",
            {
                (5120, 48, 40, 8, 8192, 202048, 16): "17bx16e_irope",
                (5120, 48, 40, 8, 8192, 202048, 128): "17bx128e_irope",
            },
            contexts=False,
            is_in_0_3=False,
        )
    ),
)
