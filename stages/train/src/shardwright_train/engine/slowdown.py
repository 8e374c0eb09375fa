"""Ranks that stand for slower ones, so that plans for several node types can be tried on one machine."""

import time

from shardwright_train.pipeline.runner import MicrobatchChunk, StepHook


def slowed(hook: StepHook, times: int) -> StepHook:
    """A hook of steps that then take `times` as long for what this rank computes; what it waits for takes as long."""
    return hook if times == 1 else _Slowed(hook, times)


class _Slowed:
    """Sleeps after each part of a step, for as long as a slower processor would still compute."""

    def __init__(self, hook: StepHook, times: int) -> None:
        self._hook, self._times = hook, times
        self._computed_s = time.thread_time()

    def __call__(self, name: str, at: MicrobatchChunk | None = None) -> None:
        # Of this thread alone: without an accelerator it does what autograd does, and gloo has threads of its own.
        time.sleep((self._times - 1) * (time.thread_time() - self._computed_s))
        self._hook(name, at)
        self._computed_s = time.thread_time()
