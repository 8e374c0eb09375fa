"""Parameter groups of the optimizer, by the parameters' names and dims in the stock model."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardwright_formats.io import BadInput

OPTION = "--learning-rate-factor"
_MAX = 1e6


class LearningRateFactor(NamedTuple):
    """A factor of the learning rate of some parameters."""

    pattern: str
    """Pattern of full names in the stock model: `*` matches any text, dots included, `?` one character."""
    factor: float
    """Factor, at least 0, which freezes the parameters."""

    @classmethod
    def of(cls, text: str) -> "LearningRateFactor":
        """Parse `PATTERN=FACTOR`; raise BadInput where a text is malformed."""
        pattern, _, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not pattern or not 0 <= factor <= _MAX:
            what = f"{text!r} is no PATTERN=FACTOR with a factor from 0 to {_MAX:,.0f}"
            raise BadInput(OPTION, what, "name parameters as in 'model.layers.*.weight=0.1'")
        return cls(pattern, factor)


class ParameterGroup(NamedTuple):
    """The properties of a parameter that its update by the optimizer depends on."""

    decays: bool
    factor: float


def group_of(
    name: str, dims: int, factors: Sequence[LearningRateFactor], decay_norms_and_biases: bool
) -> ParameterGroup:
    """Return the group of a parameter, by its name and number of dims in the stock model.

    Norms and biases are the vectors, and what is called a bias. Of several patterns that match the first decides.
    """
    decays = decay_norms_and_biases or (dims > 1 and not name.endswith("bias"))
    found = (factor for pattern, factor in factors if fnmatchcase(name, pattern))
    return ParameterGroup(decays, next(found, 1.0))


def check_patterns(factors: Iterable[LearningRateFactor], names: Sequence[str]) -> None:
    """Raise BadInput where a pattern matches none of a model's parameters."""
    for pattern, _ in factors:
        if not any(fnmatchcase(name, pattern) for name in names):
            what = f"{pattern!r} matches none of the model's {len(names)} parameters"
            raise BadInput(OPTION, what, f"they are called {names[0]} and the like")
