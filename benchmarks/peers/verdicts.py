"""What each cost model says of the two plans, in words."""

from typing import Any

from peers.galvatron_repairs import DEFECTS, DIFFERENCES

__all__ = ["cause", "our_verdict", "their_verdict"]

ALIKE = 5e-4
"""Closer times are said to be alike; the figures are in the JSON."""


def our_verdict(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """What our simulator says of the peer's plan beside ours, and whether it is within the bytes that ours had."""
    if ours["plan"] is None:
        return ours["why"]
    ratio = theirs["simulated_s"] / ours["priced"]["simulated_s"]
    over_mib = max(theirs["memory_mib"]) - ours["budget_mib"]
    said = f"ours is {ratio - 1:.1%} faster" if ratio >= 1 else f"ours is {1 / ratio - 1:.1%} slower"
    said = "both alike" if abs(ratio - 1) < ALIKE else said
    return said + (f"; theirs is {over_mib} MiB over the budget" if over_mib > 0 else "")


def their_verdict(peer: dict[str, Any], said: dict[str, Any]) -> str:
    """What the peer's model says of our plan beside its own, and the defect that makes it prefer its own."""
    if "ours" not in peer:
        return f"its format cannot say our plan: {said.get('refused_too', 'nothing fits')}"
    ours, theirs, usable = peer["ours"], peer["theirs"], peer["theirs"]["usable_mib"]
    memory = f"memory {max(ours['memory_mib'])} MiB, "
    over_mib, late_mib = (max(ours[name]) - usable for name in ("memory_mib", "memory_mib_late_gradients"))
    memory += "fits" if over_mib <= 0 else f"{over_mib} MiB over"
    if over_mib > 0 and late_mib < over_mib:
        memory += f", {max(0, late_mib)} if gradients are not counted beside the activations that they replace"
    ratio = ours["step_s"] / theirs["step_s"]
    if abs(ratio - 1) < ALIKE:
        return f"prices both alike; {memory}"
    if ratio < 1:
        return f"prefers our plan by {1 / ratio - 1:.1%}; {memory}"
    turned = [names for names, s in ours["step_s_mended"].items() if s <= theirs["step_s_mended"][names]]
    return f"prefers its own by {ratio - 1:.1%}, {cause(turned)}; {memory}"


def cause(turned: list[str]) -> str:
    """What makes the peer's model prefer its own plan, from all that turns the preference when mended.

    One defect is named before several, and defects before the differences that are none.
    """
    for kind, names in (("defect", DEFECTS), ("difference", DIFFERENCES)):
        alone = [name for name in names if name in turned]
        if alone:
            return f"for the {kind} {' or '.join(alone)}"
        if " ".join(names) in turned:
            return f"for its {kind}s together ({', '.join(names)})"
    together = " ".join((*DEFECTS, *DIFFERENCES)) in turned
    return "for its defects and differences together" if together else "why is not determined"
