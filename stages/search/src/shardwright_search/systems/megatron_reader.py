"""Megatron-LM's arguments as a plan; arguments for model, data and precision are not read.

Each argument, or field of Megatron Bridge, is read, changes nothing that a plan decides, or is refused. Names are from
`megatron/training/arguments.py`, of megatron-core's TransformerConfig, and of the Bridge's `training/config.py`. How
communication is hidden is the question's `--runtime`, and the precision its `--precision`.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.estimate.held import LIGHT, Module
from shardwright.io import BadInput
from shardwright.models.mtp import mtp_layers
from shardwright.models.registry import FAMILIES
from shardwright.types import MAX_LAYERS, ContextParallel, DataParallel, Model, Recompute, SequenceParallel
from shardwright.types.plan import FP8, NARROW_BITS, NVFP4, Attention, GradientReduction, Plan
from shardwright_search.space.uniform import UniformStrategy, even_cuts, with_experts
from shardwright_search.systems.entry import Reading, Setting, Settings, has_experts

_READ = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "hierarchical_context_parallel_sizes"),
    *("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage", "decoder_pipeline_manual_split_list"),
    *("num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("use_distributed_optimizer", "num_distributed_optimizer_instances", "use_megatron_fsdp", "use_custom_fsdp"),
    *("data_parallel_sharding_strategy", "recompute_activations", "recompute_granularity", "recompute_method"),
    *("recompute_num_layers", "recompute_modules"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
}
_HIDING = {
    *("overlap_grad_reduce", "overlap_param_gather", "overlap_param_gather_with_optimizer_step", "tp_comm_overlap"),
    *("no_overlap_p2p_communication", "overlap_p2p_communication_warmup_flush", "overlap_p2p_comm"),
    *("overlap_p2p_comm_warmup_flush", "tp_comm_overlap_cfg", "tp_comm_overlap_rs_dgrad", "tp_comm_overlap_ag"),
    *("tp_comm_overlap_rs", "disable_tp_comm_overlap_ag", "disable_tp_comm_overlap_rs", "moe_shared_expert_overlap"),
    *("tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1", "overlap_moe_expert_parallel_comm"),
    *("ddp_bucket_size", "ddp_num_buckets", "ddp_pad_buckets_for_high_nccl_busbw"),
}
"""Settings of how communication is hidden, and cut into messages."""
_TUNED = {
    *("use_transformer_engine_op_fuser", "moe_paged_stash", "moe_flex_dispatcher_backend"),
    *("moe_expert_rank_capacity_factor", "moe_pad_experts_for_cuda_graph_inference", "moe_mlp_glu_interleave_size"),
}
"""Settings of how experts run, which `--tuned` asks for."""
_ELSEWHERE = {
    *("data_parallel_random_init", "pipeline_model_parallel_comm_backend", "no_async_tensor_model_parallel_allreduce"),
    *("async_tensor_model_parallel_allreduce", "distributed_backend", "distributed_timeout_minutes"),
    *("distributed_timeout_seconds_after_init", "record_memory_history", "memory_snapshot_path", "parallel_output"),
    *("empty_unused_memory_level", "log_memory_to_tensorboard", "scatter_embedding_sequence_parallel"),
    *("strict_fsdp_dtensor_load", "moe_router_dtype", "disable_bf16_reduced_precision_matmul", "pipeline_dtype"),
    *("params_dtype", "autocast_dtype", "use_flash_attn", "deallocate_pipeline_outputs", "cuda_graph_scope"),
    *("cuda_graph_warmup_steps", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph"),
    *("ckpt_fully_parallel_save", "ckpt_fully_parallel_load", "no_ckpt_fully_parallel_save", "fully_parallel_save"),
    *("fully_parallel_load", "optimizer_config_override_provider", "load_main_params_from_ckpt", "mixed_precision"),
    *("comm_overlap", "te_rng_tracker", "use_te_rng_tracker", "check_for_nan_in_loss", "check_for_nan_in_grad"),
}
"""Settings of starting, saving and logging, or decided by the question, whose names have words that concern plans."""
_FP32 = ("fp32", "float32", "torch.float32")
_VALUES: Mapping[str, tuple[object, ...]] = {
    "optimizer": ("adam",),
    "outer_dp_sharding_strategy": ("no_shard",),
    "cuda_graph_impl": ("none", "transformer_engine", "full_iteration"),
    "cpu_offloading_num_layers": ("0", 0),
    "optimizer_offload_fraction": ("1.0", 1.0),
    "hierarchical_context_parallel_sizes": ("1", 1),
    **dict.fromkeys(("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), _FP32),
    **dict.fromkeys(("cpu_offloading_activations", "cpu_offloading_weights"), (True, False)),
    # Names without a word of plans, of settings that are off by default.
    **dict.fromkeys(("use_tp_pp_dp_mapping", "microbatch_group_size_per_vp_stage", "moe_extended_tp"), (False,)),
    **dict.fromkeys(("defer_embedding_wgrad_compute", "fp32_residual_connection"), (False,)),
    **dict.fromkeys(("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "peft"), (False,)),
}
_IN_FP4 = {"fp4", "fp4_format", "fp4_recipe", "fp4_param_gather", "fp4_param", "moe_router_padding_for_quantization"}
_IN_FP8 = {
    *("fp8", "fp8_format", "fp8_recipe", "fp8_margin", "fp8_interval", "fp8_amax_history_len"),
    *("fp8_amax_compute_algo", "fp8_wgrad", "no_fp8_wgrad", "moe_router_padding_for_fp8"),
    *("moe_router_padding_for_quantization", "fp8_param_gather", "fp8_param", "reuse_grad_buf_for_mxfp8_param_ag"),
}
"""Settings of matrix products in fp8, which the question requests; `_IN_FP4`: in nvfp4."""
_DDP = Settings(
    harmless=(
        *_HIDING,
        *("grad_reduce_in_fp32", "bucket_size", "pad_buckets_for_high_nccl_busbw", "average_in_collective"),
        *("align_param_gather", "check_for_nan_in_grad", "check_for_large_grads", "gradient_reduce_div_fusion"),
        *("suggested_communication_unit_size", "nccl_ub", "disable_symmetric_registration", "preserve_fp32_weights"),
        *("delay_wgrad_compute", "fsdp_manual_registration"),
    ),
    values=_VALUES,
)
_OPTIMIZER = Settings(
    harmless=(
        *_HIDING,
        *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
        *("sgd_momentum", "clip_grad", "bf16", "fp16", "loss_scale", "initial_loss_scale", "min_loss_scale"),
        *("loss_scale_window", "hysteresis", "log_num_zeros_in_grad", "barrier_with_L1_time", "timers"),
        *("config_logger_dir", "use_distributed_optimizer", "params_dtype", "store_param_remainders"),
        *("decoupled_weight_decay", "pin_cpu_grads", "pin_cpu_params"),
    ),
    values=_VALUES,
)


def check_arguments(file: str, given: Mapping[str, Sequence[str]], setting: Setting) -> None:
    """Raise BadInput naming the first argument of Megatron-LM that a plan cannot express."""
    values = {name: " ".join(words) if words else True for name, words in given.items()}
    _settings(_READ, setting).check(file, values)


def check_fields(file: str, given: Mapping[str, object], read: Collection[str], setting: Setting) -> None:
    """Raise BadInput naming the first field of a recipe that a plan cannot express; `read`: fields that it can."""
    known = _settings((), setting)
    for field, value in given.items():
        section, _, name = field.rpartition(".")
        where = f"cfg.{section}." if section else "cfg."
        settings = {"ddp": _DDP, "optimizer": _OPTIMIZER}.get(section, known)
        if field in read and name not in _VALUES:
            continue
        for compute in NARROW_BITS:
            named = field == "mixed_precision" and isinstance(value, str) and compute in value
            if named and setting.precision.compute != compute:
                problem = f"cfg.{field} {value} is not priced in {setting.precision.compute}"
                raise BadInput(file, problem, f"ask for {compute}")
        settings.check(file, {name: value}, where)


def _settings(read: Collection[str], setting: Setting) -> Settings:
    """Return the known settings except for settings of model, data and logging."""
    asked = {FP8: _IN_FP8, NVFP4: _IN_FP4}.get(setting.precision.compute, set[str]())
    return Settings(read=read, harmless=_HIDING | _TUNED | _ELSEWHERE | asked, values=_VALUES, strict=False)


# The plan of the arguments.

Words = Mapping[str, Sequence[str]]
"""Values of arguments by name, with underscores; an argument without a value has none."""
_COUNT = re.compile(r"[1-9]\d{0,6}")
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_NOT_PRICED = ("hierarchical_context_parallel_sizes", "decoder_pipeline_manual_split_list")
COMM_TYPES = {ContextParallel.RING: "p2p", ContextParallel.GATHER: "all_gather"}
"""Values of `--cp-comm-type`; the first is its default. A single value applies to all layers."""
_FSDP = {
    "no_shard": DataParallel.DDP,
    "optim_grads": DataParallel.ZERO2,
    "optim_grads_params": DataParallel.ZERO3,
}
_CORE_ATTENTION = (
    "Megatron-LM's core_attn recomputes attention between its projections alone: flash attention keeps no scores, "
    "so that this frees nothing, and its second forward pass is not priced"
)


def read_arguments(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a file of arguments; BadInput as `read_megatron`, and for a file without a parallel size."""
    if not words_of(text, file).keys() & set(SIZES):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in SIZES)
        raise BadInput(file, "sets no parallel size", f"give a file of Megatron-LM's arguments, with one of {names}")
    return read_megatron(text, file, setting)


def read_megatron(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of arguments; BadInput naming `file` for errors, and for features that no plan has."""
    given = words_of(text, file)
    for name in _NOT_PRICED:
        if given.get(name, ["1"]) != ["1"]:
            raise BadInput(file, f"{name} {' '.join(given[name])} is not priced", "leave it at 1")
    check_arguments(file, given, setting)
    pp_size = _count(file, given, "pipeline_model_parallel_size")
    cp_size, context = _context(file, given)
    uniform = setting.uniform(
        file,
        pp_size,
        _count(file, given, "micro_batch_size"),
        tp_size=_count(file, given, "tensor_model_parallel_size"),
        cp_size=cp_size,
        context=context,
        sequence_parallel=SequenceParallel.MEGATRON if "sequence_parallel" in given else SequenceParallel.NONE,
    )
    uniform = _with_ranges(file, given, setting.model.layers, uniform)
    uniform = _with_states(file, given, uniform)
    ep_size = _count(file, given, "expert_model_parallel_size")
    etp_size = _count(file, given, "expert_tensor_parallel_size", str(uniform.layer.tp_size))
    uniform = with_experts(file, setting.model, uniform, ep_size, etp_size)
    if uniform.layer.experts is not UNSET and uniform.layer.shard_size:
        problem = "num_distributed_optimizer_instances with expert parallelism is not priced"
        raise BadInput(file, problem, "leave it at 1")
    kind, notes = _recompute(file, given, setting)
    plan = setting.plan(uniform.having(file, recompute=kind), file)
    differing = (
        (name, " ".join(given[name]) if name in given else None) for name in ("global_batch_size", "seq_length")
    )
    notes += _mtp_notes(file, given, mtp_layers(setting.model.layers))
    return Reading(_first_recomputed(file, given, plan), (*setting.differences(*differing), *notes))


def words_of(text: str, file: str) -> Words:
    """Return arguments by name; if one is repeated, the last counts, as in argparse."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise BadInput(file, f"are not valid arguments ({error})", "correct them") from None
    given: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values = given[name.replace("-", "_")] = [value] if equals else []
        else:
            values.append(word)
    return given


def _count(file: str, given: Words, name: str, default: str = "1") -> int:
    text = " ".join(given.get(name, (default,)))
    if not _COUNT.fullmatch(text):
        raise BadInput(file, f"{name} {text!r} is not a number from 1", "correct it")
    return int(text)


def _context(file: str, given: Words) -> tuple[int, ContextParallel]:
    """Return the context-parallel degree and kind; by default a ring, as in Megatron-LM."""
    cp_size = _count(file, given, "context_parallel_size")
    if cp_size == 1:  # then the other has no effect
        return 1, ContextParallel.GATHER
    asked = set(given.get("cp_comm_type", ("p2p",)))
    known = [kind for kind, name in COMM_TYPES.items() if asked == {name}]
    if not known:
        problem = f"cp_comm_type {' '.join(sorted(asked))} is not priced"
        raise BadInput(file, problem, f"choose {' or '.join(COMM_TYPES.values())} for all layers")
    return cp_size, known[0]


def _with_ranges(file: str, given: Words, names: tuple[str, ...], uniform: UniformStrategy) -> UniformStrategy:
    """Return the choice with the layers of each stage and chunk, if these are given.

    Layers that predict further tokens are in the last range unless a layout has them elsewhere.
    """
    pp_size, further, holder = uniform.pp_size, mtp_layers(names), -1
    layers = len(names) - further
    if _LAYOUT in given:
        sizes, _, holder = read_layout(file, "".join(given[_LAYOUT]))
        chunks = len(sizes) // pp_size
    else:
        ends = _layers_of_ends(file, given)
        chunks = _chunks(file, given, layers + sum(ends), pp_size)
        if any(name in given for name in _OF_ENDS):
            sizes = _sizes_of_ends(file, given, layers, pp_size, chunks)
        elif any(ends):
            sizes = _sizes_with_ends(file, layers, pp_size * chunks, ends)
        elif not further:
            return uniform._replace(chunks=chunks)
        else:
            sizes = [high - low for low, high in pairwise(even_cuts(layers, pp_size * chunks))]
    if sum(sizes) != layers or len(sizes) != pp_size * chunks:
        problem = f"{len(sizes)} ranges of {sum(sizes)} layers for {pp_size} pipeline stages of {layers} layers"
        raise BadInput(file, problem, "correct the layout")
    sizes[holder] += further
    return uniform._replace(chunks=chunks, ranges=tuple(pairwise((0, *accumulate(sizes)))))


_LAYOUT = "pipeline_model_parallel_layout"
_OF_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_ACCOUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def _mtp_notes(file: str, given: Words, priced: int) -> list[str]:
    """Return notes on MTP layers that differ from the priced ones; BadInput if the layout contradicts the option."""
    drawn = str(read_layout(file, "".join(given[_LAYOUT])).mtp_layers) if _LAYOUT in given else None
    asked = " ".join(given.get("mtp_num_layers", (drawn or "0",)))
    if drawn is not None and asked != drawn:
        raise BadInput(file, f"mtp_num_layers {asked!r} and {drawn} layers m in the layout", "make them equal")
    layers = 0 if asked == "0" else _count(file, given, "mtp_num_layers", asked)
    return [] if layers == priced else [f"its mtp_num_layers is {layers}: it is priced with {priced}, by --mtp"]


def _layers_of_ends(file: str, given: Words) -> tuple[int, int]:
    """Return how many layers the embedding and the loss count as: one each if the option is set, else none."""
    accounts = [name for name in _ACCOUNTS if name in given]
    if accounts and any(name in given for name in _OF_ENDS):
        problem = f"{accounts[0]} together with a number of layers of the first or last stage"
        raise BadInput(file, problem, "give one of them, as Megatron-LM demands")
    embedding, loss = (int(name in accounts) for name in _ACCOUNTS)
    return embedding, loss


def _chunks(file: str, given: Words, counted: int, pp_size: int) -> int:
    """Return the number of chunks of a stage; `counted`: layers, including those that embedding and loss count as."""
    name = "num_layers_per_virtual_pipeline_stage"
    if name not in given:
        return _count(file, given, "num_virtual_stages_per_pipeline_rank")
    size = _count(file, given, name)
    if counted % (pp_size * size):
        problem = f"{name} {size} for {counted} layers in {pp_size} pipeline stages"
        raise BadInput(file, problem, "choose a divisor")
    return counted // (pp_size * size)


def _sizes_with_ends(file: str, layers: int, ranges: int, ends: tuple[int, int]) -> list[int]:
    """Return the layers of equal ranges, less one in the first for the embedding and one in the last for the loss.

    A range may have no layers (`get_num_layers_to_build` in `core/transformer/transformer_block.py`).
    """
    size, left = divmod(layers + sum(ends), ranges)
    if left:
        problem = f"{layers} layers and {sum(ends)} for embedding and loss are no multiple of {ranges} ranges"
        raise BadInput(file, problem, "choose other pipeline stages or chunks, or write a layout")
    sizes = [size] * ranges
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return sizes


def _sizes_of_ends(file: str, given: Words, layers: int, pp_size: int, chunks: int) -> list[int]:
    """Return the layers of each range if the first or the last stage has a different number.

    With several chunks, the layers of each stage are divided evenly.
    """
    first, last = ([_count(file, given, name)] if name in given else [] for name in _OF_ENDS)
    middle = pp_size - len(first) - len(last)
    left = layers - sum(first) - sum(last)
    if left < 0 or not 0 <= middle <= layers:
        raise BadInput(file, f"{' and '.join(_OF_ENDS)} for {layers} layers", "correct them")
    between = [high - low for low, high in pairwise(even_cuts(left, middle))] if middle else []
    sizes = [*first, *between, *last]
    if chunks > 1 and (odd := [size for size in sizes if size % chunks]):
        raise BadInput(file, f"{odd[0]} layers of a stage in {chunks} chunks", "choose a divisor, or write a layout")
    return [size // chunks for size in sizes] * chunks


def _with_states(file: str, given: Words, uniform: UniformStrategy) -> UniformStrategy:
    """Return the choice with its sharding of states: DDP, the distributed optimizer, or Megatron-FSDP."""
    kind, reduction = DataParallel.DDP, GradientReduction.DEFERRED
    if "use_distributed_optimizer" in given:
        kind = DataParallel.ZERO2
    if "use_megatron_fsdp" in given or "use_custom_fsdp" in given:
        name = " ".join(given.get("data_parallel_sharding_strategy", ("no_shard",)))
        if name not in _FSDP:
            raise BadInput(file, f"data_parallel_sharding_strategy {name} is not priced", f"choose {', '.join(_FSDP)}")
        kind, reduction = _FSDP[name], GradientReduction.EVERY_MICROBATCH
    instances = _count(file, given, "num_distributed_optimizer_instances")
    if uniform.replicas % instances:
        problem = f"num_distributed_optimizer_instances {instances} does not divide {uniform.replicas} ranks"
        raise BadInput(file, problem, "choose a divisor")
    shard_size = uniform.replicas // instances if 1 < instances < uniform.replicas else 0
    uniform = uniform.having(file, data_parallel=kind, shard_size=shard_size)
    return uniform._replace(gradient_reduction=reduction)


def _recompute(file: str, given: Words, setting: Setting) -> tuple[Recompute, list[str]]:
    """Return the kind of recomputation, and notes on parts of it that are not priced."""
    default = "selective" if "recompute_activations" in given else "none"
    granularity = " ".join(given.get("recompute_granularity", (default,)))
    if granularity == "full":
        whole = " ".join(given.get("recompute_method", ("uniform",))) == "uniform"
        if whole and (number := _count(file, given, "recompute_num_layers")) > 1:
            raise BadInput(file, f"recompute_num_layers {number} of method uniform is not priced", "choose 1, or block")
        blocks = " ".join(given.get("recompute_method", ())) == "block"
        return Recompute.NONE if blocks else Recompute.FULL, []
    if granularity == "none":
        return Recompute.NONE, []
    if granularity != "selective":
        raise BadInput(file, f"recompute_granularity {granularity!r}", "choose full, selective")
    modules = set(given.get("recompute_modules") or ("core_attn",))
    light = set(light_modules(setting.model))
    if light <= modules and modules <= light | {"core_attn"}:
        return Recompute.LIGHT, [_CORE_ATTENTION] * ("core_attn" in modules)
    if has_experts(setting.model):
        modules = {"mlp" if name == "moe" else name for name in modules}
    if unknown := sorted(modules - {"core_attn", "mlp"}):
        problem = f"recompute_modules {unknown[0]} is not priced by itself"
        raise BadInput(file, problem, f"choose core_attn, mlp, or all of {', '.join(sorted(light))}")
    if "core_attn" in modules and setting.attention is Attention.EAGER:
        raise BadInput(file, "recompute_modules core_attn with eager attention is not priced", "take flash attention")
    notes = [_CORE_ATTENTION] * ("core_attn" in modules)
    return Recompute.MLP if "mlp" in modules else Recompute.NONE, notes


def light_modules(model: Model) -> tuple[str, ...]:
    """Return Megatron-LM's modules that light recomputation recomputes, as far as the model has them."""
    facts = FAMILIES.get(model.family)
    latents = facts is not None and facts.attention.latents(facts.configured(model.config)) is not None
    has = {Module.MOE_ACT: has_experts(model), Module.MLA_UP_PROJ: latents}
    return tuple(str(module) for module in LIGHT if has.get(module, True))


def _first_recomputed(file: str, given: Words, plan: Plan) -> Plan:
    """Return the plan with the first layers of each stage or chunk recomputed, if Megatron's method is `block`."""
    if " ".join(given.get("recompute_method", ())) != "block":
        return plan
    count = _count(file, given, "recompute_num_layers")
    first = {i for stage in plan.stages for low, high in stage.layers for i in range(low, min(high, low + count))}
    kinds = (Recompute.FULL if i in first else Recompute.NONE for i in range(len(plan.layers)))
    layers = tuple(replace(layer, recompute=kind) for layer, kind in zip(plan.layers, kinds, strict=True))
    return replace(plan, layers=layers)


# Megatron-LM's layout string of a pipeline, `Et*3|(tt|)*29|m|L`: which range of layers each stage and chunk has.
#
# `E` is the embedding, `t` a layer, `m` one that predicts a further token (MTP), `L` head and loss; `|` ends a range,
# which may be empty, and `*` repeats a sign, or what is in parentheses. Commas mean nothing. Source:
# `core/transformer/pipeline_parallel_layer_layout.py` of megatron-core 0.16.1.


_MAX_SIGNS = 4 * MAX_LAYERS
"""Signs of a layout with its repetitions written out, which are enough for the most layers, each in its own range."""
_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_SIGN = re.compile(r"(.)\*(\d+)")
_WHOLE = re.compile(r"E[t|]*(m*)\|*L")
_SIGNS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_SHOWN = 60


class Layout(NamedTuple):
    """A pipeline layout: the numbers of layers of each range, and where layers that predict further tokens are."""

    sizes: list[int]
    """Decoder layers of each range, in the order in which a microbatch goes through them."""
    mtp_layers: int
    mtp_range: int
    """Index of the range with the layers that predict further tokens; the last range if there are none."""


def read_layout(file: str, layout: str) -> Layout:
    """Return the layers of each range; raise BadInput for layouts that Megatron-LM refuses."""
    expanded = layout.replace(",", "")
    for pattern in (_GROUP, _SIGN):
        expanded = _expanded(file, expanded, pattern)
    whole = _WHOLE.fullmatch(expanded)
    if whole is None:
        remedy = "write it as in Et*3|(tt|)*4L: one E first, one L last, and * after each parenthesis"
        raise BadInput(file, f"{_LAYOUT} {layout[:_SHOWN]!r} is not understood", remedy)
    ranges = expanded.split("|")
    mtp_range = next((i for i, part in enumerate(ranges) if "m" in part), len(ranges) - 1)
    return Layout([part.count("t") for part in ranges], len(whole[1]), mtp_range)


def layout_of_lists(rows: Sequence[Sequence[object]]) -> str:
    """Return the layout string for lists of names, one for each range; unknown names are unchanged."""
    return "|".join("".join(_SIGNS.get(str(name).strip().lower(), str(name)) for name in row) for row in rows)


def written_layout(sizes: Sequence[int], mtp_range: int = 0, mtp_layers: int = 0) -> str:
    """Return the layout string for ranges of these sizes, one of which also has the MTP layers."""
    ranges = [f"t*{size}" if size else "" for size in sizes]
    ranges[mtp_range] += "m" * mtp_layers
    return f"E{'|'.join(ranges)}L"


def _expanded(file: str, layout: str, pattern: re.Pattern[str]) -> str:
    """Return a layout with one kind of repetition written out; BadInput if it would have too many layers."""
    parts, at, left = list[str](), 0, _MAX_SIGNS - len(layout)
    for match in pattern.finditer(layout):
        count = int(match[2]) if len(match[2]) < len(str(_MAX_SIGNS)) else _MAX_SIGNS
        left -= len(match[1]) * count
        if left < 0:
            problem = f"{_LAYOUT} {layout[:_SHOWN]!r} is of more than {MAX_LAYERS} layers"
            raise BadInput(file, problem, "correct the layout")
        parts += [layout[at : match.start()], match[1] * count]
        at = match.end()
    return "".join((*parts, layout[at:]))
