"""`shardwright-search uniform`: the plan that spreads every layer alike."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright_formats.io.errors import BadInput, one_line_errors
from shardwright_formats.io.json import atomic_path, read_document, write_document
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import Attention, GradientReduction, Precision, Schedule
from shardwright_formats.types.strategy import DataParallel, Recompute, SequenceParallel
from shardwright_search.commands.arguments import ClusterFile, DType, ModelFile
from shardwright_search.commands.prediction import prediction_of_evaluated, prediction_path
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import read_profiles
from shardwright_search.explain import plan_summary, show
from shardwright_search.interop.uniform import UniformRequest, uniform_plan

__all__ = ["uniform_command"]


def uniform_command(
    model: ModelFile,
    cluster: ClusterFile,
    global_batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step.")],
    out: Annotated[Path, typer.Option(help="Plan file to write.")],
    num_microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a step.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="tp_size: ranks of a tensor-parallel group.")] = 1,
    tp_consecutive: Annotated[
        bool, typer.Option("--tp-consecutive/--tp-strided", help="Groups of neighbouring ranks, or of ranks dp apart.")
    ] = True,
    pp: Annotated[int, typer.Option(min=1, help="pp_size: pipeline stages.")] = 1,
    data_parallel: Annotated[DataParallel, typer.Option(help="What data-parallel ranks share.")] = DataParallel.DDP,
    sequence_parallel: Annotated[
        SequenceParallel, typer.Option(help="How a tensor-parallel group shares the sequence.")
    ] = SequenceParallel.NONE,
    recompute: Annotated[
        Recompute, typer.Option(help="Which activations are computed again in backward.")
    ] = Recompute.NONE,
    schedule: Annotated[Schedule, typer.Option(help="Order of the microbatches.")] = Schedule.ONE_F_ONE_B,
    layer_ranges: Annotated[
        int, typer.Option(min=1, help="Layer ranges of a pipeline stage, with --schedule interleaved_1f1b.")
    ] = 1,
    gradient_reduction: Annotated[
        GradientReduction, typer.Option(help="When gradients are reduced.")
    ] = GradientReduction.DEFERRED,
    vocab_tp: Annotated[
        int | None, typer.Option(min=1, help="tp_size of embedding and head; by default the layers'.")
    ] = None,
    vocab_data_parallel: Annotated[
        DataParallel | None, typer.Option(help="The same for embedding and head; by default the layers'.")
    ] = None,
    vocab_sequence_parallel: Annotated[
        SequenceParallel | None, typer.Option(help="The same for embedding and head; by default the layers'.")
    ] = None,
    precision_parameters: Annotated[DType, typer.Option(help="Type of stored parameters.")] = "float32",
    precision_compute: Annotated[DType, typer.Option(help="Type of forward and backward.")] = "float32",
    precision_reduce: Annotated[DType, typer.Option(help="Type of gradient reduction.")] = "float32",
    attention: Annotated[Attention, typer.Option(help="Attention kernel.")] = Attention.AUTO,
    name: Annotated[str | None, typer.Option(help="Name of the plan; by default the file's.")] = None,
    hardware: Annotated[
        Path | None, typer.Option(help="Hardware profile (HDF5): with --profile, PLAN.prediction.json is written too.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Model profile (HDF5): see --hardware.")] = None,
) -> None:
    """Write the plan that spreads every layer alike; with profiles its predicted time (s) and memory (bytes) too."""
    with one_line_errors():
        request = UniformRequest(
            name=name or out.stem,
            global_batch_size=global_batch_size,
            num_microbatches=num_microbatches,
            tp_size=tp,
            pp_size=pp,
            data_parallel=data_parallel,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
            schedule=schedule,
            precision=Precision(parameters=precision_parameters, compute=precision_compute, reduce=precision_reduce),
            attention=attention,
            tp_consecutive=tp_consecutive,
            layer_ranges=layer_ranges,
            gradient_reduction=gradient_reduction,
            vocabulary_tp_size=vocab_tp,
            vocabulary_data_parallel=vocab_data_parallel,
            vocabulary_sequence_parallel=vocab_sequence_parallel,
        )
        _write(request, model, cluster, hardware, profile, out)


def _write(
    request: UniformRequest, model: Path, cluster: Path, hardware: Path | None, profile: Path | None, out: Path
) -> None:
    """Write the plan, and with profiles its prediction beside it: both or neither."""
    plan = uniform_plan(request, read_document(model, Model), read_document(cluster, Cluster))
    if hardware is None and profile is None:
        write_document(out, plan)
        return
    if hardware is None or profile is None:
        raise BadInput("--hardware and --profile", "one is given without the other", "give both or neither")
    files = {"cluster": cluster, "model": model, "hardware": hardware, "profile": profile}
    prediction = prediction_of_evaluated(plan, evaluate(plan, read_profiles(hardware, profile)), files)
    with atomic_path(prediction_path(out)) as new_prediction, atomic_path(out) as new_plan:
        write_document(new_prediction, prediction)
        write_document(new_plan, plan)
    show(plan_summary(plan, prediction))
