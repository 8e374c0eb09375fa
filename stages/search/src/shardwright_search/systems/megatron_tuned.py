"""Arguments of Megatron-LM for expert exchanges as `Runtime.tuned` prices them, as in Megatron-Bridge's recipes.

Names and values are from Megatron-Bridge 0.6.2 (`perf_recipes/qwen/common.py`, and the environment of its recipes),
and of megatron-core 0.19 (`TransformerConfig`). Matrix products in MXFP8 and NVFP4 are one operator inside a graph of
the whole step, which needs the paged stash of 0.19; in 16 bits graphs replay all except the experts, as 0.16 can, too.
"""

from collections.abc import Mapping

from msgspec import UNSET

from shardwright.types import Plan, Recompute
from shardwright_search.cost_model.layer import has_other_passes
from shardwright_search.space.uniform import UniformStrategy
from shardwright_search.systems.exporting import scaled_in

_DISPATCHED = {"--moe-token-dispatcher-type": "flex", "--moe-router-dtype": "fp32"}
_OVERLAP = "--overlap-moe-expert-parallel-comm"
_FUSED = "--use-transformer-engine-op-fuser"
_IN_BLOCKS: Mapping[str, str | bool] = {
    _FUSED: True,
    "--cuda-graph-impl": "full_iteration",
    "--no-check-for-nan-in-loss-and-grad": True,
    "--moe-paged-stash": True,
    "--moe-expert-rank-capacity-factor": "1.5",
    "--moe-pad-experts-for-cuda-graph-inference": True,
    "--moe-mlp-glu-interleave-size": "32",
}


def tuned_options(plan: Plan, uniform: UniformStrategy) -> Mapping[str, str | bool | tuple[str, ...]]:
    """Return the arguments for a plan's experts; none without expert parallelism."""
    experts = uniform.layer.experts
    if experts is UNSET or experts.ep_size == 1:
        return {}
    in_blocks = scaled_in(plan) is not None
    joined = all(node.domain_devices is not UNSET for node in plan.cluster.node_types.values())
    options: dict[str, str | bool | tuple[str, ...]] = {
        **_DISPATCHED,
        "--moe-flex-dispatcher-backend": "hybridep" if in_blocks or joined else "deepep",
    }
    replays = any(layer.recompute.replays_experts for layer in plan.layers)
    light = any(layer.recompute is Recompute.LIGHT for layer in plan.layers)
    if has_other_passes(uniform.pp_size, plan.num_microbatches, uniform.chunks) and not replays:
        options |= {_OVERLAP: True}
    if in_blocks:
        return {**options, **_IN_BLOCKS}
    if not (replays or light):
        scope = ("attn", "moe_router", "moe_preprocess")
        return {**options, "--cuda-graph-impl": "transformer_engine", "--cuda-graph-scope": scope}
    return options


def tuned_environment(plan: Plan, options: Mapping[str, object]) -> tuple[str, ...]:
    """Return lines that set the recipes' environment variables: for HybridEP's NVLink domains, and fused operators.

    If expert exchanges overlap with computation, the device needs several connections (`validate_args`).
    """
    lines, sizes = [], [node.domain_devices for node in plan.cluster.node_types.values()]
    if _OVERLAP in options and "--use-megatron-fsdp" not in options:
        lines.append('export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"')
    if _FUSED in options:
        lines.append("export NVTE_CUTEDSL_FUSED_GROUPED_MLP=1")
    if options.get("--moe-flex-dispatcher-backend") == "hybridep" and UNSET not in sizes:
        lines.append(f"export NVLINK_DOMAIN_SIZE={sizes[0]} USE_MNNVL=1")
    return tuple(lines)
