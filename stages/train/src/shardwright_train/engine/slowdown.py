"""Artificially slowed ranks, so that plans for several node types can be tried on one machine."""

import time

from shardwright_train.pipeline.runner import MicrobatchChunk, StepHook


def slowed(hook: StepHook, times: int) -> StepHook:
    """Return a step hook that makes this rank's computation take `times` as long; waits are not slowed."""
    return hook if times == 1 else _Slowed(hook, times)


class _Slowed:
    """A hook that sleeps after each part of a step, as long as a slower processor would still compute."""

    def __init__(self, hook: StepHook, times: int) -> None:
        self._hook, self._times = hook, times
        self._computed_s = time.thread_time()

    def __call__(self, name: str, at: MicrobatchChunk | None = None) -> None:
        # Of this thread alone: without an accelerator it does what autograd does, and gloo has threads of its own.
        time.sleep((self._times - 1) * (time.thread_time() - self._computed_s))
        self._hook(name, at)
        self._computed_s = time.thread_time()
