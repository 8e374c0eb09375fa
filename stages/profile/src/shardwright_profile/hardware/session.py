"""The session of one rank in a sweep (only the ranks of a sweep import this)."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright_formats.semantics.process_groups import EDGE_CHANNELS
from shardwright_formats.semantics.sweep_plan import CollectiveKind, Groups
from shardwright_formats.types.hardware_profile import Collective
from shardwright_launch.journal import Journal
from shardwright_profile.hardware.profile import Entry, EntryKey, SweepIdentity
from shardwright_profile.hardware.statistics import MIN_REPEATS
from shardwright_profile.hardware.timing import Stopwatch


class ProcessGroups:
    """The process groups of this rank, each made when first asked for; all ranks of the world ask in one order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.mine, self.pair = cache(self._made), cache(self._warmed_up)

    def of(self, kind: CollectiveKind) -> dist.ProcessGroup | None:
        """Return the one of a kind's groups that this rank is in, or None."""
        return (self.pair if kind.key.collective is Collective.P2P else self.mine)(kind.groups)

    def _made(self, groups: Groups, few_channels: bool = False) -> dist.ProcessGroup | None:
        made = {
            group: dist.new_group(list(group), pg_options=self._few_channels() if few_channels else None)
            for group in groups
        }
        return next((process_group for group, process_group in made.items() if dist.get_rank() in group), None)

    def _warmed_up(self, pairs: Groups) -> dist.ProcessGroup | None:
        """Return the group of a sender and a receiver, warmed up by one message as training does for its edges."""
        pair, number = self._made(pairs, few_channels=True), torch.zeros(1, device=self._device)
        for source, target in pairs:
            if dist.get_rank() == source:
                dist.send(number, target, pair)
            elif dist.get_rank() == target:
                dist.recv(number, source, pair)
        return pair

    def _few_channels(self) -> "dist.ProcessGroupNCCL.Options | None":
        """Return NCCL's options of training's pipeline edges, None for gloo."""
        if self._device.type != "cuda":
            return None
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = options.config.max_ctas = EDGE_CHANNELS
        return options


class Session(NamedTuple):
    """The state that the parts of a sweep share."""

    identity: SweepIdentity
    stopwatch: Stopwatch
    journal: Journal[SweepIdentity, Entry]
    process_groups: ProcessGroups

    @property
    def device(self) -> torch.device:
        """Return the device that this rank computes on."""
        return self.stopwatch.device

    @property
    def max_repeats(self) -> int:
        """Return the maximum number of repeats of a point."""
        return self.identity.max_repeats

    @property
    def min_repeats(self) -> int:
        """Return the minimum number of repeats of a point."""
        return min(MIN_REPEATS, self.max_repeats)

    def find(self, *key: Hashable) -> Entry | None:
        """Return the entry of this key, or None where it is not known."""
        return self.journal.find(*key)


class Task(NamedTuple):
    """A measurement to make: a message of one size, or several that are timed at once."""

    what: object
    """Object whose text names the task to the user."""
    keys: Sequence[EntryKey]
    """Keys of the entries that the task gives."""
    measure: Callable[[float], Sequence[Entry]]
    """Function from a number of seconds that it may take to its entries."""
    share: float = 1.0
    """Share of the time that the task's series has left."""
    needs_s: float | None = None
    """Seconds that the task needs: with less left, it and the rest of its series are left out; None: never left out."""


def timed(session: Session, series: Sequence[Iterable[Task]], time_s: float) -> Iterator[tuple[int, Task, list[Entry]]]:
    """Run series of tasks in about `time_s` seconds; all ranks of the world call this and get the same entries.

    The series share the time evenly, and what one leaves over goes to those after it. What is known already is not
    timed again. Yields the number of the series, the task and its entries, which are in the journal when the next task
    is asked for.
    """
    budget = session.stopwatch.budget(time_s)
    for number, tasks in enumerate(series):
        own = session.stopwatch.budget(budget.left_s() / (len(series) - number))
        for task in tasks:
            entries = [entry for key in task.keys if (entry := session.find(*key)) is not None]
            if len(entries) < len(task.keys):
                left_s = own.left_s()
                if task.needs_s is not None and task.needs_s > left_s:
                    break
                entries = list(task.measure(task.share * left_s))
            yield number, task, entries
