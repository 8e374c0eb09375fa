"""Frozen parts of a model: which parameters are not trained, and which layers have no backward pass.

Layers of one type are equal, so that a type is split if its layers are frozen differently. Layers that are completely
trained keep the family's type name; for the others, a suffix after a dot states what is frozen.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types.model import EMBEDDING, HEAD, LOW_RANK, LayerType, Model, Parameter, base_type

OPTION = "--frozen"
Place = int | str
"""`embedding`, `head`, or the index of a block."""
NO_BACKWARD = "no_grad"
"""The suffix of types for which neither the layer nor any layer before it is trained."""
_FROZEN, _PARTLY, _ADAPTED = "frozen", "part", "lora"
_PART = re.compile(r"(?:(embedding|head|layers)|layers\[(?:(\d+)|(\d*):(\d*))\])(?:\.(.+))?", re.ASCII)
_REMEDY = "name embedding, head, layers, layers[2] or layers[0:8], and after a dot parameters, as in layers.mlp.*"


class FrozenPart(NamedTuple):
    """A pattern of parameters to freeze, in some layers of a model."""

    text: str
    layer: str
    """`embedding`, `head` or `layers`."""
    first: int
    end: int | None
    """The first block after those that are meant; None if they extend to the last block."""
    pattern: str
    """Pattern of names in the description: `*` matches any text, including dots, `?` one character."""

    @classmethod
    def parse(cls, text: str) -> "FrozenPart":
        """Parse `LAYERS` or `LAYERS.PATTERN`; raise BadInput if the text is malformed."""
        if (match := _PART.fullmatch(text)) is None:
            raise BadInput(OPTION, f"{text!r} names no part of a model", _REMEDY)
        layer, number, low, high, pattern = match.groups()
        first = int(number or low or 0)
        end = first + 1 if number else int(high) if high else None
        return cls(text, layer or "layers", first, end, pattern or "*")

    def matches(self, place: Place, parameter: str) -> bool:
        """Return whether the pattern matches a parameter of the layer at `place`."""
        if isinstance(place, str):
            return place == self.layer and fnmatchcase(parameter, self.pattern)
        inside = self.layer == "layers" and self.first <= place and (self.end is None or place < self.end)
        return inside and fnmatchcase(parameter, self.pattern)


def freeze(model: Model, parts: Sequence[FrozenPart], file: object = OPTION) -> Model:
    """Return the model with the named parts frozen, in addition to parts that are frozen already.

    Its layer types are split accordingly. Raises BadInput, naming `file`, if a part matches no parameter, if one of
    several replicas of a parameter would be frozen and another trained, or if nothing is left to train.
    """
    for part in parts:
        if not any(part.matches(at, p.name) for at, kind in layers_of(model) for p in _parameters(model, kind)):
            raise BadInput(file, f"{part.text!r} matches no parameter of the model", _REMEDY)
    return freeze_where(model, lambda at, p: any(part.matches(at, p.name) for part in parts), file)


def freeze_where(model: Model, is_frozen: Callable[[Place, Parameter], bool], file: object) -> Model:
    """Return the model with parameters frozen by a predicate, in addition to parameters that are frozen already.

    See `freeze`.
    """
    frozen = {
        at: frozenset(p.name for p in _parameters(model, kind) if p.frozen is True or is_frozen(at, p))
        for at, kind in layers_of(model)
    }
    _check_replicas(model, frozen, file)
    if all(len(frozen[at]) == len(_parameters(model, kind)) for at, kind in layers_of(model)):
        raise BadInput(file, "every parameter is frozen", "leave some to be trained")
    return _split(model, [kind for _, kind in layers_of(model)], tuple(frozen.values()))


def layers_of(model: Model) -> Iterator[tuple[Place, str]]:
    """Yield the place and the type of each layer, including embedding and head."""
    yield EMBEDDING, EMBEDDING
    yield from enumerate(model.layers)
    yield HEAD, HEAD


def _split(model: Model, kinds: Sequence[str], frozen: Sequence[frozenset[str]]) -> Model:
    """Return the model with a type for each layer type, set of frozen parameters, and whether gradients pass."""
    split: dict[tuple[str, tuple[Parameter, ...], bool], str] = {}
    types: dict[str, LayerType] = {}
    names, backward = list[str](), False
    for kind, held in zip(kinds, frozen, strict=True):
        backward = backward or len(held) < len(_parameters(model, kind)) or kind == HEAD
        made = _frozen_type(model.types[kind], held, backward)
        key = base_type(kind), made.parameters, backward
        if key not in split:
            split[key] = kind if kind in (EMBEDDING, HEAD) else _name(model, kind, held, backward, taken=types)
            types[split[key]] = made
        names.append(split[key])
    return replace(model, layers=tuple(names[1:-1]), types=types)


def _name(model: Model, kind: str, held: frozenset[str], backward: bool, taken: Mapping[str, object]) -> str:
    """Return the name of a block type, which states what is frozen in it."""
    base, trained = base_type(kind), {p.name for p in _parameters(model, kind)} - held
    if held <= {p.name for p in _parameters(model, base) if not p.trained} if base in model.types else not held:
        return base
    word = _FROZEN if not trained else _ADAPTED if all(LOW_RANK in name for name in trained) else _PARTLY
    word = word if backward else NO_BACKWARD
    numbers = (word, *(f"{word}{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in (f"{base}.{word}" for word in numbers) if name not in taken)


def _frozen_type(kind: LayerType, held: frozenset[str], backward: bool) -> LayerType:
    parameters = tuple(replace(p, frozen=True) if p.name in held else p for p in kind.parameters)
    plain = replace(kind, parameters=parameters)
    return plain if backward else replace(plain, backward=False)


def _parameters(model: Model, kind: str) -> tuple[Parameter, ...]:
    return model.types[kind].parameters


def _check_replicas(model: Model, frozen: Mapping[Place, frozenset[str]], file: object) -> None:
    """Raise BadInput if a parameter of several layers is frozen in one and trained in another."""
    for states in _replicas(model, frozen):
        name, held = next(iter(states.items()))
        if len(set(held)) > 1:
            remedy = "freeze it in all of them, or in none"
            raise BadInput(file, f"{name} is one parameter of several layers, and frozen in some of them", remedy)


def _replicas(model: Model, frozen: Mapping[Place, frozenset[str]]) -> Iterator[dict[str, list[bool]]]:
    for first, second in model.tied:
        yield {first: [first in frozen[EMBEDDING], second in frozen[HEAD]]}
    for base in dict.fromkeys(map(base_type, model.layers)):
        numbers = [number for number, kind in enumerate(model.layers) if base_type(kind) == base]
        for parameter in _parameters(model, model.layers[numbers[0]]):
            if parameter.shared:
                yield {parameter.name: [parameter.name in frozen[number] for number in numbers]}
