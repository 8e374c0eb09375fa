"""The state of one rank in a sweep: its stopwatch, process groups and tasks (only the ranks of a sweep import this)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardwright.launch.backend import edge_options, synchronize
from shardwright.launch.heartbeat import Heartbeat
from shardwright.launch.journal import Journal
from shardwright.plan.process_groups import EDGE_CHANNELS
from shardwright.plan.sweep_plan import CollectiveKind, Groups
from shardwright.types.hardware_profile import Collective
from shardwright_profile.hardware.profile import MIN_REPEATS, Entry, EntryKey, SweepIdentity, more_repeats, settled

T = TypeVar("T")
WARM_UP_REPEATS = 3


class Stopwatch:
    """A stopwatch for calls that every rank makes; it returns the same times on every rank."""

    def __init__(self, device: torch.device, heartbeat: Heartbeat | None = None) -> None:
        self.device, self._heartbeat = device, heartbeat
        self.doing = "before the first measurement"
        """Current activity of this rank, which is reported to the launcher at each repeat."""

    def rank_times_s(self, call: Callable[[], object], repeats: int) -> NDArray[Any]:
        """Return the seconds of each repeat of `call` on each rank: [ranks, repeats] float64.

        A barrier aligns the ranks before each repeat; a CUDA device is synchronised before and after it.
        """
        times_s = torch.zeros(repeats, dtype=torch.float64)
        for i in range(repeats):
            self.align()
            start = perf_counter()
            call()
            synchronize(self.device)
            times_s[i] = perf_counter() - start
        return self.gathered(times_s)

    def slowest_s(self, call: Callable[[], object], repeats: int) -> NDArray[Any]:
        """Return the seconds of each repeat of `call` on the rank that is slowest in it: [repeats] float64."""
        return np.asarray(self.rank_times_s(call, repeats).max(axis=0))

    def repeated(self, measure: Callable[[int], NDArray[Any]], share_s: float, max_repeats: int) -> NDArray[Any]:
        """Repeat in rounds until every series' median is settled, `share_s` is spent, or `max_repeats` are made.

        `measure` makes a number of repeats and returns their seconds, the same on every rank: [series, repeats]
        float64. The first round has 6 repeats, or `max_repeats` if that is less, however short `share_s` is.
        """
        budget = self.budget(share_s)
        times_s = measure(min(MIN_REPEATS, max_repeats))
        one_s = (share_s - budget.left_s()) / times_s.shape[1]
        while not all(map(settled, times_s)):
            more = more_repeats(times_s.shape[1], max_repeats, budget.left_s(), one_s)
            if not more:
                break
            times_s = np.concatenate([times_s, measure(more)], axis=1)
        return times_s

    def budget(self, time_s: float) -> "Budget":
        """Return a budget of `time_s` seconds that begins now."""
        return Budget(self, perf_counter(), time_s)

    def agreed(self, value: float) -> float:
        """Return the largest of the ranks' values, so that all ranks make the same decision."""
        shared = torch.tensor([value], dtype=torch.float64).to(self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return float(shared.cpu()[0])

    def gathered(self, mine: torch.Tensor) -> NDArray[Any]:
        """Return every rank's numbers, stacked in rank order: [ranks, *mine.shape]."""
        parts = [torch.zeros_like(mine, device=self.device) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.to(self.device))
        return np.stack([part.cpu().numpy() for part in parts])

    def of_first(self, value: T, kind: type[T]) -> T:
        """Return rank 0's `value` on every rank; it is sent as JSON and decoded as `kind`."""
        content = msgspec.json.encode(value)
        size = torch.tensor(len(content), device=self.device)
        dist.broadcast(size, src=0)
        data = torch.frombuffer(bytearray(content.ljust(int(size))[: int(size)]), dtype=torch.uint8).to(self.device)
        dist.broadcast(data, src=0)
        return msgspec.json.decode(data.cpu().numpy().tobytes(), type=kind)

    def align(self) -> None:
        """Wait until every rank has made this call and its device is idle."""
        if self._heartbeat is not None:
            self._heartbeat.begin(self.doing)
        dist.barrier()
        synchronize(self.device)


class Budget(NamedTuple):
    """A time limit on which all ranks agree."""

    stopwatch: Stopwatch
    started: float
    time_s: float

    def left_s(self) -> float:
        """Return the seconds that the slowest rank has left of the budget."""
        return self.time_s - self.stopwatch.agreed(perf_counter() - self.started)


class ProcessGroups:
    """The process groups of this rank, each created on first use; all ranks must ask for them in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.mine, self.pair = cache(self._made), cache(self._warmed_up)

    def group_for(self, kind: CollectiveKind) -> dist.ProcessGroup | None:
        """Return the process group in which this rank takes part in a kind of collective, or None."""
        return (self.pair if kind.key.collective is Collective.P2P else self.mine)(kind.groups)

    def _made(self, groups: Groups, few_channels: bool = False) -> dist.ProcessGroup | None:
        made = {
            group: dist.new_group(
                list(group), pg_options=edge_options(self._device, EDGE_CHANNELS) if few_channels else None
            )
            for group in groups
        }
        return next((process_group for group, process_group in made.items() if dist.get_rank() in group), None)

    def _warmed_up(self, pairs: Groups) -> dist.ProcessGroup | None:
        """Return this rank's group of a sender and a receiver, or None; one message warms it up, as in training."""
        pair, number = self._made(pairs, few_channels=True), torch.zeros(1, device=self._device)
        for source, target in pairs:
            if dist.get_rank() == source:
                dist.send(number, target, pair)
            elif dist.get_rank() == target:
                dist.recv(number, source, pair)
        return pair


class Session(NamedTuple):
    """The state that the parts of a hardware measurement have in common."""

    identity: SweepIdentity
    stopwatch: Stopwatch
    journal: Journal[SweepIdentity, Entry]
    process_groups: ProcessGroups

    @property
    def min_repeats(self) -> int:
        """Return the minimum number of repeats of a point."""
        return min(MIN_REPEATS, self.identity.max_repeats)


class Task(NamedTuple):
    """A measurement to make, such as a collective at one size, or several messages that are timed at once."""

    subject: object
    """Object whose `str` names the task to the user."""
    keys: Sequence[EntryKey]
    """Journal keys of the entries that the task returns."""
    measure: Callable[[float], Sequence[Entry]]
    """Function that makes the measurement within a number of seconds and returns its entries."""
    share: float = 1.0
    """Share of the remaining time of its series that the task may take."""
    needs_s: float | None = None
    """Seconds that the task needs; if less is left, it and the rest of its series are skipped; None: never skipped."""


def timed(session: Session, series: Sequence[Iterable[Task]], time_s: float) -> Iterator[tuple[int, Task, list[Entry]]]:
    """Run series of tasks in about `time_s` seconds; all ranks call this and get the same entries.

    Each series gets an equal share of the time that is left. What is in the journal is not timed again. Yields the
    index of the series, the task and its entries; the caller adds these to the journal before it asks for the next one.
    """
    budget = session.stopwatch.budget(time_s)
    for number, tasks in enumerate(series):
        series_budget = session.stopwatch.budget(budget.left_s() / (len(series) - number))
        for task in tasks:
            entries = [entry for key in task.keys if (entry := session.journal.find(*key)) is not None]
            if len(entries) < len(task.keys):
                left_s = series_budget.left_s()
                if task.needs_s is not None and task.needs_s > left_s:
                    break
                entries = list(task.measure(task.share * left_s))
            yield number, task, entries
