"""A made-up system: ZeRO-2 or ZeRO-3 over all ranks, and a file of two lines."""

from shardwright.estimate.runtimes import RUNTIMES, RuntimeName
from shardwright.types import DataParallel, GradientReduction, Model, Plan, Precision, Recompute
from shardwright_search.systems.entry import Entry, Limits, Reading, Setting, program_of, torchrun
from shardwright_search.systems.exporting import Exported, ExportTarget, uniform_of


def export(plan: Plan, plan_file: object) -> Exported:
    """Its file; BadInput for tensor or pipeline parallelism, and for what no system has."""
    target = ExportTarget("Made-up", plan_file)
    uniform = uniform_of(plan, target)
    target.demand(uniform.pp_size == uniform.layer.tp_size == 1, "model parallelism", "choose tp 1 and pp 1")
    return Exported(f"made-up {uniform.layer.data_parallel}\nsamples {uniform.micro_batch_size}\n", ())


def read(text: str, file: str, setting: Setting) -> Reading:
    """The plan of its file."""
    _, kind, _, samples = text.split()
    choice = setting.uniform(file, 1, int(samples), GradientReduction.DEFERRED, data_parallel=DataParallel(kind))
    return Reading(setting.plan(choice, file))


def limits(_model: Model, _precision: Precision) -> tuple[Limits, ...]:
    """Its one way."""
    kinds = (DataParallel.ZERO2, DataParallel.ZERO3)
    once, whole = GradientReduction.DEFERRED, (Recompute.NONE,)
    return (Limits("ZeRO", kinds, once, whole, tp_sizes=(1,), pipeline=False),)


MADE_UP = Entry(
    title="Made-up",
    version="made-up 1.0",
    sources=("made_up.py: all of it",),
    runtime=RUNTIMES[RuntimeName.NANOTRON],
    limits=limits,
    unsearched=(),
    file_name="plan.made-up",
    mark="made-up",
    export=export,
    read=read,
    command=lambda plan, file: torchrun(plan, f"made_up.py {file}"),
    program=program_of('made_up.py "$folder/plan.made-up"'),
)
