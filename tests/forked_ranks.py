"""Ranks for tests, forked from a process in which PyTorch, transformers and the workers stand imported.

Importing these takes a process 4 s of a core, more than most tests compute on a rank. Users' ranks are started by
shardwright.launch: tests of starting, watching and ending ranks use that, and so does `make parity`.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from shardwright.launch.heartbeat import RankFiles

__all__ = ["forking", "run_worker"]

_END_S = 5.0
"""What the others have to end when a rank has failed."""


def run_worker(worker: str, arguments: Sequence[str], world_size: int, method: str = "forkserver") -> None:
    """Call `main` of a worker's module on as many ranks; raise AssertionError with the traces of those that fail.

    `method` `fork` forks this process itself, which must have no threads.
    """
    context = multiprocessing.get_context(method) if method != "forkserver" else forking()
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "WORLD_SIZE": str(world_size),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        ranks: list[BaseProcess] = []
        for rank in range(world_size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | RankFiles.of_rank(Path(folder), rank).environment
            trace = Path(folder, f"{rank}.trace")
            ranks.append(context.Process(target=_rank, args=(worker, arguments, shared | place, trace), daemon=True))
            ranks[-1].start()
        _join(ranks)
        traces = [f"rank {path.stem}:\n{path.read_text()}" for path in sorted(Path(folder).glob("*.trace"))]
        assert not any(rank.exitcode for rank in ranks), "\n".join(traces) or [rank.exitcode for rank in ranks]


def forking() -> BaseContext:
    """What forks processes from one that has imported everything, which is started unless it runs: one a session."""
    kept = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONWARNINGS", "OMP_NUM_THREADS")}
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONWARNINGS": "ignore::FutureWarning:torch.distributed.c10d_logger",
        "OMP_NUM_THREADS": "1",
    }
    forkserver.set_forkserver_preload(["imported_for_ranks"])
    forkserver.ensure_running()
    for name, value in kept.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    return multiprocessing.get_context("forkserver")


def _rank(worker: str, arguments: Sequence[str], environment: dict[str, str], trace: Path) -> None:
    os.environ |= environment
    try:
        importlib.import_module(worker).main(*arguments)
    except BaseException:
        trace.write_text(traceback.format_exc())
        raise


def _join(ranks: Sequence[BaseProcess]) -> None:
    """Wait for all; when one fails, the others have a short time."""
    running = {rank.sentinel: rank for rank in ranks}
    timeout_s = None
    while running and (ended := wait(list(running), timeout_s)):
        if any(running.pop(sentinel).exitcode for sentinel in ended):
            timeout_s = _END_S
    for rank in running.values():
        rank.kill()
    for rank in ranks:
        rank.join()
