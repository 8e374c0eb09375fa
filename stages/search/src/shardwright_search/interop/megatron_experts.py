"""Experts in Megatron-LM's arguments: what they are, and the ranks that share them out.

Its grid of ranks for experts is that of plans: tensor-parallel ranks of experts are neighbours, then expert-parallel
ones, then those that hold replicas (`parallel_state.py`, order `tp-cp-ep-dp-pp`).
"""

from collections.abc import Mapping
from itertools import groupby

from msgspec import UNSET

from shardwright_formats.types import Experts, ExpertStrategy, Model, Plan, SequenceParallel
from shardwright_models.experts import DENSE, SPARSE
from shardwright_models.facts import Family
from shardwright_search.interop.limits import has_experts
from shardwright_search.interop.target import ExportTarget
from shardwright_search.space.uniform import UniformStrategy

Arguments = Mapping[str, str | int | float]
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


def expert_model_options(model: Model, family: Family) -> Arguments:
    """Return what a model's experts are, none without; positions are never dropped, as is its default.

    Its balance loss of sequences divides by the experts of a position and adds up layers.
    """
    held = [experts for kind in model.layers if (experts := model.types[kind].experts) is not UNSET]
    return _options_of(model, held[0], family) if held else {}


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
