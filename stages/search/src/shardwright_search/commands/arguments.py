"""Arguments that several commands of shardwright-search share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwright_search.cost_model.time_model import TimeModel

__all__ = [
    "ClusterFile",
    "CorrectionFile",
    "DType",
    "HardwareFile",
    "ModelFile",
    "PlanFile",
    "ProfileFile",
    "TimeModelOption",
]

ClusterFile = Annotated[Path, typer.Option("--cluster", help="Cluster file (shardwright.cluster, JSON).")]
ModelFile = Annotated[Path, typer.Option("--model", help="Model description (shardwright.model, JSON).")]
HardwareFile = Annotated[Path, typer.Option("--hardware", help="Hardware profile of the cluster (HDF5).")]
ProfileFile = Annotated[Path, typer.Option("--profile", help="Model profile on the cluster's device (HDF5).")]
CorrectionFile = Annotated[
    Path | None,
    typer.Option("--correction", help="What measured plans taught (shardwright.correction, JSON), to be applied."),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file (shardwright.plan, JSON).")]
DType = Literal["float64", "float32", "bfloat16", "float16"]
TimeModelOption = Annotated[
    TimeModel, typer.Option("--time-model", help="How times are read off the profile; sequence: at any length, too.")
]
