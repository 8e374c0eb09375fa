"""`shardwright-search correct`: what measured plans teach, as a file of its own."""

from pathlib import Path
from typing import Annotated

import typer

from shardwright_formats.io.errors import BadInput, one_line_errors
from shardwright_formats.io.json import read_document, sha256_of_file, write_document
from shardwright_formats.types.correction import Correction
from shardwright_formats.types.measurement import Measurement
from shardwright_search.cost_model.calibration import Evidence, evidence_of, learned
from shardwright_search.cost_model.profiles import Profiles, read_profiles

__all__ = ["correct_command"]


def correct_command(
    measurements: Annotated[list[Path], typer.Argument(metavar="MEASUREMENT...", help="Measured plans (JSON).")],
    hardware: Annotated[Path, typer.Option(help="Hardware profile that the plans were predicted with (HDF5).")],
    profile: Annotated[Path, typer.Option(help="Model profile that the plans were predicted with (HDF5).")],
    out: Annotated[Path, typer.Option(help="Correction file to write (shardwright.correction, JSON).")],
) -> None:
    """Learn from measured plans by which factor each term of a prediction is off; the profiles stay as they are.

    A search uses the factors only where it is given the file with --correction.
    """
    with one_line_errors():
        profiles = read_profiles(hardware, profile)
        evidence = [one for path in measurements for one in _evidence_in(path, profiles)]
        factors, warnings = learned(evidence)
        correction = Correction(
            factors=factors,
            plans_sha256=tuple(dict.fromkeys(one.plan_sha256 for one in evidence)),
            measurements_sha256=tuple(map(sha256_of_file, measurements)),
            hardware_sha256=sha256_of_file(hardware),
            profiles_sha256=(sha256_of_file(profile),),
            warnings=warnings,
        )
        write_document(out, correction)
    for term, of in factors.items():
        typer.echo(f"{term}: {of.factor:.3f} x predicted ({of.lowest:.3f} to {of.highest:.3f}; {of.num_plans} plans)")
    for warning in warnings:
        typer.echo(f"warning: {warning}")


def _evidence_in(path: Path, profiles: Profiles) -> list[Evidence]:
    measurement = read_document(path, Measurement)
    if measurement.device != profiles.origin.device:
        what = f"was measured on {measurement.device!r}, the profile on {profiles.origin.device!r}"
        raise BadInput(path, what, "take the profiles of that device")
    return [one for measured in measurement.plans for one in evidence_of(measured, profiles)]
