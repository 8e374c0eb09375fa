"""The commands that start ranks, `run` and `measure`: their options are checked first, and lost ranks restarted."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from shardwright.display.units import bytes_text
from shardwright.io.errors import BadInput, OutOfMemory, RanksLost, RunFailed
from shardwright.io.json import read_any_document, read_document, read_object, write_document
from shardwright.io.versions import versions_text
from shardwright.launch.accelerator import COLLECTIVES, CPU, check_accelerator, device_type_of
from shardwright.launch.journal import journal_path
from shardwright.launch.lock import HeldLock, only_run, scratch_folder
from shardwright.launch.meeting import meeting_of
from shardwright.launch.nodes import Nodes, check_all_nodes
from shardwright.launch.ranks import EXPANDABLE, allocator_setting, launch
from shardwright.launch.signals import relayed_signals
from shardwright.plan.offload import host_inputs, host_states
from shardwright.types.cluster import Cluster, NodeGroup
from shardwright.types.measurement import Measurement, PlanFailure
from shardwright.types.plan import Attention, ContextProbe, ExpertProbe, Plan, Plans
from shardwright.types.prediction import Prediction
from shardwright.types.run import Replanned
from shardwright_train.checkpoints.folders import LOCK, OUT_LOCK, SECRET, adopt_older, folder_of_run, latest_checkpoint
from shardwright_train.engine.learning_rate import LearningRateFactor, check_patterns
from shardwright_train.models.support import check_installed, check_supported
from shardwright_train.options import MeasureJob, MeasureOptions, OnNodeLoss, RunJob, RunOptions, encode_job
from shardwright_train.start import check_deterministic, without_collection
from shardwright_train.training.loggers import check_loggers

_DATA = "pass one that `prepare` wrote, or one with images.npy and labels.npy"
_Turns = tuple[str, ...]
"""Hashes of plans that are measured alternately."""


def start_run(options: RunOptions) -> None:
    """Train on this node's share of the ranks."""
    nodes = options.nodes(os.environ)
    plan = read_document(options.plan, Plan)
    check_plan(plan, options.plan, nodes)
    _check_adapter(options, plan)
    if options.data != Path("random"):
        _check_data(options.data)
    _check_evaluation(options)
    if options.deterministic:
        check_deterministic(plan, options.plan)
    check_loggers(options.log_to)
    _check_folders(options.out, options.checkpoints, options.log_dir)
    if options.weights is not None:
        _check_weights(options, options.weights, plan)
    if options.learning_rate_factor:
        _check_learning_rates(options, plan)
    adopt_older(options.checkpoints, plan, options.resume_from)
    attempt = Attempt(options, plan, nodes)
    _check_apart(options, attempt.folder)
    if options.on_node_loss is OnNodeLoss.REPLAN:
        check_replan(options, plan, attempt.folder, nodes)
    with only_run(options.out / OUT_LOCK, nodes) as held:
        run_with_restarts(attempt._replace(locks=held))


def _check_data(folder: Path) -> None:
    """Raise BadInput if a data folder has no valid description, before ranks are started."""
    if not folder.is_dir():
        raise BadInput(folder, "is not a folder", _DATA)
    from shardwright_train.data.sampling import check_described

    check_described(folder)


def _check_weights(options: RunOptions, weights: Path, plan: Plan) -> None:
    """Raise BadInput if a run cannot begin with a folder's weights, before ranks are started; print warnings."""
    if options.resume_from is not None:
        raise BadInput(
            weights, "a branch starts from the weights of its checkpoint", "leave out --weights or --resume-from"
        )
    with without_collection():
        from shardwright_train.models.base import family_of
        from shardwright_train.weights.reading import open_weights
    family = family_of(plan.model, options.plan)
    opened = open_weights(weights, plan.model, family, options.new_weights, options.adapter)
    for note in opened.notes(plan.precision.parameters):
        print(f"{weights}: {note}", file=sys.stderr, flush=True)


def _check_adapter(options: RunOptions, plan: Plan) -> None:
    """Raise BadInput if a run would not begin with the trained adapter with which its model was described."""
    if options.adapter is not None and options.weights is None:
        raise BadInput(options.adapter, "an adapter needs the weights of its base model", "add --weights BASE")
    low_rank, begins = plan.model.low_rank, options.resume_from is None and options.data != Path("random")
    if low_rank is not UNSET and low_rank.weights_sha256 is not UNSET and options.adapter is None and begins:
        problem = "its model was described with a trained adapter, from which a run must start"
        raise BadInput(options.plan, problem, "add --adapter FOLDER, or describe it only from the adapter_config.json")


def _check_evaluation(job: RunOptions) -> None:
    """Raise BadInput if the options of an evaluation contradict each other."""
    if job.valid_data is not None and job.valid_fraction:
        raise BadInput("--valid-data, --valid-fraction", "cannot be used together", "pass only one")
    if job.valid_data is not None:
        _check_data(job.valid_data)
    asked = {"--eval-every": job.eval_every, "--eval-samples": job.eval_samples, "--keep-best": job.keep_best}
    option = next((option for option, value in asked.items() if value), None)
    if option is not None and job.valid_data is None and not job.valid_fraction:
        raise BadInput(option, "there is nothing to evaluate on", "give --valid-fraction or --valid-data")


def _check_learning_rates(options: RunOptions, plan: Plan) -> None:
    """Raise BadInput if a learning rate factor is malformed or matches no parameter, before ranks are started."""
    factors = tuple(map(LearningRateFactor.parse, options.learning_rate_factor))
    with without_collection():
        from shardwright_train.models.base import family_of
    check_patterns(factors, family_of(plan.model, options.plan).stock_names(plan.model))


def start_measure(options: MeasureOptions) -> None:
    """Measure every plan of the files, in one launch per world size, and write one measurement.

    Finished plans are kept in a journal next to it until it is complete: a restart measures only the remaining ones.
    Each rank writes its traces into the folder `trace`, if there is one.
    """
    nodes, out = options.nodes(os.environ), options.out
    asked = [(file, _plans_of(file)) for file in options.plans]
    plans = [(file, plan) for file, some in asked for plan in some.plans]
    for file, plan in plans:
        check_plan(plan, file, nodes)
    _check_folders(options.trace, options.log_dir)
    with (
        only_run(out.with_name(f"{out.name}.lock"), nodes),
        meeting_of(nodes, out.with_name(f"{out.name}.secret"), os.environ) as nodes,
        scratch_folder() as scratch,
    ):
        sized = sorted((plan for _, plan in plans), key=lambda plan: plan.world_size)
        beside = _Beside.read([some for _, some in asked])
        results = _Results({}, {})
        for _, group in groupby(sized, key=lambda plan: plan.world_size):
            _measure(tuple(group), beside, options, nodes, scratch, results)
            beside = beside._replace(experts=())  # any launch can measure them
        if nodes.rank == 0:
            write_document(out, _in_order([plan for _, plan in plans], results))
            journal_path(out).unlink(missing_ok=True)


class _Beside(NamedTuple):
    """What the files of plans request besides the plans, which are identified here by their hashes."""

    in_turns: tuple[_Turns, ...]
    shares: Mapping[str, int]
    """For context probes, by plan: the number of ranks over which longer samples would be split; a rank represents one.
    """
    experts: tuple[ExpertProbe, ...]

    @classmethod
    def read(cls, asked: Sequence[Plans]) -> "_Beside":
        """Return which plans the files request to measure alternately and as context probes, and all expert probes."""
        return cls(
            tuple(tuple(some.plans[place].sha256 for place in group) for some in asked for group in some.in_turns),
            {some.plans[probe.plan].sha256: probe.cp_size for some in asked for probe in some.context or ()},
            tuple(probe for some in asked for probe in some.experts or ()),
        )

    def for_plans(self, plans: tuple[Plan, ...]) -> Plans:
        """Return these plans with their groups to measure alternately, their context probes, and all expert probes."""
        places = {plan.sha256: place for place, plan in enumerate(plans)}
        groups = (tuple(places[one] for one in group if one in places) for group in self.in_turns)
        shares = (ContextProbe(plan=places[one], cp_size=size) for one, size in self.shares.items() if one in places)
        return Plans(
            plans=plans,
            in_turns=tuple(group for group in groups if len(group) > 1),
            experts=self.experts or UNSET,
            context=tuple(shares) or UNSET,
        )


class _Results(NamedTuple):
    """The results and failures of the plans so far, by plan hash; measurements are known on node 0."""

    measured: dict[str, Measurement]
    failed: dict[str, PlanFailure]


def _measure(
    plans: tuple[Plan, ...], beside: _Beside, options: MeasureOptions, nodes: Nodes, scratch: Path, results: _Results
) -> None:
    """Measure plans of one world size in one launch, and relaunch each time that a device runs out of memory.

    Ranks that wait for a rank that ran out of memory cannot be interrupted: they are started again, and measurements
    are kept. If a plan ran out of memory while it was measured alternately with others, it and the others are then
    measured one by one.
    """
    together, result = scratch / "plans.json", scratch / "result.json"
    fields = msgspec.structs.asdict(options) | {"plans": (together,), "out": result}
    launches = len(results.failed)
    while plans:
        write_document(together, beside.for_plans(plans))
        job = MeasureJob(**fields, journal=journal_path(options.out).absolute())
        try:
            start_ranks(job, plans[0], nodes, f"after {launches} that ran out of memory")
        except OutOfMemory as error:
            lacking = next((plan for plan in plans if plan.sha256 == error.subject), None)
            if lacking is None:
                raise
            launches += 1
            if any(error.subject in group for group in beside.in_turns):
                consequence = "it and the plans that it takes turns with are measured one by one"
                print(f"{lacking.name}: {error}: {consequence}", file=sys.stderr)
                apart = tuple(group for group in beside.in_turns if error.subject not in group)
                beside = beside._replace(in_turns=apart)
                continue
            print(f"{lacking.name} was not measured: {error}", file=sys.stderr)
            results.failed[error.subject] = PlanFailure(
                plan=lacking,
                category="out_of_memory",
                rank=error.rank,
                where=error.where,
                asked_bytes=error.asked_bytes,
            )
            plans = tuple(plan for plan in plans if plan.sha256 != error.subject)
            continue
        if nodes.rank == 0:
            measurement = read_document(result, Measurement)
            results.measured.update({one.plan.sha256: measurement for one in measurement.plans})
        return


def _in_order(plans: Sequence[Plan], results: _Results) -> Measurement:
    failed = tuple(results.failed[plan.sha256] for plan in plans if plan.sha256 in results.failed)
    done = [(plan, results.measured[plan.sha256]) for plan in plans if plan.sha256 in results.measured]
    if not done:
        return _of_failures(failed)
    taken = {measured.attention for plan, measured in done if plan.attention is Attention.AUTO}
    if len(taken) > 1:
        raise RunFailed(
            f"auto selected {' and '.join(sorted(taken))}: measure them in two commands, or set one in the plans"
        )
    return msgspec.structs.replace(
        done[0][1],
        date=max(measured.date for _, measured in done),
        attention=taken.pop() if taken else done[0][1].attention,
        plans=tuple(next(one for one in measured.plans if one.plan.sha256 == plan.sha256) for plan, measured in done),
        failed=failed,
    )


def _of_failures(failed: tuple[PlanFailure, ...]) -> Measurement:
    """Return a measurement with only failures, which are known without the ranks."""
    plan = failed[0].plan
    device_type = device_type_of(plan.cluster, plan.name)
    on_gpu = device_type != CPU
    return Measurement(
        device=plan.cluster.of_rank(0).device,
        backend=COLLECTIVES[device_type],
        date=datetime.now(UTC).date().isoformat(),
        versions=versions_text(("torch", "transformers"), on_gpu=on_gpu),
        attention=plan.attention.value,
        allocator=(allocator_setting(os.environ) or EXPANDABLE) if on_gpu else "",
        plans=(),
        failed=failed,
    )


def _plans_of(file: Path) -> Plans:
    document = read_any_document(file, Plan, Plans, Prediction)
    if isinstance(document, Plans):
        return document
    if isinstance(document, Plan):
        return Plans(plans=(document,))
    assert isinstance(document, Prediction)
    return Plans(plans=tuple(runner_up.plan for runner_up in document.runners_up))


def check_plan(plan: Plan, file: object, nodes: Nodes) -> None:
    """Raise BadInput if these nodes cannot run a plan, before anything is started."""
    check_supported(plan, file)
    check_all_nodes(plan.cluster, nodes, file)
    device_type_of(plan.cluster, file)
    check_installed(plan, file)
    check_accelerator(plan.cluster, nodes.rank, file)
    if any(layer.offload is not UNSET for layer in plan.layers):
        check_host_memory(plan, nodes.ranks_here(plan.cluster), _free_host_bytes(file), file)


def check_host_memory(plan: Plan, ranks: Iterable[int], free_bytes: int, file: object) -> None:
    """Raise BadInput if the ranks of a node would keep more in its host memory than `free_bytes`.

    Optimizer states count, and of activations only the layers' inputs, which are all that recomputed layers keep.
    """
    ranks = tuple(ranks)
    needed = sum(sum(host_states(plan, rank)) + host_inputs(plan, rank) for rank in ranks)
    if needed > free_bytes:
        states = f"its {len(ranks)} ranks here keep {bytes_text(needed)} and more of offloaded layers in host memory"
        raise BadInput(file, f"{states}, {bytes_text(free_bytes)} are free", "offload fewer layers")


def _free_host_bytes(file: object) -> int:
    """Return the bytes of this machine's memory that Linux counts as available; raise BadInput on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        problem = "offload: there is no /proc/meminfo, which says how much host memory is free"
        raise BadInput(file, problem, "train on Linux, or leave offload out") from None
    kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kib) * 1024


def _check_folders(*folders: Path | None) -> None:
    """Raise BadInput if a file has a folder's name."""
    for folder in filter(None, folders):
        if folder.exists() and not folder.is_dir():
            raise BadInput(folder, "is not a folder", "name another")


def _check_apart(options: RunOptions, run: Path) -> None:
    """Raise BadInput if --out is inside the folder of the run's checkpoints, which has files with the same names."""
    if options.out.resolve().is_relative_to(run.resolve()):
        raise BadInput(options.out, "is the folder of this run's checkpoints", "choose another --out")


def start_ranks(job: RunJob | MeasureJob, plan: Plan, nodes: Nodes, name: str = "", start: int = 0) -> None:
    """Start this node's ranks of a plan, and wait until they have finished a job."""
    with scratch_folder() as scratch:
        job_file = scratch / "job.json"
        job_file.write_bytes(encode_job(job))
        device_type = device_type_of(plan.cluster, job_file)
        command = [sys.executable, "-m", "shardwright_train.worker", str(job_file), device_type]
        launch(
            command,
            nodes.ranks_here(plan.cluster),
            plan.world_size,
            nodes,
            hang_timeout_s=job.hang_timeout_s,
            log_folder=job.log_dir,
            name=name,
            start=start,
        )


# Restarts of a run after lost ranks or nodes, under the same plan or a new one for the remaining nodes.


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


def run_with_restarts(attempt: Attempt) -> None:
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
                job = RunJob(**msgspec.structs.asdict(options), locks=attempt.locks)
                return start_ranks(job, attempt.plan, nodes, start=attempt.start)
            except RanksLost as lost:
                if lost.start >= options.max_restarts:
                    raise
                attempt = attempt._replace(start=lost.start + 1)
                how_often = f"start {attempt.start} of {options.max_restarts} at most"
                print(f"{lost}: restarting from the newest checkpoint, {how_often}", file=sys.stderr, flush=True)
                if lost.nodes and options.on_node_loss is OnNodeLoss.REPLAN:
                    left = replanned(options, attempt.plan, nodes, lost.nodes, attempt.folder)
                    return run_with_restarts(Attempt(*left, attempt.start, attempt.locks))


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
    """Return the run of the remaining nodes: a branch from the newest checkpoint, under a plan searched by node 0.

    Raises RunFailed if node 0 itself is gone, or if no plan is found for the remaining nodes.
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
    """Return the cluster of the remaining nodes, in their order."""
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
            problem = f"node 0 wrote no plan for the remaining nodes to {file.parent} within {_WAIT_S:g} s"
            raise RunFailed(f"{problem}: see what it printed, and check that all nodes share that folder")
        time.sleep(_POLL_S)
    return read_document(file, Replanned)
