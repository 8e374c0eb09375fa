"""Non-finite numbers: the dynamic loss scale that avoids them in float16, and the search for their origin.

The loss is multiplied by a scale S before the backward pass and gradients are divided by S after it, so that small
gradients do not underflow (Micikevicius et al. 2018). S is halved after an overflow, and doubled after 2000 steps
without one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count

import torch
from torch import Tensor, nn

from shardwright.types import EMBEDDING, HEAD
from shardwright_train.engine.engine import Engine
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.runner import Step
from shardwright_train.torch_private import tree_leaves

_START = 2.0**16
_GROWTH_STEPS = 2000
_FACTOR = 2.0
_MIN_SCALE = 1.0
# Forward finds come before those of the backward pass, then earlier microbatches, then lower layers, then ranks.
_Find = tuple[int, int, int, int, str]


@dataclass(frozen=True)
class LossScale:
    """The factor by which the loss is multiplied before the backward pass."""

    value: float = 1.0
    fixed: bool = True
    steps_without_overflow: int = 0

    @classmethod
    def for_compute(cls, dtype: str) -> "LossScale":
        """The initial scale for a dtype: float16 starts at 2^16 and adapts; other formats need none."""
        return cls(_START, fixed=False) if dtype == "float16" else cls()

    @property
    def can_fall(self) -> bool:
        """Return whether an overflow may come from the loss scale; at 1 it comes from the model."""
        return not self.fixed and self.value > _MIN_SCALE

    def after(self, overflowed: bool) -> "LossScale":
        """The scale of the next step: halved after an overflow, doubled after 2000 steps without one."""
        if self.fixed:
            return self
        if overflowed:
            return LossScale(self.value / _FACTOR, fixed=False)
        steps = self.steps_without_overflow + 1
        if steps == _GROWTH_STEPS:
            return LossScale(self.value * _FACTOR, fixed=False)
        return LossScale(self.value, fixed=False, steps_without_overflow=steps)


def first_nonfinite(engine: Engine, step: Step, world: World) -> str:
    """Run a step again, checking every layer's output and gradients, and return where the first non-finite value is.

    Collective over the world; the parameters are as they were, for such a step updates nothing.
    """
    finds: list[_Find] = []
    rank = world.rank

    def find_in_output(name: str, calls: Iterator[int], _module: nn.Module, _args: object, output: object) -> None:
        microbatch = next(calls)
        if not _finite(output):
            place = f"in the output of {name} on rank {rank}, microbatch {microbatch}"
            finds.append((0, microbatch, _position(name), rank, place))

    layers = engine.stage.layers
    hooks = [layer.module.register_forward_hook(partial(find_in_output, layer.name, count())) for layer in layers]
    engine.forward_backward(step)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        for name, parameter in layer.parallel.parameters.items():
            if parameter.grad is not None and not _finite(local_tensor(parameter.grad)):
                # The backward pass comes from the head and meets the lowest layer last.
                place = f"in the gradient of {layer.name}'s {name} on rank {rank}"
                finds.append((1, 0, -_position(layer.name), rank, place))
            parameter.grad = None
    known = list(chain.from_iterable(world.all_say(sorted(finds)[:1], list[_Find])))
    return f"first {min(known)[-1]}" if known else "and not again when the step was repeated"


def _finite(values: object) -> bool:
    # Detached, so that no graph is kept: a replay would otherwise go on to what selective recomputation left out.
    return all(bool(torch.isfinite(x.detach()).all()) for x in tree_leaves(values) if isinstance(x, Tensor))


def _position(layer: str) -> int:
    if layer == EMBEDDING:
        return -1
    return 1 << 30 if layer == HEAD else int(layer[len("layers[") : -1])
