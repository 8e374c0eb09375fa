"""Errors for plans that another system cannot express, and the common strategy that most systems require."""

import json
from collections.abc import Collection, Container, Iterator, Sequence
from math import isfinite
from typing import Literal, NamedTuple

from msgspec import UNSET
from msgspec.structs import asdict, replace

from shardwright.devices.table import shipped_devices
from shardwright.io import BadInput
from shardwright.models.context import context_obstacle, ring_obstacle
from shardwright.models.low_rank import adapter_config
from shardwright.models.low_rank_targets import matched_names
from shardwright.models.mtp import mtp_depth
from shardwright.plan.axes import axes_of, effective
from shardwright.plan.communication import shares_experts
from shardwright.plan.schedules.registry import schedule_of
from shardwright.plan.supported_fields import check_fields
from shardwright.types import EMBEDDING, HEAD, Model
from shardwright.types.model import base_type
from shardwright.types.plan import FP8, NVFP4, Attention, Plan, Precision, Schedule, misfit
from shardwright.types.strategy import ContextParallel, LayerStrategy, Recompute, SequenceParallel, Strategy
from shardwright_search.space.uniform import UniformStrategy

WHOLE_LAYERS = (Recompute.NONE, Recompute.FULL)
"""Recomputation that each system has."""


class Exported(NamedTuple):
    """A plan in another system's format."""

    text: str
    """Content of the file."""
    notes: tuple[str, ...]
    """Points that the file cannot express and the user has to take care of, one per line."""
    environment: tuple[str, ...] = ()
    """Lines of a shell that set up the environment of the system's processes."""
    beside: tuple[tuple[str, str], ...] = ()
    """Names and contents of further files in the folder that starts the plan."""


class ExportTarget(NamedTuple):
    """A system that a plan is exported for, and the file of the plan: both are named if the plan is refused."""

    name: str
    plan_file: object

    def demand(self, holds: bool, feature: str, remedy: str) -> None:
        """Raise BadInput unless the condition holds; `feature` names what the system cannot express."""
        if not holds:
            raise BadInput(self.plan_file, f"{self.name} cannot express {feature}", remedy)

    def demand_schedule(self, plan: Plan, schedules: Collection[Schedule]) -> None:
        """Raise BadInput unless the plan's schedule is one of the system's."""
        self.demand(plan.schedule in schedules, f"the schedule {plan.schedule}", f"choose {' or '.join(schedules)}")

    def demand_number(self, name: str, value: object) -> None:
        """Raise BadInput unless a value of a model's configuration is a number: a plan may hold any."""
        holds = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        self.demand(holds, f"{name} {value!r}", "give a number")

    def demand_in_float32(self, plan: Plan, *computes: str) -> None:
        """Raise BadInput unless parameters and reductions are in float32, and computation is in one of the types."""
        kept, used, reduced = plan.precision.parameters, plan.precision.compute, plan.precision.reduce
        words = f"{', '.join(computes[:-1])} or {computes[-1]}"
        holds = kept == reduced == "float32" and used in computes
        self.demand_precision(plan, holds, f"compute in {words}, and keep and reduce in float32")

    def demand_precision(self, plan: Plan, holds: bool, remedy: str, where: str = "") -> None:
        """Raise BadInput that names the plan's precision unless the condition holds."""
        self.demand(holds, f"precision {plan.precision.text}{where}", remedy)


def uniform_of(
    plan: Plan,
    target: ExportTarget,
    kinds: Sequence[Recompute] = WHOLE_LAYERS,
    has_expert_grids: bool = False,
    has_context: bool = False,
    types: Container[str] = (),
    with_peft: bool = False,
) -> UniformStrategy:
    """Return the one strategy of a plan whose layers are all sharded equally, as every system but Galvatron requires.

    Recomputation is left out: layers may differ in it. Raises BadInput naming the first layer, embedding and head
    included, that is sharded differently from the first block, and for features that no system has: strided
    tensor-parallel groups, Ulysses, kinds of recomputation that are not in `kinds`, interleaved microbatches in unequal
    groups. Some features are refused unless the system has them: expert parallelism (`has_expert_grids`), context
    parallelism (`has_context`), layers of several types unless its models may contain all of them (`types`), and
    low-rank matrices (`with_peft`).
    """
    check_exportable(plan, target, with_peft, types)
    if not has_context:
        check_whole_positions(plan, target)
    if not has_expert_grids:
        check_whole_experts(plan, target)
    check_stages(plan, target)
    for i, layer in enumerate(plan.layers):
        first_type, feature = plan.layers[0].type, f"layers[{i}]: type {layer.type}, where layers[0] has"
        kinds_of = base_type(layer.type), base_type(first_type)
        holds = len(set(kinds_of)) == 1 or all(each in types for each in kinds_of)
        target.demand(holds, f"{feature} {first_type}", "export plans of models with layers of one type")
    check_recompute(plan, target, kinds)
    count, pp_size, chunks = plan.num_microbatches, len(plan.stages), len(plan.stages[0].layers)
    feature = f"{count} interleaved microbatches, which {pp_size} pipeline stages do not divide"
    holds = chunks == 1 or plan.schedule.turns or count % pp_size == 0
    target.demand(holds, feature, "choose a multiple of the pipeline stages")
    first = _shared_strategy(plan, target)
    _check_context_alike(plan, target)
    return UniformStrategy(
        replace(_layer_with_experts(plan, target), **asdict(first)),
        pp_size=pp_size,
        micro_batch_size=plan.microbatch_samples // first.dp_size,
        gradient_reduction=plan.gradient_reduction,
        chunks=chunks,
        ranges=tuple(plan.stages[stage].layers[chunk] for stage, chunk in plan.way),
    )


def check_exportable(plan: Plan, target: ExportTarget, with_peft: bool = False, types: Container[str] = ()) -> None:
    """Raise BadInput for fields that no export supports, and for frozen parameters, except under peft.

    Layers that predict further tokens are refused unless their types are in `types`.
    """
    check_fields(plan, target.plan_file, f"the {target.name} export", ("precision.base",) if with_peft else ())
    holds = not plan.model.is_frozen or (with_peft and plan.model.low_rank is not UNSET)
    target.demand(holds, "frozen parameters", "export a plan of the model that is trained whole")
    for i, layer in enumerate(plan.layers):
        holds = not mtp_depth(layer.type) or layer.type in types
        target.demand(holds, f"layers[{i}]: {layer.type}, which predicts a further token", "plan without --mtp")


def strategies(plan: Plan) -> Iterator[tuple[str, Strategy]]:
    """Yield the name and the effective strategy of embedding, layers and head, in order."""
    yield EMBEDDING, effective(plan.embedding)
    for i, layer in enumerate(plan.layers):
        yield f"layers[{i}]", effective(layer)
    yield HEAD, effective(plan.head)


def check_stages(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput unless the pipeline stages are equal blocks of ranks and the schedule suits their number.

    Without a pipeline every system works through the microbatches one after the other: that is 1F1B, not GPipe, which
    holds all of them.
    """
    width = len(plan.stages[0].ranks)
    for i, stage in enumerate(plan.stages):
        widths = f"stages[{i}]: {len(stage.ranks)} ranks, stages[0] has {width}"
        target.demand(len(stage.ranks) == width, widths, "plan stages of equal width")
        block = range(i * width, (i + 1) * width)
        order = f"stages[{i}]: its ranks are not {block[0]} to {block[-1]}"
        target.demand(stage.ranks == tuple(block), order, "number by stage")
    holds = len(plan.stages) > 1 or schedule_of(plan.schedule).in_flight(1, plan.num_microbatches, 0) == 1
    target.demand(holds, f"{plan.schedule} in a single pipeline stage", "choose the schedule 1f1b")


def check_whole_positions(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput naming the first layer with context parallelism: its ranks split positions also in attention."""
    for where, strategy in strategies(plan):
        target.demand(strategy.cp_size == 1, f"{where}: cp_size above 1", "split positions by sequence_parallel")


def check_whole_experts(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput naming the first layer whose ranks shard experts."""
    for i, layer in enumerate(plan.layers):
        feature = f"layers[{i}], whose ranks shard experts"
        target.demand(not shares_experts(layer), feature, "leave out its experts")


def check_expert_states(where: str, layer: LayerStrategy, target: ExportTarget) -> None:
    """Raise BadInput if the states of a layer's experts are sharded differently from the rest, or in rank groups."""
    if (apart := experts_apart(layer)) is not None:
        feature, remedy = apart
        target.demand(False, f"{where}: {feature}", remedy)


def experts_apart(layer: LayerStrategy) -> tuple[str, str] | None:
    """Return how the sharding of experts' states differs from the rest, and the remedy; None if it does not.

    Other systems have one kind of data parallelism for both, and no shard groups together with expert grids.
    """
    grid = layer.expert_grid
    if grid is None or axes_of(grid).dense.states.size == 1:
        return None
    kind = effective(layer).data_parallel
    if grid.data_parallel is not kind:
        feature = f"experts {grid.data_parallel}, where the rest has {kind}"
        return feature, "give experts the data_parallel of their layer"
    grouped = layer.shard_size or grid.shard_size
    return ("experts with states sharded in groups", "leave out shard_size") if grouped else None


def _check_context_alike(plan: Plan, target: ExportTarget) -> None:
    """Raise BadInput unless all layers use the same kind of context parallelism."""
    first = plan.layers[0].context
    for i, layer in enumerate(plan.layers):
        feature = f"layers[{i}]: context {layer.context}, where layers[0] has {first}"
        target.demand(layer.context is first, feature, "choose one way for all layers")


def _layer_with_experts(plan: Plan, target: ExportTarget) -> LayerStrategy:
    """Return the first layer that has experts, whose sharding all such layers share; the first of all without any."""
    layers = [(i, layer) for i, layer in enumerate(plan.layers) if plan.model.types[layer.type].experts is not UNSET]
    number, first = layers[0] if layers else (0, plan.layers[0])
    for i, layer in layers:
        feature = f"layers[{i}]: experts split differently from layers[{number}]"
        target.demand(layer.experts == first.experts, feature, "shard them in the same way in all layers")
        check_expert_states(f"layers[{i}]", layer, target)
    return first


def check_recompute(plan: Plan, target: ExportTarget, kinds: Sequence[Recompute] = WHOLE_LAYERS) -> None:
    """Raise BadInput if a layer's recomputation is not one of these kinds."""
    remedy = "recompute all of it or nothing" if kinds == WHOLE_LAYERS else f"choose {', '.join(kinds)}"
    for i, layer in enumerate(plan.layers):
        target.demand(layer.recompute in kinds, f"layers[{i}]: recompute {layer.recompute}", remedy)


def scaled_in(plan: Plan) -> Literal["mxfp8", "nvfp4"] | None:
    """Return the format of matrix products that are scaled in small blocks, as FP8 is if all devices have MXFP8.

    None: matrix products are in other formats, or scaled as a whole.
    """
    if plan.precision.compute == NVFP4:
        return "nvfp4"
    found = (shipped_devices().get(node.device) for node in plan.cluster.node_types.values())
    mxfp8 = plan.precision.compute == FP8 and all(device is not None and device.mxfp8 for device in found)
    return "mxfp8" if mxfp8 else None


def kernel_notes(plan: Plan) -> Iterator[str]:
    """Yield notes on the kernels that a plan names, which the other system chooses itself."""
    if plan.attention is not Attention.AUTO:
        yield f"the attention kernel {plan.attention} is not in the file"
    if plan.fused:
        yield f"kernels that compute {', '.join(plan.fused)} are not in the file"
    if plan.precision.tf32:
        yield "that factors may be rounded to TF32 is not in the file"
    if plan.compile:
        yield "that layers are compiled is not in the file"


def _shared_strategy(plan: Plan, target: ExportTarget) -> Strategy:
    """Return the first layer's strategy, which all share."""
    named = list(strategies(plan))
    first_where, first = named[1]
    for where, strategy in named:
        target.demand(strategy.tp_consecutive, f"{where}: strided tensor-parallel groups", "make them consecutive")
        ulysses = strategy.sequence_parallel is SequenceParallel.ULYSSES
        target.demand(not ulysses, f"{where}: sequence_parallel ulysses", "choose none or megatron")
        for field in Strategy.__struct_fields__:
            value, shared = getattr(strategy, field), getattr(first, field)
            feature = f"{where}: {field} {value}, where {first_where} has {shared}"
            target.demand(value == shared, feature, "shard embedding, layers and head in the same way")
    return first


def attention_obstacle(model: Model, drops: bool = False) -> str | None:
    """Return why a model's attention does not support other systems' context parallelism; None if it does.

    `drops`: whether the system supports dropout in attention.
    """
    masked = ring_obstacle(model, Attention.AUTO)
    if masked is not None:
        return masked.problem
    for name in dict.fromkeys(model.layers):
        ring = LayerStrategy(type=name, tp_size=1, cp_size=2, dp_size=1, context=ContextParallel.RING)
        if (problem := misfit(model, name, ring)) is not None:
            return problem
    dropping = None if drops else context_obstacle(model, Attention.AUTO)
    return None if dropping is None else dropping.problem


def contexts_of(model: Model, drops: bool = False) -> tuple[ContextParallel, ...]:
    """Return the kinds of context parallelism that a model supports in other systems; empty if none."""
    return tuple(ContextParallel) if attention_obstacle(model, drops) is None else ()


def check_context(plan: Plan, uniform: UniformStrategy, target: ExportTarget, drops: bool = False) -> None:
    """Raise BadInput if layers split positions and the system's attention does not support that for the model."""
    if uniform.shares_context:
        obstacle = attention_obstacle(plan.model, drops)
        feature = f"layers[0]: cp_size {uniform.layer.cp_size} ({obstacle})"
        target.demand(obstacle is None, feature, "choose cp_size 1")


# Python code that adds a plan's low-rank matrices to a stock model of transformers by peft.
#
# Frozen matrices in 8 or 4 bits are quantized by bitsandbytes 0.49. Only 4 bits can be sharded over ranks: they are
# stored in tensors of the compute format (`bnb_4bit_quant_storage`; peft's pages on FSDP and on DeepSpeed).


IMPORTED = "from peft import LoraConfig, get_peft_model\n"
_TEXT = '''

ADAPTER = LoraConfig(
{arguments}
)


def adapted(model):
    """Return the model with low-rank matrices, which alone are trained: prepare this one."""
    return get_peft_model(model, ADAPTER{kept})
'''


_QUANTIZED = {
    "8bit": "BitsAndBytesConfig(load_in_8bit=True)",
    "4bit": (
        'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, '
        "bnb_4bit_compute_dtype=torch.{compute}, bnb_4bit_quant_storage=torch.{compute})"
    ),
}
"""Configurations of transformers' quantized models, by the bits of a plan's frozen matrices."""


def imported_for(plan: Plan) -> str:
    """Return the Python imports for `adapter_text`, except torch."""
    if plan.model.low_rank is UNSET:
        return ""
    return IMPORTED + ("" if plan.precision.base is UNSET else "from transformers import BitsAndBytesConfig\n")


def loading_text(precision: Precision) -> str:
    """Return Python lines with the arguments for loading the stock model; empty for plain float32."""
    given = [] if precision.parameters == "float32" else [f'"dtype": torch.{precision.parameters}']
    if precision.base is not UNSET:
        given.append(f'"quantization_config": {_QUANTIZED[precision.base].format(compute=precision.compute)}')
    return f"\n\nLOADED = {{{', '.join(given)}}}\n" if given else ""


def loading_notes(precision: Precision) -> tuple[str, ...]:
    """Return a note on how to use the lines of `loading_text`, if there are any."""
    return ("your script loads the model by from_pretrained(..., **LOADED)",) if loading_text(precision) else ()


def adapter_text(plan: Plan) -> str:
    """Return Python lines that add the low-rank matrices to a stock model; empty if all of it is trained.

    peft makes them in float32 for models in 16 bits unless it is told not to.
    """
    model = plan.model
    if model.low_rank is UNSET:
        return ""
    config = adapter_config(model) | {"inference_mode": False}
    config["target_modules"] = _shortest(model, config["target_modules"])
    given = {key: value for key, value in config.items() if key != "peft_type" and value not in (None, {}, [])}
    lines = (f"    {key}={value if isinstance(value, bool) else json.dumps(value)}," for key, value in given.items())
    kept = "" if plan.precision.parameters == "float32" else ", autocast_adapter_dtype=False"
    return _TEXT.format(arguments="\n".join(lines), kept=kept)


def _shortest(model: Model, names: list[str]) -> list[str]:
    """Return the last parts of names if they name the same modules in every layer and no others; else the names."""
    ends = {name.rpartition(".")[2] for name in names}
    others = {name for name in matched_names(model) if name.rpartition(".")[2] in ends} - set(names)
    return names if others else sorted(ends)
