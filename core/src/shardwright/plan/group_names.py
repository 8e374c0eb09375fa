"""The ranks of a process group in the text that PyTorch knows it by, for those who have the text alone."""

from collections.abc import Sequence

_OF_RANKS = " of ranks "


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the end of a group's description; `described_ranks` reads it."""
    return f"{_OF_RANKS}{' '.join(map(str, ranks))}"


def described_ranks(description: str) -> tuple[int, ...]:
    """Return the ranks of a group by its description, none where it has another form."""
    _, separator, ranks = description.rpartition(_OF_RANKS)
    return tuple(map(int, ranks.split())) if separator else ()
