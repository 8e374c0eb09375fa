"""Tensors in safetensors files: a whole parameter, several stacked parameters, or a piece of a parameter.

transformers merges the pieces of experts by its conversion mapping: experts in the first dim, then matrices side by
side in the second.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist

from shardwright.io import BadInput, system_fault
from shardwright.plan.layout import Box
from shardwright_train.models.base import Family
from shardwright_train.weights.quantized import Stored

AGAIN = "fetch the folder again"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The formats that tensors of files may have, by their names there."""


def header(file: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors file by key, without reading any; raises BadInput if the file is not complete."""
    try:
        with safe_open(file, "numpy") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}
            return {key: Stored(file, key, tuple(x.get_shape()), x.get_dtype()) for key, x in slices.items()}
    except SafetensorError as error:
        raise BadInput(file, f"is not a valid safetensors file ({error})", AGAIN) from None
    except OSError as error:
        raise system_fault(error, file) from None


# Tensors that hold the rows of several parameters, such as queries, keys and values in one matrix.


Shape = tuple[int, ...]


def tensors_of_files(family: Family, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """The parameters that each tensor of a file holds, in the order of their rows, with their shapes."""
    tensors = dict[str, dict[str, Shape]]()
    for name in sorted(shapes, key=lambda name: family.file_name(name)[1]):
        tensors.setdefault(family.file_name(name)[0], {})[name] = shapes[name]
    return tensors


def stacked_shape(shapes: Collection[Shape]) -> Shape:
    """The shape of a tensor that holds the rows of tensors of some shapes."""
    first = next(iter(shapes))
    return first if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *first[1:])


def row_ranges(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, int, int]]:
    """Yield the names of stacked tensors with the half-open ranges of their rows."""
    begin = 0
    for name, shape in shapes.items():
        yield name, begin, begin + shape[0]
        begin += shape[0]


# Parameters of experts, which files hold in pieces: a tensor for each expert and each matrix side by side.


_NUMBER = "*"
"""The word for an expert's number in the patterns of transformers."""


class Place(NamedTuple):
    """The place of a piece in its parameter."""

    expert: int
    matrix: int
    """Number among the matrices side by side."""


class Source(NamedTuple):
    """A matrix that files hold of each expert, by the pattern of its name."""

    patterns: tuple[str, ...]
    """Patterns of all matrices that are side by side in the parameter."""
    matrix: int

    def place(self, key: str) -> Place | None:
        """Return the place of a tensor by its key in a file."""
        pattern = re.escape(self.patterns[self.matrix]).replace(re.escape(_NUMBER), r"(\d+)")
        match = re.search(pattern, key)
        return None if match is None else Place(int(match[1]), self.matrix)


def source_of(pattern: str | None, converters: Sequence[Any]) -> Source | None:
    """The matrix that a pattern of a conversion names; None if tensors are not pieces of experts."""
    for converter in converters:
        patterns = tuple(converter.source_patterns)
        if pattern in patterns and _merges_experts(converter, len(patterns)):
            return Source(patterns, patterns.index(pattern))
    return None


def piece_shape(shape: tuple[int, ...], source: Source) -> tuple[int, ...]:
    """The shape of each piece of a parameter [experts, rows, columns]."""
    _, rows, *columns = shape
    return rows // len(source.patterns), *columns


def places(shape: Sequence[int], source: Source) -> Iterator[Place]:
    """Yield the places of all pieces of a parameter, in order."""
    return (Place(*at) for at in product(range(shape[0]), range(len(source.patterns))))


def key_of(pattern_name: str, source: Source, place: Place) -> str:
    """Return the name of a piece in a file, from the name of the first matrix with a placeholder for its number."""
    named = pattern_name.replace(source.patterns[0], source.patterns[place.matrix])
    return named.replace(_NUMBER, str(place.expert))


class Pieces(NamedTuple):
    """The pieces of a parameter of a `shape` [experts, rows, columns] that a folder holds."""

    shape: tuple[int, ...]
    source: Source
    tensors: dict[Place, Stored]

    def wrong(self, name: str, stored_name: str, is_whole: bool) -> str | None:
        """Return what is wrong with the pieces, or None: missing, surplus, or the whole parameter exists, too.

        `stored_name` is the parameter's in files, as `key_of` has it.
        """
        if is_whole:
            return f"has {name} whole and in pieces"
        wanted = tuple(places(self.shape, self.source))
        if lacking := [place for place in wanted if place not in self.tensors]:
            return f"lacks {key_of(stored_name, self.source, lacking[0])}"
        if len(self.tensors) > len(wanted):
            return f"has {max(self.tensors).expert + 1} experts, but the model has {self.shape[0]}"
        return None

    def read(self, window: Tensor, box: Box) -> None:
        """Fill a tensor with the part `box` of the parameter, opening each file once.

        Raises BadInput if a file has changed since.
        """
        wanted = sorted(_windows(box, len(self.source.patterns)), key=self._file_of)
        for file, group in groupby(wanted, key=self._file_of):
            try:
                with safe_open(file, "pt") as opened:
                    for place, at, inside in group:
                        part = tuple(slice(low, high) for low, high in inside)
                        window[at].copy_(self.tensors[place].part(opened, part))
            except (SafetensorError, OSError) as error:
                raise BadInput(file, f"cannot be read ({error})", "fetch the folder again") from None

    def _file_of(self, wanted: "_Wanted") -> Path:
        return self.tensors[wanted.place].file


class _Wanted(NamedTuple):
    """The part of a piece that a part of a parameter needs."""

    place: Place
    at: tuple[int, ...]
    """Its indices in the part."""
    box: Box


def _windows(box: Box, matrices: int) -> Iterator[_Wanted]:
    """Yield the pieces, and their parts, that a block of a parameter needs.

    The parameter's shape is [experts, rows, columns], or [experts, matrices, rows, columns] if several are side by
    side.
    """
    (first, end), *inside = box
    if matrices == 1:
        yield from (_Wanted(Place(expert, 0), (expert - first,), tuple(inside)) for expert in range(first, end))
        return
    (low, high), *inside = inside
    for expert, matrix in product(range(first, end), range(low, high)):
        yield _Wanted(Place(expert, matrix), (expert - first, matrix - low), tuple(inside))


def _merges_experts(converter: Any, matrices: int) -> bool:
    operations = converter.operations
    wanted = (MergeModulelist, Concatenate)[: 1 + (matrices > 1)]
    kinds = len(operations) == len(wanted) and all(map(isinstance, operations, wanted))
    return kinds and [operation.dim for operation in operations] == [0, 1][: len(wanted)]
