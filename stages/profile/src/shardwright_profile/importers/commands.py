"""The commands `shardwright-profile import …`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwright_formats.io.errors import BadInput, one_line_errors

__all__ = ["import_app"]

import_app = typer.Typer(no_args_is_help=True, help="Turn published profiles of other systems into ours.")

Out = Annotated[Path, typer.Option(help="The profile to write, HDF5.")]
Ratio = Annotated[
    float,
    typer.Option(min=0.0, help="Backward time over forward time, without recomputation: it is in none of these files."),
]
Device = Annotated[str, typer.Option(help="Name of the device that was measured, as clusters name it.")]
MicroBatches = Annotated[
    str, typer.Option(help="Micro-batches to have rows for even where none was measured, in samples, as 1,2,4.")
]


@import_app.command()
def galvatron(
    computation: Annotated[Path, typer.Option(help="Times: computation_profiling_*.json, in ms.")],
    device: Device,
    backward_ratio: Ratio,
    out: Out,
    memory: Annotated[Path | None, typer.Option(help="Memory: memory_profiling_*.json, in MiB.")] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(help="The model, JSON (shardwright.model); may be repeated, once for each sequence length."),
    ] = None,
    type_: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            help="In place of --model, once for each type of layer, in order: NAME,LAYERS,POSITIONS,FEATURES,HEADS.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="With --type: name of the model.")] = "galvatron",
    model_out: Annotated[
        Path | None, typer.Option(help="With --type: the description to write, JSON (shardwright.model).")
    ] = None,
    tp_sizes: Annotated[
        str, typer.Option(help="Tensor-parallel sizes, in ranks, as 1,2,4; beyond 1 times are assumed.")
    ] = "1",
    hardware: Annotated[
        Path | None, typer.Option(help="Hardware profile, HDF5, that prices the traffic of tensor parallelism.")
    ] = None,
    sequence_parallel: Annotated[
        Literal["none", "megatron"] | None,
        typer.Option(help="Of a memory file with both kinds of tables, which to take; by default megatron's."),
    ] = None,
    micro_batch_sizes: MicroBatches = "",
    precision: Annotated[
        str, typer.Option(help="Number formats that were measured: parameters/compute/reduce.")
    ] = "float32/bfloat16/float32",
    attention: Annotated[str, typer.Option(help="Attention kernel that was measured.")] = "auto",
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Leave out or level times that cannot be, and say so; else they are refused."),
    ] = False,
) -> None:
    """Import a model's times and memory as hetu-galvatron 2.4.0 measures them.

    Galvatron times forward passes on one GPU. What else a row says is derived or assumed, and marked so.
    """
    with one_line_errors():
        from shardwright_formats.io.json import read_document, write_document
        from shardwright_formats.types.hardware_profile import read_hardware_profile
        from shardwright_formats.types.model import Model
        from shardwright_formats.types.model_profile import write_model_profile
        from shardwright_formats.types.strategy import SequenceParallel
        from shardwright_profile.importers.flat_model import parse_type
        from shardwright_profile.importers.galvatron.keys import read_computation, read_memory
        from shardwright_profile.importers.galvatron.model_profile import (
            GalvatronRequest,
            flat_galvatron_model,
            import_galvatron,
        )
        from shardwright_profile.importers.traffic import Hardware

        _check_precision(precision)
        times = read_computation(computation)
        sizes = None if memory is None else read_memory(memory)
        tables = None if sequence_parallel is None else SequenceParallel(sequence_parallel)
        if tables and sizes is None:
            raise BadInput("--sequence-parallel", "chooses among memory tables, and there are none", "pass --memory")
        models = [read_document(path, Model) for path in model or ()]
        if bool(model) == bool(type_) or bool(type_) != bool(model_out):
            raise BadInput("--model", "either --model, or --type with --model-out, is needed", "pass one of the two")
        if type_ and model_out:
            if sizes is None:
                raise BadInput("--type", "sizes of the layers are needed", "pass --memory")
            models = [flat_galvatron_model(name, times, sizes, [parse_type(text) for text in type_], tables)]
        profile = import_galvatron(
            GalvatronRequest(
                computation=times,
                memory=sizes,
                models=tuple(models),
                device=device,
                backward_ratio=backward_ratio,
                tp_sizes=_numbers("--tp-sizes", tp_sizes) or (1,),
                hardware=None if hardware is None else Hardware(hardware, read_hardware_profile(hardware)),
                sequence_parallel=tables,
                micro_batch_sizes=_numbers("--micro-batch-sizes", micro_batch_sizes),
                precision=precision,
                attention=attention,
                repair=repair,
            )
        )
        write_model_profile(out, profile)
        if type_ and model_out:
            write_document(model_out, models[0])
        _tell(out, profile.provenance.notes)


@import_app.command()
def galvatron_hardware(
    cluster: Annotated[str, typer.Option(help="Name of the cluster in all later files.")],
    device: Device,
    out: Out,
    allreduce: Annotated[
        list[Path] | None,
        typer.Option(help="allreduce_bandwidth_*.json, in GB/s (1e9); may be repeated, the first that says it counts."),
    ] = None,
    p2p: Annotated[
        list[Path] | None, typer.Option(help="p2p_bandwidth_*.json, in GB/s (1e9); may be repeated.")
    ] = None,
    sp_time: Annotated[
        list[Path] | None,
        typer.Option(help="sp_time_*.json, in ms on messages in MiB: taken before bandwidths; may be repeated."),
    ] = None,
    overlap: Annotated[Path | None, typer.Option(help="overlap_coefficient.json, a factor of time.")] = None,
) -> None:
    """Import a cluster's bandwidths and times as hetu-galvatron 2.4.0 measures them."""
    with one_line_errors():
        from shardwright_formats.types.hardware_profile import write_hardware_profile
        from shardwright_profile.importers.galvatron.hardware import GalvatronTables, import_galvatron_hardware

        tables = GalvatronTables(tuple(allreduce or ()), tuple(p2p or ()), tuple(sp_time or ()), overlap)
        profile = import_galvatron_hardware(tables, cluster, device)
        write_hardware_profile(out, profile)
        _tell(out, profile.provenance.notes)


@import_app.command()
def fasop(
    times: Annotated[Path, typer.Option(help="Layer times, CSV, in s: config/reference/fasop-layer-times.csv.")],
    constants: Annotated[Path, typer.Option(help="Constants, JSON: config/reference/fasop-constants.json.")],
    model_name: Annotated[str, typer.Option(help="FASOP's model: gpt2XL, bert or T5.")],
    gpu: Annotated[str, typer.Option(help="FASOP's GPU: A100 or A10.")],
    model: Annotated[Path, typer.Option(help="The model, JSON (shardwright.model).")],
    device: Device,
    backward_ratio: Ratio,
    out: Out,
    micro_batch_sizes: MicroBatches = "",
    precision: Annotated[
        str, typer.Option(help="Number formats to assume: parameters/compute/reduce.")
    ] = "float32/float16/float32",
) -> None:
    """Import the layer times of FASOP: one forward time a kind of layer, at micro-batch 1 and tp_size 1, 2, 4."""
    with one_line_errors():
        from shardwright_formats.io.json import read_document
        from shardwright_formats.types.model import Model
        from shardwright_formats.types.model_profile import write_model_profile
        from shardwright_profile.importers.fasop import FasopRequest, import_fasop, read_fasop_times
        from shardwright_profile.importers.fasop_constants import read_fasop_constants

        _check_precision(precision)
        profile = import_fasop(
            FasopRequest(
                times=read_fasop_times(times),
                constants=read_fasop_constants(constants),
                fasop_model=model_name,
                gpu=gpu,
                model=read_document(model, Model),
                device=device,
                backward_ratio=backward_ratio,
                micro_batch_sizes=_numbers("--micro-batch-sizes", micro_batch_sizes),
                precision=precision,
            )
        )
        write_model_profile(out, profile)
        _tell(out, profile.provenance.notes)


@import_app.command()
def fasop_hardware(
    constants: Annotated[Path, typer.Option(help="Constants, JSON: config/reference/fasop-constants.json.")],
    setting: Annotated[str, typer.Option(help="FASOP's bandwidths: default (4 GPUs a node) or pareto (8).")],
    gpu: Annotated[str, typer.Option(help="FASOP's GPU: A100 or A10.")],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")],
    cluster: Annotated[str, typer.Option(help="Name of the cluster in all later files.")],
    device: Device,
    out: Out,
) -> None:
    """Write a hardware profile from FASOP's bandwidths; nothing of it was timed."""
    with one_line_errors():
        from shardwright_formats.types.hardware_profile import write_hardware_profile
        from shardwright_profile.importers.fasop_constants import fasop_hardware as made_of
        from shardwright_profile.importers.fasop_constants import read_fasop_constants

        profile = made_of(read_fasop_constants(constants), setting, gpu, nodes, cluster, device)
        write_hardware_profile(out, profile)
        _tell(out, profile.provenance.notes)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part]
    if not all(len(part) < 10 and part.isascii() and part.isdigit() and int(part) for part in parts):
        raise BadInput(option, f"{text[:40]!r} is no list of whole numbers", "write them as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def _check_precision(precision: str) -> None:
    from shardwright_formats.types.plan import ITEMSIZE

    parts = precision.split("/")
    if len(parts) != 3 or any(part not in ITEMSIZE for part in parts):
        raise BadInput("--precision", f"{precision!r} is unknown", "write it as float32/bfloat16/float32")


def _tell(out: Path, notes: str) -> None:
    """What there is to know of a profile, a line each, on standard error."""
    lines: Sequence[str] = notes.splitlines()
    for line in lines:
        print(f"note: {line}", file=sys.stderr)
    print(f"{out} is written", file=sys.stderr)
