"""The check of a plan in one process: validity, traffic and memory of every role, printed for people."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from shardwright_formats.io import NothingFits
from shardwright_formats.semantics.chunks import chunk_layers
from shardwright_formats.semantics.communication import Cause, step_messages
from shardwright_formats.semantics.layout import parameter_box
from shardwright_formats.semantics.process_groups import Purpose, communicator_bytes, communicators
from shardwright_formats.semantics.schedules.registry import schedule_of
from shardwright_formats.types import MIB, Plan
from shardwright_train.dry_run.simulated_step import SimulatedStep, Traffic, simulate_step
from shardwright_train.models.base import Family

_SIMULATED = 2
"""Number of simulated microbatches; each further one has the activations of the second."""
_LEFT_COLUMNS = ("ranks", "why", "collective", "communicators")


class Role(NamedTuple):
    """A set of ranks with the same work: one pipeline stage, with equally large shards."""

    stage: int
    ranks: tuple[int, ...]


class RoleCheck(NamedTuple):
    """The traffic and memory of one rank of a role in a step."""

    role: Role
    messages: Mapping[tuple[Cause, Traffic], tuple[int, int]]
    """Number of messages, and their bytes together, by cause and kind; sends are counted by the sender.

    Redistribution may move more on one rank of a role than on another: the most is given.
    """
    miscounted: Mapping[Traffic, tuple[int, int]]
    """Kinds of traffic whose simulated bytes differ from the formulas: bytes counted, bytes by formula."""
    parameters_bytes: int
    gradients_bytes: int
    """Bytes of the gradients before the optimizer's step."""
    optimizer_bytes: int
    peak_bytes: int
    """Peak tensor memory in bytes; estimated from two microbatches where a stage holds more of them."""
    communicators: Mapping[Purpose, int]
    """Number of NCCL communicators by purpose, of the role's rank whose communicators hold most memory."""


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
    simulated = min(_SIMULATED, plan.num_microbatches)
    batch_size = simulated * plan.microbatch_samples
    shorter = msgspec.structs.replace(plan, num_microbatches=simulated, global_batch_size=batch_size)
    checks = []
    for number, role in enumerate(roles, start=1):
        step = simulate_step(shorter, role.ranks[0], family, attention, reset_attention_mask)
        check = RoleCheck(
            role=role,
            messages=_messages(plan, role),
            miscounted=_miscounted(shorter, role.ranks[0], step),
            parameters_bytes=step.parameters_bytes,
            gradients_bytes=step.gradients_bytes,
            optimizer_bytes=step.optimizer_bytes,
            peak_bytes=step.peak_bytes + _further(plan, role.stage, simulated) * step.activation_bytes,
            communicators=max((counted[rank] for rank in role.ranks), key=communicator_bytes),
        )
        checks.append(check)
        progress(number, len(roles))
    return tuple(checks)


def raise_if_too_large(plan: Plan, checks: tuple[RoleCheck, ...]) -> None:
    """Raise NothingFits naming the rank that exceeds its memory most, if one does."""
    lacking = []
    for check in checks:
        for rank in check.role.ranks:
            device = plan.cluster.of_rank(rank)
            resident = check.peak_bytes + (0 if device.on_cpu else communicator_bytes(check.communicators))
            lacking.append((resident - device.memory_bytes, -rank))
    worst, rank = max(lacking)
    if worst > 0:
        node_type = plan.cluster.node_type_of_rank[-rank]
        raise NothingFits(f"rank {-rank} on a {node_type} lacks {worst} bytes: recompute more, or share out more")


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


def _further(plan: Plan, stage: int, simulated: int) -> int:
    """Return how many more chunks' activations the whole step holds than the simulated one."""
    chunks, stages = len(plan.stages[stage].layers), len(plan.stages)
    whole = schedule_of(plan.schedule).in_flight(stages, plan.num_microbatches, stage, chunks)
    return whole - schedule_of(plan.schedule).in_flight(stages, simulated, stage, chunks)


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
    memory_columns = ("stage", "ranks", "parameters", "gradients", "optimizer", "peak", "device")
    memory = _table(f"{plan.name}: tensor memory of a rank, MiB (peak: estimated)", memory_columns)
    traffic_columns = ("stage", "ranks", "why", "collective", "among", "number", "MiB together")
    traffic = _table("Messages of a rank in one step (of a full tensor; sends by sender)", traffic_columns)
    for check in checks:
        stage, ranks = str(check.role.stage), _spans(check.role.ranks)
        node_type = plan.cluster.of_rank(check.role.ranks[0])
        sizes = (check.parameters_bytes, check.gradients_bytes, check.optimizer_bytes, check.peak_bytes)
        memory.add_row(stage, ranks, *map(_mib, (*sizes, node_type.memory_bytes)))
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
    title = "NCCL communicators of a rank, MiB assumed (in the device's memory beside the tensors)"
    table = _table(title, ("stage", "ranks", "communicators", "MiB together"))
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
        yield "The bytes counted in the simulated step are those of the formulas."
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
