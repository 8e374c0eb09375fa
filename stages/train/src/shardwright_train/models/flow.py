"""The flow of hidden states through a stock model: whether its blocks can run one by one on different ranks.

A pass over fake tensors records what each tensor was made from. A model can be split if each of its blocks is given
the hidden states of the previous block, unchanged, and otherwise only what follows from the number or the values of
tokens (masks, positions, angles): then a rank can call its blocks as the stock model does, without other ranks' blocks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardwright.types import Model
from shardwright_train.models.stock import refusals
from shardwright_train.models.traced import Whole, at_place, built, calling, ends_of, states_place
from shardwright_train.torch_private import FakeTensorMode, TorchDispatchMode, storage_key, tree_leaves

_TRIED = (2, 3)
"""Numbers of samples of the two passes: lengths that grow from one to the other count samples."""

_USUAL_DIMS = 3

_Label = str | int
"""What a tensor was made from: tokens, weights outside of blocks, the embedding's modules, or a block by its index."""
_TOKENS, _WEIGHTS, _EMBEDDED = "tokens", "weights", "embedded"


class Shape(NamedTuple):
    """The shape of a tensor that depends on the number of samples."""

    fixed: tuple[int, ...]
    """Lengths for no samples."""
    each: tuple[int, ...]
    """What each sample adds to the lengths."""
    dtype: torch.dtype | None
    """None: the format that the model computes in."""

    def zeros(self, samples: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros of this shape for a number of samples."""
        lengths = [fixed + each * samples for fixed, each in zip(self.fixed, self.each, strict=True)]
        return torch.zeros(lengths, dtype=self.dtype or dtype, device=device)


class Flow(NamedTuple):
    """How a stock model calls its blocks."""

    path: str
    """The path of the list of blocks."""
    place: int | str
    """The argument with the hidden states: its index or name."""
    states: Shape
    outputs: tuple[Shape | None, ...] | None
    """The outputs of blocks, with None in place of the hidden states and of what is no tensor; None: blocks return only
    the hidden states."""
    output: int
    """The index of the hidden states among the outputs."""
    early: Mapping[str, Shape]
    """The outputs of the embedding's modules that have parameters, by path."""
    embedding: frozenset[str]
    """Paths of modules outside of blocks with parameters of the embedding."""
    head: frozenset[str]
    """Paths of modules outside of blocks with parameters of the head."""
    by_tokens: bool
    """Whether arguments of blocks depend on the values of tokens."""

    @property
    def samples(self) -> int:
        """Return the dim of the hidden states that counts samples."""
        return self.states.each.index(1)

    @property
    def _is_usual(self) -> bool:
        """Return whether the hidden states are already [samples, positions, features]."""
        return self.samples == 0 and len(self.states.each) == _USUAL_DIMS

    def handed_on(self, states: Tensor, length: int) -> Tensor:
        """Return a block's hidden states as [samples, positions, features], from the stock model's form."""
        if self._is_usual and states.shape[1] == length:
            return states
        moved = states.movedim(self.samples, 0)
        return moved.reshape(len(moved), length, -1).clone()  # a view would be no output of a pipeline stage

    def given(self, states: Tensor) -> Tensor:
        """Return hidden states [samples, positions, features] in the form that the stock model's blocks expect."""
        inner = [fixed for fixed, each in zip(self.states.fixed, self.states.each, strict=True) if not each]
        if self._is_usual and [*states.shape[1:]] == inner:
            return states
        return states.reshape(len(states), *inner).movedim(0, self.samples)


def flow_of(model: Model) -> Flow:
    """Return how a described stock model calls its blocks; raise ValueError if they cannot run one by one."""
    return flow_of_config(msgspec.json.encode(model.config), model.family, model.sequence_length)


@lru_cache(maxsize=4)
def flow_of_config(encoded: bytes, kind: str, length: int) -> Flow:
    """Return how the stock model of a configuration in JSON calls its blocks; raise ValueError as `flow_of` does."""
    config = {**msgspec.json.decode(encoded), "model_type": kind}
    with FakeTensorMode(allow_non_fake_inputs=True):
        whole = built(config, plain=True)
        _check_apart(whole)
        with refusals("a pass of the stock model cannot be followed"):
            first, second = (_observed(whole, samples, length) for samples in _TRIED)
    embedding, head = ends_of(whole, first.early.keys(), first.late)
    outputs = None
    if first.outputs is not None and second.outputs is not None:
        outputs = tuple(map(_shape, first.outputs, second.outputs))
    states = _shape(first.states, second.states)
    if (
        states is None
        or sorted(states.each) != [0] * (len(states.each) - 1) + [1]
        or any(fixed for fixed, each in zip(states.fixed, states.each, strict=True) if each)
    ):
        raise ValueError("its hidden states have no dim of samples")
    return Flow(
        path=whole.path,
        place=first.place,
        states=states,
        outputs=outputs,
        output=first.output,
        early={path: shape for path in first.early if (shape := _shape(first.early[path], second.early[path]))},
        embedding=embedding,
        head=head,
        by_tokens=first.by_tokens,
    )


def _shape(one: Tensor | None, other: Tensor | None) -> Shape | None:
    """Return the shape of a tensor for any number of samples, inferred from two examples."""
    if one is None or other is None:
        return None
    few, more = _TRIED
    each = tuple((b - a) // (more - few) for a, b in zip(one.shape, other.shape, strict=True))
    fixed = tuple(a - few * grows for a, grows in zip(one.shape, each, strict=True))
    return Shape(fixed, each, None if one.dtype is torch.bfloat16 else one.dtype)


class _Observed(NamedTuple):
    """What a pass over fake tensors showed about a stock model; fields as in `Flow`."""

    place: int | str
    states: Tensor
    outputs: tuple[Tensor | None, ...] | None
    output: int
    early: Mapping[str, Tensor]
    late: frozenset[str]
    by_tokens: bool


def _check_apart(whole: Whole) -> None:
    """Raise ValueError for parameters that several blocks share, or that are next to the list of blocks."""
    owners: dict[int, int] = {}
    for number, block in enumerate(whole.blocks):
        for name, parameter in block.named_parameters():
            if owners.setdefault(id(parameter), number) != number:
                raise ValueError(f"its blocks share the parameter {name}")
    for path, module in whole.model.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own and f"{whole.path}.".startswith(f"{path}." if path else ""):
            raise ValueError(f"{path or 'the model'}.{own[0]} is of neither a block nor a module of embedding or head")


class _Labels(TorchDispatchMode):
    """A mode that records from which inputs each tensor was computed, by its memory."""

    def __init__(self, whole: Whole, last: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of: dict[int, frozenset[_Label]] = {}
        self._alive: list[Tensor] = []
        self._allowed = {_TOKENS, _WEIGHTS, last}
        self.behind = False
        """Whether all blocks have run."""
        for name, parameter in whole.model.named_parameters():
            if not name.startswith(f"{whole.path}."):
                self.mark(parameter, _WEIGHTS)

    def mark(self, tensor: Tensor, *labels: _Label) -> None:
        """Add labels to a tensor."""
        self._of[storage_key(tensor)] = self.of(tensor).union(labels)
        self._alive.append(tensor)  # so that no other one takes its place in memory

    def of(self, tensor: Tensor) -> frozenset[_Label]:
        """Return the labels of a tensor."""
        return self._of.get(storage_key(tensor), frozenset())

    def of_all(self, tensors: Iterable[Tensor]) -> frozenset[_Label]:
        """Return the labels of all of these tensors."""
        return frozenset(chain.from_iterable(map(self.of, tensors)))

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operator, and label its results with the labels of its inputs."""
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        name = operator.name().partition(".")[0].partition("::")[2]
        if name.endswith("_like") or name.startswith("new_"):
            return result  # it depends on a tensor's shape, not on its values
        labels = self.of_all(_tensors((args, kwargs)))
        if self.behind and (others := labels - self._allowed):
            what = "the embedding" if _EMBEDDED in others else "a block before the last"
            raise ValueError(f"its head reads what {what} gives")
        for tensor in _tensors(result) if labels else ():
            self.mark(tensor, *labels)
        return result


def _observed(whole: Whole, samples: int, length: int) -> _Observed:
    """Call the stock model on fake tensors and record its flow; only the first block of each class runs."""
    last, labels = len(whole.blocks) - 1, _Labels(whole, len(whole.blocks) - 1)
    places, seen, order = list[int | str](), list[Tensor](), list[int]()
    forms: dict[Any, tuple[int, tuple[Tensor | None, ...] | None]] = {}
    early, late = dict[str, Tensor](), set[str]()
    by_tokens = False

    def around(number: int, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal by_tokens
            place = states_place(args, kwargs)
            states = at_place(args, kwargs, place)
            if order and states is not seen[-1]:
                raise ValueError("the stock model computes between its blocks")
            if places and place != places[-1]:
                raise ValueError("its blocks take hidden states in several ways")
            for name, x in (*enumerate(args), *kwargs.items()):
                made_from = labels.of_all(each for each in _tensors(x) if each is not states)
                if any(isinstance(label, int) for label in made_from):
                    raise ValueError(f"its blocks receive more from other blocks than hidden states ({name})")
                if made_from & {_WEIGHTS, _EMBEDDED}:
                    raise ValueError(f"its blocks receive more from the embedding than hidden states ({name})")
                by_tokens = by_tokens or _TOKENS in made_from
            places.append(place)
            order.append(number)
            if type(block) not in forms:
                forms[type(block)] = _form(forward(*args, **kwargs), states)
            at, others = forms[type(block)]
            fresh = torch.empty_like(states).requires_grad_()
            labels.mark(fresh, number)
            seen.append(fresh)
            labels.behind = number == last
            if others is None:
                return fresh
            for other in _tensors(others):
                labels.mark(other, number)
            return tuple(fresh if i == at else other for i, other in enumerate(others))

        return run

    def noted(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if len(order) not in (0, len(whole.blocks)):
                raise ValueError(f"{path} runs between its blocks")
            if order:
                late.add(path)
            elif isinstance(output, Tensor):
                early[path] = output
                labels.mark(output, _EMBEDDED)
            else:
                raise ValueError(f"{path} of the embedding gives more than a tensor")

        return hook

    before = [block.forward for block in whole.blocks]
    hooks = [
        module.register_forward_hook(noted(path))
        for path, module in whole.model.named_modules()
        if next(module.parameters(recurse=False), None) is not None and not path.startswith(f"{whole.path}.")
    ]
    for number, block in enumerate(whole.blocks):
        block.forward = around(number, block, before[number])
    tokens = torch.zeros((samples, length), dtype=torch.long)
    labels.mark(tokens, _TOKENS)
    try:
        with labels:
            logits: Tensor = whole.model(**calling(whole.model.forward, tokens)).logits
    finally:
        for hook in hooks:
            hook.remove()
        for block, forward in zip(whole.blocks, before, strict=True):
            block.forward = forward
    if order != list(range(len(whole.blocks))):
        raise ValueError("its blocks do not run one after the other, each once")
    if logits.shape[:2] != (samples, length):
        raise ValueError("its logits are not one row for each position of each sample")
    if both := early.keys() & late:
        raise ValueError(f"{min(both)} runs both before its blocks and after them")
    at, others = forms[type(whole.blocks[0])]
    if any((where, more is None) != (at, others is None) for where, more in forms.values()):
        raise ValueError("its blocks give hidden states in several ways")
    return _Observed(places[0], seen[0], others, at, early, frozenset(late), by_tokens)


def _form(output: Any, states: Tensor) -> tuple[int, tuple[Tensor | None, ...] | None]:
    """Return the index of the hidden states in a block's output, and its other outputs."""
    if isinstance(output, Tensor):
        return 0, None
    if not isinstance(output, tuple | list):
        raise ValueError(f"its blocks give a {type(output).__name__}")
    at = next((i for i, x in enumerate(output) if isinstance(x, Tensor) and x.shape == states.shape), None)
    if at is None:
        raise ValueError("its blocks change the shape of hidden states")
    return at, tuple(x if isinstance(x, Tensor) and i != at else None for i, x in enumerate(output))


def _tensors(nested: object) -> Iterator[Tensor]:
    """Yield the tensors in containers, including those in transformers' objects."""
    for leaf in tree_leaves(nested):
        if isinstance(leaf, Tensor):
            yield leaf
        elif type(leaf).__module__.startswith("transformers") and not isinstance(leaf, nn.Module | PreTrainedConfig):
            yield from _tensors(list(getattr(leaf, "__dict__", {}).values()))
