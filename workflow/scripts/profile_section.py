"""What the report says of a profile: where its numbers come from, how well curves explain them, and their picture."""

import base64
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwright_formats.types.model_profile import ModelProfile, read_model_profile

__all__ = ["ProfileOutcome", "profile_section", "read_profile"]

_MODES = {
    "batch": "line in the micro-batch size",
    "sequence": "parabola in the sequence length",
    "joint": "both together",
}
_QUANTITIES = {"forward_s": "forward", "backward_s": "backward", "activation_bytes": "activations"}


class ProfileOutcome(NamedTuple):
    """A model profile and the picture that was drawn of it."""

    name: str
    profile: ModelProfile
    picture: bytes
    """SVG."""


def read_profile(results: Path, name: str) -> ProfileOutcome:
    """A profile by its file's name, `MODEL@NODE_TYPE`; BadInput where it cannot be read."""
    profile = read_model_profile(results / "profiles" / f"{name}.h5")
    return ProfileOutcome(name, profile, (results / "pictures" / f"{name}.svg").read_bytes())


def profile_section(found: ProfileOutcome) -> str:
    """The section of one profile."""
    origin, provenance, layers = found.profile.origin, found.profile.provenance, found.profile.layers
    sources = sorted({value.decode() for name in layers if name.endswith("_source") for value in layers[name]})
    facts = (
        f"{origin.model} on {origin.device} ({origin.backend}), {origin.precision}, attention {origin.attention}; "
        f"{len(layers['type'])} points, {', '.join(sources)}; {provenance.date}, {provenance.versions}"
    )
    notes = "".join(f"<li>{escape(line)}</li>" for line in provenance.notes.splitlines())
    encoded = base64.b64encode(found.picture).decode()
    return (
        f"<h2>Profile: {escape(found.name)}</h2><p class='soft'>{escape(facts)}</p>"
        + (f"<ul>{notes}</ul>" if notes else "")
        + _fits(found.profile)
        + f'<div class="wide"><img alt="points, curves and residuals" src="data:image/svg+xml;base64,{encoded}"></div>'
    )


def _fits(profile: ModelProfile) -> str:
    fits, rows = profile.fits, []
    for mode, words in _MODES.items():
        for quantity, of in _QUANTITIES.items():
            chosen = (fits["mode"] == mode.encode()) & (fits["quantity"] == quantity.encode())
            if not chosen.any():
                continue
            left_out = fits["left_out_error"][chosen & (fits["left_out_points"] > 0)]
            numbers = (
                str(int(chosen.sum())),
                f"{float(np.median(fits['typical_residual'][chosen])):.1%}",
                f"{float(fits['worst_residual'][chosen].max()):.1%}",
                f"{float(np.median(left_out)):.1%}" if len(left_out) else "–",
            )
            cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
            rows.append(f"<tr><td>{of}</td><td>{words}</td>{cells}</tr>")
    if not rows:
        return ""
    heads = ("curves", "typical residual", "worst", "left out and predicted")
    head = "<th></th><th>curve</th>" + "".join(f'<th class="number">{name}</th>' for name in heads)
    return (
        "<h3>How well curves explain the points (relative errors; medians over the curves)</h3>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
