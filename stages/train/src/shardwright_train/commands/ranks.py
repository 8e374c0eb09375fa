"""The commands that start ranks, `run` and `measure`: their options are checked first."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from shardwright.display.units import bytes_text
from shardwright.io import BadInput, OutOfMemory, RunFailed, read_any_document, read_document, write_document
from shardwright.io.versions import versions_text
from shardwright.launch.accelerator import COLLECTIVES, CPU, check_accelerator, device_type_of
from shardwright.launch.journal import journal_path
from shardwright.launch.lock import only_run, scratch_folder
from shardwright.launch.meeting import meeting_of
from shardwright.launch.nodes import Nodes, check_all_nodes
from shardwright.launch.ranks import EXPANDABLE, allocator_setting, launch
from shardwright.plan.offload import host_inputs, host_states
from shardwright.types import Attention, ContextProbe, ExpertProbe, Measurement, Plan, PlanFailure, Plans, Prediction
from shardwright_train.checkpoints.folders import OUT_LOCK, adopt_older
from shardwright_train.determinism import check_deterministic
from shardwright_train.engine.learning_rate import LearningRateFactor, check_patterns
from shardwright_train.imports import without_collection
from shardwright_train.models.support import check_installed, check_supported
from shardwright_train.options import MeasureJob, MeasureOptions, OnNodeLoss, RunJob, RunOptions, encode_job
from shardwright_train.supervision import Attempt, check_replan, run_with_restarts
from shardwright_train.training.loggers import check_loggers

_DATA = "pass one that `prepare` wrote, or one with images.npy and labels.npy"
_Turns = tuple[str, ...]
"""Hashes of plans that are measured in turns."""


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
        run_with_restarts(attempt._replace(locks=held), _start_attempt)


def _start_attempt(attempt: Attempt) -> None:
    job = RunJob(**msgspec.structs.asdict(attempt.options), locks=attempt.locks)
    start_ranks(job, attempt.plan, attempt.nodes, start=attempt.start)


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
    """Raise BadInput if a run would not begin with the trained adapter that its model was described with."""
    if options.adapter is not None and options.weights is None:
        raise BadInput(options.adapter, "an adapter needs the weights of its base model", "add --weights BASE")
    low_rank, begins = plan.model.low_rank, options.resume_from is None and options.data != Path("random")
    if low_rank is not UNSET and low_rank.weights_sha256 is not UNSET and options.adapter is None and begins:
        problem = "its model was described with a trained adapter, from which a run must start"
        raise BadInput(options.plan, problem, "add --adapter FOLDER, or describe it only from the adapter_config.json")


def _check_evaluation(job: RunOptions) -> None:
    """Raise BadInput if the options of an evaluation contradict each other."""
    if job.valid_data is not None and job.valid_fraction:
        raise BadInput("--valid-data, --valid-fraction", "exclude each other", "pass only one")
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
    """Files and options that plans need in addition; plans are identified by their hashes."""

    in_turns: tuple[_Turns, ...]
    shares: Mapping[str, int]
    """Number of ranks over which longer samples would be split, for plans whose ranks each stand for one of these."""
    experts: tuple[ExpertProbe, ...]

    @classmethod
    def read(cls, asked: Sequence[Plans]) -> "_Beside":
        """Return which plans the files request to measure in turns, and as context probes."""
        return cls(
            tuple(tuple(some.plans[place].sha256 for place in group) for some in asked for group in some.in_turns),
            {some.plans[probe.plan].sha256: probe.cp_size for some in asked for probe in some.context or ()},
            tuple(probe for some in asked for probe in some.experts or ()),
        )

    def for_plans(self, plans: tuple[Plan, ...]) -> Plans:
        """Return these plans with the requests that concern them."""
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
    plans: tuple[Plan, ...],
    beside: _Beside,
    options: MeasureOptions,
    nodes: Nodes,
    scratch: Path,
    results: _Results,
) -> None:
    """Measure plans of one world size in one launch, and relaunch each time that a device runs out of memory.

    Ranks that wait for one that ran out cannot be called back: they are started anew, and what is measured is kept.
    A plan that ran out while it was measured in turns with others is measured by itself, and so are the others.
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
    """A measurement with only failures, which are known without the ranks."""
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
    """Raise BadInput if what the ranks of a node keep in its memory exceeds what is free of it.

    Counted are optimizer states, and of activations the layers' inputs, which are all that recomputed layers keep.
    """
    ranks = tuple(ranks)
    needed = sum(sum(host_states(plan, rank)) + host_inputs(plan, rank) for rank in ranks)
    if needed > free_bytes:
        states = f"its {len(ranks)} ranks here keep {bytes_text(needed)} and more of offloaded layers in host memory"
        raise BadInput(file, f"{states}, {bytes_text(free_bytes)} are free", "offload fewer layers")


def _free_host_bytes(file: object) -> int:
    """Return the bytes of this machine's memory that Linux counts as available; BadInput on other systems."""
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
    """Raise BadInput if --out is inside the folder of the run's checkpoints, whose files have the same names."""
    if options.out.resolve().is_relative_to(run.resolve()):
        raise BadInput(options.out, "is the folder of this run's checkpoints", "choose another --out")


def start_ranks(job: RunJob | MeasureJob, plan: Plan, nodes: Nodes, name: str = "", start: int = 0) -> None:
    """Start this node's ranks of a plan, and wait until they have done a job."""
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
