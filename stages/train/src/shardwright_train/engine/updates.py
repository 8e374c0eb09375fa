"""Optimizer updates on local tensors, which a flag on the device can disable.

They are PyTorch's optimizers, or have the same interface, with the two attributes of the fused ones: `found_inf`, 1 if
the step must change nothing, and `grad_scale`, a divisor of gradients. With g the gradient, r the learning rate of a
parameter and d its decay:

- adamw: `torch.optim.AdamW` (Loshchilov & Hutter 2019);
- adamw-bf16: the same, whose averages are rounded to bfloat16 when the step is over: the step itself uses unrounded
  ones. An average that changes by less than 1 part in 512 of itself stays as it is;
- adamw-8bit: the same, whose averages of matrices become 8-bit codes (below);
- sgd: `torch.optim.SGD` with momentum 0.9: b = 0.9 b + g + d w, w = w - r b; the decay is part of the gradient;
- lion (Chen et al. 2023, algorithm 2): w = w - r (sign(0.9 m + 0.1 g) + d w), then m = 0.99 m + 0.01 g;
- muon: `torch.optim.Muon` with `match_rms_adamw`, for each matrix [A, B] of blocks: m = 0.95 m + 0.05 g, and
  w = w - r (0.2 sqrt(max(A, B)) O(0.05 g + 0.95 m) + d w), where O orthogonalizes (homes.py); adamw for all other
  parameters.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import pad
from torch.optim.adamw import adamw

from shardwright.optimizers.registry import ADAMW, ADAMW_8BIT, ADAMW_BF16, LION, MUON, SGD, Optimizer
from shardwright_train.engine.homes import Held, Homes
from shardwright_train.engine.learning_rate import Hyperparameters
from shardwright_train.parallel.data import placed_as, torch_dtype
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.torch_private import StridedShard

# Averages in 8 bits: codes, and a scale for each block of a parameter's row, independent of sharding.
#
# Blocks lie along rows, so that sharding rows cuts no block. If columns are sharded through blocks, their ranks agree
# on each block's largest value: every plan keeps the same codes. The 256 values of a code are as in Dettmers et al.
# 2022 ("8-bit optimizers via block-wise quantization"): seven decades, the largest with the most values. A positive
# average of squares is never rounded to 0, because the update divides by its root.


_DECADES = 7


@cache
def values(signed: bool) -> tuple[float, ...]:
    """Return the 256 values of a code, ascending, from -1 (`signed`) or 0 to 1."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2 ** (decade + (not signed))
        means = (0.1 + 0.9 * (i + 0.5) / count for i in range(count))
        found += [10.0 ** (decade + 1 - _DECADES) * mean for mean in means]
    return tuple(sorted(found + [-value for value in found if signed and 0 < value < 1]))


class Blocks(NamedTuple):
    """The blocks of a parameter's rows that a rank holds, entirely or in part."""

    row: int
    """Length of a whole row."""
    size: int
    """Number of elements of a block; the last block of a row has fewer if the size does not divide the row."""
    first: int = 0
    """Index of the first column that the rank holds."""
    columns: int = 0
    """Number of columns that the rank holds."""
    groups: tuple[Callable[[], dist.ProcessGroup], ...] = ()
    """Functions that return groups of ranks with columns of the same blocks: each rank has the scales of whole rows."""

    @classmethod
    def of(cls, parameter: Tensor, size: int, groups: Groups | None) -> "Blocks":
        """Return the blocks of a parameter, which may be sharded over some of a plan's `groups`."""
        row = parameter.shape[-1]
        if not isinstance(parameter, DTensor):
            return cls(row, size, 0, row)
        first, columns, cuts, place = 0, row, _cuts(parameter), parameter.device_mesh.get_coordinate()
        assert place is not None
        whole = all(length % size == 0 for _, length in cuts)
        for axis, length in cuts:
            begin = min(length * place[axis], columns)
            first, columns = first + begin, min(length, columns - begin)
        cut = (
            ()
            if whole or groups is None
            else tuple(partial(groups.along, parameter.device_mesh, axis) for axis, _ in cuts)
        )
        return cls(row, size, first, columns, cut)

    @property
    def scales(self) -> int:
        """Return how many scales of a row the rank holds."""
        return -(-(self.row if self.groups else self.columns) // self.size)

    def placed(self, parameter: Tensor, scales: Tensor) -> Tensor:
        """Return scales with the layout of their parameter, except that each rank of `groups` has whole rows."""
        if not isinstance(parameter, DTensor):
            return scales
        axes = {axis for axis, _ in _cuts(parameter)} if self.groups else set[int]()
        placements = [Replicate() if axis in axes else placed for axis, placed in enumerate(parameter.placements)]
        shape = torch.Size((*parameter.shape[:-1], -(-self.row // self.size)))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            scales, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def unpacked(self, codes: Tensor, scales: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
        """Return the numbers that codes and scales represent."""
        table = torch.tensor(values(signed), dtype=dtype, device=codes.device)
        blocks = self._blocks(table[codes.int()]) * self._mine(scales).to(dtype).unsqueeze(-1)
        return self._whole(blocks)

    def maxima(self, x: Tensor) -> Tensor:
        """Return the largest absolute value of each block, among the numbers that the rank holds, in float32."""
        found = torch.zeros((*x.shape[:-1], self.scales), dtype=torch.float32, device=x.device)
        if x.numel():
            self._mine(found).copy_(self._blocks(x.abs()).amax(-1))
        return found

    def codes(self, x: Tensor, scales: Tensor, signed: bool) -> Tensor:
        """Return the nearest code of each number; the lower one of two equally near codes."""
        table = torch.tensor(values(signed), dtype=x.dtype, device=x.device)
        divisors = self._mine(scales).to(x.dtype)
        shares = self._blocks(x) / torch.where(divisors == 0, 1, divisors).unsqueeze(-1)
        found: Tensor = torch.bucketize(shares, (table[1:] + table[:-1]) / 2, out_int32=True)
        found = found if signed else torch.where(shares > 0, found.clamp(min=1), found)
        return self._whole(found).to(torch.uint8)

    def _blocks(self, x: Tensor) -> Tensor:
        """Return numbers by block [..., blocks, size], padded if the rank holds only a part of a block."""
        left = self.first % self.size
        blocks: Tensor = pad(x, (left, -(left + self.columns) % self.size)).unflatten(-1, (-1, self.size))
        return blocks

    def _whole(self, blocks: Tensor) -> Tensor:
        left = self.first % self.size
        whole: Tensor = blocks.flatten(-2)[..., left : left + self.columns]
        return whole.contiguous()  # as fused kernels take it to be

    def _mine(self, scales: Tensor) -> Tensor:
        """Return the scales of the blocks of which the rank holds a part."""
        if not self.groups:
            return scales
        low = self.first // self.size
        return scales[..., low : -(-(self.first + self.columns) // self.size)]


def _cuts(parameter: DTensor) -> list[tuple[int, int]]:
    """Return the mesh axes that shard a parameter's last dim, each with the largest shard's columns, in order."""
    last, length = parameter.dim() - 1, parameter.shape[-1]
    cutting = [(axis, placed) for axis, placed in enumerate(parameter.placements) if placed.is_shard(last)]
    found = []
    # Strided sharding cuts what other placements have left.
    for axis, _ in sorted(cutting, key=lambda pair: isinstance(pair[1], StridedShard)):
        length = -(-length // parameter.device_mesh.size(axis))
        found.append((axis, length))
    return found


# The updates.


MOMENTUM = 0.9
LION_BETAS = (0.9, 0.99)
MUON_MOMENTUM, MUON_SCALE = 0.95, 0.2
_BLOCKS, _CODES, _SCALES = "blocks", "_codes", "_scales"
"""Key of the `Blocks` of a state kept in codes, and suffixes of the names of its codes and scales."""
_HELD = "held"
"""Key of the `Held` of a parameter whose matrices are updated whole."""


class _Update(torch.optim.Optimizer, ABC):
    """An optimizer of this project, which updates one parameter after the other."""

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
        """Return the gradient, or `otherwise` if the step must not change anything; and a factor of changes, 1 or 0."""
        assert parameter.grad is not None
        gradient = parameter.grad if self.grad_scale is None else parameter.grad / self.grad_scale
        allowed = self.found_inf == 0
        return torch.where(allowed, gradient, otherwise), allowed.to(parameter.dtype)


class RoundedAdamW(_Update):
    """AdamW whose averages are stored in another format than the parameters."""

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
        """Store the averages as codes, with scales on which all ranks that hold parts of a block agree."""
        if _BLOCKS not in state:
            super().keep(state, averages)
            return
        blocks: Blocks = state[_BLOCKS]
        maxima = torch.stack([blocks.maxima(average) for average in averages])
        for group in blocks.groups:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group())
        # The extreme of a block may be rounded, so that encoding decoded values can change codes: a step that must
        # change nothing keeps the old ones.
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
        """Update the average of gradients, and return the gradient's tensor overwritten with Nesterov's average."""
        (kept,) = (state[each.name] for each in MUON.states)
        gradient, _ = self._gradient(parameter, kept)
        kept.lerp_(gradient, 1 - MUON_MOMENTUM)
        assert parameter.grad is not None
        return parameter.grad.copy_(gradient.lerp_(kept, MUON_MOMENTUM))

    def averages(self, parameter: Tensor, state: Mapping[str, Any]) -> list[Tensor]:
        """Return the stored averages themselves."""
        return [state[each.name] for each in ADAMW.states]

    def keep(self, state: Mapping[str, Any], averages: Sequence[Tensor]) -> None:
        """Do nothing: `averages` returned the stored tensors themselves, which were updated in place."""


def initial_states(
    optimizer: Optimizer, parameter: Tensor, local: Tensor, updates: int, groups: Groups | None, held: Held | None
) -> dict[str, Any]:
    """Return the states of a parameter's shard before the first step; bias correction continues after `updates` steps.

    `held`: what ranks hold of the parameter, if it consists of matrices of blocks; otherwise None.
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
    """Return the states of a parameter that a checkpoint stores, placed as the parameter is."""
    return {
        name: states[_BLOCKS].placed(parameter, x) if name.endswith(_SCALES) else placed_as(parameter, x)
        for name, x in moved_states(states).items()
    }


def moved_states(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the states of a parameter that checkpoints store and offload moves: all except the count of steps."""
    return {name: x for name, x in states.items() if name not in ("step", _BLOCKS, _HELD)}


UPDATES: dict[str, Callable[[list[dict[str, Any]], Hyperparameters], torch.optim.Optimizer]] = {
    ADAMW.name: lambda groups, settings: torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True),
    ADAMW_BF16.name: RoundedAdamW,
    ADAMW_8BIT.name: EightBitAdamW,
    SGD.name: lambda groups, _: torch.optim.SGD(groups, momentum=MOMENTUM, fused=True),
    LION.name: lambda groups, _: Lion(groups),
    MUON.name: Muon,
}
"""Function that makes each optimizer, by name, from parameter groups and hyperparameters."""
