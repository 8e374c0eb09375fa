"""Experts in Megatron-LM's arguments: what they are, and the ranks that share them out.

Its grid of ranks for experts is that of plans: tensor-parallel ranks of experts are neighbours, then expert-parallel
ones, then those that hold replicas (`parallel_state.py`, order `tp-cp-ep-dp-pp`).
"""

from collections.abc import Iterator
from itertools import groupby

from msgspec import UNSET

from shardwright_formats.types import Experts, ExpertStrategy, Model, Plan, SequenceParallel
from shardwright_models.experts import DENSE, SPARSE, Routing
from shardwright_models.facts import Family
from shardwright_search.interop.limits import has_experts
from shardwright_search.interop.megatron_attention import Arguments
from shardwright_search.interop.target import ExportTarget
from shardwright_search.space.uniform import UniformStrategy

LAYER_TYPES = (DENSE, SPARSE)
"""Types of layer that its models may have beside one another: `--moe-layer-freq` says which have experts."""


def check_split_sequence(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> None:
    """Raise BadInput for experts beside tensor parallelism of whole sequences, which Megatron-LM refuses."""
    holds = uniform.tp_size == 1 or uniform.sequence_parallel is SequenceParallel.MEGATRON
    feature = "experts beside tensor parallelism of whole sequences"
    target.demand(holds or not has_experts(plan.model), feature, "choose sequence_parallel megatron")


def expert_options(experts: ExpertStrategy | None) -> Arguments:
    """Return the degrees of experts; left out, each rank has its share of the features of all."""
    if experts is None:
        return {}
    sizes = {
        "--expert-model-parallel-size": experts.ep_size,
        "--expert-tensor-parallel-size": experts.etp_size,
    }
    return {**sizes, "--moe-token-dispatcher-type": "alltoall"}


def expert_model_options(model: Model, family: Family, target: ExportTarget) -> Arguments:
    """Return what a model's experts are, none without; positions are never dropped, as is its default.

    Its balance loss of sequences divides by the experts of a position and adds up layers.

    Raises BadInput for routers that Megatron-LM does not have, of families that it runs exactly otherwise.
    """
    held = [experts for kind in model.layers if (experts := model.types[kind].experts) is not UNSET]
    if not held:
        return {}
    routed = {} if (routing := routing_of(model, family)) is None else _routing_options(routing, held[0], target)
    return {**_options_of(model, held[0], family), **routed}


def routing_of(model: Model, family: Family) -> Routing | None:
    """Return how a model's experts are chosen; None: it has none, or Megatron-LM does not run its blocks exactly."""
    if family.experts is None or family.megatron is None or not has_experts(model):
        return None
    return family.experts.routing(family.configured(model.config))


def _routing_options(routing: Routing, experts: Experts, target: ExportTarget) -> Arguments:
    """Return the options of `topk_routing_with_score_function` in `core/transformer/moe/moe_utils.py`."""
    sigmoid = routing.scores == "sigmoid"
    holds = not sigmoid or routing.normalized
    target.demand(holds, "sigmoid scores that are not divided by their sum", "set norm_topk_prob")
    holds = sigmoid or not routing.normalized or experts.top_k > 1
    target.demand(holds, "one expert of each position, weighted by 1", "choose two experts or more")
    scaled = sigmoid or not routing.normalized
    target.demand(scaled or routing.scale == 1, "softmax scores that are normalized and scaled", "leave the scale at 1")
    groups, chosen = routing.groups or (1, 1)
    return {
        "--moe-router-score-function": routing.scores,
        "--moe-router-pre-softmax": not sigmoid and not routing.normalized,
        "--moe-router-topk-scaling-factor": routing.scale if routing.scale != 1 else False,
        "--moe-router-num-groups": groups if groups > 1 else False,
        "--moe-router-group-topk": chosen if groups > 1 else False,
        "--moe-router-enable-expert-bias": routing.corrected,
    }


def routing_notes(model: Model, family: Family) -> Iterator[str]:
    """Yield how Megatron-LM's routers differ from the model's: groups, and corrections that it changes step by step."""
    if (routing := routing_of(model, family)) is None:
        return
    config = family.configured(model.config)
    assert family.experts is not None
    groups, chosen = routing.groups or (1, 1)
    if groups > 1 and (best := config[family.experts.top_k] // chosen) != routing.best_of_group:
        yield f"it chooses groups of experts by the sum of their {best} best, the model by {routing.best_of_group}"
    if routing.corrected:
        yield "its corrections of scores change by --moe-router-bias-update-rate, 0.001 unless you give another"


def _options_of(model: Model, experts: Experts, family: Family) -> Arguments:
    keys = family.experts
    assert keys is not None
    strength: float = family.configured(model.config).get(keys.balance) or 0.0
    if keys.balance_of == "model":
        strength *= experts.top_k / sum(model.types[kind].experts is not UNSET for kind in model.layers)
    shared = experts.shared_features
    return {
        "--num-experts": experts.number,
        "--moe-router-topk": experts.top_k,
        "--moe-ffn-hidden-size": experts.features,
        **_layers_with_experts(model),
        **({} if shared is UNSET else {"--moe-shared-expert-intermediate-size": shared}),
        "--moe-router-load-balancing-type": "seq_aux_loss" if strength else "none",
        "--moe-aux-loss-coeff": strength,
        "--moe-grouped-gemm": True,
    }


def _layers_with_experts(model: Model) -> Arguments:
    """Return which layers have experts, as the sum of lists that it evaluates; left out where all do."""
    sparse = [int(model.types[kind].experts is not UNSET) for kind in model.layers]
    terms = (f"[{value}]*{len(list(group))}" for value, group in groupby(sparse))
    return {} if all(sparse) else {"--moe-layer-freq": "+".join(terms)}
