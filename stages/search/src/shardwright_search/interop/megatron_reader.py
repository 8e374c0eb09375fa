"""Megatron-LM's arguments as a plan: what its run does with them; those of model, data and precision are not read."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from msgspec import UNSET
from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.types import (
    Attention,
    ContextParallel,
    DataParallel,
    GradientReduction,
    Plan,
    Recompute,
    SequenceParallel,
)
from shardwright_search.interop.limits import Reading, Setting
from shardwright_search.space.uniform import UniformStrategy, even_cuts

Words = Mapping[str, Sequence[str]]
"""Values of arguments by name, with underscores; an argument without a value has none."""
_COUNT = re.compile(r"[1-9]\d{0,6}")
_NOT_PRICED = ("hierarchical_context_parallel_sizes", "decoder_pipeline_manual_split_list")
COMM_TYPES = {ContextParallel.RING: "p2p", ContextParallel.GATHER: "all_gather"}
"""Values of `--cp-comm-type`; the first is its default, and of all layers where there is one value."""
_FSDP = {
    "no_shard": DataParallel.DDP,
    "optim_grads": DataParallel.ZERO2,
    "optim_grads_params": DataParallel.ZERO3,
}
_CORE_ATTENTION = (
    "Megatron-LM's core_attn recomputes attention between its projections alone: flash attention keeps no scores, "
    "so that this frees nothing, and its second forward pass is not priced"
)
_LAYER_NORM = "that norms are recomputed (layernorm) is not priced"


def read_megatron(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of arguments; BadInput naming `file` for what is wrong, and for what no plan has."""
    given = words_of(text, file)
    for name in _NOT_PRICED:
        if given.get(name, ["1"]) != ["1"]:
            raise BadInput(file, f"{name} {' '.join(given[name])} is not priced", "leave it at 1")
    pp_size = _count(file, given, "pipeline_model_parallel_size")
    uniform = UniformStrategy(
        tp_size=_count(file, given, "tensor_model_parallel_size"),
        pp_size=pp_size,
        micro_batch_size=_count(file, given, "micro_batch_size"),
        sequence_parallel=SequenceParallel.MEGATRON if "sequence_parallel" in given else SequenceParallel.NONE,
    )
    uniform = _with_context(file, given, uniform)
    uniform = _with_ranges(file, given, len(setting.model.layers), uniform)
    uniform = _with_states(file, given, setting.with_dp_size(uniform, file))
    tp_size = str(uniform.tp_size)
    ep_size = _count(file, given, "expert_model_parallel_size")
    uniform = uniform.with_experts(ep_size, _count(file, given, "expert_tensor_parallel_size", tp_size))
    if uniform.experts is not None and uniform.shard_size:
        problem = "num_distributed_optimizer_instances beside experts that ranks share out is not priced"
        raise BadInput(file, problem, "leave it at 1")
    kind, notes = _recompute(file, given, setting)
    plan = setting.plan(uniform._replace(recompute=kind), file)
    return Reading(_first_recomputed(file, given, plan), tuple(notes))


def words_of(text: str, file: str) -> Words:
    """Return arguments by name; of one that stands twice the last counts, as argparse has it."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise BadInput(file, f"are no arguments ({error})", "correct them") from None
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
        raise BadInput(file, f"{name} {text!r} is no number from 1", "correct it")
    return int(text)


def _with_context(file: str, given: Words, uniform: UniformStrategy) -> UniformStrategy:
    """Return the choice with positions shared out, by default round a ring, as Megatron-LM has it."""
    cp_size = _count(file, given, "context_parallel_size")
    if cp_size == 1:  # then the other has no effect
        return uniform
    asked = set(given.get("cp_comm_type", ("p2p",)))
    known = [kind for kind, name in COMM_TYPES.items() if asked == {name}]
    if not known:
        problem = f"cp_comm_type {' '.join(sorted(asked))} is not priced"
        raise BadInput(file, problem, f"choose {' or '.join(COMM_TYPES.values())} for all layers")
    return uniform._replace(cp_size=cp_size, context=known[0])


def _with_ranges(file: str, given: Words, layers: int, uniform: UniformStrategy) -> UniformStrategy:
    """Return the choice with the layers of each stage and chunk, where these are given."""
    pp_size, sizes, chunks = uniform.pp_size, list[int](), 1
    if "pipeline_model_parallel_layout" in given:
        sizes = _layout_sizes(file, "".join(given["pipeline_model_parallel_layout"]))
        chunks = len(sizes) // pp_size
    elif "num_layers_per_virtual_pipeline_stage" in given:
        size = _count(file, given, "num_layers_per_virtual_pipeline_stage")
        sizes = [size] * (layers // size)
        chunks = len(sizes) // pp_size
    elif "decoder_first_pipeline_num_layers" in given or "decoder_last_pipeline_num_layers" in given:
        sizes = _sizes_of_ends(file, given, layers, pp_size)
    else:
        chunks = _count(file, given, "num_virtual_stages_per_pipeline_rank")
    if not sizes:
        return uniform._replace(chunks=chunks)
    if sum(sizes) != layers or len(sizes) != pp_size * chunks:
        problem = f"{len(sizes)} ranges of {sum(sizes)} layers for {pp_size} pipeline stages of {layers} layers"
        raise BadInput(file, problem, "correct the layout")
    return uniform._replace(chunks=chunks, ranges=tuple(pairwise((0, *accumulate(sizes)))))


def _sizes_of_ends(file: str, given: Words, layers: int, pp_size: int) -> list[int]:
    """Return the layers of each stage where the first, the last or both have a number of their own."""
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    first, last = ([_count(file, given, name)] if name in given else [] for name in names)
    middle = pp_size - len(first) - len(last)
    left = layers - sum(first) - sum(last)
    if left < 0 or middle < 0:
        raise BadInput(file, f"{' and '.join(names)} for {layers} layers", "correct them")
    return [*first, *(high - low for low, high in (pairwise(even_cuts(left, middle)) if middle else ())), *last]


def _layout_sizes(file: str, layout: str) -> list[int]:
    """Return the decoder layers of each range of `Et*3|(tt|)*2|L`."""
    expanded = "".join(_expanded(layout.replace(",", "")))
    if re.fullmatch(r"[EtL|]*", expanded) is None or not expanded.startswith("E") or not expanded.endswith("L"):
        raise BadInput(file, f"pipeline_model_parallel_layout {layout!r} is not understood", "write it as in Et*3|t*4L")
    return [part.count("t") for part in expanded.split("|")]


def _expanded(layout: str) -> Iterator[str]:
    """Yield the parts of a layout, with repetitions written out."""
    for match in re.finditer(r"(\([^()]*\)|[^*])(?:\*(\d+))?", layout):
        part = match[1]
        inner = "".join(_expanded(part[1:-1])) if part.startswith("(") else part
        yield inner * int(match[2] or 1)


def _with_states(file: str, given: Words, uniform: UniformStrategy) -> UniformStrategy:
    """Return the choice with who shares the states out: DDP, the distributed optimizer, or Megatron-FSDP."""
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
    return uniform._replace(
        data_parallel=kind,
        gradient_reduction=reduction,
        shard_size=uniform.replicas // instances if 1 < instances < uniform.replicas else 0,
    )


def _recompute(file: str, given: Words, setting: Setting) -> tuple[Recompute, list[str]]:
    """Return the kind of all layers, but for those that the method `block` leaves out, and what of it is not priced."""
    default = "selective" if "recompute_activations" in given else "none"
    granularity = " ".join(given.get("recompute_granularity", (default,)))
    if granularity == "full":
        blocks = " ".join(given.get("recompute_method", ())) == "block"
        return Recompute.NONE if blocks else Recompute.FULL, []
    if granularity == "none":
        return Recompute.NONE, []
    if granularity != "selective":
        raise BadInput(file, f"recompute_granularity {granularity!r}", "choose full, selective")
    modules = set(given.get("recompute_modules") or ("core_attn",))
    if any(setting.model.types[name].experts is not UNSET for name in setting.model.layers):
        modules = {"mlp" if name == "moe" else name for name in modules}
    if unknown := sorted(modules - {"core_attn", "mlp", "layernorm"}):
        raise BadInput(file, f"recompute_modules {unknown[0]} is not priced", "choose core_attn, mlp, layernorm")
    if "core_attn" in modules and setting.attention is Attention.EAGER:
        raise BadInput(file, "recompute_modules core_attn beside eager attention is not priced", "take flash attention")
    notes = [note for name, note in (("core_attn", _CORE_ATTENTION), ("layernorm", _LAYER_NORM)) if name in modules]
    return Recompute.MLP if "mlp" in modules else Recompute.NONE, notes


def _first_recomputed(file: str, given: Words, plan: Plan) -> Plan:
    """Return the plan with the first layers of each stage or chunk recomputed, where Megatron's method is `block`."""
    if " ".join(given.get("recompute_method", ())) != "block":
        return plan
    count = _count(file, given, "recompute_num_layers")
    first = {i for stage in plan.stages for low, high in stage.layers for i in range(low, min(high, low + count))}
    kinds = (Recompute.FULL if i in first else Recompute.NONE for i in range(len(plan.layers)))
    layers = tuple(replace(layer, recompute=kind) for layer, kind in zip(plan.layers, kinds, strict=True))
    return replace(plan, layers=layers)
