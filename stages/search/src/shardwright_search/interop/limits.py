"""The part of the space of plans that another system runs, and what its files leave to the run that reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.types import (
    Attention,
    Cluster,
    ContextParallel,
    DataParallel,
    GradientReduction,
    Model,
    Plan,
    Precision,
    Recompute,
    Schedule,
    SequenceParallel,
)
from shardwright_search.interop.target import Exported, experts_apart
from shardwright_search.space.configurations import Configuration, most_stages
from shardwright_search.space.demands import Demands, Outer
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.uniform import UniformStrategy, plan_of_uniform


class Setting(NamedTuple):
    """Settings of a run that a file of another system leaves out, or that are not read from it."""

    model: Model
    cluster: Cluster
    global_batch_size: int
    precision: Precision = Precision()
    attention: Attention = Attention.AUTO
    compile: bool = False

    def with_dp_size(self, choice: UniformStrategy, name: str) -> UniformStrategy:
        """Return the choice with the data-parallel ranks that are left; BadInput naming `name` where none divide."""
        devices, model_ranks = self.cluster.num_devices, choice.tp_size * choice.cp_size * choice.pp_size
        if devices % model_ranks:
            context = f" x cp {choice.cp_size}" if choice.cp_size > 1 else ""
            problem = f"tp {choice.tp_size}{context} x pp {choice.pp_size} does not divide {devices} GPUs"
            raise BadInput(name, problem, "choose divisors")
        return choice._replace(dp_size=devices // model_ranks)

    def plan(self, choice: UniformStrategy, name: str) -> Plan:
        """Return the plan of a choice on all devices, with evenly cut layers where it has no ranges.

        `dp_size` of the choice is not read. Raises BadInput naming `name` where its numbers do not divide one another.
        """
        choice, batch = self.with_dp_size(choice, name), self.global_batch_size
        if batch % (choice.dp_size * choice.micro_batch_size):
            problem = f"dp {choice.dp_size} x mbs {choice.micro_batch_size} does not divide the batch {batch}"
            raise BadInput(name, problem, "choose another mbs or --batch")
        return plan_of_uniform(
            name,
            choice,
            self.model,
            self.cluster,
            global_batch_size=batch,
            num_microbatches=choice.num_microbatches(batch),
            schedule=Schedule.ONE_F_ONE_B if choice.chunks == 1 else Schedule.INTERLEAVED_1F1B,
            gradient_reduction=choice.gradient_reduction,
            precision=self.precision,
            attention=self.attention,
            compile=self.compile,
        )


class Reading(NamedTuple):
    """The plan that another system's file stands for, and what of the file no plan has, a line each."""

    plan: Plan
    notes: tuple[str, ...] = ()


class Limits(NamedTuple):
    """Plans that a system runs in one way; a system has several where their gradients are reduced differently."""

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
    """Types of layers that models of one strategy may have beside one another."""
    expert_grids: bool = False
    """Whether experts may be shared out otherwise than the rest of a layer."""
    contexts: tuple[ContextParallel, ...] = ()
    """Ways in which positions attend to those of other ranks; none: each rank has whole samples in attention."""
    demands: Demands = Demands(outer=Outer.AS_LAYERS)

    def runs(self, model: Model) -> bool:
        """Return whether one strategy of all layers, where the system has no other, may be of the model's types."""
        return not self.uniform or len(names := set(model.layers)) == 1 or names <= set(self.types)

    def narrowed(self, request: SearchRequest, model: Model, devices: int) -> SearchRequest | None:
        """Return the part of a request's space that the system runs in this way; None: nothing of it."""
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


class Target(NamedTuple):
    """A system that plans are searched and exported for: what it runs, and its files."""

    title: str
    version: str
    sources: tuple[str, ...]
    """Files of the system that say what it runs."""
    limits: Callable[[Model, Precision], tuple[Limits, ...]]
    unsearched: tuple[str, ...]
    """What the system runs beside it that is not searched."""
    file_name: str
    """Name of its file, whose ending says whose a file is."""
    mark: str
    """A word that each of its files has, and none of another system's of the same ending; empty: no other has it."""
    export: Callable[[Plan, object], Exported]
    """Function that writes a plan; it raises BadInput, naming the plan's file, for what the system cannot run."""
    read: Callable[[str, str, Setting], Reading]
    """Function of a text and the name of its file, for errors."""
    command: Callable[[Plan, str], str]
    """Function of a plan and the path of its file: the command that starts it on each node."""

    def is_its_file(self, path: Path, text: str) -> bool:
        """Return whether a file is one of the system's, by its ending and its words."""
        return path.suffix == Path(self.file_name).suffix and self.mark in text


def torchrun(plan: Plan, words: str, launcher: str = "torchrun") -> str:
    """Return the command that starts the ranks of a node; nodes are numbered in the order of the plan's cluster."""
    counts = [plan.cluster.node_types[group.node_type].devices_per_node for group in plan.cluster.nodes]
    nodes = sum(group.count for group in plan.cluster.nodes)
    per_node = str(counts[0]) if len(set(counts)) == 1 else "$GPUS_OF_THIS_NODE"
    where = "" if nodes == 1 else " --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port 29500"
    return f"{launcher} --nnodes {nodes} --nproc_per_node {per_node}{where} {words}"


def has_experts(model: Model) -> bool:
    """Return whether some layer of a model has experts."""
    return any(model.types[kind].experts is not UNSET for kind in model.layers)


def expert_states_alike(configuration: Configuration) -> bool:
    """Return whether states of experts are shared as those of the rest of their layers, all alike."""
    return configuration.layers is None or experts_apart(configuration.layers) is None


def whole_groups(configuration: Configuration) -> bool:
    """Return whether interleaved microbatches are a multiple of the pipeline stages, as in Megatron-LM and torch."""
    return configuration.num_chunks == 1 or configuration.num_microbatches % configuration.pp_size == 0
