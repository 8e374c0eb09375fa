"""Optimizer updates on local tensors, which a flag on the device can disable.

They are PyTorch's optimizers, or have their shape, and the two attributes of its fused ones: `found_inf`, 1 where the
step must change nothing, and `grad_scale`, a divisor of gradients. With g the gradient, r the learning rate of a
parameter and d its decay:

- adamw: `torch.optim.AdamW` (Loshchilov & Hutter 2019);
- adamw-bf16: the same, whose averages are rounded to bfloat16 when the step is over: the step itself uses unrounded
  ones. An average that changes by less than 1 part in 512 of itself stays as it is;
- adamw-8bit: the same, whose averages of matrices become codes of 8 bits (eight_bits.py);
- sgd: `torch.optim.SGD` with momentum 0.9: b = 0.9 b + g + d w, w = w - r b; the decay is part of the gradient;
- lion (Chen et al. 2023, algorithm 2): w = w - r (sign(0.9 m + 0.1 g) + d w), then m = 0.99 m + 0.01 g;
- muon: `torch.optim.Muon` with `match_rms_adamw`, for each matrix [A, B] of blocks: m = 0.95 m + 0.05 g, and
  w = w - r (0.2 sqrt(max(A, B)) O(0.05 g + 0.95 m) + d w), where O is of homes.py; adamw for all other parameters.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from shardwright.optimizers.registry import ADAMW, ADAMW_8BIT, ADAMW_BF16, LION, MUON, SGD, Optimizer
from shardwright_train.engine.eight_bits import Blocks, values
from shardwright_train.engine.homes import Held, Homes
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.parallel.data import placed_as, torch_dtype
from shardwright_train.parallel.process_groups import Groups

MOMENTUM = 0.9
LION_BETAS = (0.9, 0.99)
MUON_MOMENTUM, MUON_SCALE = 0.95, 0.2
_BLOCKS, _CODES, _SCALES = "blocks", "_codes", "_scales"
"""Key of the blocks of a state in codes, and ends of the names of these and of their scales."""
_HELD = "held"
"""Key of what ranks hold of a parameter of matrices that are updated whole."""


class _Update(torch.optim.Optimizer, ABC):
    """An update of this project, parameter by parameter."""

    found_inf: Tensor
    grad_scale: Tensor | None

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group, parameter in self._with_gradients():
            self.update(parameter, group, self.state[parameter])

    @abstractmethod
    def update(self, parameter: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Update one parameter of a group, and its states."""

    def _with_gradients(self) -> Iterator[tuple[Mapping[str, Any], Tensor]]:
        return ((group, p) for group in self.param_groups for p in group["params"] if p.grad is not None)

    def _gradient(self, parameter: Tensor, otherwise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient, or `otherwise` if the step must not change anything; and 0 or 1 to scale changes."""
        assert parameter.grad is not None
        gradient = parameter.grad if self.grad_scale is None else parameter.grad / self.grad_scale
        allowed = self.found_inf == 0
        return torch.where(allowed, gradient, otherwise), allowed.to(parameter.dtype)


class RoundedAdamW(_Update):
    """AdamW whose averages are stored in another format than the parameters'."""

    def __init__(self, groups: list[dict[str, Any]], settings: Hyperparameters) -> None:
        super().__init__(groups)
        (self._beta1, self._beta2), self._eps = settings.betas, settings.eps

    def update(self, parameter: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Update with unrounded averages, then store rounded ones."""
        averages = first, second = self.averages(parameter, state)
        assert parameter.grad is not None
        adamw(
            [parameter],
            [parameter.grad],
            [first],
            [second],
            [],
            [state["step"]],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            beta1=self._beta1,
            beta2=self._beta2,
            eps=self._eps,
        )
        self.keep(state, averages)

    def averages(self, parameter: Tensor, state: Mapping[str, Any]) -> list[Tensor]:
        """Return copies of the stored averages in the parameter's format."""
        return [state[each.name].to(parameter.dtype, copy=True) for each in ADAMW.states]

    def keep(self, state: Mapping[str, Any], averages: Sequence[Tensor]) -> None:
        """Store the averages until the next step."""
        for each, average in zip(ADAMW.states, averages, strict=True):
            state[each.name].copy_(average)


class EightBitAdamW(RoundedAdamW):
    """AdamW whose averages of matrices are stored in 8 bits."""

    def averages(self, parameter: Tensor, state: Mapping[str, Any]) -> list[Tensor]:
        """Return the averages, decoded from 8 bits."""
        if _BLOCKS not in state:
            return super().averages(parameter, state)
        blocks: Blocks = state[_BLOCKS]
        if not parameter.numel():
            return [torch.empty_like(parameter) for _ in ADAMW.states]
        return [
            blocks.unpacked(state[name + _CODES], state[name + _SCALES], signed, parameter.dtype)
            for name, signed in _signs()
        ]

    def keep(self, state: Mapping[str, Any], averages: Sequence[Tensor]) -> None:
        """Keep codes, with the scales on which all ranks that hold parts of a block agree."""
        if _BLOCKS not in state:
            super().keep(state, averages)
            return
        blocks: Blocks = state[_BLOCKS]
        maxima = torch.stack([blocks.maxima(average) for average in averages])
        for group in blocks.groups:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group())
        # The extreme of a block may be rounded, so that codes of codes are others: a step without a change has none.
        allowed = self.found_inf == 0
        for (name, signed), average, scales in zip(_signs(), averages, maxima, strict=True):
            kept = [(state[name + _SCALES], scales)]
            if average.numel():
                kept.append((state[name + _CODES], blocks.codes(average, scales, signed)))
            for before, new in kept:
                before.copy_(torch.where(allowed, new, before))


def _signs() -> Iterator[tuple[str, bool]]:
    """Yield the averages' names, and whether they may be negative: the average of squares may not."""
    return zip((each.name for each in ADAMW.states), (True, False), strict=True)


class Lion(_Update):
    """Lion (Chen et al. 2023): steps of equal size, in the direction of an average."""

    def update(self, parameter: Tensor, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        """Update with one average of gradients, then store another with slower decay."""
        (kept,) = (state[each.name] for each in LION.states)
        gradient, allowed = self._gradient(parameter, kept)
        rate, (now, later) = group["lr"] * allowed, LION_BETAS
        direction = kept.lerp(gradient, 1 - now).sign_()
        parameter.mul_(1 - rate * group["weight_decay"]).sub_(direction.mul_(rate))
        kept.lerp_(gradient, 1 - later)


class Muon(RoundedAdamW):
    """Muon for matrices of blocks, whole at their homes, and AdamW for everything else."""

    _homes: Homes | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; the gradients of matrices become their updates."""
        matrices = list[tuple[Mapping[str, Any], Tensor, Tensor, Held]]()
        for group, parameter in self._with_gradients():
            state = self.state[parameter]
            if _HELD in state:
                matrices.append((group, parameter, self._averaged(parameter, state), state[_HELD]))
            else:
                self.update(parameter, group, state)
        if not matrices:
            return
        self._homes = self._homes or Homes([held for *_, held in matrices])
        self._homes.orthogonalize([updates for _, _, updates, _ in matrices])
        allowed = self.found_inf == 0
        for group, parameter, updates, held in matrices:
            rate = group["lr"] * MUON_SCALE * math.sqrt(max(held.matrix))
            new = (parameter * (1 - group["lr"] * group["weight_decay"])).add_(updates, alpha=-rate)
            parameter.copy_(torch.where(allowed, new, parameter))

    def _averaged(self, parameter: Tensor, state: Mapping[str, Any]) -> Tensor:
        """Average a gradient with those before, and put Nesterov's average in its place."""
        (kept,) = (state[each.name] for each in MUON.states)
        gradient, _ = self._gradient(parameter, kept)
        kept.lerp_(gradient, 1 - MUON_MOMENTUM)
        assert parameter.grad is not None
        return parameter.grad.copy_(gradient.lerp_(kept, MUON_MOMENTUM))

    def averages(self, parameter: Tensor, state: Mapping[str, Any]) -> list[Tensor]:
        """The kept averages themselves."""
        return [state[each.name] for each in ADAMW.states]

    def keep(self, state: Mapping[str, Any], averages: Sequence[Tensor]) -> None:
        """Nothing: the averages were updated where they are kept."""


def initial_states(
    optimizer: Optimizer, parameter: Tensor, local: Tensor, updates: int, groups: Groups | None, held: Held | None
) -> dict[str, Any]:
    """The states of a parameter's shard before the first step; bias correction continues after earlier updates.

    `held`: of a parameter of matrices of blocks.
    """
    states: dict[str, Any] = {"step": torch.tensor(float(updates), dtype=torch.float32, device=local.device)}
    is_whole = optimizer.whole_matrices and held is not None
    if is_whole:
        states[_HELD] = held
    for each in optimizer.states_of(is_whole if optimizer.whole_matrices else parameter.dim() > 1):
        if each.block:
            states[_BLOCKS] = blocks = Blocks.of(parameter, each.block, groups)
            signed = dict(_signs())[each.name]
            states[each.name + _SCALES] = blocks.maxima(torch.zeros_like(local))
            states[each.name + _CODES] = torch.full_like(local, values(signed).index(0.0), dtype=torch.uint8)
        else:
            dtype = None if each.dtype is None else torch_dtype(each.dtype)
            states[each.name] = torch.zeros_like(local, dtype=dtype)
    return states


def tensors_of(parameter: Tensor, states: Mapping[str, Any]) -> dict[str, Tensor]:
    """What a checkpoint has of a parameter's states, placed as the parameter is."""
    return {
        name: states[_BLOCKS].placed(parameter, x) if name.endswith(_SCALES) else placed_as(parameter, x)
        for name, x in moved_states(states).items()
    }


def moved_states(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """The states of a parameter that checkpoints have and that offload moves: all but the count of steps."""
    return {name: x for name, x in states.items() if name not in ("step", _BLOCKS, _HELD)}


UPDATES: dict[str, Callable[[list[dict[str, Any]], Hyperparameters], torch.optim.Optimizer]] = {
    ADAMW.name: lambda groups, settings: torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True),
    ADAMW_BF16.name: RoundedAdamW,
    ADAMW_8BIT.name: EightBitAdamW,
    SGD.name: lambda groups, _: torch.optim.SGD(groups, momentum=MOMENTUM, fused=True),
    LION.name: lambda groups, _: Lion(groups),
    MUON.name: Muon,
}
"""What makes the update of each optimizer, of groups with members, decay and factor of the learning rate."""
