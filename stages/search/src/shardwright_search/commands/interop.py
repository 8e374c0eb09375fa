"""`shardwright-search import` and `export`: plans from and for other systems."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwright_formats.io.errors import one_line_errors
from shardwright_formats.io.json import read_document, write_bytes, write_document
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import Attention, GradientReduction, Plan, Precision
from shardwright_search.commands.arguments import ClusterFile, DType, ModelFile, PlanFile
from shardwright_search.interop.galvatron import Unsaid, galvatron_file, plan_of_galvatron
from shardwright_search.interop.galvatron_file import read_galvatron
from shardwright_search.interop.megatron import megatron_arguments
from shardwright_search.interop.torchtitan import torchtitan_toml

__all__ = ["System", "export_command", "import_app"]

import_app = typer.Typer(help="Read plans of other systems.", no_args_is_help=True)


class System(StrEnum):
    """Whom plans are exported for."""

    GALVATRON = "galvatron"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"


_EXPORTERS = {
    System.GALVATRON: galvatron_file,
    System.MEGATRON: megatron_arguments,
    System.TORCHTITAN: torchtitan_toml,
}


@import_app.callback()
def _import_app() -> None:
    """Read plans of other systems."""


@import_app.command("galvatron")
def import_galvatron_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Galvatron's strategy file (JSON).")],
    model: ModelFile,
    cluster: ClusterFile,
    out: Annotated[Path, typer.Option(help="Plan file to write.")],
    sequence_parallel: Annotated[
        Literal["none", "megatron"] | None,
        typer.Option(help="Whether the run has Galvatron's --sequence-parallel; needed where tp is above 1."),
    ] = None,
    gradient_reduction: Annotated[
        GradientReduction, typer.Option(help="every_microbatch for its --no_async_grad_reduce.")
    ] = GradientReduction.DEFERRED,
    num_microbatches: Annotated[
        int | None, typer.Option(min=1, help="Instead of the file's chunks, where those are of unequal size.")
    ] = None,
    precision_compute: Annotated[DType, typer.Option(help="Its --mixed_precision: type of forward and backward.")] = (
        "bfloat16"
    ),
    precision_reduce: Annotated[
        DType | None, typer.Option(help="float32 for its --reduce_in_fp32; by default as computed.")
    ] = None,
    attention: Annotated[Attention, typer.Option(help="Attention kernel.")] = Attention.AUTO,
    name: Annotated[str | None, typer.Option(help="Name of the plan; by default the file's.")] = None,
) -> None:
    """Write the plan that Galvatron would run; options stand for those of its run that its file does not hold."""
    with one_line_errors():
        unsaid = Unsaid(
            name=name or out.stem,
            tensor_sequence_parallel=sequence_parallel,
            gradient_reduction=gradient_reduction,
            precision=Precision(compute=precision_compute, reduce=precision_reduce or precision_compute),
            attention=attention,
            num_microbatches=num_microbatches,
        )
        given = read_galvatron(config)
        description, machines = read_document(model, Model), read_document(cluster, Cluster)
        write_document(out, plan_of_galvatron(given, description, machines, unsaid, config))


def export_command(
    plan: PlanFile,
    to: Annotated[System, typer.Option(help="The system that is to run the plan.")],
    out: Annotated[Path, typer.Option(help="Its file: JSON, command-line arguments or TOML.")],
) -> None:
    """Write a plan for another system, or say in one line what that system cannot express."""
    with one_line_errors():
        exported = _EXPORTERS[to](read_document(plan, Plan), plan)
        write_bytes(out, exported.text.encode())
    for note in exported.notes:
        typer.echo(note)
