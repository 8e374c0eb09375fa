"""The ways to read times and activations off a profile."""

from enum import StrEnum


class TimeModel(StrEnum):
    """How times and activations are derived from a profile's points."""

    INTERPOLATE = "interpolate"
    """Between the points of the model's own length."""
    STATIC = "static"
    """Proportional to the micro-batch size."""
    BATCH = "batch"
    """A line in the micro-batch size."""
    SEQUENCE = "sequence"
    """A quadratic in the length, also for lengths that were never profiled."""
