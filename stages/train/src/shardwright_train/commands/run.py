"""The command `run`: checks of its options before ranks are started, and the starts."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from shardwright_formats.io import BadInput, read_document
from shardwright_formats.types import Plan
from shardwright_launch.lock import only_run
from shardwright_train.checkpoints.folders import OUT_LOCK
from shardwright_train.commands.start import check_folder, check_plan, start_ranks
from shardwright_train.engine.parameter_groups import LearningRateFactor, check_patterns
from shardwright_train.imports import without_collection
from shardwright_train.options import OnNodeLoss, RunJob, RunOptions
from shardwright_train.supervision.replan import check_replan
from shardwright_train.supervision.restarts import Attempt, run_with_restarts

_DATA = "name one that `prepare` wrote, or one of images.npy and labels.npy"


def start_run(options: RunOptions) -> None:
    """Train on this node's share of the ranks."""
    nodes = options.nodes(os.environ)
    plan = read_document(options.plan, Plan)
    check_plan(plan, options.plan, nodes)
    if options.data != Path("random"):
        _check_data(options.data)
    _check_evaluation(options)
    _check_loggers(options)
    for folder in filter(None, (options.out, options.checkpoints, options.log_dir)):
        check_folder(folder)
    if options.weights is not None:
        _check_weights(options, options.weights, plan)
    if options.learning_rate_factor:
        _check_learning_rates(options, plan)
    attempt = Attempt(options, plan, nodes)
    if options.on_node_loss is OnNodeLoss.REPLAN:
        check_replan(options, plan, attempt.folder, nodes)
    with only_run(options.out / OUT_LOCK, nodes) as held:
        run_with_restarts(attempt._replace(locks=held), _start_attempt)


def _start_attempt(attempt: Attempt) -> None:
    job = RunJob(**msgspec.structs.asdict(attempt.options), locks=attempt.locks)
    start_ranks(job, attempt.plan, attempt.nodes, start=attempt.start)


def _check_data(folder: Path) -> None:
    """Raise BadInput where a data folder has no valid description, before ranks are started."""
    if not folder.is_dir():
        raise BadInput(folder, "is no folder", _DATA)
    from shardwright_train.data.blend import check_described

    check_described(folder)


def _check_weights(options: RunOptions, weights: Path, plan: Plan) -> None:
    """Raise BadInput where a run cannot begin with a folder's weights, before ranks are started; print warnings."""
    if options.resume_from is not None:
        raise BadInput(weights, "a branch has the weights of its checkpoint", "leave out --weights or --resume-from")
    with without_collection():
        from shardwright_train.models.registry import family_named
        from shardwright_train.weights.agreement import agree
    found = agree(weights, plan.model, family_named(plan.model.family, options.plan), options.new_weights)
    for note in found.notes(plan.precision.parameters):
        print(f"{weights}: {note}", file=sys.stderr, flush=True)


def _check_loggers(options: RunOptions) -> None:
    """Raise BadInput where a logger's package is not installed."""
    for name, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        if name in options.log_to and find_spec(package) is None:
            remedy = f"pip install 'shardwright-train[{name}]'" if name != "tensorboard" else f"pip install {package}"
            raise BadInput(f"--log-to {name}", f"{package} is not installed", f"{remedy}, or log elsewhere")


def _check_evaluation(job: RunOptions) -> None:
    """Raise BadInput where the options of an evaluation contradict each other."""
    if job.valid_data is not None and job.valid_fraction:
        what = "a folder to evaluate on, and a share of the data"
        raise BadInput("--valid-data, --valid-fraction", what, "give one of them")
    if job.valid_data is not None:
        _check_data(job.valid_data)
    asked = {"--eval-every": job.eval_every, "--eval-samples": job.eval_samples, "--keep-best": job.keep_best}
    if job.valid_data is None and not job.valid_fraction:
        for option in (option for option, value in asked.items() if value):
            raise BadInput(option, "there is nothing to evaluate on", "give --valid-fraction or --valid-data")


def _check_learning_rates(options: RunOptions, plan: Plan) -> None:
    """Raise BadInput where a learning rate factor is malformed or matches no parameter, before ranks are started."""
    factors = tuple(map(LearningRateFactor.of, options.learning_rate_factor))
    with without_collection():
        from shardwright_train.models.registry import family_named
    check_patterns(factors, family_named(plan.model.family, options.plan).stock_names(plan.model))
