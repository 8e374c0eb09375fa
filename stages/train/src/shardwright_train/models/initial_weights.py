"""Initial weights as a function of seed, parameter and position, so that a rank computes only its own shard."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, product

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor, nn

from shardwright.models.low_rank import SECOND, pairs_of
from shardwright.models.low_rank_targets import paths_of
from shardwright.types import EMBEDDING, HEAD, LOW_RANK, Model
from shardwright_train.parallel.low_rank import add_low_rank

_BLOCK = 1 << 16
"""Count of random numbers drawn at once: about 4 MiB per thread, including temporary memory."""
_WORDS = 4
"""Number of 64-bit words that the generator returns for one value of its counter."""
_PER_COUNT = 2 * _WORDS
"""Number of random numbers per value of the counter: one for each half of a word."""
_HALF_WORD = np.uint64(32)
_LOW = np.uint64((1 << 32) - 1)

_Run = tuple[int, int]
"""Start and length of a run of neighbouring elements."""


@dataclass(frozen=True)
class Constant:
    """A constant value."""

    value: float


@dataclass(frozen=True)
class Normal:
    """The normal distribution, by Box & Muller (1958): two numbers from two uniform numbers."""

    mean: float
    std: float

    def transform(self, uniform: Tensor) -> Tensor:
        """Return numbers of this distribution for uniform ones [2, n] in (0, 1)."""
        radius, angle = uniform[0].log_().mul_(-2.0).sqrt_().mul_(self.std), uniform[1].mul_(2.0 * math.pi)
        return torch.stack((radius * angle.cos(), radius * angle.sin())).add_(self.mean)


@dataclass(frozen=True)
class TruncatedNormal:
    """The normal distribution between two bounds, by the inverse of its cumulative distribution."""

    mean: float
    std: float
    low: float
    high: float

    def transform(self, uniform: Tensor) -> Tensor:
        """Return numbers of this distribution for uniform ones [2, n] in (0, 1)."""
        below, above = (math.erfc((self.mean - x) / self.std / math.sqrt(2)) / 2 for x in (self.low, self.high))
        share = uniform.mul_(above - below).add_(below)
        normal: Tensor = torch.special.ndtri(share)
        return normal.mul_(self.std).add_(self.mean).clamp_(self.low, self.high)


@dataclass(frozen=True)
class Uniform:
    """The uniform distribution between two bounds."""

    low: float
    high: float

    def transform(self, uniform: Tensor) -> Tensor:
        """Return numbers of this distribution for uniform ones [2, n] in (0, 1)."""
        return uniform.mul_(self.high - self.low).add_(self.low)


@dataclass(frozen=True)
class Given:
    """Given values of a whole parameter."""

    values: Tensor


Distribution = Constant | Given | Normal | TruncatedNormal | Uniform


@dataclass(frozen=True)
class Filling:
    """The initial values of some rows of a parameter, or of all."""

    distribution: Distribution
    rows: tuple[int, int] | None = None
    """Range of rows, begin and end, of the first dim; None: all."""


Box = Sequence[tuple[int, int]]


def fill(target: Tensor, fillings: Sequence[Filling], shape: Sequence[int], box: Box, *key: object) -> None:
    """Fill a tensor, on any device, with the block `box` of a parameter with a `shape`, drawn for a key.

    The counter of the generator, Philox (Salmon et al. 2011) keyed by the key's SHA-256, follows from an element's
    index in the whole parameter, so values do not depend on the box, and only the box's elements are drawn.
    """
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    target, words = target.detach(), np.frombuffer(digest[:16], np.uint64)
    if not shape:
        target, shape, box = target.view(1), (1,), ((0, 1),)
    for filling in fillings:
        low, high = filling.rows or (0, shape[0])
        inside = max(low, box[0][0]), max(low, box[0][0], min(high, box[0][1]))
        part = target[inside[0] - box[0][0] : inside[1] - box[0][0]]
        _fill(part, filling.distribution, shape, (inside, *box[1:]), words)


def _fill(target: Tensor, distribution: Distribution, shape: Sequence[int], box: Box, key: NDArray[np.uint64]) -> None:
    if isinstance(distribution, Constant):
        target.fill_(distribution.value)
        return
    if isinstance(distribution, Given):
        target.copy_(distribution.values.view(*shape)[tuple(slice(*bounds) for bounds in box)])
        return
    flat = target.view(-1) if target.is_contiguous() else target.new_empty(target.numel())

    def draw(block: tuple[int, list[_Run]]) -> None:
        first, runs = block
        drawn = _drawn(distribution, runs, key)
        flat[first : first + len(drawn)].copy_(drawn)

    blocks = list(_blocks(_runs(shape, box)))
    if (count := min(torch.get_num_threads(), len(blocks))) > 1:
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(draw, blocks))
    else:  # starting threads takes longer than drawing the parameters of a small layer
        list(map(draw, blocks))
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))


def _drawn(distribution: Normal | TruncatedNormal | Uniform, runs: Sequence[_Run], key: NDArray[np.uint64]) -> Tensor:
    """Return the random numbers of some runs of elements, drawn together."""
    counts = [range(start // _PER_COUNT, -(-(start + length) // _PER_COUNT)) for start, length in runs]
    drawn = distribution.transform(_uniform(counts, key)).T.reshape(-1)
    if len(drawn) == sum(length for _, length in runs):
        return drawn
    begins = accumulate((_PER_COUNT * len(count) for count in counts), initial=0)
    offsets = [begin + start % _PER_COUNT for begin, (start, _) in zip(begins, runs, strict=False)]
    return torch.cat([drawn[at : at + length] for at, (_, length) in zip(offsets, runs, strict=True)])


def _uniform(counts: Sequence[range], key: NDArray[np.uint64]) -> Tensor:
    """Return uniform numbers [2, n] in (0, 1) for ascending counters: from the high and the low half of each word."""
    generator, at, words = np.random.Philox(counter=counts[0].start, key=key), counts[0].start, []
    for count in counts:
        generator.advance(count.start - at)
        words.append(generator.random_raw(_WORDS * len(count)))
        at = count.stop
    together = np.concatenate(words)
    return (
        torch.from_numpy(np.stack((together >> _HALF_WORD, together & _LOW)).astype(np.float64))
        .add_(0.5)
        .mul_(2.0**-32)
    )


def _runs(shape: Sequence[int], box: Box) -> Iterator[_Run]:
    """Yield the runs that make up a box, none longer than a block."""
    whole = len(shape)
    while whole > 1 and box[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(whole)]
    low, high = box[whole - 1]
    for place in product(*(range(*bounds) for bounds in box[: whole - 1])):
        first = sum(x * stride for x, stride in zip((*place, low), strides, strict=True))
        last = first + (high - low) * strides[-1]
        for start in range(first, last, _BLOCK):
            yield start, min(_BLOCK, last - start)


def _blocks(runs: Iterator[_Run]) -> Iterator[tuple[int, list[_Run]]]:
    """Yield the runs that are drawn together, and the number of random numbers before them."""
    first, size = 0, 0
    block: list[_Run] = []
    for run in runs:
        if size + run[1] > _BLOCK:
            yield first, block
            first, size, block = first + size, 0, []
        size += run[1]
        block.append(run)
    if size:
        yield first, block


# Low-rank matrices (LoRA): added to stock modules, and filled as peft fills them.


def with_low_rank(module: nn.Module, model: Model, layer: str) -> nn.Module:
    """Return a layer's stock module with the low-rank matrices that the model has there, on the meta device."""
    if model.low_rank is UNSET:
        return module
    place = layer if layer in (EMBEDDING, HEAD) else int(layer.removeprefix("layers[").removesuffix("]"))
    kind, path = model.layers[place] if isinstance(place, int) else place, paths_of(model)[place]
    with torch.device("meta"):
        for pair, first, second in pairs_of(model, kind):
            scaling = model.low_rank.scaling_of(f"{path}{pair.target}", pair.rank)
            add_low_rank(module, pair, first, second, scaling)
    return module


def low_rank_fillings(module: nn.Module, model: Model) -> Mapping[str, tuple[Filling, ...]]:
    """Return how peft fills low-rank matrices, by their names in a layer's module.

    A is filled like torch's Linear, uniform in +-1/sqrt(inputs) (He et al. 2015, with a = sqrt(5)). B is zero, unless
    the model says that it does not start at zero: then it is filled like A.
    """
    return {
        name: (Filling(_distribution(name, tuple(parameter.shape), model), None),)
        for name, parameter in module.named_parameters()
        if LOW_RANK in name
    }


def _distribution(name: str, shape: tuple[int, ...], model: Model) -> Distribution:
    assert model.low_rank is not UNSET
    if model.low_rank.starts_at_zero and name.endswith(SECOND):
        return Constant(0.0)
    # peft holds B of all experts side by side.
    inputs = shape[-1] * (shape[0] if len(shape) == 3 and name.endswith(SECOND) else 1)
    return Uniform(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs))
