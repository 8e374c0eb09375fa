"""The check of a plan in one process: the traffic and memory of each role, from a step on tensors without data.

One rank of each role runs its step under FakeTensorMode in a fake world; operators are counted as they are dispatched.
A few microbatches are enough: 1F1B, interleaved or not, repeats itself once the pipeline is full, so the first
microbatches give the peak. GPipe holds all microbatches, so the memory at each event of a pass is linear in their
number: two steps, one of them a microbatch longer, give both coefficients.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from msgspec import structs
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardwright.io import NothingFits
from shardwright.plan.chunks import chunk_layers, stage_actions
from shardwright.plan.communication import Cause, step_messages
from shardwright.plan.layout import parameter_box
from shardwright.plan.offload import copied_bytes
from shardwright.plan.process_groups import Purpose, communicator_bytes, communicators
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import MIB, Plan
from shardwright.types.hardware_profile import Collective
from shardwright_train.data.share import DOCUMENTS
from shardwright_train.engine.engine import build_engine
from shardwright_train.engine.optimizer import ShardedOptimizer
from shardwright_train.models.base import Family
from shardwright_train.models.stock import with_memory
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.host_activations import CountedCopies
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.p2p import holds_as_much, until_fullest
from shardwright_train.pipeline.runner import MicrobatchChunk, Step, on_device
from shardwright_train.torch_private import FakeStore, FakeTensorMode, TorchDispatchMode, tree_leaves

# The step of one rank, on tensors without data.


# For each operator, the collective and the index of the argument with the full tensor.
_COLLECTIVES = {
    "c10d::allreduce_": (Collective.ALL_REDUCE, 0),
    "c10d::_allgather_base_": (Collective.ALL_GATHER, 0),
    "c10d::_reduce_scatter_base_": (Collective.REDUCE_SCATTER, 1),
    "c10d::alltoall_base_": (Collective.ALL_TO_ALL, 1),
    "c10d::send": (Collective.P2P, 0),
}


StepEvent = tuple[str, MicrobatchChunk]
"""An event of a pass, and the microbatch and chunk of that pass."""


class Traffic(NamedTuple):
    """A kind of communication, and its bytes."""

    collective: Collective
    group_size: int


class SimulatedStep(NamedTuple):
    """The traffic and memory of one simulated step of a rank."""

    message_bytes: Mapping[Traffic, int]
    """Bytes of all messages of a kind, as `hardware_profile.Collective` counts them; the sender counts sends."""
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    host_bytes: int
    """Bytes of optimizer state in host memory."""
    host_activation_bytes: int
    """Peak bytes of activations in host memory."""
    peak_bytes: int
    """Peak of resident tensor memory in bytes, including parameters, gradients and optimizer state."""
    microbatch_bytes: int
    """Bytes of a microbatch's tokens and labels, or pixels, which the rank holds throughout the step."""
    resident_bytes: Mapping[StepEvent, int]
    """Resident bytes at each event of a pass, without ZeRO-3's gathered parameters; see `StepHook`."""
    peaks: Mapping[StepEvent, int]
    """Peak of resident bytes between each event of a pass and the previous event."""


def simulate_step(
    plan: Plan, rank: int, family: Family, attention: str, reset_attention_mask: bool = False
) -> SimulatedStep:
    """Build a rank's pipeline stage as every command does, and run one step of it without data or other ranks.

    `reset_attention_mask`: whether samples have marked documents, so that masks are made.
    """
    device = torch.device("cpu")
    with _simulated_world(rank, plan.world_size):
        context = RankContext(
            plan=plan, family=family, rank=rank, groups=Groups("cpu"), attention=attention, device=device, seed=None
        )
        engine = build_engine(context)
        generator = torch.Generator().manual_seed(0)
        batch = family.learns(plan.model).random_batch(plan.global_batch_size, generator)
        if reset_attention_mask:
            batch[DOCUMENTS] = torch.zeros_like(batch["tokens"])
        step = Step.of_batch(batch, context.share)
        resident, sent = _ResidentBytes(), _SentBytes()
        events: dict[StepEvent, int] = {}
        peaks: dict[StepEvent, int] = {}

        def hook(name: str, at: MicrobatchChunk | None = None) -> None:
            if at is not None:
                peaks[name, at] = max(peaks.get((name, at), 0), resident.peak_since())
                events[name, at] = resident.now - engine.stage.gathered_bytes

        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            # One fake copy on the device: a tensor with data would be converted anew at each use.
            step = replace(step, batch={name: fake.from_tensor(x) for name, x in step.batch.items()})
            for chunk in engine.stage.chunks:
                with_memory(chunk, device)
            for parameter in engine.stage.parameters_by_name().values():
                resident.follow(parameter)
            parameters = resident.now
            with resident:
                optimizer = engine.optimizer
                kept = [x for states in optimizer.host_states for x in states.values()]
                resident.release(kept)
                with_optimizer = resident.now
                if optimizer.streamed:
                    engine.late.wait_for_use(_WaitingUpdates(optimizer), optimizer.streamed)
                with sent:
                    engine.forward_backward(step, hook)
            gradients = optimizer.gradient_bytes
            held = sum(x.nbytes for x in on_device(step.batch, context).values())
        return SimulatedStep(
            message_bytes=dict(sent.bytes),
            parameters_bytes=parameters,
            gradients_bytes=gradients,
            optimizer_bytes=with_optimizer - parameters,
            host_bytes=sum(x.nbytes for x in kept),
            host_activation_bytes=_host_activation_bytes(context),
            peak_bytes=max(resident.peak, with_optimizer + gradients),
            microbatch_bytes=held // plan.num_microbatches,
            resident_bytes=events,
            peaks=peaks,
        )


class _WaitingUpdates:
    """The memory of updates that a step has left for the next step: their gradients, and buffers for copies."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        states = [each for layer in optimizer.streamed for each in optimizer.streamed_states(layer)]
        size = copied_bytes(sum(x.nbytes for x in each.values()) for each in states)
        self._buffers = [torch.empty(size, dtype=torch.uint8)]
        self._gradients = {
            layer: [torch.empty_like(local_tensor(optimizer.parameters[name].detach())) for name in names]
            for layer, names in optimizer.streamed.items()
        }

    def start_updates(self, layer: str) -> None:
        """Do nothing: running updates take no further memory."""

    def finish_updates(self, layer: str) -> None:
        """Free the gradients of a layer."""
        del self._gradients[layer]

    def end_updates(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


def _host_activation_bytes(context: RankContext) -> int:
    host = context.host_activations
    if host is None:
        return 0
    assert isinstance(host.copies, CountedCopies)
    return host.copies.most_host_bytes


@contextmanager
def _simulated_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _SentBytes(TorchDispatchMode):
    """A dispatch mode that counts the bytes of every collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[Traffic] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in _COLLECTIVES:
            collective, which = _COLLECTIVES[func.name()]
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            size = dist.ProcessGroup.unbox(group).size()
            key = Traffic(collective, 2 if collective is Collective.P2P else size)
            self.bytes[key] += sum(x.nbytes for x in tree_leaves(args[which]))
        return func(*args, **(kwargs or {}))


class _ResidentBytes(TorchDispatchMode):
    """A dispatch mode that tracks the storages that operations allocate, until they are freed.

    FSDP empties and refills storages that it keeps, which is visible in no operation: their sizes are read again
    whenever the sum seems to reach a peak since the last event, and when the sum is requested.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._sum = 0
        self._recent = 0
        self.peak = 0

    @property
    def now(self) -> int:
        """Return the bytes that are allocated now."""
        for key, (ref, _) in list(self._storages.items()):
            storage = ref()
            if storage is not None:
                self._storages[key] = ref, storage.nbytes()
        self._sum = sum(size for _, size in self._storages.values())
        self.peak, self._recent = max(self.peak, self._sum), max(self._recent, self._sum)
        return self._sum

    def peak_since(self) -> int:
        """Return the peak of the allocated bytes since the last call."""
        now = self.now
        found, self._recent = self._recent, now
        return found

    def follow(self, x: Tensor) -> None:
        """Count a tensor's storage from now on."""
        # A DTensor itself pretends to have a storage of the whole tensor.
        storage = local_tensor(x).untyped_storage()
        key = id(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes()
            self._sum += storage.nbytes()

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Stop counting tensors, and restart the peak: on CPU, tensors in host memory look like any others."""
        for x in tensors:
            self._forget(id(x.untyped_storage()))
        self.peak = self._recent = self._sum

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            # What a layer keeps in host memory is on another device (meta).
            if isinstance(x, Tensor) and x.device.type == "cpu":
                self.follow(x)
        if self._sum > self._recent:
            _ = self.now
        return result

    def _forget(self, key: int) -> None:
        self._sum -= self._storages.pop(key, (None, 0))[1]


# The shortened step, and the peak memory of the whole one.


_ROUNDS = 8
"""Least number of micro-batches, per pipeline stage, of a shortened step with several chunks and weight passes."""
_PAIR = 4, 5
"""Microbatches of two steps of GPipe: in each, the first two and the last two differ from those between them."""


def simulate_peak(
    plan: Plan, rank: int, family: Family, attention: str, reset_attention_mask: bool = False
) -> tuple[Plan, SimulatedStep, int]:
    """Return a shortened plan, its simulated step on a rank, and the peak bytes of a step of the whole plan."""
    count = _microbatches(plan, plan.stage_of_rank(rank))
    pair = _PAIR if count == plan.num_microbatches > _PAIR[-1] and _holds_all(plan) else (count,)
    plans = [_shortened(plan, each) for each in pair]
    steps = [simulate_step(each, rank, family, attention, reset_attention_mask) for each in plans]
    further = plan.num_microbatches - pair[0]
    if len(steps) > 1:
        return plans[0], steps[0], _extended_peak(steps[0], steps[1], further)
    return plans[0], steps[0], steps[0].peak_bytes + further * steps[0].microbatch_bytes


def _microbatches(plan: Plan, stage: int) -> int:
    """Return how many micro-batches a shortened step needs to reach the whole step's peak memory.

    Each of several chunks is fullest at another moment of a group of microbatches, so that one more group is needed.
    """
    whole, schedule = stage_actions(plan, stage), schedule_of(plan.schedule)
    stages, chunks = len(plan.stages), len(plan.stages[stage].layers)
    needed = len({action.microbatch for action in until_fullest(whole)})
    counts = range(needed, plan.num_microbatches + 1)
    if plan.schedule.splits:
        # With fewer microbatches weight passes come sooner, once no forward pass is left.
        if chunks > 1:  # greedy orders of several chunks repeat themselves late, after rounds of the stages
            counts = range(max(needed, _ROUNDS * stages), plan.num_microbatches + 1)
            counts = range(plan.num_microbatches - len(counts) // stages * stages, plan.num_microbatches + 1, stages)
        shorter = (n for n in counts if holds_as_much(schedule.actions(stages, n, stage, chunks), whole))
        return next(shorter, plan.num_microbatches)
    starts = [
        count
        for count in counts
        if schedule.actions(stages, count, stage, chunks) == tuple(a for a in whole if a.microbatch < count)
    ]
    return starts[0] if chunks == 1 else starts[:2][-1]


def _holds_all(plan: Plan) -> bool:
    """Return whether every stage, even the last, holds all microbatches at once."""
    stages, count = len(plan.stages), plan.num_microbatches
    return not plan.schedule.splits and schedule_of(plan.schedule).in_flight(stages, count, stages - 1) == count


def _shortened(plan: Plan, count: int) -> Plan:
    return structs.replace(plan, num_microbatches=count, global_batch_size=count * plan.microbatch_samples)


def _extended_peak(shorter: SimulatedStep, longer: SimulatedStep, further: int) -> int:
    """Return the peak bytes with `further` microbatches, each adding as much as the longer step's additional one."""
    half = _PAIR[0] // 2
    peaks = []
    for (name, (microbatch, chunk)), size in shorter.peaks.items():
        counterpart = longer.peaks[name, (microbatch + (microbatch >= half), chunk)]
        peaks.append(size + further * (counterpart - size))
    return max(peaks)


# All roles of a plan, printed for people.


_LEFT_COLUMNS = ("ranks", "why", "collective", "communicators")


class Role(NamedTuple):
    """A set of ranks with the same work: one pipeline stage, with equally large shards."""

    stage: int
    ranks: tuple[int, ...]


class RoleCheck(NamedTuple):
    """The traffic and memory of one rank of a role in a step."""

    role: Role
    messages: Mapping[tuple[Cause, Traffic], tuple[int, int]]
    """Number of messages, and their total bytes, by cause and kind; sends are counted by the sender.

    Redistribution may move more on one rank of a role than on another: the maximum is given.
    """
    miscounted: Mapping[Traffic, tuple[int, int]]
    """Kinds of traffic whose simulated bytes differ from the formulas: bytes counted, bytes by formula."""
    step: SimulatedStep
    """The simulated step, which may be shortened."""
    host_bytes: int
    """Bytes in host memory: optimizer states, which each step copies to the device and back, and activations."""
    peak_bytes: int
    """Peak tensor memory in bytes."""
    communicators: Mapping[Purpose, int]
    """Number of NCCL communicators by purpose, on the role's rank whose communicators take the most memory."""


def roles_of(plan: Plan) -> tuple[Role, ...]:
    """Return the distinct roles of a plan's ranks, each with all its ranks."""
    ranks_of: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for me, rank in enumerate(stage.ranks):
            ranks_of.setdefault((index, tuple(_shard_sizes(plan, index, me))), []).append(rank)
    return tuple(Role(stage_index, tuple(ranks)) for (stage_index, _), ranks in ranks_of.items())


def check_roles(
    plan: Plan, family: Family, attention: str, progress: Callable[[int, int], None], reset_attention_mask: bool = False
) -> tuple[RoleCheck, ...]:
    """Simulate a step of one rank of each role; `progress` is called with the number done and the total."""
    roles, counted = roles_of(plan), communicators(plan)
    checks = []
    for number, role in enumerate(roles, start=1):
        rank = role.ranks[0]
        shorter, step, peak_bytes = simulate_peak(plan, rank, family, attention, reset_attention_mask)
        check = RoleCheck(
            role=role,
            messages=_messages(plan, role),
            miscounted=_miscounted(shorter, rank, step),
            step=step,
            host_bytes=step.host_bytes
            + step.host_activation_bytes * _in_flight(plan, role) // _in_flight(shorter, role),
            peak_bytes=peak_bytes,
            communicators=max((counted[rank] for rank in role.ranks), key=communicator_bytes),
        )
        checks.append(check)
        progress(number, len(roles))
    return tuple(checks)


def _in_flight(plan: Plan, role: Role) -> int:
    """Return the micro-batches whose activations a stage holds at once."""
    return schedule_of(plan.schedule).in_flight(len(plan.stages), plan.num_microbatches, role.stage)


def raise_if_too_large(plan: Plan, checks: tuple[RoleCheck, ...]) -> None:
    """Raise NothingFits naming the rank that exceeds its memory by the most, if any does."""
    lacking = []
    for check in checks:
        for rank in check.role.ranks:
            device = plan.cluster.of_rank(rank)
            resident = check.peak_bytes + (0 if device.on_cpu else communicator_bytes(check.communicators))
            lacking.append((resident - device.memory_bytes, -rank))
    worst, rank = max(lacking)
    if worst > 0:
        node_type = plan.cluster.node_type_of_rank[-rank]
        raise NothingFits(f"rank {-rank} on a {node_type} exceeds its memory by {worst} bytes: recompute or shard more")


def _messages(plan: Plan, role: Role) -> Mapping[tuple[Cause, Traffic], tuple[int, int]]:
    max_messages: Counter[tuple[Cause, Traffic]] = Counter()
    max_bytes: Counter[tuple[Cause, Traffic]] = Counter()
    for rank in role.ranks:
        counts, sizes = Counter[tuple[Cause, Traffic]](), Counter[tuple[Cause, Traffic]]()
        for message in step_messages(plan, rank):
            key = message.cause, Traffic(message.collective, message.group_size)
            counts[key] += message.times
            sizes[key] += message.times * message.bytes
        max_messages |= counts
        max_bytes |= sizes
    return {key: (count, max_bytes[key]) for key, count in max_messages.items()}


def _miscounted(plan: Plan, rank: int, step: SimulatedStep) -> Mapping[Traffic, tuple[int, int]]:
    formula: Counter[Traffic] = Counter()
    for message in step_messages(plan, rank):
        # The optimizer's own message needs numbers, which a fake step does not have.
        if message.cause is not Cause.NORM:
            formula[Traffic(message.collective, message.group_size)] += message.times * message.bytes
    kinds = {*formula, *step.message_bytes}
    pairs = {kind: (step.message_bytes.get(kind, 0), formula[kind]) for kind in kinds}
    return {kind: pair for kind, pair in pairs.items() if pair[0] != pair[1]}


def _shard_sizes(plan: Plan, stage: int, me: int) -> Iterator[int]:
    for chunk in range(len(plan.stages[stage].layers)):
        for _, type_name, strategy in chunk_layers(plan, stage, chunk):
            for parameter in plan.model.types[type_name].parameters:
                yield prod(high - low for low, high in parameter_box(parameter, strategy, me))


def print_checks(plan: Plan, checks: Sequence[RoleCheck], console: Console) -> None:
    """Print memory and traffic of every role."""
    offloads = any(check.host_bytes for check in checks)
    memory_columns = ("stage", "ranks", "parameters", "gradients", "optimizer", "peak", "device", *["host"] * offloads)
    memory = _table(f"{plan.name}: tensor memory of a rank, MiB", memory_columns)
    traffic_columns = ("stage", "ranks", "why", "collective", "among", "number", "MiB in total")
    traffic = _table("Messages of a rank in one step (of a full tensor; sends by sender)", traffic_columns)
    for check in checks:
        stage, ranks = str(check.role.stage), _spans(check.role.ranks)
        node_type = plan.cluster.of_rank(check.role.ranks[0])
        step = check.step
        sizes = (step.parameters_bytes, step.gradients_bytes, step.optimizer_bytes, check.peak_bytes)
        memory.add_row(stage, ranks, *map(_mib, (*sizes, node_type.memory_bytes, *[check.host_bytes] * offloads)))
        for (cause, kind), (count, size) in check.messages.items():
            row = (cause.value, kind.collective.value, str(kind.group_size), str(count), _mib(size))
            traffic.add_row(stage, ranks, *row)
    console.print(memory)
    console.print(traffic)
    if any(not plan.cluster.of_rank(rank).on_cpu for check in checks for rank in check.role.ranks):
        console.print(_communicators(checks))
    for line in _count_report(checks):
        console.print(line)


def _communicators(checks: Sequence[RoleCheck]) -> Table:
    title = "NCCL communicators of a rank, MiB assumed (in device memory, in addition to tensors)"
    table = _table(title, ("stage", "ranks", "communicators", "MiB in total"))
    for check in checks:
        counted = ", ".join(f"{count} of {purpose}" for purpose, count in check.communicators.items())
        resident = _mib(communicator_bytes(check.communicators))
        table.add_row(str(check.role.stage), _spans(check.role.ranks), counted, resident)
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT_COLUMNS else "right")
    return table


def _count_report(checks: Sequence[RoleCheck]) -> Iterator[str]:
    wrong = [(check, kind, pair) for check in checks for kind, pair in check.miscounted.items()]
    if not wrong:
        yield "The bytes counted in the simulated step match the formulas."
    for check, kind, (counted, formula) in wrong:
        yield (
            f"warning: rank {check.role.ranks[0]}: {kind.collective.value} among {kind.group_size}: counted {counted} "
            f"bytes in the simulated step, {formula} by the formulas"
        )


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}"


def _spans(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as `0-3 8` for 0, 1, 2, 3, 8."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
