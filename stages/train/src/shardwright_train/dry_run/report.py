"""The check of a plan, printed for people."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from shardwright_formats.semantics.process_groups import communicator_bytes
from shardwright_formats.types import Plan
from shardwright_train.dry_run.check import RoleCheck

_MIB = 1 << 20


def print_checks(plan: Plan, checks: Sequence[RoleCheck], console: Console) -> None:
    """Print memory and traffic of every role."""
    memory = Table(title=f"{plan.name}: tensor memory of a rank, MiB (peak: estimated)", title_justify="left")
    for column in ("stage", "ranks", "parameters", "gradients", "optimizer", "peak", "device"):
        memory.add_column(column, justify="left" if column == "ranks" else "right")
    traffic = Table(title="Messages of a rank in one step (of a full tensor; sends by sender)", title_justify="left")
    for column in ("stage", "ranks", "why", "collective", "among", "number", "MiB together"):
        traffic.add_column(column, justify="left" if column in ("ranks", "why", "collective") else "right")
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
    for line in _verdict(checks):
        console.print(line)


def _communicators(checks: Sequence[RoleCheck]) -> Table:
    title = "NCCL communicators of a rank, MiB assumed (in the device's memory beside the tensors)"
    found = Table(title=title, title_justify="left")
    for column in ("stage", "ranks", "communicators", "MiB together"):
        found.add_column(column, justify="left" if column in ("ranks", "communicators") else "right")
    for check in checks:
        counted = ", ".join(f"{count} of {purpose}" for purpose, count in check.communicators.items())
        held = _mib(communicator_bytes(check.communicators))
        found.add_row(str(check.role.stage), _spans(check.role.ranks), counted, held)
    return found


def _verdict(checks: Sequence[RoleCheck]) -> Iterator[str]:
    wrong = [(check, kind, pair) for check in checks for kind, pair in check.miscounted.items()]
    if not wrong:
        yield "The bytes counted in the simulated step are those of the formulas."
    for check, kind, (counted, formula) in wrong:
        yield (
            f"warning: rank {check.role.ranks[0]}: {kind.collective.value} among {kind.group_size}: counted {counted} "
            f"bytes in the simulated step, {formula} by the formulas"
        )


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}"


def _spans(numbers: Sequence[int]) -> str:
    """Return numbers as ranges, such as `0-3 8` for 0, 1, 2, 3, 8."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
