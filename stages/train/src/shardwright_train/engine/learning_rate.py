"""Optimizer hyperparameters: the learning rate of every step, and parameter groups by stock names and dims."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardwright.io import BadInput

OPTION = "--learning-rate-factor"
_MAX = 1e6


class LearningRateFactor(NamedTuple):
    """A factor of the learning rate of some parameters."""

    pattern: str
    """Pattern of full names in the stock model: `*` matches any text, including dots, `?` one character."""
    factor: float
    """Factor of at least 0; the factor 0 freezes the parameters."""

    @classmethod
    def parse(cls, text: str) -> "LearningRateFactor":
        """Parse `PATTERN=FACTOR`; raise BadInput if the text is malformed."""
        pattern, _, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not pattern or not 0 <= factor <= _MAX:
            problem = f"{text!r} is not a PATTERN=FACTOR with a factor from 0 to {_MAX:,.0f}"
            raise BadInput(OPTION, problem, "write parameters as in 'model.layers.*.weight=0.1'")
        return cls(pattern, factor)


class LearningRateSchedule(StrEnum):
    """The shape of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    INVERSE_SQRT = "inverse_sqrt"
    WSD = "wsd"


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The optimizer hyperparameters of a run, which are not part of the plan."""

    learning_rate: float
    """Peak learning rate."""
    warmup_steps: int
    steps: int
    weight_decay: float
    clip_norm: float
    decay_norms_and_biases: bool = False
    learning_rate_factors: tuple[LearningRateFactor, ...] = ()
    """Factors of the learning rate of matching parameters; the first pattern that matches decides."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    learning_rate_schedule: LearningRateSchedule = LearningRateSchedule.COSINE
    final_fraction: float = 0.1
    """Learning rate of the last step as a fraction of the peak, for schedules that decay to it."""
    router_bias_update_rate: float = 1e-3
    """Change per step of a router's bias for an expert that is chosen more or less often than the mean."""
    decay_fraction: float = 0.1
    """Fraction of all steps in which wsd decays."""

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step; steps count from 1, and the rate is constant after the last step.

        All schedules rise linearly to the peak at step `warmup_steps` (Goyal et al. 2017). Then, with p the fraction of
        the later steps that is done and f the `final_fraction`, the peak is multiplied by

        - constant: 1;
        - linear: 1 - (1 - f) p (Devlin et al. 2019, with f = 0);
        - cosine: f + (1 - f) (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017, equation 5, without restarts);
        - inverse_sqrt: sqrt(warmup_steps / step), or sqrt(1 / step) without warm-up (Vaswani et al. 2017, equation 3,
          scaled to the peak);
        - wsd: 1, then over the last `decay_fraction` of all steps, or what the warm-up leaves of it, linearly to f (Hu
          et al. 2024, section 4, who leave the shape of the decay open; linear as in Hägele et al. 2024).
        """
        step, warmup = min(step, self.steps), self.warmup_steps
        if step <= warmup:
            return self.learning_rate * step / warmup
        match self.learning_rate_schedule:
            case LearningRateSchedule.CONSTANT:
                share = 1.0
            case LearningRateSchedule.LINEAR:
                share = self._line(step, warmup)
            case LearningRateSchedule.COSINE:
                cosine = 0.5 * (1 + math.cos(math.pi * self._progress(step, warmup)))
                share = self.final_fraction + (1 - self.final_fraction) * cosine
            case LearningRateSchedule.INVERSE_SQRT:
                share = math.sqrt(max(1, warmup) / step)
            case LearningRateSchedule.WSD:
                share = self._line(step, max(warmup, self.steps * (1 - self.decay_fraction)))
        return self.learning_rate * share

    def _line(self, step: int, begin: float) -> float:
        return 1 - (1 - self.final_fraction) * self._progress(step, begin)

    def _progress(self, step: int, begin: float) -> float:
        """Return the fraction of the steps after `begin` that is done, from 0 to 1."""
        return (step - begin) / (self.steps - begin) if step > begin else 0.0


ANY = Hyperparameters(learning_rate=1e-4, warmup_steps=0, steps=1, weight_decay=0.1, clip_norm=1.0)
"""Hyperparameters for measurements of time and memory, for which only finiteness of the weights matters."""


class ParameterGroup(NamedTuple):
    """The properties of a parameter that its update by the optimizer depends on."""

    decays: bool
    factor: float


def group_of(
    name: str, dims: int, factors: Sequence[LearningRateFactor], decay_norms_and_biases: bool
) -> ParameterGroup:
    """Return the parameter group of a parameter, by its name and number of dims in the stock model.

    A parameter counts as a norm or bias if it has a single dim, or if its name ends with "bias". If several patterns
    match, the first one decides.
    """
    decays = decay_norms_and_biases or (dims > 1 and not name.endswith("bias"))
    matching = (factor for pattern, factor in factors if fnmatchcase(name, pattern))
    return ParameterGroup(decays, next(matching, 1.0))


def check_patterns(factors: Iterable[LearningRateFactor], names: Sequence[str]) -> None:
    """Raise BadInput if a pattern does not match any of a model's parameters."""
    for pattern, _ in factors:
        if not any(fnmatchcase(name, pattern) for name in names):
            problem = f"{pattern!r} matches none of the model's {len(names)} parameters"
            raise BadInput(OPTION, problem, f"their names look like {names[0]}")
