"""`shardwright-search evaluate` and `uniform`: what a given plan, or one that shards all layers alike, would take."""

from shardwright_formats.command import show
from shardwright_formats.io import BadInput, atomic_path, read_document, write_document
from shardwright_formats.types import Cluster, Model, Plan
from shardwright_search.commands.inputs import read_inputs
from shardwright_search.commands.prediction import plan_summary, prediction_of_evaluated, written
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.interop.uniform import uniform_plan
from shardwright_search.options import EvaluateOptions, ProfileOptions, UniformOptions


def evaluate_plan(options: EvaluateOptions) -> None:
    """Write the prediction of a plan."""
    plan, inputs = read_document(options.plan, Plan), read_inputs(options)
    evaluation = evaluate(plan, inputs.profiles, cost_model_of(plan, inputs.profiles, options.time_model))
    prediction = prediction_of_evaluated(plan, evaluation, {"plan": options.plan} | inputs.files, inputs.warnings)
    with atomic_path(options.out) as path:
        write_document(path, prediction)
        show(plan_summary(plan, prediction))


def uniform(options: UniformOptions) -> None:
    """Write the plan, and with profiles its prediction beside it: both or neither."""
    cluster, model = read_document(options.cluster, Cluster), read_document(options.model, Model)
    plan = uniform_plan(options.name or options.out.stem, options, model, cluster)
    if options.hardware is None and options.profile is None:
        write_document(options.out, plan)
        return
    if options.hardware is None or options.profile is None:
        raise BadInput("--hardware and --profile", "one is given without the other", "give both or neither")
    inputs = read_inputs(ProfileOptions(hardware=(options.hardware,), profile=(options.profile,)))
    files = {"cluster": options.cluster, "model": options.model} | inputs.files
    prediction = prediction_of_evaluated(plan, evaluate(plan, inputs.profiles), files)
    with written(options.out, plan, prediction):
        show(plan_summary(plan, prediction))
