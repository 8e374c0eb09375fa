"""The ranks of a process group in the description that PyTorch shows, for readers of that text."""

from collections.abc import Sequence

_OF_RANKS = " of ranks "


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the part of a group's description that lists its ranks; `described_ranks` parses it."""
    return f"{_OF_RANKS}{' '.join(map(str, ranks))}"


def described_ranks(description: str) -> tuple[int, ...]:
    """Return the ranks of a group from its description; empty if the description has another form."""
    _, separator, ranks = description.rpartition(_OF_RANKS)
    return tuple(map(int, ranks.split())) if separator else ()
