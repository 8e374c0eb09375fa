"""Random numbers that are equal on ranks with replicas, and independent on ranks with shards."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from shardwright.launch.backend import on_accelerator, random_state, restore_random_state

RNGKey = tuple[int, int, int]
"""Key of a pass's random numbers: the run's seed, the step and the microbatch."""


def seed_of(*parts: object) -> int:
    """Return a generator seed derived from the given parts."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:7])


@dataclass
class _Pass:
    """The key of the current draws; `outer` is the state to restore after this rank draws for its own shard."""

    seed: tuple[object, ...]
    outer: torch.Tensor | None = None
    parts: int = 0


class Randomness:
    """The random numbers of one layer (embedding, block or head) on this rank.

    Each pass of a microbatch starts from its own seed, so that a recomputed pass draws the same numbers again. Ranks
    that hold copies of the activations (with equal `holder`: a tensor-parallel group without sequence parallelism)
    share the seed. Between `inside` and `outside`, where each has its own heads and features, they draw separately.
    """

    def __init__(self, layer: str, holder: tuple[int, ...], part: int, device: torch.device) -> None:
        self._who: tuple[object, ...] = (layer, *holder)
        self._part, self._device = part, device
        self._now: _Pass | None = None

    @property
    def current(self) -> tuple[object, ...] | None:
        """The key of the current draws, with which `seeded` draws the same again."""
        return None if self._now is None else self._now.seed

    @contextmanager
    def seeded(self, *seed: object) -> Iterator[None]:
        """Use a seed inside, and restore the process's random state afterwards."""
        before = self._now
        with torch.random.fork_rng(devices=[self._device] if on_accelerator(self._device) else []):
            self._now = _Pass(seed)
            torch.manual_seed(seed_of(*seed, *self._who))
            try:
                yield
            finally:
                self._now = before

    def repeating(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes contexts in which the random numbers that are drawn next are drawn again."""
        return nullcontext if self._now is None else partial(self._from, random_state(self._device))

    @contextmanager
    def _from(self, state: torch.Tensor) -> Iterator[None]:
        with torch.random.fork_rng(devices=[self._device] if on_accelerator(self._device) else []):
            restore_random_state(state, self._device)
            yield

    def inside(self) -> None:
        """Begin the part in which this rank computes its own shard."""
        now = self._now
        if now is not None and now.outer is None:
            now.outer = random_state(self._device)
            torch.manual_seed(seed_of(*now.seed, *self._who, "part", now.parts, self._part))
            now.parts += 1

    def outside(self) -> None:
        """End the part in which this rank computes its own shard."""
        now = self._now
        if now is not None and now.outer is not None:
            restore_random_state(now.outer, self._device)
            now.outer = None
