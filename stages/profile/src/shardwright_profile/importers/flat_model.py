"""A minimal description of a model that only a profile knows: sizes without shapes, enough to plan with.

No family of the runtime builds it, so plans of it can be searched, priced and compared, but not trained.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwright_formats.io import BadInput
from shardwright_formats.types import EMBEDDING, HEAD, BoundaryTensor, Heads, LayerType, Model, Parameter, Region

_STATES = "hidden_states"
_ELEMENT_BYTES = 4


class FlatType(NamedTuple):
    """A type of layer as it is given on the command line."""

    name: str
    layers: int
    positions: int
    """Number of positions of a sample."""
    features: int
    """Number of features of a position."""
    heads: int
    """Number of heads, which tp_size must divide."""


def parse_type(text: str) -> FlatType:
    """Return the type described by NAME,LAYERS,POSITIONS,FEATURES,HEADS; raise BadInput where the text is none."""
    name, *numbers = text.split(",")
    good = len(numbers) == 4 and all(len(n) < 9 and n.isascii() and n.isdigit() and int(n) for n in numbers)
    if not good or not name.isidentifier() or name in (EMBEDDING, HEAD):
        raise BadInput("--type", f"{text!r} is no type", "write NAME,LAYERS,POSITIONS,FEATURES,HEADS")
    return FlatType(name, *map(int, numbers))


def flat_model(
    name: str,
    family: str,
    types: Sequence[FlatType],
    parameters_bytes: Mapping[str, float],
    config: Mapping[str, object],
) -> Model:
    """Return the model of these types, in order, each with one parameter of as many elements as its float32 bytes say.

    `parameters_bytes` holds those of one layer of each type, of the embedding and of the head. Operations are counted
    as 2 a parameter and position, attention's own left out. Each layer communicates as Megatron's attention and MLP do
    (Shoeybi et al. 2019); embedding and head share their vocabulary.
    """
    if len({kind.name for kind in types}) < len(types):
        raise BadInput("--type", "two types have one name", "name them apart")
    first, last = types[0], types[-1]
    made = {EMBEDDING: _end(parameters_bytes[EMBEDDING], EMBEDDING, first)}
    made |= {kind.name: _block(parameters_bytes[kind.name], kind) for kind in types}
    made[HEAD] = _end(parameters_bytes[HEAD], HEAD, last)
    return Model(
        name=name,
        family=family,
        config=dict(config),
        sequence_length=first.positions,
        layers=tuple(kind.name for kind in types for _ in range(kind.layers)),
        types=made,
    )


def _block(parameters_bytes: float, kind: FlatType) -> LayerType:
    heads = Heads(
        queries=_STATES,
        keys=_STATES,
        heads=kind.heads,
        kv_heads=kind.heads,
        head_features=max(1, kind.features // kind.heads),
    )
    numel = _numel(parameters_bytes)
    return LayerType(
        parameters=(_parameter(numel),),
        forward_flops_per_sample=2 * numel * kind.positions,
        tp_must_divide={"heads": kind.heads},
        ulysses_must_divide={"heads": kind.heads},
        outputs=(_states(kind),),
        regions=(
            Region(name="attention", enters=(_STATES,), leaves=_STATES, attention=heads),
            Region(name="mlp", enters=(_STATES,), leaves=_STATES),
        ),
    )


def _end(parameters_bytes: float, name: str, neighbour: FlatType) -> LayerType:
    numel = _numel(parameters_bytes)
    inner = {
        EMBEDDING: Region(name="lookup", leaves=_STATES),
        HEAD: Region(name="logits", enters=(_STATES,)),
    }
    return LayerType(
        parameters=(_parameter(numel, f"{name}.flat"),),
        forward_flops_per_sample=2 * numel,
        outputs=(_states(neighbour),) if name == EMBEDDING else (),
        regions=(inner[name],),
    )


def _states(kind: FlatType) -> BoundaryTensor:
    return BoundaryTensor(name=_STATES, sequence_length=kind.positions, features=kind.features)


def _parameter(numel: int, name: str = "flat") -> Parameter:
    return Parameter(name=name, shape=(numel,), tp_dim=0)


def _numel(parameters_bytes: float) -> int:
    return max(1, round(parameters_bytes / _ELEMENT_BYTES))
