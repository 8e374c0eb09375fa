"""The learning rate of every step."""

import math
from enum import StrEnum

__all__ = ["LearningRateSchedule", "learning_rate_at"]


class LearningRateSchedule(StrEnum):
    """What follows the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    INVERSE_SQRT = "inverse_sqrt"
    WSD = "wsd"


def learning_rate_at(
    step: int,
    schedule: LearningRateSchedule,
    *,
    peak: float,
    steps: int,
    warmup_steps: int,
    final_fraction: float,
    decay_fraction: float,
) -> float:
    """The learning rate of a step; steps count from 1, and past the last of `steps` it stays what it was there.

    All schedules rise in a line to `peak` at step `warmup_steps` (Goyal et al. 2017). Then, with p the share of the
    steps after it that are done and f the `final_fraction`, the peak is multiplied by

    - constant: 1;
    - linear: 1 - (1 - f) p (Devlin et al. 2019, with f = 0);
    - cosine: f + (1 - f) (1 + cos(pi p)) / 2 (Loshchilov & Hutter 2017, equation 5, without restarts);
    - inverse_sqrt: sqrt(warmup_steps / step), or sqrt(1 / step) without warm-up (Vaswani et al. 2017, equation 3,
      scaled to the peak);
    - wsd: 1, then over the last `decay_fraction` of all steps, or what the warm-up leaves of it, a line to f (Hu et al.
      2024, section 4, who leave the shape of the decay open; the line is that of Hägele et al. 2024).
    """
    step = min(step, steps)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    match schedule:
        case LearningRateSchedule.CONSTANT:
            share = 1.0
        case LearningRateSchedule.LINEAR:
            share = _line(_progress(step, warmup_steps, steps), final_fraction)
        case LearningRateSchedule.COSINE:
            cosine = 0.5 * (1 + math.cos(math.pi * _progress(step, warmup_steps, steps)))
            share = final_fraction + (1 - final_fraction) * cosine
        case LearningRateSchedule.INVERSE_SQRT:
            share = math.sqrt(max(1, warmup_steps) / step)
        case LearningRateSchedule.WSD:
            begin = max(warmup_steps, steps * (1 - decay_fraction))
            share = _line(_progress(step, begin, steps), final_fraction)
    return peak * share


def _progress(step: int, begin: float, end: int) -> float:
    """How much of the steps after `begin` up to `end` is done, from 0 to 1."""
    return (step - begin) / (end - begin) if step > begin else 0.0


def _line(progress: float, final_fraction: float) -> float:
    return 1 - (1 - final_fraction) * progress
