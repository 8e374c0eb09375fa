"""What plans are priced with: profiles, and what measured plans taught about them if that is asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io import BadInput, read_document
from shardwright_formats.types import Correction
from shardwright_search.cost_model.profiles import Profiles, read_profiles
from shardwright_search.options import ProfileOptions


class Inputs(NamedTuple):
    """Profiles, the files they come from by role, and what a prediction must say of them."""

    profiles: Profiles
    files: dict[str, Path]
    warnings: tuple[str, ...]


def read_inputs(options: ProfileOptions) -> Inputs:
    """Read the profiles, with the correction applied to them where there is one.

    Raises BadInput where the correction was learned from other profiles.
    """
    hardware, profile, correction = options.hardware, options.profile, options.correction
    profiles = read_profiles(hardware, profile)
    files = _roles("hardware", hardware) | _roles("profile", profile)
    if correction is None:
        return Inputs(profiles, files, ())
    from shardwright_search.cost_model.calibration import check_learned_from, corrected

    if profiles.others:
        raise BadInput(correction, "is given for a mixed cluster", "leave it out: a correction is of one device")
    learned = read_document(correction, Correction)
    check_learned_from(learned, correction, hardware[0], profile)
    words = [f"{term} x {of.factor:.3f}" for term, of in sorted(learned.factors.items())]
    told = f"corrected by {correction.name}: {', '.join(words)}"
    warnings = (told, *(f"{correction.name}: {warning}" for warning in learned.warnings))
    return Inputs(corrected(profiles, learned), files | {"correction": correction}, warnings)


def _roles(role: str, files: Sequence[Path]) -> dict[str, Path]:
    """The role itself, of several files with their number from the second on."""
    return {role if number == 1 else f"{role} {number}": file for number, file in enumerate(files, 1)}
