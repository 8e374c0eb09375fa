"""Restarts after ranks or nodes were lost, under the same plan or one for the remaining nodes."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io import RanksLost
from shardwright_formats.types import Plan
from shardwright_launch.lock import HeldLock, only_run
from shardwright_launch.meeting import meeting_of
from shardwright_launch.nodes import Nodes
from shardwright_train.checkpoints.folders import LOCK, SECRET, folder_of_run
from shardwright_train.options import OnNodeLoss, RunOptions
from shardwright_train.supervision.replan import replanned


class Attempt(NamedTuple):
    """The parameters of one start of this node's ranks."""

    options: RunOptions
    plan: Plan
    nodes: Nodes
    start: int = 0
    """Number of earlier starts of the run's ranks."""
    locks: tuple[HeldLock, ...] = ()
    """Locks that are held during the start."""

    @property
    def folder(self) -> Path:
        """Return the folder of the checkpoints."""
        return folder_of_run(self.options.checkpoints, self.plan.sha256, self.options.resume_from)


def run_with_restarts(attempt: Attempt, launch: Callable[[Attempt], None]) -> None:
    """Start the ranks, and restart them up to `max_restarts` times where they are lost; each start resumes by itself.

    Raises RanksLost after the last restart; an orderly error of the ranks would recur, and is raised at once.
    """
    options = attempt.options
    with (
        only_run(attempt.folder / LOCK, attempt.nodes) as held,
        meeting_of(attempt.nodes, attempt.folder / SECRET, os.environ) as nodes,
    ):
        attempt = attempt._replace(nodes=nodes, locks=(*attempt.locks, *held))
        while True:
            try:
                return launch(attempt)
            except RanksLost as lost:
                if lost.start >= options.max_restarts:
                    raise
                attempt = attempt._replace(start=lost.start + 1)
                how_often = f"start {attempt.start} of {options.max_restarts} at most"
                print(f"{lost}: starting anew from the newest checkpoint, {how_often}", file=sys.stderr, flush=True)
                if lost.nodes and options.on_node_loss is OnNodeLoss.REPLAN:
                    left = replanned(options, attempt.plan, nodes, lost.nodes, attempt.folder)
                    return run_with_restarts(Attempt(*left, attempt.start, attempt.locks), launch)
