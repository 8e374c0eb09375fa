"""Restarts of a run after lost ranks or nodes, under the same plan or a new one for the remaining nodes."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwright.io import BadInput, RanksLost, RunFailed, read_document, read_object, write_document
from shardwright.launch.lock import HeldLock, only_run
from shardwright.launch.meeting import meeting_of
from shardwright.launch.nodes import Nodes
from shardwright.launch.signals import relayed_signals
from shardwright.types import Cluster, NodeGroup, Plan, Prediction, Replanned
from shardwright_train.checkpoints.folders import LOCK, SECRET, folder_of_run, latest_checkpoint
from shardwright_train.options import OnNodeLoss, RunOptions

_SEARCH_S = 300.0
"""Seconds that the search may look for a better plan; an assumption."""
_WAIT_S = 2 * _SEARCH_S
"""Seconds that the other nodes wait for the plan that node 0 searches."""
_POLL_S = 0.2
_FOLDER, _ANSWER = "replanned", "replanned.json"


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
        return folder_of_run(self.options.checkpoints, self.plan, self.options.resume_from)


def run_with_restarts(attempt: Attempt, launch: Callable[[Attempt], None]) -> None:
    """Start the ranks, and restart them up to `max_restarts` times if they are lost; each start resumes by itself.

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
                print(f"{lost}: restarting from the newest checkpoint, {how_often}", file=sys.stderr, flush=True)
                if lost.nodes and options.on_node_loss is OnNodeLoss.REPLAN:
                    left = replanned(options, attempt.plan, nodes, lost.nodes, attempt.folder)
                    return run_with_restarts(Attempt(*left, attempt.start, attempt.locks), launch)


def check_replan(options: RunOptions, plan: Plan, run: Path, nodes: Nodes) -> None:
    """Raise BadInput if replanning is impossible, and delete the plan that an earlier start found."""
    search = options.replan_search
    if search is None or options.replan_hardware is None or not options.replan_profile:
        problem = "needs the inputs of a search"
        raise BadInput("--on-node-loss replan", problem, "give --replan-hardware, --replan-profile and --replan-search")
    if not options.max_restarts:
        raise BadInput("--on-node-loss replan", "restarts the ranks", "pass --max-restarts, 1 or more")
    for file in (options.replan_hardware, *options.replan_profile):
        if not file.is_file():
            raise BadInput(file, "is not a file", "pass a profile for the search")
    asked = read_object(search).get("global_batch_size")
    if asked != plan.global_batch_size:
        problem = f"asks for a global batch of {asked}, but the plan has {plan.global_batch_size}"
        raise BadInput(search, problem, "search for the same batch")
    _program()
    if nodes.rank == 0:
        shutil.rmtree(run / _FOLDER, ignore_errors=True)


def replanned(
    options: RunOptions, plan: Plan, nodes: Nodes, gone: Collection[int], run: Path
) -> tuple[RunOptions, Plan, Nodes]:
    """The remaining nodes' run: a branch from the newest checkpoint, under a plan searched by node 0.

    Raises RunFailed if node 0 itself is gone, or none of the nodes left can hold the model.
    """
    if 0 in gone:
        branch = f"plan for the others and branch with --resume-from {latest_checkpoint(run)}"
        remedy = f"start the command on all nodes once it is back, or {branch}"
        raise RunFailed(f"node 0, where the nodes meet and which no other can replace, is gone: {remedy}")
    folder = run / _FOLDER / "-".join(map(str, gone))
    if nodes.rank == 0:
        _search(options, plan, gone, run, folder)
    answer = _awaited(folder / _ANSWER)
    parent = options.resume_from if answer.resume_from is None else Path(answer.resume_from)
    rank = nodes.rank - sum(node < nodes.rank for node in gone)
    left = dataclasses.replace(nodes, count=nodes.count - len(gone), rank=rank)
    return msgspec.structs.replace(options, plan=folder / "plan.json", resume_from=parent), answer.plan, left


def without_nodes(cluster: Cluster, gone: Collection[int]) -> Cluster:
    """The cluster of the remaining nodes, in their order."""
    types = [group.node_type for group in cluster.nodes for _ in range(group.count)]
    left = [node_type for node, node_type in enumerate(types) if node not in gone]
    groups = tuple(NodeGroup(node_type=name, count=len(list(nodes))) for name, nodes in groupby(left))
    return msgspec.structs.replace(cluster, nodes=groups)


def _search(options: RunOptions, plan: Plan, gone: Collection[int], run: Path, folder: Path) -> None:
    cluster, model, out = folder / "cluster.json", folder / "model.json", folder / "plan.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_document(cluster, without_nodes(plan.cluster, gone))
    write_document(model, plan.model)
    write_document(folder / "lost.json", plan)
    profiles = ["--hardware", options.replan_hardware]
    profiles += [word for profile in options.replan_profile for word in ("--profile", profile)]
    profiles += [] if options.replan_imbalance is None else ["--imbalance", options.replan_imbalance]
    _run(["evaluate", folder / "lost.json", *profiles, "--out", folder / "lost.prediction.json"])
    described = ["--cluster", cluster, "--model", model, "--search", options.replan_search]
    _run(["plan", *profiles, *described, "--time-limit", _SEARCH_S, "--out", out])
    predictions = (read_document(folder / f"{name}.prediction.json", Prediction) for name in ("lost", "plan"))
    before, after = (prediction.estimate.simulated_step_time_s for prediction in predictions)
    checkpoint = latest_checkpoint(run)
    resume_from = None if checkpoint is None else str(checkpoint)
    new_plan = read_document(out, Plan)
    answer = Replanned(plan=new_plan, resume_from=resume_from, step_before_s=before, step_after_s=after)
    costs = f"predicted {after:.4g} s a step, {before:.4g} s with all of them ({after / before - 1:+.0%})"
    print(f"planned for the nodes that are left: {costs}: {out}", file=sys.stderr, flush=True)
    write_document(folder / _ANSWER, answer)


def _run(arguments: Sequence[object]) -> None:
    """Run a command of the search stage; raise RunFailed with its last line if it fails."""
    command = [_program(), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with relayed_signals(process.terminate) as signals:
        _, errors = process.communicate()
    if process.returncode or signals:
        why = errors.strip().rpartition("\n")[2] or f"it ended with {process.returncode}"
        raise RunFailed(f"no plan for the remaining nodes: {why.removeprefix('error: ')}")


def _program() -> str:
    program_file = Path(sys.executable).with_name("shardwright")
    program = str(program_file) if program_file.is_file() else shutil.which("shardwright")
    if program is None:
        raise BadInput("shardwright", "is not installed here", "--on-node-loss replan needs it: install it")
    return program


def _awaited(file: Path) -> Replanned:
    until_s = time.monotonic() + _WAIT_S
    while file.name not in (path.name for path in file.parent.glob("*.json")):
        if time.monotonic() > until_s:
            raise RunFailed(f"node 0 found no plan for the remaining nodes within {_WAIT_S:g} s")
        time.sleep(_POLL_S)
    return read_document(file, Replanned)
