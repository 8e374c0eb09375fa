"""The strategies that layers can have, by what they depend on: the same on any cluster with stages so wide."""

from math import gcd, lcm
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from shardwright_formats.semantics.layout import Layout, layout_of
from shardwright_formats.types.model import EMBEDDING, HEAD, Model
from shardwright_formats.types.strategy import LayerStrategy, SequenceParallel, Strategy
from shardwright_search.space.configurations import shardings
from shardwright_search.space.request import SearchRequest
from shardwright_search.step.cached_method import cached_method


class Choice(NamedTuple):
    """What the strategies to choose from depend on."""

    widths: tuple[int, ...]
    """Ranks that stages may have, ascending."""
    samples: int
    """Of a microbatch."""
    layers: LayerStrategy | None
    buffer_tokens: int | None
    tp_sizes: tuple[int, ...] | None
    """The asked ones that divide a width; None: all."""
    shard_sizes: tuple[int, ...] | None
    """Likewise; None: none but whole groups."""


class Shardings(msgspec.Struct, frozen=True, eq=False):
    """The strategies of each type on stages of each width, and the layouts they use; equal only to itself."""

    strategies: dict[int, dict[str, tuple[Strategy, ...]]]
    """By width and type."""
    layouts: tuple[Layout, ...]
    """Of all widths."""

    def of(self, type_name: str, width: int) -> tuple[Strategy, ...]:
        """Of one type on stages of one width."""
        return self.strategies[width][type_name]


class LayerChoices(msgspec.Struct, frozen=True, dict=True, eq=False):
    """Of a narrowed request, with all that was listed so far; the degrees that it asks for are told by the choice."""

    request: SearchRequest
    model: Model

    def shardings(self, choice: Choice) -> Shardings:
        """Of the widths over which every type of layer can be sharded, embedding and head aside."""
        return self._shardings(alike(choice))

    @cached_method
    def _shardings(self, choice: Choice) -> Shardings:
        found, degrees = {}, (choice.tp_sizes, choice.shard_sizes)
        for width in choice.widths:
            own = {
                name: tuple(s for s in self._every(name, width, *degrees) if self._possible(s, choice, name))
                for name in dict.fromkeys((EMBEDDING, *self.model.layers, HEAD))
            }
            if all(own[name] for name in self.model.layers):
                found[width] = own
        used = {layout_of(s) for own in found.values() for of_type in own.values() for s in of_type}
        return Shardings(strategies=found, layouts=tuple(sorted(used)))

    @cached_method
    def _every(
        self, type_name: str, width: int, tp_sizes: tuple[int, ...] | None, shard_sizes: tuple[int, ...] | None
    ) -> tuple[Strategy, ...]:
        if tp_sizes == ():
            return ()
        request = replace(self.request, tp_sizes=tp_sizes, shard_sizes=shard_sizes)
        return shardings(request, self.model, type_name, width)

    def _possible(self, strategy: Strategy, choice: Choice, type_name: str) -> bool:
        """Whether it shares a microbatch's samples out evenly, and is what the configuration fixes."""
        if choice.samples % strategy.dp_size:
            return False
        tokens = self.gathered_tokens(strategy, choice.samples)
        if choice.buffer_tokens is not None and tokens > choice.buffer_tokens:
            return False
        if choice.layers is None or not isinstance(strategy, LayerStrategy):
            return True
        return strategy == replace(choice.layers, type=type_name)

    def gathered_tokens(self, strategy: Strategy, samples: int) -> int:
        """Tokens that Megatron's sequence parallelism gathers whole."""
        if strategy.sequence_parallel is not SequenceParallel.MEGATRON:
            return 0
        return samples // strategy.dp_size * self.model.sequence_length


def alike(choice: Choice) -> Choice:
    """The least microbatch with the same strategies: all degrees divide the width of a stage."""
    if choice.buffer_tokens is not None:
        return choice
    return choice._replace(samples=gcd(choice.samples, lcm(*choice.widths)))
