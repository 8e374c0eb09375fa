"""Going on after ranks or nodes were lost: the ranks are started anew, under the same plan or one for what is left."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io.errors import RanksLost
from shardwright_formats.types.plan import Plan
from shardwright_launch.lock import HeldLock, only_run
from shardwright_launch.meeting import meeting_of
from shardwright_launch.nodes import Nodes
from shardwright_train.checkpoints.folders import LOCK, SECRET, folder_of_run
from shardwright_train.options import OnNodeLoss, RunOptions
from shardwright_train.supervision.replan import replanned


class Attempt(NamedTuple):
    """What this node's ranks are started for."""

    options: RunOptions
    plan: Plan
    nodes: Nodes
    start: int = 0
    """How often the ranks of the run were started anew before."""
    locks: tuple[HeldLock, ...] = ()
    """The locks that are held meanwhile."""

    @property
    def folder(self) -> Path:
        """Where the checkpoints lie."""
        return folder_of_run(self.options.checkpoints, self.plan.sha256, self.options.resume_from)


def run_with_restarts(attempt: Attempt, launch: Callable[[Attempt], None]) -> None:
    """Start the ranks, and anew where they are lost, up to `max_restarts` times; each start resumes by itself.

    Raises RanksLost where that is used up; what the ranks report in order would come again, and is raised at once.
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
