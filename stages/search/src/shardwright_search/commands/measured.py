"""`shardwright correct`: correction factors from measured plans."""

from pathlib import Path

from shardwright.command import show
from shardwright.io import BadInput, atomic_path, read_document, sha256_of_file, write_document
from shardwright.types import Correction, Measurement
from shardwright_search.cost_model.calibration import Evidence, evidence_of, learned
from shardwright_search.cost_model.profiles import Profiles, read_profiles
from shardwright_search.options import CorrectOptions


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
