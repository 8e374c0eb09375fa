"""Scaling the loss so that float16 gradients neither vanish nor overflow (Micikevicius et al. 2018)."""

from dataclasses import dataclass

_START = 2.0**16
_GROWTH_STEPS = 2000
_FACTOR = 2.0
_LEAST = 1.0


@dataclass(frozen=True)
class LossScale:
    """The factor by which the loss is multiplied before the backward pass."""

    value: float = 1.0
    fixed: bool = True
    steps_without_overflow: int = 0

    @classmethod
    def for_compute(cls, dtype: str) -> "LossScale":
        """Return the initial scale of a dtype: float16 starts at 2^16 and adapts; other formats need none."""
        return cls(_START, fixed=False) if dtype == "float16" else cls()

    @property
    def can_fall(self) -> bool:
        """Return whether an overflow may come from the scale; at 1 it comes from the model."""
        return not self.fixed and self.value > _LEAST

    def after(self, overflowed: bool) -> "LossScale":
        """Return the scale of the next step: halved after an overflow, doubled after 2000 steps without one."""
        if self.fixed:
            return self
        if overflowed:
            return LossScale(self.value / _FACTOR, fixed=False)
        steps = self.steps_without_overflow + 1
        if steps == _GROWTH_STEPS:
            return LossScale(self.value * _FACTOR, fixed=False)
        return LossScale(self.value, fixed=False, steps_without_overflow=steps)
