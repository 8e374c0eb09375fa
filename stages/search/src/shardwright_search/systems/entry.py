"""The definition of a system that runs plans: its part of the search space, its files, and how they are read."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.estimate.runtimes import Runtime
from shardwright.io import BadInput
from shardwright.models.context import recompute_kinds
from shardwright.types import Cluster, ContextParallel, DataParallel, LayerStrategy, Model, Recompute, SequenceParallel
from shardwright.types.model import base_type
from shardwright.types.plan import Attention, GradientReduction, OptimizerName, Plan, Precision, Schedule
from shardwright_search.space.configurations import Configuration, Demands, Outer, most_stages
from shardwright_search.space.request import OuterSpace, SearchRequest, StageWidths
from shardwright_search.space.uniform import UniformStrategy, plan_of_uniform, sizes_that_fit
from shardwright_search.systems.exporting import Exported, experts_apart
from shardwright_search.systems.launch import Launch, Program, in_pipeline_order, launch_of


class Setting(NamedTuple):
    """Settings of a run that another system's file leaves out, or that are not read from it."""

    model: Model
    cluster: Cluster
    global_batch_size: int
    precision: Precision = Precision()
    optimizer: OptimizerName = "adamw"
    attention: Attention = Attention.AUTO
    compile: bool = False
    loss_chunks: int = 1

    def uniform(
        self,
        name: str,
        pp_size: int,
        micro_batch_size: int = 1,
        gradient_reduction: GradientReduction = GradientReduction.DEFERRED,
        *,
        tp_size: int = 1,
        cp_size: int = 1,
        **of_layer: Any,  # noqa: ANN401 (of the fields of a layer)
    ) -> UniformStrategy:
        """Return a choice of one strategy, on all devices; BadInput naming `name` if the sizes do not divide them."""
        devices, model_ranks = self.cluster.num_devices, tp_size * cp_size * pp_size
        if devices % model_ranks:
            context = f" x cp {cp_size}" if cp_size > 1 else ""
            problem = f"tp {tp_size}{context} x pp {pp_size} does not divide {devices} GPUs"
            raise BadInput(name, problem, "choose divisors")
        dp_size = devices // model_ranks
        with sizes_that_fit(name):
            layer = LayerStrategy(
                type=self.model.layers[0], tp_size=tp_size, cp_size=cp_size, dp_size=dp_size, **of_layer
            )
        return UniformStrategy(layer, pp_size, micro_batch_size, gradient_reduction)

    def differences(self, batch: tuple[str, object], length: tuple[str, object] = ("", None)) -> tuple[str, ...]:
        """Return a line for each difference between a file's batch or length and the requested one.

        A value is None where the file leaves it open.
        """
        asked = ((*batch, self.global_batch_size), (*length, self.model.sequence_length))
        return tuple(
            f"its {name} is {given}: it is priced with {wanted}, as requested"
            for name, given, wanted in asked
            if given is not None and str(given) != str(wanted)
        )

    def plan(self, choice: UniformStrategy, name: str) -> Plan:
        """Return the plan of a choice, with evenly cut layers if it has no ranges.

        Raises BadInput naming `name` if its numbers do not divide one another.
        """
        batch, dp_size = self.global_batch_size, choice.layer.dp_size
        if batch % (dp_size * choice.micro_batch_size):
            problem = f"dp {dp_size} x mbs {choice.micro_batch_size} does not divide the batch {batch}"
            raise BadInput(name, problem, "choose another mbs or batch")
        return plan_of_uniform(
            name,
            choice,
            self.model,
            self.cluster,
            global_batch_size=batch,
            num_microbatches=batch // (dp_size * choice.micro_batch_size),
            schedule=Schedule.ONE_F_ONE_B if choice.chunks == 1 else Schedule.INTERLEAVED_1F1B,
            gradient_reduction=choice.gradient_reduction,
            precision=self.precision,
            optimizer=self.optimizer,
            attention=self.attention,
            compile=self.compile,
            loss_chunks=UNSET if self.loss_chunks == 1 else self.loss_chunks,
        )


class Reading(NamedTuple):
    """The plan in another system's file, and a line for each setting of the file that a plan does not have."""

    plan: Plan
    notes: tuple[str, ...] = ()


class Limits(NamedTuple):
    """Limits of the plans that a system runs in one way; a way has one kind of gradient reduction."""

    words: str
    data_parallel: tuple[DataParallel, ...]
    gradient_reduction: GradientReduction
    recompute: tuple[Recompute, ...]
    sequence_parallel: tuple[SequenceParallel, ...] = (SequenceParallel.NONE,)
    tp_sizes: tuple[int, ...] | None = None
    """Degrees of tensor parallelism; None: any."""
    pipeline: bool | None = None
    """Whether there are several pipeline stages; None: either."""
    schedules: tuple[Schedule, ...] = (Schedule.ONE_F_ONE_B,)
    uniform: bool = True
    """Whether all layers share one strategy."""
    types: tuple[str, ...] = ()
    """Types of layers that models may contain together if all layers share one strategy."""
    expert_grids: bool = False
    """Whether experts may be sharded differently from the rest of a layer."""
    contexts: tuple[ContextParallel, ...] = ()
    """Kinds of context parallelism; empty: each rank has whole samples in attention."""
    demands: Demands = Demands(outer=Outer.AS_LAYERS)

    def runs(self, model: Model) -> bool:
        """Return whether the model's types of layers may share one strategy; True if the system does not need that."""
        return not self.uniform or len(names := set(map(base_type, model.layers))) == 1 or names <= set(self.types)

    def narrowed(self, request: SearchRequest, model: Model, devices: int) -> SearchRequest | None:
        """Return the part of a request's space that the system runs in this way; None: the part is empty."""
        several = tuple(size for size in range(2, most_stages(len(model.layers)) + 1) if devices % size == 0)
        degrees = {None: request.pp_sizes, False: (1,), True: several}[self.pipeline]
        tp_sizes = request.tp_sizes if self.tp_sizes is None else self.tp_sizes
        schedules = tuple(each for each in self.schedules if each in request.schedules)
        if degrees == () or not schedules:
            return None
        return replace(
            request,
            fine_grained=request.fine_grained and not self.uniform,
            pp_sizes=degrees,
            tp_sizes=tp_sizes,
            cp_sizes=request.cp_sizes if self.contexts else (1,),
            context=self.contexts or request.context,
            ep_sizes=request.ep_sizes if self.expert_grids else (),
            data_parallel=self.data_parallel,
            gradient_reduction=self.gradient_reduction,
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel,
            schedules=schedules,
        )

    def restricted(self, request: SearchRequest, model: Model, devices: int) -> SearchRequest | None:
        """Return the intersection of a request's space with the plans of this way; None: it is empty.

        Raises ValueError if the request sets strategies of embedding or head, which the system decides.
        """
        if (request.embedding, request.head) != (OuterSpace(), OuterSpace()):
            raise ValueError("embedding and head: their strategies are those that the system has")
        request = replace(request, recompute=recompute_kinds(request.recompute, model))
        narrow = self.narrowed(request, model, devices)
        if (
            narrow is None
            or self.gradient_reduction is not request.gradient_reduction
            or True not in request.tp_consecutive
        ):
            return None
        both = {name: _in_both(getattr(request, name), getattr(narrow, name)) for name in _LISTED}
        if () in both.values():
            return None
        return replace(
            narrow,
            **both,
            tp_consecutive=(True,),
            shard_sizes=None,
            stage_widths=StageWidths.EQUAL,
            span_node_types=False,
        )


_LISTED = ("pp_sizes", "tp_sizes", "cp_sizes", "data_parallel", "recompute", "sequence_parallel")
"""Lists of a request that a system narrows."""


def _in_both(asked: tuple[Any, ...] | None, had: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Return the values in both lists; None stands for a list of all values."""
    if asked is None or had is None:
        return had if asked is None else asked
    return tuple(each for each in asked if each in had)


class Entry(NamedTuple):
    """A system that runs plans: its name, its runtime, its part of the search space, and its files."""

    title: str
    version: str
    sources: tuple[str, ...]
    """Files of the system that show what it runs."""
    runtime: Runtime
    """Its kernels, its overlap, and what it holds in memory, by which plans for it are priced."""
    limits: Callable[[Model, Precision], tuple[Limits, ...]]
    unsearched: tuple[str, ...]
    """Features of the system that are not searched."""
    file_name: str
    """Name of its file; a file of another name is recognised by this ending and `mark`."""
    mark: str
    """A word in each of its files, and in no other system's with that ending; empty: no other has the ending."""
    export: Callable[[Plan, object], Exported]
    """Function that writes a plan; it raises BadInput, naming the plan's file, for what the system cannot run."""
    read: Callable[[str, str, Setting], Reading]
    """Function that reads the text of a file as a plan; the file's name is for errors."""
    command: Callable[[Plan, str], str]
    """Function of a plan and the path of its file: the command that starts it on each node."""
    program: Callable[[Plan, Exported], Program]
    """Function of a plan and its export: what the scripts of `launch` start."""
    read_words: Callable[[str, str, Setting], Reading] | None = None
    """Function that reads words of its command line, also in a file of any name; None: it has no such words."""

    def launched(self, plan: Plan, plan_file: object, hosts: Path | None = None) -> tuple[Exported, Launch]:
        """Return the exported plan, its ranks in pipeline order, and the files that start it on hosts.

        Raises BadInput naming the plan's file for what the system cannot run, or torchrun cannot number.
        """
        ordered = in_pipeline_order(plan, plan_file)
        exported = self.export(ordered, plan_file)
        program = self.program(ordered, exported)
        return exported, launch_of(program, exported, self.file_name, ordered, plan_file, hosts)

    def is_its_file(self, path: Path, text: str) -> bool:
        """Return whether a file is one of the system's, by its suffix and its content."""
        return path.suffix == Path(self.file_name).suffix and self.mark in text


def program_of(words: str, what: str = "") -> Callable[[Plan, Exported], Program]:
    """Return the program of a system whose command is the same for all plans; `what`: the meaning of `$TRAIN`."""
    program = Program(words, {"TRAIN": what} if what else {})
    return lambda _plan, _exported: program


def torchrun(plan: Plan, words: str) -> str:
    """Return the command that starts the ranks of a node; nodes are numbered in the order of the plan's cluster."""
    counts = [plan.cluster.node_types[group.node_type].devices_per_node for group in plan.cluster.nodes]
    nodes = sum(group.count for group in plan.cluster.nodes)
    per_node = str(counts[0]) if len(set(counts)) == 1 else "$GPUS_OF_THIS_NODE"
    where = "" if nodes == 1 else " --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port 29500"
    return f"torchrun --nnodes {nodes} --nproc_per_node {per_node}{where} {words}"


def has_experts(model: Model) -> bool:
    """Return whether some layer of a model has experts."""
    return any(model.types[kind].experts is not UNSET for kind in model.layers)


def expert_states_alike(configuration: Configuration) -> bool:
    """Return whether experts' states are sharded as the rest of their layers."""
    return configuration.layers is None or experts_apart(configuration.layers) is None


def whole_groups(configuration: Configuration) -> bool:
    """Return whether interleaved microbatches are a multiple of the pipeline stages, as in Megatron-LM and torch."""
    return configuration.num_chunks == 1 or configuration.num_microbatches % configuration.pp_size == 0


# Settings of a system's files that a plan cannot express: they are refused by name, unless they change nothing.

_PRICED = re.compile(
    "offload|parallel|pipeline|shard|fsdp|recompute|activation_checkpoint|checkpoint_activations|cuda_graph|quantiz|"
    "quant_|fp8|fp4|int8|precision|dtype|optimizer|overlap|buffer|bucket|distribut|memory|virtual|microbatch"
)
"""Words of names that concern parallelism, memory, states of the optimizer, precision or kernels."""
_MOST = 60
"""Characters of a name or a string that a refusal shows."""
_BEYOND = 10**18


class Settings(NamedTuple):
    """The settings in one section of a system's files, by their effect on a plan."""

    read: Collection[str] = ()
    """Settings that the reader turns into the plan."""
    harmless: Collection[str] = ()
    """Settings that change nothing a plan decides, or that the question decides, such as the precision."""
    values: Mapping[str, tuple[object, ...]] = {}
    """Settings that only these values leave without an effect on the plan."""
    strict: bool = True
    """Whether any other setting is refused; else only those whose names concern what plans decide."""

    def check(self, file: str, given: Mapping[str, object], section: str = "") -> None:
        """Raise BadInput naming the first setting that a plan cannot express and that is not off."""
        for name, value in given.items():
            if not self._is_accepted(name, value):
                problem = f"{section}{name[:_MOST]} {shown(value)} is not priced"
                raise BadInput(file, problem, "leave it out: no plan can express it")

    def _is_accepted(self, name: str, value: object) -> bool:
        if name in self.read or name in self.harmless:
            return True
        if name in self.values:
            return _is_among(value, self.values[name]) or (_is_off(value) and _is_among(False, self.values[name]))
        return _is_off(value) or not (self.strict or concerns_plans(name))


def concerns_plans(name: str) -> bool:
    """Return whether a setting's name has a word of parallelism, memory, states, precision or kernels."""
    return _PRICED.search(name.lower().replace("-", "_")) is not None


def shown(value: object) -> str:
    """Return a value for an error message, with long numbers, long strings and nested values shortened."""
    if isinstance(value, str):
        return value[:_MOST]
    if isinstance(value, Mapping):
        return "{...}"
    return repr(value) if isinstance(value, bool | float) or (type(value) is int and abs(value) < _BEYOND) else "[...]"


def _is_among(value: object, known: Iterable[object]) -> bool:
    """Return whether a value is one of several; true is not 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in known)


def _is_off(value: object) -> bool:
    """Return whether a value means that a feature is off: false, none, empty, or a section with `enabled` false."""
    if isinstance(value, Mapping):
        return (
            not value or value.get("enabled", value.get("enable")) is False or value.get("device", 0) in (None, "none")
        )
    return value in ("", "none", "None") if isinstance(value, str) else value is None or value is False or value == []
