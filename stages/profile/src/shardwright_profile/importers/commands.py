"""The commands `shardwright-profile import …`."""

import sys
from pathlib import Path

from shardwright_formats.io import BadInput, read_document, write_document
from shardwright_formats.types import Model
from shardwright_formats.types.hardware_profile import write_hardware_profile
from shardwright_formats.types.model_profile import write_model_profile
from shardwright_profile.importers.fasop import FasopRequest, import_fasop, read_fasop_constants, read_fasop_times
from shardwright_profile.importers.fasop import fasop_hardware as made_of
from shardwright_profile.importers.flat_model import parse_type
from shardwright_profile.importers.galvatron.hardware import import_galvatron_hardware
from shardwright_profile.importers.galvatron.keys import read_computation, read_memory
from shardwright_profile.importers.galvatron.model_profile import (
    GalvatronRequest,
    flat_galvatron_model,
    import_galvatron,
)
from shardwright_profile.importers.traffic import Hardware
from shardwright_profile.options import (
    FasopHardwareOptions,
    FasopOptions,
    GalvatronHardwareOptions,
    GalvatronOptions,
)


def galvatron(options: GalvatronOptions) -> None:
    """Write the profile of a model that Galvatron measured and, for a model given by its types, its description."""
    times = read_computation(options.computation)
    sizes = None if options.memory is None else read_memory(options.memory)
    if options.sequence_parallel and sizes is None:
        raise BadInput("--sequence-parallel", "chooses among memory tables, and there are none", "pass --memory")
    models = [read_document(path, Model) for path in options.model]
    if bool(options.model) == bool(options.type) or bool(options.type) != bool(options.model_out):
        raise BadInput("--model", "either --model, or --type with --model-out, is needed", "pass one of the two")
    if options.type:
        if sizes is None:
            raise BadInput("--type", "sizes of the layers are needed", "pass --memory")
        types = [parse_type(text) for text in options.type]
        models = [flat_galvatron_model(options.name, times, sizes, types, options.tables)]
    hardware = None if options.hardware is None else Hardware.read(options.hardware)
    profile = import_galvatron(GalvatronRequest(options, times, sizes, tuple(models), hardware))
    write_model_profile(options.out, profile)
    if options.model_out:
        write_document(options.model_out, models[0])
    _report(options.out, profile.provenance.notes)


def galvatron_hardware(options: GalvatronHardwareOptions) -> None:
    """Write the profile of a cluster that Galvatron measured."""
    profile = import_galvatron_hardware(options)
    write_hardware_profile(options.out, profile)
    _report(options.out, profile.provenance.notes)


def fasop(options: FasopOptions) -> None:
    """Write the model profile from FASOP's layer times."""
    times, constants = read_fasop_times(options.times), read_fasop_constants(options.constants)
    profile = import_fasop(FasopRequest(options, times, constants, read_document(options.model, Model)))
    write_model_profile(options.out, profile)
    _report(options.out, profile.provenance.notes)


def fasop_hardware(options: FasopHardwareOptions) -> None:
    """Write the hardware profile from FASOP's bandwidths."""
    profile = made_of(read_fasop_constants(options.constants), options)
    write_hardware_profile(options.out, profile)
    _report(options.out, profile.provenance.notes)


def _report(out: Path, notes: str) -> None:
    """Print a profile's notes, a line each, and its path on standard error."""
    for line in notes.splitlines():
        print(f"note: {line}", file=sys.stderr)
    print(f"{out} is written", file=sys.stderr)
