"""Megatron-LM: a plan as its command-line arguments, with the arguments that describe the model.

Names and meanings are from `megatron/training/arguments.py` and `megatron/core/transformer/` in its main branch of
late 2025; megatron-core 0.16 has the same names in its TransformerConfig. Ranks are numbered as its default order
`tp-cp-ep-dp-pp` numbers them; for experts, tensor-parallel ranks are neighbours, then expert-parallel ones, then those
that hold replicas (`parallel_state.py`), as in plans.

Data parallelism. DDP is Megatron's own. ZeRO-2 whose gradients are reduced once a step is its distributed optimizer:
the same messages, one reduce-scatter and one all-gather a step, and the whole gradients that deferred reduction holds
anyway. ZeRO-3, and ZeRO-2 that reduces after every microbatch, is Megatron-FSDP, which reduces so, and which is
documented together with tensor parallelism but not with a pipeline. Megatron-LM has neither DDP that reduces after
every microbatch, nor ZeRO-3 that holds whole gradients over several microbatches.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from msgspec import UNSET, UnsetType

from shardwright.estimate.layers import goes_in_pieces
from shardwright.estimate.runtimes import RUNTIMES, RuntimeName
from shardwright.models.facts import Family
from shardwright.models.mtp import MTP_TYPES, mtp_layers, without_mtp
from shardwright.models.registry import FAMILIES
from shardwright.models.traits import BLOCK, DENSE, SPARSE, Latents, Routing
from shardwright.types import DataParallel, Experts, ExpertStrategy, Heads, Model, Recompute, SequenceParallel
from shardwright.types.plan import FP8, NARROW_BITS, NVFP4, GradientReduction, Plan, Precision, Schedule
from shardwright_search.space.configurations import Demands, Outer
from shardwright_search.space.uniform import UniformStrategy
from shardwright_search.systems.entry import Entry, Limits, expert_states_alike, has_experts, torchrun, whole_groups
from shardwright_search.systems.exporting import (
    Exported,
    ExportTarget,
    check_context,
    contexts_of,
    kernel_notes,
    scaled_in,
    uniform_of,
)
from shardwright_search.systems.launch import Program
from shardwright_search.systems.megatron_reader import (
    COMM_TYPES,
    light_modules,
    read_arguments,
    read_megatron,
    written_layout,
)
from shardwright_search.systems.megatron_tuned import tuned_environment, tuned_options

# Attention: heads, and the latents that they may be computed from.

Value = str | int | float | tuple[str, ...]
"""Value of an argument; True if it has no value, False if the argument is left out, a tuple if it has several."""
Arguments = Mapping[str, Value]
"""Values of arguments by name."""
YARN = {"factor": "--rotary-scaling-factor", "mscale": "--mscale", "mscale_all_dim": "--mscale-all-dim"}
_ORIGINAL = "original_max_position_embeddings"
_FIXED = {_ORIGINAL: 4096, "beta_fast": 32, "beta_slow": 1}
"""Keys of YaRN without an option, with the values that `MLATransformerConfig` has."""


def head_options(heads: Heads, hidden: int, latents: Latents | None) -> Arguments:
    """Return the options for attention heads; `latents`: of multi-head latent attention, None for other attention."""
    options: dict[str, Value] = {"--num-attention-heads": heads.heads}
    if latents is not None:
        return {**options, **_latent_options(heads, latents)}
    if heads.head_features * heads.heads != hidden:
        options["--kv-channels"] = heads.head_features
    if heads.kv_heads != heads.heads:
        options |= {"--group-query-attention": True, "--num-query-groups": heads.kv_heads}
    return options


def _latent_options(heads: Heads, latents: Latents) -> Arguments:
    """Return the options for latent attention, whose keys have rotated features that all heads share."""
    queries = {} if latents.queries is None else {"--q-lora-rank": latents.queries}
    return {
        "--multi-latent-attention": True,
        **queries,
        "--kv-lora-rank": latents.keys,
        "--qk-head-dim": heads.head_features - latents.rotated,
        "--qk-pos-emb-head-dim": latents.rotated,
        "--v-head-dim": heads.features_of_values,
    }


def latent_rope_options(rope: Mapping[str, Any]) -> Arguments:
    """Return the options for rotary embeddings of latent attention, which Megatron-LM scales by YaRN by default.

    Its fused kernel, which it uses by default, is refused for other embeddings (`MLATransformerConfig`).
    """
    if rope["rope_type"] != "yarn":
        return {"--rope-type": "rope", "--no-rope-fusion": True}
    return {"--rope-type": "yarn"} | {option: float(rope[key]) for key, option in YARN.items() if key in rope}


def other_latent_rope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return the keys of YaRN, with values, that differ from Megatron-LM's and that no option changes.

    If a configuration does not state the original length, its longest length counts (transformers,
    modeling_rope_utils).
    """
    given = {**_FIXED, _ORIGINAL: config.get("max_position_embeddings"), **rope}
    return [f"{key} {given[key]}" for key, value in _FIXED.items() if given[key] != value]


# Experts: what they are, and the ranks that they are split over.

LAYER_TYPES = tuple(f"{name}{end}" for name in (BLOCK, DENSE, SPARSE) for end in ("", *MTP_TYPES))
"""Types of layers that its models may contain together: `--moe-layer-freq` states which have experts."""


def check_split_sequence(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> None:
    """Raise BadInput for experts with tensor but without sequence parallelism, which Megatron-LM refuses."""
    holds = uniform.layer.tp_size == 1 or uniform.layer.sequence_parallel is SequenceParallel.MEGATRON
    feature = "experts with tensor parallelism but without sequence parallelism"
    target.demand(holds or not has_experts(plan.model), feature, "choose sequence_parallel megatron")


def expert_options(experts: ExpertStrategy | UnsetType) -> Arguments:
    """Return the options for expert parallelism; without them each rank has a share of the features of all experts."""
    if experts is UNSET:
        return {}
    sizes = {
        "--expert-model-parallel-size": experts.ep_size,
        "--expert-tensor-parallel-size": experts.etp_size,
    }
    return {**sizes, "--moe-token-dispatcher-type": "alltoall"}


def expert_model_options(model: Model, family: Family, target: ExportTarget) -> Arguments:
    """Return the options for a model's experts; positions are never dropped, as is Megatron-LM's default.

    Its balance loss of sequences divides by the number of experts of a position and is summed over layers.

    Raises BadInput for routers that Megatron-LM does not have, in families that it runs exactly otherwise.
    """
    held = [experts for kind in model.layers if (experts := model.types[kind].experts) is not UNSET]
    if not held:
        return {}
    routed = {} if (routing := routing_of(model, family)) is None else _routing_options(routing, held[0], target)
    return {**_options_of(model, held[0], family), **routed}


def routing_of(model: Model, family: Family) -> Routing | None:
    """Return how a model's experts are chosen; None: it has none, or Megatron-LM does not run its blocks exactly."""
    if family.experts is None or family.systems.megatron is None or not has_experts(model):
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
    """Yield notes on how Megatron-LM's routers differ from the model's: groups, and updates of the expert bias."""
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
    """Return the option for which layers have experts, as Python lists; left out if all have."""
    sparse = [int(model.types[kind].experts is not UNSET) for kind in without_mtp(model.layers)]
    terms = (f"[{value}]*{len(list(group))}" for value, group in groupby(sparse))
    return {} if all(sparse) else {"--moe-layer-freq": "+".join(terms)}


# The model: all of it if Megatron's GPT runs the family's blocks exactly, else its sizes.

_HEAD_NORMS = ("q_norm.weight", "kv_a_layernorm.weight")
"""Ends of the names of norms of queries, or of the latents of keys."""


def model_options(model: Model, target: ExportTarget) -> Arguments:
    """Return the options for a model's sizes, and its norms and more if Megatron-LM runs it exactly.

    Raises BadInput for biases that Megatron-LM has no option for.
    """
    block = model.types[model.layers[0]]
    hidden = model.boundary[0].features
    heads = next((region.attention for region in block.regions if region.attention is not None), None)
    family = FAMILIES.get(model.family)
    if family is not None:
        _check_numbers(family, model.config, target)
    inner = None if family is None else block.tp_must_divide.get(family.divided.lengths[-1])
    further = mtp_layers(model.layers)
    options: dict[str, Value] = {"--num-layers": len(model.layers) - further, "--hidden-size": hidden}
    options["--mtp-num-layers"] = further or False
    options |= {} if inner is None else {"--ffn-hidden-size": inner}
    latents = None if family is None else family.attention.latents(family.configured(model.config))
    options |= {} if heads is None else head_options(heads, hidden, latents)
    options |= {} if family is None else expert_model_options(model, family, target)
    options["--seq-length"] = model.sequence_length
    positions = model.config.get("max_position_embeddings", model.config.get("n_positions"))
    options["--max-position-embeddings"] = positions if type(positions) is int else model.sequence_length
    vocabulary = model.config.get("vocab_size")
    if type(vocabulary) is int:
        # A plan pads nothing that tensor parallelism does not need.
        options |= {
            "--tokenizer-type": "NullTokenizer",
            "--vocab-size": vocabulary,
            "--make-vocab-size-divisible-by": 1,
        }
    options["--untie-embeddings-and-output-weights"] = not model.tied
    return {**options, **(_exact(family, model, target) if family is not None and family.systems.megatron else {})}


def model_notes(model: Model) -> Iterator[str]:
    """Yield notes on properties of the model that the arguments cannot express."""
    family = FAMILIES.get(model.family)
    if family is None or not family.systems.megatron:
        rest = "norms, positions and activations"
        if has_experts(model):
            rest = "norms, positions, activations and routers"
        yield f"of a {model.family} model the arguments give only the sizes: {rest} are yours"
    if family is not None:
        yield from routing_notes(model, family)
    rope = _rope(model.config)
    known = (
        ("default", "llama3")
        if family is None or family.attention.latents(family.keys.defaults) is None
        else ("default", "yarn")
    )
    if family is not None and family.attention.positions == "rope" and rope["rope_type"] not in known:
        yield f"rotary embeddings of type {rope['rope_type']} are not in the file"
    elif rope["rope_type"] == "yarn" and (others := other_latent_rope(rope, model.config)):
        yield f"Megatron-LM has no options for {', '.join(others)} of rotary embeddings of type yarn"


def _exact(family: Family, model: Model, target: ExportTarget) -> Arguments:
    """Return the options that follow from a family's facts."""
    config, rope, hidden = family.configured(model.config), _rope(model.config), family.dropouts.hidden
    window = model.types[model.layers[0]].window
    rotary, epsilon = family.attention.positions == "rope", family.norm.epsilon
    options: dict[str, Value] = {
        "--position-embedding-type": family.attention.positions,
        # Positions before a query's own, and after it.
        "--window-size": window is not None and f"{window - 1},0",
        "--rotary-base": rotary and int(rope.get("rope_theta", 10000)),
        "--normalization": family.norm.kind,
        "--norm-epsilon": 1e-5 if epsilon is None else config[epsilon],
        "--swiglu": family.feed_forward(config).gated,
        "--attention-dropout": config[family.dropouts.attention],
        "--hidden-dropout": 0.0 if hidden is None else config[hidden],
        "--qk-layernorm": any(p.name.endswith(_HEAD_NORMS) for p in model.types[model.layers[0]].parameters),
        **_biases(model, target),
    }
    if family.attention.latents(config) is not None:
        options |= latent_rope_options(rope)
    elif rotary and rope.get("rope_type") == "llama3":
        options |= {"--use-rope-scaling": True, "--rope-scaling-factor": rope.get("factor", 8.0)}
    return options


def _check_numbers(family: Family, config: Mapping[str, Any], target: ExportTarget) -> None:
    """Raise BadInput for a configuration value that is not a number where its family or rotary scaling needs one.

    A plan may contain any configuration that is in its file.
    """
    given, rope = family.configured(config), _rope(config)
    needed = (family.norm.epsilon, family.dropouts.attention, family.dropouts.hidden)
    for key, default in family.keys.defaults.items():
        if isinstance(default, bool):
            target.demand(isinstance(given[key], bool), f"{key} {given[key]!r}", "give true or false")
        elif isinstance(default, int | float | None) and (given[key] is not None or key in needed):
            target.demand_number(key, given[key])
    for key in ("rope_theta", *YARN):
        if key in rope:
            target.demand_number(key, rope[key])


def _biases(model: Model, target: ExportTarget) -> Arguments:
    """Return the options for biases: of all matrices, of none, or only of queries, keys and values."""
    parameters = model.types[model.layers[0]].parameters
    matrices = {p.name.removesuffix(".weight") for p in parameters if p.name.endswith(".weight") and len(p.shape) > 1}
    biased = matrices & {p.name.removesuffix(".bias") for p in parameters}
    inputs = {name for name in matrices if name.endswith(("q_proj", "k_proj", "v_proj"))}
    remedy = "set attention_bias and mlp_bias to the same value"
    target.demand(biased in (set(), inputs, matrices), "biases of some matrices of a layer", remedy)
    return {"--disable-bias-linear": biased != matrices, "--add-qkv-bias": bool(biased) and biased == inputs}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters; newer files have them under one key, older ones have the base as a separate key."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = dict(scaling) if isinstance(scaling, Mapping) else {}
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    if "rope_theta" in config:
        parameters.setdefault("rope_theta", config["rope_theta"])
    return parameters


# The plan.

_TARGET = "Megatron-LM"
_OF_MODULES = (Recompute.MLP, Recompute.LIGHT)
_KINDS = (Recompute.NONE, Recompute.FULL, Recompute.MLP, Recompute.LIGHT)
"""Kinds of recomputation that both Megatron-LM and plans have; the last two are its selective kind."""
_FSDP = "--use-megatron-fsdp"
_SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B)
"""Schedules of a pipeline; the layer ranges of a stage decide between them."""


def megatron_arguments(plan: Plan, plan_file: object, tuned: bool = False) -> Exported:
    """Return the arguments that a plan determines, one per line; the user adds data and learning rate.

    `tuned`: experts run as `Runtime.tuned` prices them. Raises BadInput naming the first feature that Megatron-LM
    cannot express.
    """
    target = ExportTarget(_TARGET, plan_file)
    uniform = uniform_of(plan, target, _KINDS, has_expert_grids=True, has_context=True, types=LAYER_TYPES)
    check_context(plan, uniform, target, drops=True)
    check_split_sequence(plan, uniform, target)
    if uniform.pp_size > 1:
        target.demand_schedule(plan, _SCHEDULES)
    options = {
        **model_options(plan.model, target),
        "--tensor-model-parallel-size": uniform.layer.tp_size,
        "--pipeline-model-parallel-size": uniform.pp_size,
        **_context(uniform),
        "--sequence-parallel": uniform.layer.sequence_parallel is SequenceParallel.MEGATRON,
        "--micro-batch-size": uniform.micro_batch_size,
        "--global-batch-size": plan.global_batch_size,
        "--optimizer": "adam",
        **expert_options(uniform.layer.experts),
        **_partition(plan, uniform, target),
        **_data_parallel(plan, uniform, target),
        **_recompute(plan, uniform.ranges, target),
        **_precision(plan, target),
    }
    options |= {**_hidden(plan, uniform, options), **_narrow_parameters(plan, options)}
    options |= tuned_options(plan, uniform) if tuned else {}
    given = {option: value for option, value in options.items() if value is not False}
    text = "".join(f"{shlex.join((option, *_words(value)))}\n" for option, value in given.items())
    variables = (*tuned_environment(plan, given), *_environment(uniform, given))
    return Exported(text, tuple(_notes(plan, uniform, given)), variables)


def _words(value: Value) -> Sequence[str]:
    """Return the words after an option: none, one, or one for each of its values."""
    if isinstance(value, tuple):
        return value
    return () if value is True else (str(value),)


def _context(uniform: UniformStrategy) -> Arguments:
    """Return the options for context parallelism."""
    if not uniform.shares_context:
        return {}
    return {"--context-parallel-size": uniform.layer.cp_size, "--cp-comm-type": COMM_TYPES[uniform.layer.context]}


def _partition(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> Arguments:
    """Return the options for cuts: a layout string, unless ranges are equal except for the first and last one.

    Layers that predict further tokens are in the last range unless a layout has them elsewhere.
    """
    further = mtp_layers(plan.model.layers)
    decoder = len(plan.layers) - further
    holders = [i for i, (low, high) in enumerate(uniform.ranges) if high > max(low, decoder)]
    feature = "layers that predict further tokens in several layer ranges, or before the last chunk of a stage"
    fits = len(holders) <= 1 and all(i >= len(uniform.ranges) - uniform.pp_size for i in holders)
    target.demand(fits, feature, "keep them in one range of a last chunk")
    sizes = [min(high, decoder) - min(low, decoder) for low, high in uniform.ranges]
    if holders and holders[0] != len(sizes) - 1:
        return {"--pipeline-model-parallel-layout": written_layout(sizes, holders[0], further)}
    if len(set(sizes)) == 1:
        return {"--num-layers-per-virtual-pipeline-stage": sizes[0]} if uniform.chunks > 1 else {}
    if uniform.chunks == 1 and min(sizes) > 0 and len(set(sizes[1:-1])) <= 1:
        return {"--decoder-first-pipeline-num-layers": sizes[0], "--decoder-last-pipeline-num-layers": sizes[-1]}
    return {"--pipeline-model-parallel-layout": written_layout(sizes, len(sizes) - 1, further)}


def _data_parallel(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> Arguments:
    kind, one_microbatch = uniform.layer.data_parallel, plan.num_microbatches == 1
    once = one_microbatch or plan.gradient_reduction is GradientReduction.DEFERRED
    if uniform.replicas == 1:
        # Parameters in FP8 or NVFP4 need it, even if nothing is sharded.
        return {"--use-distributed-optimizer": plan.precision.compute in NARROW_BITS}
    if kind is DataParallel.DDP:
        feature = "layers[0]: ddp that reduces gradients after every microbatch"
        target.demand(once, feature, "choose gradient_reduction deferred")
        return {}
    # Its optimizer instances are groups of neighbouring data-parallel ranks, and replicas of one another.
    grouped = uniform.layer.shard_size > 0
    groups: Arguments = {"--num-distributed-optimizer-instances": uniform.shard_groups if grouped else False}
    if kind is DataParallel.ZERO2 and once:
        return {"--use-distributed-optimizer": True, **groups}
    how = kind if kind is DataParallel.ZERO3 else f"{kind} that reduces gradients after every microbatch"
    remedy = "choose zero2 with gradient_reduction deferred, or one pipeline stage"
    target.demand(uniform.pp_size == 1, f"layers[0]: {how} in several pipeline stages", remedy)
    feature = f"layers[0]: {kind} that holds whole gradients over several microbatches"
    target.demand(not once or one_microbatch, feature, "choose gradient_reduction every_microbatch")
    target.demand(plan.precision.compute != NVFP4, f"layers[0]: {how} in {NVFP4}", f"choose {DataParallel.ZERO2}")
    return {
        _FSDP: True,
        "--data-parallel-sharding-strategy": "optim_grads_params" if kind is DataParallel.ZERO3 else "optim_grads",
        # Megatron-FSDP demands these, too.
        "--use-distributed-optimizer": True,
        "--no-gradient-accumulation-fusion": True,
        "--ckpt-format": "fsdp_dtensor",
        **groups,
        "--outer-dp-sharding-strategy": "no_shard" if grouped else False,
    }


def _hidden(plan: Plan, uniform: UniformStrategy, options: Arguments) -> Arguments:
    """Return the options for overlap that the runtime's price assumes (`Runtime`), and for the loss."""
    runtime = RUNTIMES[RuntimeName.MEGATRON_CORE]
    beside = runtime.overlap is not None and uniform.replicas > 1
    pieces = runtime.message_pieces > 1 and goes_in_pieces(plan.model, uniform.layer)
    # Megatron-LM 0.19 refuses Transformer Engine's fused loss; the backward pass of its own returns bfloat16.
    fused = plan.precision.compute in ("bfloat16", *NARROW_BITS)
    return {
        "--overlap-grad-reduce": beside,
        "--overlap-param-gather": beside and options.get("--use-distributed-optimizer", False),
        "--tp-comm-overlap": pieces and uniform.layer.tp_size > 1,
        **({"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "native"} if fused else {}),
    }


def _narrow_parameters(plan: Plan, options: Arguments) -> Arguments:
    """Return the options for parameters in FP8 or NVFP4, which the price assumes if ranks gather parameters.

    See `Held.narrow_parameters`.
    """
    if plan.precision.compute not in NARROW_BITS or not options.get("--use-distributed-optimizer"):
        return {}
    if plan.precision.compute == NVFP4:
        return {"--fp4-param-gather": True}
    # Otherwise gathers of MXFP8, in 16 bits, have a buffer in addition to the parameters. Megatron-FSDP has its own.
    shared = scaled_in(plan) == "mxfp8" and _FSDP not in options
    return {"--fp8-param-gather": True, "--reuse-grad-buf-for-mxfp8-param-ag": shared}


def _notes(plan: Plan, uniform: UniformStrategy, options: Arguments) -> Iterator[str]:
    fsdp = _FSDP in options
    yield f"run it on {plan.world_size} ranks"
    yield "its data are made up until --data-path and --tokenizer-type replace --mock-data and the NullTokenizer"
    if "--tp-comm-overlap" in options:
        yield "--tp-comm-overlap needs Transformer Engine's user buffers, inside a node: without them leave it out"
    if plan.precision.compute == FP8:
        yield f"FP8 is scaled by {_fp8_recipe(plan)} here: other recipes of --fp8-recipe take as long by this price"
    if fsdp:
        yield "unset CUDA_DEVICE_MAX_CONNECTIONS, as Megatron-FSDP wants it"
    elif uniform.layer.tp_size > 1 or uniform.shares_context:
        yield "set CUDA_DEVICE_MAX_CONNECTIONS=1 where the GPUs are older than Blackwell"
    if plan.num_microbatches == 1 and "--use-distributed-optimizer" in options and not fsdp:
        yield "its distributed optimizer holds whole gradients with one microbatch too, 4 bytes a parameter"
    if uniform.shares_context:
        yield "context parallelism needs Transformer Engine: keep --transformer-impl transformer_engine, the default"
    yield from model_notes(plan.model)
    yield from kernel_notes(plan)


def _environment(uniform: UniformStrategy, options: Arguments) -> tuple[str, ...]:
    """Return shell lines for CUDA_DEVICE_MAX_CONNECTIONS: unset for FSDP; 1 if needed, unless the user has set it."""
    if _FSDP in options:
        return ("unset CUDA_DEVICE_MAX_CONNECTIONS",)
    needed = uniform.layer.tp_size > 1 or uniform.shares_context
    return ('export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"',) if needed else ()


def _recompute(plan: Plan, ranges: Sequence[tuple[int, int]], target: ExportTarget) -> Arguments:
    """Return the options for recomputation: of all layers, or of the first layers of each range.

    The feed-forward parts, or light modules, are recomputed in every layer or in none, and not together with whole
    layers.
    """
    kind = next((layer.recompute for layer in plan.layers if layer.recompute in _OF_MODULES), None)
    if kind is not None:
        other = next((i for i, layer in enumerate(plan.layers) if layer.recompute is not kind), 0)
        feature = f"layers[{other}]: recompute {plan.layers[other].recompute}, where others have {kind}"
        alike = all(layer.recompute is kind for layer in plan.layers)
        target.demand(alike, feature, "recompute all layers in the same way")
    if kind is Recompute.LIGHT:
        return {"--recompute-granularity": "selective", "--recompute-modules": light_modules(plan.model)}
    if kind is Recompute.MLP:
        kinds = {plan.model.types[layer.type].experts is UNSET for layer in plan.layers}
        modules = tuple("mlp" if dense else "moe" for dense in sorted(kinds, reverse=True))
        return {"--recompute-granularity": "selective", "--recompute-modules": modules}
    recomputed = [layer.recompute is Recompute.FULL for layer in plan.layers]
    most = max(sum(recomputed[low:high]) for low, high in ranges)
    if not most:
        return {}
    method, count = ("uniform", 1) if all(recomputed) else ("block", most)
    for i, first in ((i, low) for low, high in ranges for i in range(low, high) if method == "block"):
        layer = f"layers[{i}]: recompute {plan.layers[i].recompute}"
        where = f"where another pipeline stage recomputes its first {most} layers"
        remedy = "recompute the same number of first layers in every pipeline stage"
        target.demand(recomputed[i] == (i - first < most), f"{layer}, {where}", remedy)
    return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": count}


_PRECISIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("float32", "float32"): (),
    ("bfloat16", "float32"): ("--bf16",),
    ("bfloat16", "bfloat16"): ("--bf16", "--grad-reduce-in-bf16"),
    ("float16", "float32"): ("--fp16", "--accumulate-allreduce-grads-in-fp32"),
    ("float16", "float16"): ("--fp16",),
}
"""Arguments by the types of computation and reduction; with bfloat16, gradients stay in float32 by default."""


def _precision(plan: Plan, target: ExportTarget) -> Arguments:
    """Return the options of a plan's types; parameters and optimizer state stay in float32."""
    compute = plan.precision.compute
    options = _PRECISIONS.get(("bfloat16" if compute in NARROW_BITS else compute, plan.precision.reduce))
    remedy = "keep parameters in float32, and reduce in float32 or as computed"
    target.demand_precision(plan, plan.precision.parameters == "float32" and options is not None, remedy)
    narrow: Arguments = {}
    if compute == NVFP4:
        narrow = {"--fp4-format": "e2m1", "--fp4-recipe": NVFP4}
    elif compute == FP8:
        recipe = _fp8_recipe(plan)
        narrow = {"--fp8-format": "e4m3" if recipe == "mxfp8" else "hybrid", "--fp8-recipe": recipe}
    return {**dict.fromkeys(options or (), True), **narrow}


def _fp8_recipe(plan: Plan) -> str:
    """Return the recipe of FP8 scaling, as in Megatron Bridge's `training/mixed_precision.py`."""
    return scaled_in(plan) or "tensorwise"


def megatron_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return Megatron-LM's two ways: its own optimizers with pipelines, and Megatron-FSDP without."""
    whole = () if has_experts(model) else (SequenceParallel.NONE,)
    parallel = *whole, SequenceParallel.MEGATRON
    contexts = contexts_of(model, drops=True)
    demands = Demands(outer=Outer.AS_LAYERS, allows=lambda each: whole_groups(each) and expert_states_alike(each))
    limits = partial(
        Limits,
        recompute=_KINDS,
        sequence_parallel=parallel,
        types=LAYER_TYPES,
        expert_grids=True,
        contexts=contexts,
        demands=demands,
    )
    own = limits(
        "DDP or its distributed optimizer, gradients reduced once a step",
        (DataParallel.DDP, DataParallel.ZERO2),
        GradientReduction.DEFERRED,
        schedules=_SCHEDULES,
    )
    fsdp = limits(
        "Megatron-FSDP without a pipeline, gradients reduced after every micro-batch",
        (DataParallel.ZERO2, DataParallel.ZERO3),
        GradientReduction.EVERY_MICROBATCH,
        pipeline=False,
    )
    # Megatron-FSDP has no parameters in NVFP4.
    return (own,) if precision.compute == NVFP4 else (own, fsdp)


MEGATRON = Entry(
    title=_TARGET,
    version="megatron-core 0.16.1 and 0.19.2",
    sources=(
        "megatron/core/transformer/transformer_config.py: recompute_modules, pipeline_model_parallel_layout",
        "megatron/core/distributed/distributed_data_parallel_config.py: use_distributed_optimizer, use_megatron_fsdp",
        "megatron/core/pipeline_parallel/schedules.py: interleaved micro-batches are a multiple of the stages",
    ),
    runtime=RUNTIMES[RuntimeName.MEGATRON_CORE],
    limits=megatron_limits,
    unsearched=(
        "recomputation of some layers of a stage (block)",
        "optimizer instances",
        "core_attn, and light modules one by one",
    ),
    file_name="args.txt",
    mark="",
    export=megatron_arguments,
    read=read_arguments,
    read_words=read_megatron,
    command=lambda plan, file: torchrun(plan, f'"$PRETRAIN" $(xargs < {file}) --mock-data --train-iters 20 --lr 1e-4'),
    program=lambda _plan, exported: Program(
        '"$PRETRAIN" "${arguments[@]}"',
        {"PRETRAIN": "path of Megatron-LM's script, such as /opt/Megatron-LM/pretrain_gpt.py"},
        arguments=exported.text,
    ),
)
_tuned = partial(megatron_arguments, tuned=True)
TUNED_MEGATRON = MEGATRON._replace(export=_tuned, version="megatron-core 0.19.2")
"""The same with experts as its recipes for speed run them."""
