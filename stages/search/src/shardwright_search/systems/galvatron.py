"""Galvatron: its strategy file as a plan, and a plan as such a file.

Versions: hetu-galvatron 2.4.0 (`utils/config_utils.py`, `core/runtime/hybrid_parallel_config.py` read the file,
`core/search_engine/search_engine.py` writes it), and newer ones, which add context and expert parallelism and read
`vocab_sdp` where the search writes `embed_sdp`.

Its ranks are numbered as in plans: tensor-parallel or Ulysses ranks are neighbours, then context-parallel ones
(`gen_cp_group_dist` of its `comm_groups.py`), whose attention is a ring over a zig-zag order (`attention_impl.py`).
For experts, ranks that split features are neighbours, then ranks that split experts (`gen_ep_group_dist`), and their
states are sharded in the same way as the states of the layer.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import asdict, replace

from shardwright.estimate.runtimes import RUNTIMES, RuntimeName
from shardwright.io import BadInput, object_of, read_document, read_object, write_document
from shardwright.plan.axes import axes_of, effective
from shardwright.types import (
    MAX_BATCH,
    Cluster,
    ContextParallel,
    DataParallel,
    ExpertStrategy,
    LayerStrategy,
    Recompute,
    SequenceParallel,
    Strategy,
)
from shardwright.types.model import EMBEDDING, HEAD, Model
from shardwright.types.plan import GradientReduction, Plan, Precision, Schedule
from shardwright_search.options import GalvatronRun, ImportGalvatronOptions
from shardwright_search.space.configurations import Demands, Outer
from shardwright_search.space.uniform import spelled, stages_of
from shardwright_search.systems.entry import Entry, Limits, Reading, Setting, torchrun
from shardwright_search.systems.exporting import (
    WHOLE_LAYERS,
    Exported,
    ExportTarget,
    attention_obstacle,
    check_expert_states,
    check_exportable,
    check_recompute,
    check_stages,
    kernel_notes,
    strategies,
)
from shardwright_search.systems.launch import Program

# The file: read strictly, and written as its runtime reads it.

Degree = Annotated[int, Meta(ge=1, le=MAX_BATCH)]
Flag = Literal[0, 1]
PipelineType = Literal["gpipe", "pipedream_flush"]
DataParallelType = Literal["ddp", "zero2", "zero3"]


class GalvatronLayer(NamedTuple):
    """The sharding of one layer, or of embedding and head together."""

    tp_size: int
    """Degree of tensor parallelism, or of Ulysses."""
    tp_consecutive: bool
    zero3: bool
    """Flag of sharding by ZeRO-3 instead of by the file's `default_dp_type`."""
    ulysses: bool
    checkpoint: bool
    """Flag of recomputing the whole layer."""
    experts: tuple[int, int] | None = None
    """Degrees of expert parallelism and of tensor parallelism of experts; None if the file does not state them."""
    cp_size: int = 1
    """Degree of context parallelism, which newer versions have."""


class GalvatronStrategy(NamedTuple):
    """The whole file; keys that older files leave out have the value that their reader takes."""

    layers: tuple[GalvatronLayer, ...]
    vocabulary: GalvatronLayer
    """Embedding and head: never strided, never recomputed."""
    pp_division: tuple[int, ...]
    """Number of layers of each pipeline stage."""
    global_bsz: int
    chunks: int
    pipeline_type: PipelineType
    default_dp_type: DataParallelType


class _Keys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of the file; a list of numbers, one for each layer, is a string such as `1,1,2`."""

    pp_deg: Degree
    tp_sizes_enc: str
    tp_consecutive_flags: str
    dp_types_enc: str
    global_bsz: Degree
    chunks: Degree
    pipeline_type: PipelineType
    default_dp_type: DataParallelType
    pp_division: str | None = None
    use_sp: str | None = None
    checkpoint: str | None = None
    vtp: Degree = 1
    vsp: Flag = 0
    embed_sdp: Flag | None = None
    vocab_sdp: Flag | None = None
    vcp: Degree = 1
    cp_sizes_enc: str | None = None
    ep_sizes_enc: str | None = None
    tp_of_ep_sizes_enc: str | None = None


def read_galvatron(path: Path) -> GalvatronStrategy:
    """Read a strategy file; raises BadInput as `strategy_of_keys` does."""
    return strategy_of_keys(read_object(path), path)


def strategy_of_keys(raw: object, path: Path) -> GalvatronStrategy:
    """Return the content of a strategy file.

    Raises BadInput for a key that is unknown, missing or contradicts another, and for features that no plan has.
    """
    try:
        keys = msgspec.convert(raw, _Keys)
    except msgspec.ValidationError as error:
        remedy = "pass a strategy file of Galvatron; what a run's options decide must stand in it"
        raise BadInput(path, str(error), remedy) from None
    sizes = _numbers(path, "tp_sizes_enc", keys.tp_sizes_enc)
    count = len(sizes)
    contexts = _listed(path, keys, "cp_sizes_enc", count, 1)
    if min(contexts) < 1:
        raise BadInput(path, "cp_sizes_enc has a degree below 1", "use degrees from 1")
    flags = [
        _flags(path, name, _listed(path, keys, name, count, 0))
        for name in ("tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint")
    ]
    return GalvatronStrategy(
        layers=tuple(
            GalvatronLayer(*layer) for layer in zip(sizes, *flags, _experts(path, keys, count), contexts, strict=True)
        ),
        vocabulary=GalvatronLayer(
            keys.vtp, True, _vocabulary_is_zero3(path, keys), keys.vsp == 1, False, cp_size=keys.vcp
        ),
        pp_division=_division(path, keys, count),
        global_bsz=keys.global_bsz,
        chunks=keys.chunks,
        pipeline_type=keys.pipeline_type,
        default_dp_type=keys.default_dp_type,
    )


def galvatron_keys(strategy: GalvatronStrategy) -> dict[str, int | str]:
    """Return the file's keys: the keys of 2.4.0, and further keys of newer versions, which 2.4.0 ignores."""
    layers, vocabulary = strategy.layers, strategy.vocabulary
    return {
        "pp_deg": len(strategy.pp_division),
        "tp_sizes_enc": _listing(layer.tp_size for layer in layers),
        "tp_consecutive_flags": _listing(layer.tp_consecutive for layer in layers),
        "cp_sizes_enc": _listing(layer.cp_size for layer in layers),
        "dp_types_enc": _listing(layer.zero3 for layer in layers),
        "use_sp": _listing(layer.ulysses for layer in layers),
        "checkpoint": _listing(layer.checkpoint for layer in layers),
        "global_bsz": strategy.global_bsz,
        "chunks": strategy.chunks,
        "pp_division": _listing(strategy.pp_division),
        "pipeline_type": strategy.pipeline_type,
        "default_dp_type": strategy.default_dp_type,
        "vtp": vocabulary.tp_size,
        "vsp": int(vocabulary.ulysses),
        "vcp": vocabulary.cp_size,
        "embed_sdp": int(vocabulary.zero3),
        "vocab_sdp": int(vocabulary.zero3),
        **_expert_keys(layers),
    }


def _expert_keys(layers: Sequence[GalvatronLayer]) -> dict[str, int | str]:
    """Return the expert degrees of all layers, if any layer has experts; 1 for layers without."""
    if all(layer.experts is None for layer in layers):
        return {}
    pairs = [layer.experts or (1, 1) for layer in layers]
    return {"ep_sizes_enc": _listing(ep for ep, _ in pairs), "tp_of_ep_sizes_enc": _listing(etp for _, etp in pairs)}


def _experts(path: Path, keys: _Keys, count: int) -> Sequence[tuple[int, int] | None]:
    """Return the degrees of experts in each layer, which older files do not have."""
    if keys.ep_sizes_enc is None and keys.tp_of_ep_sizes_enc is None:
        return [None] * count
    ep_sizes, etp_sizes = (_listed(path, keys, name, count, 1) for name in ("ep_sizes_enc", "tp_of_ep_sizes_enc"))
    if min(*ep_sizes, *etp_sizes) < 1:
        raise BadInput(path, "ep_sizes_enc or tp_of_ep_sizes_enc has a degree below 1", "use degrees from 1")
    return list(zip(ep_sizes, etp_sizes, strict=True))


def _vocabulary_is_zero3(path: Path, keys: _Keys) -> bool:
    """Return `embed_sdp`, which the search writes, or `vocab_sdp`, which newer runtimes read."""
    given = {flag for flag in (keys.embed_sdp, keys.vocab_sdp) if flag is not None}
    if len(given) > 1:
        raise BadInput(path, "embed_sdp and vocab_sdp differ, but are names of one setting", "keep one of them")
    return given == {1}


def _division(path: Path, keys: _Keys, count: int) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage; by default even, with the remainder on the last stage."""
    if keys.pp_division is None:
        share = count // keys.pp_deg
        division = (*(share for _ in range(keys.pp_deg - 1)), count - share * (keys.pp_deg - 1))
    else:
        division = _numbers(path, "pp_division", keys.pp_division)
    if len(division) != keys.pp_deg or sum(division) != count or min(division) < 1:
        problem = f"pp_division {_listing(division)} does not share {count} layers out to {keys.pp_deg} pipeline stages"
        raise BadInput(path, problem, "give each of pp_deg stages a layer or more")
    return division


def _listed(path: Path, keys: _Keys, name: str, count: int, absent: int) -> tuple[int, ...]:
    """Return the numbers of a key, one for each layer; `absent` in every layer without the key."""
    text: str | None = getattr(keys, name)
    numbers = (absent,) * count if text is None else _numbers(path, name, text)
    if len(numbers) != count:
        raise BadInput(path, f"{name} has {len(numbers)} numbers, tp_sizes_enc has {count}", "give one per layer")
    return numbers


def _flags(path: Path, name: str, numbers: tuple[int, ...]) -> tuple[bool, ...]:
    for layer, number in enumerate(numbers):
        if number not in (0, 1):
            raise BadInput(path, f"{name} of layer {layer} is {number}, which a plan cannot express", "use 0 or 1")
    return tuple(number == 1 for number in numbers)


def _numbers(path: Path, name: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise BadInput(path, f"{name} is not a list of numbers", "write it as in 1,1,2,2")
    return tuple(int(part) for part in parts)


def _listing(numbers: Iterable[int]) -> str:
    return ",".join(str(int(number)) for number in numbers)


# A layer of the file and a strategy of a plan, each as the other.


def strategy_of(
    where: str, layer: GalvatronLayer, given: GalvatronStrategy, width: int, run: GalvatronRun, file: Path
) -> Strategy:
    """Return the sharding of one layer of the file on a stage of `width` ranks.

    Raises BadInput naming `where` for degrees that divide nothing, and for settings that the run must state.
    """
    ranks = layer.tp_size * layer.cp_size
    if ranks < 1 or width % ranks:
        degrees = f"{layer.tp_size} x cp {layer.cp_size}" if layer.cp_size > 1 else layer.tp_size
        problem = f"{where}: {degrees} does not divide the {width} ranks of a pipeline stage"
        raise BadInput(file, problem, "pass the cluster it was made for")
    # Galvatron makes every group of Ulysses of neighbours, whatever the flag.
    consecutive = layer.tp_consecutive or layer.ulysses
    if layer.cp_size > 1 and not consecutive and layer.tp_size > 1:
        raise BadInput(file, f"{where}: strided tp groups with cp {layer.cp_size}", "make them consecutive")
    sequence_parallel = SequenceParallel.ULYSSES if layer.ulysses else SequenceParallel.NONE
    if layer.tp_size > 1 and not layer.ulysses:
        if run.sequence_parallel is None:
            problem = f"{where} is {layer.tp_size}, and the file does not state whether such layers split the sequence"
            raise BadInput(file, problem, "pass --sequence-parallel none or megatron")
        sequence_parallel = SequenceParallel(run.sequence_parallel)
    return effective(
        Strategy(
            tp_size=layer.tp_size,
            tp_consecutive=consecutive or layer.cp_size > 1,
            cp_size=layer.cp_size,
            dp_size=width // ranks,
            data_parallel=DataParallel.ZERO3 if layer.zero3 else DataParallel(given.default_dp_type),
            sequence_parallel=sequence_parallel,
        )
    )


def galvatron_layer(strategy: Strategy, recompute: Recompute) -> GalvatronLayer:
    """Return the file's form of a layer's strategy."""
    return GalvatronLayer(
        tp_size=strategy.tp_size,
        tp_consecutive=strategy.tp_consecutive,
        zero3=strategy.data_parallel is DataParallel.ZERO3,
        ulysses=strategy.sequence_parallel is SequenceParallel.ULYSSES,
        checkpoint=recompute is Recompute.FULL,
        cp_size=strategy.cp_size,
    )


def check_rings(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput naming the first layer whose context parallelism differs from Galvatron's."""
    shared = next((where for where, strategy in strategies(plan) if strategy.cp_size > 1), None)
    if shared is None:
        return
    obstacle = attention_obstacle(plan.model)
    target.demand(obstacle is None, f"{shared}: cp_size above 1 ({obstacle})", "choose cp_size 1")
    for i, layer in enumerate(plan.layers):
        ring = effective(layer).cp_size == 1 or layer.context is ContextParallel.RING
        target.demand(ring, f"layers[{i}]: context {layer.context}", "choose ring")


def layer_with_experts(
    sharding: Strategy, layer: GalvatronLayer, default: DataParallelType, model: Model, number: int, file: Path
) -> LayerStrategy:
    """Return the strategy of a layer of the model; `default`: the file's kind of data parallelism that is not ZeRO-3.

    Raises BadInput for degrees of experts in a layer without experts, and ValueError if they divide nothing.
    """
    kind = model.layers[number]
    experts: ExpertStrategy | UnsetType = UNSET
    if model.types[kind].experts is UNSET:
        if layer.experts not in (None, (1, 1)):
            problem = f"ep_sizes_enc or tp_of_ep_sizes_enc of layer {number}, which has no experts, is not 1"
            raise BadInput(file, problem, "pass the model it was made for")
    elif layer.experts not in (None, (1, axes_of(sharding).dense.tensor.size)):
        (ep_size, etp_size), data_parallel = layer.experts, DataParallel.ZERO3 if layer.zero3 else DataParallel(default)
        experts = ExpertStrategy(ep_size=ep_size, etp_size=etp_size, data_parallel=data_parallel)
    context = ContextParallel.RING if axes_of(sharding).shares_context else ContextParallel.GATHER
    recompute = Recompute.FULL if layer.checkpoint else Recompute.NONE
    return spelled(LayerStrategy(**asdict(sharding), type=kind, recompute=recompute, context=context, experts=experts))


def told_of_experts(layer: GalvatronLayer, plan: Plan, number: int) -> GalvatronLayer:
    """Return a layer of the file with the degrees of its experts, if the plan's layer has experts."""
    strategy = plan.layers[number]
    if plan.model.types[strategy.type].experts is UNSET:
        return layer
    axes = axes_of(strategy.expert_grid or effective(strategy)).dense
    return layer._replace(experts=(axes.experts.size, axes.tensor.size))


# The whole plan.

_DEFAULTS: dict[DataParallel, DataParallelType] = {DataParallel.DDP: "ddp", DataParallel.ZERO2: "zero2"}
_SCHEDULES: dict[PipelineType, Schedule] = {"gpipe": Schedule.GPIPE, "pipedream_flush": Schedule.ONE_F_ONE_B}
_PIPELINE_TYPES: dict[Schedule, PipelineType] = {
    Schedule.GPIPE: "gpipe",
    Schedule.ONE_F_ONE_B: "pipedream_flush",
    Schedule.INTERLEAVED_1F1B: "pipedream_flush",
}
"""Names of the schedules of a stage with one layer range, which is all that Galvatron has."""
_UNUSED_DEFAULT: DataParallelType = "zero2"
"""Value that is written if no layer uses `default_dp_type`; Galvatron's own launch scripts have it."""
_SHARES_SEQUENCE = "read as a run with --sequence-parallel, which the file does not state"
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def import_galvatron(options: ImportGalvatronOptions) -> None:
    """Write the plan that Galvatron would run."""
    given = read_galvatron(options.config)
    model, cluster = read_document(options.model, Model), read_document(options.cluster, Cluster)
    name = options.name or options.out.stem
    write_document(options.out, plan_of_galvatron(name, given, model, cluster, options, options.config))


def plan_of_galvatron(
    name: str, given: GalvatronStrategy, model: Model, cluster: Cluster, run: GalvatronRun, file: Path
) -> Plan:
    """Return the plan that Galvatron would run.

    Raises BadInput if the file was made for another model or cluster, and if microbatches would differ in size.
    """
    pp_size = len(given.pp_division)
    if cluster.num_devices % pp_size:
        problem = f"pp_deg {pp_size} does not divide the {cluster.num_devices} devices of cluster {cluster.name}"
        raise BadInput(file, problem, "pass the cluster it was made for")
    if len(given.layers) != (count := len(_joined(model))):
        problem = f"it has {len(given.layers)} layers, model {model.name} {count}"
        raise BadInput(file, problem, "pass the model it was made for")
    width = cluster.num_devices // pp_size
    vocabulary = strategy_of("vtp", given.vocabulary, given, width, run, file)
    shardings = [
        strategy_of(f"tp_sizes_enc of layer {i}", layer, given, width, run, file)
        for i, layer in enumerate(given.layers)
    ]
    try:
        return Plan(
            name=name,
            model=model,
            cluster=cluster,
            global_batch_size=given.global_bsz,
            num_microbatches=run.num_microbatches or _num_microbatches(given, vocabulary.dp_size, file),
            # Without a pipeline Galvatron ignores pipeline_type and takes one microbatch after the other.
            schedule=_SCHEDULES[given.pipeline_type] if pp_size > 1 else Schedule.ONE_F_ONE_B,
            gradient_reduction=run.gradient_reduction,
            precision=run.precision,
            attention=run.attention,
            stages=stages_of(_ranges(given.pp_division, model), pp_size, width),
            embedding=vocabulary,
            head=vocabulary,
            layers=tuple(
                layer_with_experts(sharding, layer, given.default_dp_type, model, i, file)
                for sharding, layer, joined in zip(shardings, given.layers, _joined(model), strict=True)
                for i in joined
            ),
        )
    except ValueError as error:
        raise BadInput(file, str(error), "pass the model and cluster it was made for") from None


def galvatron_file(plan: Plan, plan_file: object) -> Exported:
    """Return Galvatron's strategy file for a plan, and the options that its run needs.

    Raises BadInput naming the first feature that the file cannot express.
    """
    given = galvatron_strategy(plan, plan_file)
    text = json.dumps(galvatron_keys(given), indent=4) + "\n"
    return Exported(text, (f"run it on {plan.world_size} ranks with {' '.join(_options(plan))}", *kernel_notes(plan)))


def galvatron_strategy(plan: Plan, plan_file: object) -> GalvatronStrategy:
    """Return the content of Galvatron's file for a plan; BadInput names the first feature that it cannot express."""
    target = ExportTarget("Galvatron", plan_file)
    check_exportable(plan, target)
    check_stages(plan, target)
    target.demand_schedule(plan, _PIPELINE_TYPES)
    check_rings(plan, target)
    _check_ranges(plan, target)
    _check_joined(plan, target)
    _check_precision(plan, target)
    default = _check_strategies(plan, target)
    return GalvatronStrategy(
        layers=tuple(
            told_of_experts(galvatron_layer(effective(plan.layers[first]), plan.layers[first].recompute), plan, first)
            for first, *_ in _joined(plan.model)
        ),
        vocabulary=galvatron_layer(effective(plan.embedding), Recompute.NONE),
        pp_division=tuple(
            sum(low <= first < high for first, *_ in _joined(plan.model))
            for stage in plan.stages
            for low, high in stage.layers
        ),
        global_bsz=plan.global_batch_size,
        chunks=plan.num_microbatches,
        pipeline_type=_PIPELINE_TYPES[plan.schedule],
        default_dp_type=default,
    )


def _joined(model: Model) -> list[tuple[int, ...]]:
    """Return the indices of the layers that form one layer of Galvatron: a block, and patch merging after it.

    Galvatron merges Swin's patches in the last block of a stage (galvatron/models/swin).
    """
    joined: list[tuple[int, ...]] = []
    for number, kind in enumerate(model.layers):
        if joined and kind in model.reshaping:
            joined[-1] += (number,)
        else:
            joined.append((number,))
    return joined


def _ranges(pp_division: Sequence[int], model: Model) -> tuple[tuple[int, int], ...]:
    """Return the half-open range of layers of each pipeline stage."""
    ends = [joined[-1] + 1 for joined in _joined(model)]
    cuts = [0, *(ends[min(count, len(ends)) - 1] if count else 0 for count in accumulate(pp_division))]
    return tuple(pairwise(cuts))


def _num_microbatches(given: GalvatronStrategy, dp_size: int, file: Path) -> int:
    """Return the number of microbatches that torch's `chunk` makes of a data-parallel rank's samples.

    Raises BadInput if the last one is smaller: a plan's microbatches are equal.
    """
    samples, left = divmod(given.global_bsz, dp_size)
    if left:
        problem = f"global_bsz {given.global_bsz} is not split evenly over the {dp_size} ranks of embedding and head"
        raise BadInput(file, problem, "pass the cluster it was made for")
    size = -(-samples // given.chunks)
    if samples % size:
        raise BadInput(
            file,
            f"chunks {given.chunks} cuts a rank's {samples} samples into microbatches of {size} and one of "
            f"{samples % size}, which a plan cannot express",
            "choose --num-microbatches yourself",
        )
    return samples // size


def _check_ranges(plan: Plan, target: ExportTarget) -> None:
    for i, stage in enumerate(plan.stages):
        feature = "several layer ranges in a pipeline stage"
        target.demand(len(stage.layers) == 1, feature, "choose the schedule 1f1b or gpipe")
        ((low, high),) = stage.layers
        target.demand(low < high, f"stages[{i}] without a layer", "give every pipeline stage a layer")


def _check_joined(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput unless layers that Galvatron joins to a block have its strategy, recomputation and stage."""
    for first, *others in _joined(plan.model):
        block = plan.layers[first]
        for number in others:
            layer = plan.layers[number]
            alike = replace(layer, type=block.type) == block
            feature = f"layers[{number}], {layer.type}, sharded or recomputed differently from the block before it"
            target.demand(alike, feature, "give both one strategy: set fine_grained to false")
            apart = any(number == low for stage in plan.stages for low, _ in stage.layers)
            target.demand(not apart, f"a cut before layers[{number}], {layer.type}", "cut behind it")


def _check_precision(plan: Plan, target: ExportTarget) -> None:
    kept, used, reduced = plan.precision.parameters, plan.precision.compute, plan.precision.reduce
    holds = kept == "float32" and used in _PRECISIONS and reduced in ("float32", used)
    target.demand_precision(plan, holds, "keep parameters in float32, and reduce in float32 or as computed")


def _check_strategies(plan: Plan, target: ExportTarget) -> DataParallelType:
    """Return the file's `default_dp_type`; raise BadInput for the first strategy that the file cannot represent."""
    default: tuple[str, DataParallel] | None = None
    sharing: tuple[str, SequenceParallel] | None = None
    for where, strategy in strategies(plan):
        kind, sequence = strategy.data_parallel, strategy.sequence_parallel
        ulysses = strategy.sequence_parallel is SequenceParallel.ULYSSES
        strided = not strategy.tp_consecutive and (where in (EMBEDDING, HEAD) or ulysses)
        target.demand(not strided, f"{where}: strided groups there", "make them consecutive")
        feature = f"{where}: states sharded in groups of {strategy.shard_size}"
        target.demand(not strategy.shard_size, feature, "shard them over all ranks: leave out shard_size")
        if kind is not DataParallel.ZERO3 and (strategy.dp_size > 1 or strategy.cp_size > 1 or ulysses):
            default = default or (where, kind)
            feature = f"{where}: {kind}, where {default[0]} has {default[1]}"
            target.demand(kind is default[1], feature, "use zero3 together with only one of ddp and zero2")
        if strategy.tp_size > 1 and not ulysses:
            sharing = sharing or (where, sequence)
            feature = f"{where}: sequence_parallel {sequence}, where {sharing[0]} has {sharing[1]}"
            target.demand(sequence is sharing[1], feature, "use one kind wherever tp_size is above 1")
    for i, layer in enumerate(plan.layers):
        check_expert_states(f"layers[{i}]", layer, target)
    check_recompute(plan, target)
    alike = effective(plan.embedding) == effective(plan.head)
    target.demand(alike, "a head sharded differently from the embedding", "shard both in the same way")
    return _UNUSED_DEFAULT if default is None else _DEFAULTS[default[1]]


def _options(plan: Plan) -> Iterator[str]:
    """Yield the options of Galvatron's run that the plan needs and the file cannot hold."""
    yield f"--mixed_precision {_PRECISIONS[plan.precision.compute]}"
    if plan.precision.reduce == "float32" != plan.precision.compute:
        yield "--reduce_in_fp32"
    if any(strategy.sequence_parallel is SequenceParallel.MEGATRON for _, strategy in strategies(plan)):
        yield "--sequence-parallel"
    if plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH and plan.num_microbatches > 1:
        yield "--no_async_grad_reduce"


def galvatron_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return Galvatron's two ways: DDP or ZeRO-2 for all layers, each together with ZeRO-3.

    Models with layers that it joins to the block before have none: not all layers can have strategies of their own.
    """
    if model.reshaping:
        return ()
    return tuple(
        Limits(
            f"{kind} and zero3, tensor parallelism that shares the sequence",
            data_parallel=(kind, DataParallel.ZERO3),
            gradient_reduction=GradientReduction.DEFERRED,
            recompute=WHOLE_LAYERS,
            sequence_parallel=(SequenceParallel.MEGATRON,),
            uniform=False,
            demands=Demands(outer=Outer.ALIKE, block_in_each_stage=True),
        )
        for kind in (DataParallel.DDP, DataParallel.ZERO2)
    )


def read_strategy(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a strategy file under a run with the setting's precision and --sequence-parallel."""
    path = Path(file)
    run = GalvatronRun(sequence_parallel="megatron", attention=setting.attention)
    plan = plan_of_galvatron(
        file, strategy_of_keys(object_of(text, path), path), setting.model, setting.cluster, run, path
    )
    batch, asked, notes = plan.global_batch_size, setting.global_batch_size, [_SHARES_SEQUENCE]
    if batch != asked:
        notes.insert(0, f"its global_bsz is {batch}, {asked} is asked: times of a sample are compared")
    return Reading(replace(plan, precision=setting.precision), tuple(notes))


def _command(plan: Plan, file: str) -> str:
    return torchrun(plan, f"train_dist.py --galvatron_config_path {file} {' '.join(_options(plan))}")


def _program(plan: Plan, _exported: Exported) -> Program:
    words = f'"$TRAIN" --galvatron_config_path "$folder/galvatron.json" {" ".join(_options(plan))}'
    return Program(words, {"TRAIN": "path of train_dist.py of Galvatron's folder of the model"})


GALVATRON = Entry(
    title="Galvatron",
    version="hetu-galvatron 2.4.0",
    sources=(
        "galvatron/core/runtime/hybrid_parallel_config.py: keys, one default_dp_type, one strategy of the vocabulary",
        "galvatron/core/runtime/arguments.py: --galvatron_config_path, --sequence-parallel",
    ),
    runtime=RUNTIMES[RuntimeName.GALVATRON],
    limits=galvatron_limits,
    unsearched=(
        "Ulysses",
        "tensor parallelism without --sequence-parallel",
        "gpipe",
        "strided groups",
        "expert parallelism",
        "context parallelism, which newer versions have",
    ),
    file_name="galvatron.json",
    mark="pp_deg",
    export=galvatron_file,
    read=read_strategy,
    command=_command,
    program=_program,
)
