"""Slowdowns of a computation and a collective that overlap, as given by the user."""

from typing import NamedTuple

from shardwright.io import BadInput

_OPTION = "--overlap-slowdowns"
_MAX_SLOWDOWN = 1000.0


class Slowdowns(NamedTuple):
    """Slowdowns of a computation and a collective that overlap: ratios to the time without overlap, at least 1."""

    compute: float
    collective: float


class Overlap(NamedTuple):
    """Slowdowns by the kind of link that the collective uses."""

    inside: Slowdowns
    """Slowdowns if the collective is inside a node."""
    across: Slowdowns
    """Slowdowns if the collective is between nodes."""

    @property
    def text(self) -> str:
        """Return the slowdowns in words, for the notes of a profile."""
        inside, across = (f"{slowdowns.compute:g} and {slowdowns.collective:g}" for slowdowns in self)
        return (
            "computation and collectives of data parallelism beside one another take (given) "
            f"{inside} times as long inside a node, {across} across nodes"
        )


def overlap_slowdowns(text: str) -> Overlap:
    """Parse `1.25:1.1`, the slowdowns of a computation and of a collective, or `1.25:1.1,1.05:1.2`.

    The second form gives slowdowns inside a node, then across nodes. Raises BadInput, naming the option, if the text
    has another form.
    """
    try:
        pairs = [Slowdowns(*map(float, part.split(":"))) for part in text.split(",")]
    except (ValueError, TypeError):
        pairs = []
    if len(pairs) not in (1, 2) or any(not 1 <= value <= _MAX_SLOWDOWN for pair in pairs for value in pair):
        fix = "write 1.25:1.1 or, inside a node and across nodes, 1.25:1.1,1.05:1.2, each from 1 to 1000"
        raise BadInput(_OPTION, f"{text!r:.40} is not a pair of slowdowns", fix)
    return Overlap(pairs[0], pairs[-1])
