"""Plans that are not searched: `shardwright evaluate`, `uniform` and `export`."""

from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os.path import realpath
from pathlib import Path

from shardwright.command import show
from shardwright.display.columns import line_width, wrapped
from shardwright.io import BadInput, atomic_path, check_new, read_document, sha256_of_file, sync_path, write_document
from shardwright.types import Cluster, Correction, Measurement, Model, Plan
from shardwright_search.advise.choices import reading_of
from shardwright_search.commands.prediction import (
    plan_summary,
    prediction_of_evaluated,
    prediction_path,
    read_inputs,
    read_prediction,
    written,
)
from shardwright_search.cost_model.calibration import Evidence, evidence_of, learned
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import Profiles, read_profiles
from shardwright_search.options import CorrectOptions, EvaluateOptions, ExportOptions, ProfileOptions, UniformOptions
from shardwright_search.systems.entry import Reading, Setting
from shardwright_search.systems.launch import Launch
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan

_EXECUTABLE = 0o755


def evaluate_plan(options: EvaluateOptions) -> None:
    """Write the prediction of a given plan."""
    plan, inputs = read_document(options.plan, Plan), read_inputs(options)
    evaluation = evaluate(plan, inputs.profiles, cost_model_of(plan, inputs.profiles, options.time_model))
    prediction = prediction_of_evaluated(plan, evaluation, {"plan": options.plan} | inputs.files, inputs.warnings)
    with atomic_path(options.out) as path:
        write_document(path, prediction)
        show(wrapped(plan_summary(plan, prediction), line_width()))


def uniform(options: UniformOptions) -> None:
    """Write a plan of one strategy for all layers, and with profiles its prediction, too: both or neither."""
    cluster, model = read_document(options.cluster, Cluster), read_document(options.model, Model)
    plan = uniform_plan(options.name or options.out.stem, options, model, cluster)
    if options.hardware is None and options.profile is None:
        if options.imbalance is not None:
            raise BadInput("--imbalance", "changes the price of a plan", "give --hardware and --profile too")
        write_document(options.out, plan)
        return
    if options.hardware is None or options.profile is None:
        raise BadInput("--hardware and --profile", "one is given without the other", "give both or neither")
    given = ProfileOptions(hardware=(options.hardware,), profile=(options.profile,), imbalance=options.imbalance)
    inputs = read_inputs(given)
    files = {"cluster": options.cluster, "model": options.model} | inputs.files
    prediction = prediction_of_evaluated(plan, evaluate(plan, inputs.profiles), files)
    with written(options.out, plan, prediction):
        show(wrapped(plan_summary(plan, prediction), line_width()))


def export_plan(options: ExportOptions) -> None:
    """Write another system's file and, if requested, the scripts that start it; show what these cannot express.

    Raises BadInput for a folder of scripts that is not empty: hosts that were written in one are no output.
    """
    (plan, read), system = _plan_to_export(options), SYSTEMS[options.to]
    if options.launch is None:
        if options.hosts is not None:
            raise BadInput("--hosts", "names the hosts of scripts", "pass --launch too")
        exported, launch = system.export(plan, options.plan), Launch({}, ())
    else:
        check_new(options.launch)
        exported, launch = system.launched(plan, options.plan, options.hosts)
    files = {options.launch / name: text for name, text in launch.files.items()} if options.launch else {}
    if realpath(options.out) in map(realpath, files):
        raise BadInput(options.out, "is a file of --launch too", "choose another name")
    with written_files({**files, options.out: exported.text}, executable=files):
        show("\n".join((*exported.notes, *launch.notes, *read)))


@contextmanager
def written_files(files: Mapping[Path, str], executable: Container[Path]) -> Iterator[None]:
    """Write text files, some of them executable; each is complete before the first gets its final name."""
    with ExitStack() as stack:
        for path, text in files.items():
            temporary = stack.enter_context(atomic_path(path))
            temporary.write_bytes(text.encode())
            sync_path(temporary)
            if path.suffix == ".sh" and path in executable:
                temporary.chmod(_EXECUTABLE)
        yield


def _plan_to_export(options: ExportOptions) -> Reading:
    """Return the plan to export, and notes on it: the file's plan, a runner-up of its search, or another plan.

    `--against` specifies the other plan, for the model, cluster, batch size and settings of the file's plan.
    """
    plan = read_document(options.plan, Plan)
    if options.runner_up is None and options.against is None:
        return Reading(plan)
    if options.runner_up is not None and options.against is not None:
        raise BadInput("--runner-up and --against", "each names a plan", "give one of them")
    if options.against is not None:
        settings = plan.precision, plan.optimizer, plan.attention, plan.compile, plan.loss_chunks or 1
        return reading_of(options.against, Setting(plan.model, plan.cluster, plan.global_batch_size, *settings))
    assert options.runner_up is not None
    runners_up = read_prediction(options.plan, plan).runners_up
    if options.runner_up > len(runners_up):
        problem = f"{options.runner_up}: {prediction_path(options.plan)} has {len(runners_up)} of them"
        raise BadInput("--runner-up", problem, "search with --runners-up, or give a lower number")
    return Reading(runners_up[options.runner_up - 1].plan)


# `shardwright correct`: correction factors from measured plans.


def correct(options: CorrectOptions) -> None:
    """Write the correction that the measured plans teach."""
    profiles = read_profiles([options.hardware], [options.profile])
    evidence = [each for path in options.measurements for each in _evidence_in(path, profiles)]
    factors, warnings = learned(evidence)
    correction = Correction(
        factors=factors,
        plans_sha256=tuple(dict.fromkeys(each.plan_sha256 for each in evidence)),
        measurements_sha256=tuple(map(sha256_of_file, options.measurements)),
        hardware_sha256=sha256_of_file(options.hardware),
        profiles_sha256=(sha256_of_file(options.profile),),
        warnings=warnings,
    )
    lines = [
        f"{term}: {x.factor:.3f} x predicted ({x.lowest:.3f} to {x.highest:.3f}; {x.num_plans} plans)"
        for term, x in factors.items()
    ]
    with atomic_path(options.out) as path:
        write_document(path, correction)
        show("\n".join([*lines, *(f"warning: {warning}" for warning in warnings)]))


def _evidence_in(path: Path, profiles: Profiles) -> list[Evidence]:
    measurement = read_document(path, Measurement)
    if measurement.device != profiles.origin.device:
        problem = f"was measured on {measurement.device!r}, the profile on {profiles.origin.device!r}"
        raise BadInput(path, problem, "take the profiles of that device")
    if not measurement.plans:
        raise BadInput(path, "every plan of it ran out of memory", "measure plans that fit")
    return [one for measured in measurement.plans for one in evidence_of(measured, profiles)]
