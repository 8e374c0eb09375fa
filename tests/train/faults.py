"""What goes wrong in a rank, in tests: each is done in the rank before it begins its work (forked_command.Fault)."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright_train.checkpoints.tensors import Saver
from shardwright_train.engine import engine
from shardwright_train.engine.engine import Engine
from shardwright_train.measurement import measure
from shardwright_train.parallel.data import local_tensor
from shardwright_train.pipeline.stage import Chunk
from shardwright_train.training.metrics import Metrics

BAD_STEP, POISONED_LAYER = 3, 2
_STEP_S, _BEFORE_A_SAVE_S = 20.0, 0.5
LACKING_PLAN = "lacking"
WORDS = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.25 GiB"


def _before(owner: Any, name: str, number: int, do: Callable[..., object]) -> None:
    """Do something with a function's arguments before it is called for the n-th time."""
    stock, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            do(*arguments)
        return stock(*arguments, **named)

    setattr(owner, name, counted)


def _lack_memory(*_: object) -> None:
    """What PyTorch raises on a GPU."""
    raise torch.OutOfMemoryError(WORDS)


def hang_in_step_3() -> None:
    """Sleep in place of the step."""

    def sleep_for_ever(*_: object) -> None:
        time.sleep(10_000)

    _before(engine, "run_step", BAD_STEP, sleep_for_ever)


def write_steps_late() -> None:
    """Write step 1 while step 2 runs, and step 2 late; fail where step 2 waits for that, or its save does not."""
    write, begun, saving = Metrics.write, threading.Event(), threading.Event()

    def late(metrics: Metrics, step: int, *arguments: Any) -> Any:
        if step == 1:
            assert begun.wait(_STEP_S), "step 2 waits for step 1 to be written"
        else:
            assert not saving.wait(_BEFORE_A_SAVE_S), "step 2 is saved before it is written"
        return write(metrics, step, *arguments)

    _before(engine, "run_step", 2, lambda *_: begun.set())
    _before(Saver, "save", 1, lambda *_: saving.set())
    Metrics.write = late  # type: ignore[method-assign]


def kill_in_step_3() -> None:
    """In a send; when it is started anew in a collective; and then no more: the folder in KILLS counts the starts."""
    start = len(list(Path(os.environ["KILLS"]).iterdir()))
    Path(os.environ["KILLS"], str(start)).touch()

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if start < 2:
        _before(Engine, "train_step", BAD_STEP, lambda *_: _before(dist, ("isend", "all_reduce")[start], 1, kill))


def poison_a_layer() -> None:
    """Fill a layer's first parameter with what is not a number."""

    def poison(trained: Engine, *_: object) -> None:
        layer = next(e for e in trained.stage.layers if e.name == f"layers[{POISONED_LAYER}]")
        with torch.no_grad():
            local_tensor(next(layer.module.parameters())).fill_(torch.nan)

    _before(Engine, "forward_backward", BAD_STEP, poison)


def lack_memory_in_backward_2() -> None:
    """In the second backward pass."""
    _before(Chunk, "prepare_backward", 2, _lack_memory)


def lack_memory_for_a_plan() -> None:
    """In the backward pass of the second microbatch of the second step of the plan of that name."""
    build, prepare, passes = measure._Runner.build, Chunk.prepare_backward, 0
    lacking = False

    def noted(plan: Any, *arguments: Any) -> Any:
        nonlocal lacking
        lacking = plan.name == LACKING_PLAN
        return build(plan, *arguments)

    def counted(chunk: Chunk, *arguments: Any, **named: Any) -> None:
        nonlocal passes
        if chunk.layers[0].name and lacking:
            passes += 1
            if passes == 4:
                _lack_memory()
        prepare(chunk, *arguments, **named)

    Chunk.prepare_backward = counted  # type: ignore[method-assign]
    measure._Runner.build = noted  # type: ignore[method-assign, assignment]
