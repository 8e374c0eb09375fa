"""Tensors in safetensors files: a whole parameter, several stacked ones, or a piece of one; quantized or not.

transformers merges experts' pieces according to its conversion mapping: experts in the first dim, then matrices side
by side in the second.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist

from shardwright.io import BadInput, system_fault
from shardwright.plan.layout import Box
from shardwright_train.models.base import Family

# Matrices stored in few bits, with block scales, dequantized exactly as transformers does.
#
# - FP8 (`quant_method: fp8`, DeepSeek-V3): a matrix in e4m3 [rows, columns] and NAME_scale_inv
#   [rows / m, columns / n], rounded up, for blocks of `weight_block_size` m x n, 128 x 128 in the published files. A
#   value is its number times its scale.
# - MXFP4 (`quant_method: mxfp4`, gpt-oss; Rouhani et al. 2023): for experts, NAME_blocks [experts, columns, groups, 16]
#   with two numbers in e2m1 in each byte, the low bits first, and NAME_scales [experts, columns, groups], exponents of
#   2 plus 127. They make [experts, 32 x groups, columns].
#
# Values are computed in float32 and rounded to the format of the tensor that they fill: to the bit as `Fp8Dequantize`
# and `Mxfp4Dequantize` of transformers 5.23 compute them. Blocks at an edge may be cut, as in DeepSeek's own code.


_GROUP = 32
"""Count of MXFP4 numbers that share a scale."""
_BIAS = 127
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_FP8, _MXFP4 = "fp8", "mxfp4"
_FP8_SCALES, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
"""Suffixes of the names of FP8 scales, MXFP4 numbers and MXFP4 scales."""
_UNUSED = (".activation_scale", ".input_scale")
"""Suffixes of the names of scales of activations, on which weights do not depend."""
_FORMATS = {"F8_E4M3": ("F64", "F32", "F16", "BF16", "U8", "F8_E8M0"), "U8": ("U8",)}
"""Formats of numbers, each with the formats that their scales may have."""
_BLOCK = (128, 128)
_REMEDY = "have transformers load and dequantize the model, and save it in bfloat16"


class Scales(NamedTuple):
    """The block scales of a matrix in a file."""

    file: Path
    key: str
    block: tuple[int, int] | None
    """Rows and columns of a block in FP8; None: groups in MXFP4."""

    @property
    def format(self) -> str:
        """Return the name of the number format, for messages."""
        return _MXFP4 if self.block is None else _FP8


class Stored(NamedTuple):
    """A tensor of a file, or some of its rows, according to the file's header; `dtype` is safetensors' name."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    first: int = 0
    """Index of its first row in the file's tensor."""
    scales: Scales | None = None
    """Scales of a quantized matrix; `shape` is then the shape of the values that it represents."""

    def part(self, opened: Any, ranges: Sequence[slice]) -> Tensor:
        """Return the values in these ranges (begin and end for each dim) of an opened file."""
        held = opened.get_slice(self.key)
        if self.scales is None:
            part: Tensor = held[tuple(ranges)]
            return part
        if self.scales.file == self.file:
            return _values(held, opened, self.scales, ranges)
        with safe_open(self.scales.file, "pt") as other:
            return _values(held, other, self.scales, ranges)


def _values(held: Any, opened: Any, scales: Scales, ranges: Sequence[slice]) -> Tensor:
    if scales.block is None:
        return _of_groups(held, opened.get_slice(scales.key), ranges)
    *outer, rows, columns = ranges
    (height, width), lengths = scales.block, (rows.stop - rows.start, columns.stop - columns.start)
    cells = (
        slice(rows.start // height, -(-rows.stop // height)),
        slice(columns.start // width, -(-columns.stop // width)),
    )
    whole = opened.get_tensor(scales.key)
    grid = _as_factors(whole)[*outer, *cells] if whole.dim() > 1 else _as_factors(whole).reshape(1, 1)
    grid = grid.repeat_interleave(height, -2).narrow(-2, rows.start % height, lengths[0])
    grid = grid.repeat_interleave(width, -1).narrow(-1, columns.start % width, lengths[1])
    values: Tensor = held[tuple(ranges)].to(torch.float32) * grid
    return values


def _as_factors(scales: Tensor) -> Tensor:
    return (scales.float() - _BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()


def _of_groups(blocks: Any, scales: Any, ranges: Sequence[slice]) -> Tensor:
    experts, rows, columns = ranges
    groups = slice(rows.start // _GROUP, -(-rows.stop // _GROUP))
    packed, exponents = blocks[experts, columns, groups], scales[experts, columns, groups].int() - _BIAS
    numbers = torch.tensor(_E2M1, dtype=torch.float32)
    pairs = torch.stack((numbers[(packed & 0xF).int()], numbers[(packed >> 4).int()]), -1)
    values = torch.ldexp(pairs.flatten(-2), exponents[..., None]).flatten(-2)
    return values.narrow(-1, rows.start % _GROUP, rows.stop - rows.start).transpose(-1, -2)


def with_values(file: Path, stored_in: object, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of a folder; quantized ones have the names and shapes of the values they represent.

    `stored_in`: the quantization_config of `file`, if it has one. Raises BadInput for formats that are not read.
    """
    scaled = [key for key in tensors if key.endswith((_FP8_SCALES, _BLOCKS, _SCALES))]
    if not isinstance(stored_in, Mapping):
        if scaled:
            problem = f"has no quantization_config, but the folder holds {scaled[0]}"
            raise BadInput(file, problem, "fetch the published config.json again")
        return dict(tensors)
    method = stored_in.get("quant_method")
    if method == _MXFP4:
        return _of_mxfp4(tensors)
    if method == _FP8:
        return _of_fp8(tensors, _block(file, stored_in))
    problem = f"quantization_config: weights in {method} are not read ({_FP8} in blocks and {_MXFP4} are)"
    raise BadInput(file, problem, _REMEDY)


def _block(file: Path, stored_in: Mapping[str, Any]) -> tuple[int, int]:
    block = stored_in.get("weight_block_size") or _BLOCK
    if isinstance(block, Sequence) and len(block) == 2 and all(type(side) is int and side > 0 for side in block):
        return block[0], block[1]
    raise BadInput(
        file, f"weight_block_size {block!r} is not two positive integers", "fetch the published config.json again"
    )


def _of_fp8(tensors: Mapping[str, Stored], block: tuple[int, int]) -> dict[str, Stored]:
    found = {}
    for key, stored in tensors.items():
        if key.endswith(_UNUSED) or (key.endswith(_FP8_SCALES) and key.removesuffix(_FP8_SCALES) in tensors):
            continue
        scales = tensors.get(f"{key}{_FP8_SCALES}")
        if scales is None:
            found[key] = stored
            continue
        _check_formats(stored, scales)
        cell = _cell(stored.shape, scales.shape, block)
        if cell is None:
            problem = f"{scales.key} has the shape {list(scales.shape)} for a matrix {list(stored.shape)}"
            raise BadInput(scales.file, f"{problem} in blocks of {block[0]} x {block[1]}", _REMEDY)
        found[key] = stored._replace(scales=Scales(scales.file, scales.key, cell))
    return found


def _cell(shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int] | None:
    """Return the rows and columns of a block, by the shape of the scales: `block`, or equal parts, or None."""
    sides, counts = shape[-2:], grid[-2:] if len(grid) > 1 else (1, 1)
    if len(shape) < 2 or 0 in counts or (len(grid) > 1 and grid[:-2] != shape[:-2]):
        return None
    if all(-(-side // length) == count for side, length, count in zip(sides, block, counts, strict=True)):
        return block
    equal = all(side % count == 0 for side, count in zip(sides, counts, strict=True))
    return (sides[0] // counts[0], sides[1] // counts[1]) if equal else None


def _of_mxfp4(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    found = {}
    for key, stored in tensors.items():
        if key.endswith(_SCALES) and f"{key.removesuffix(_SCALES)}{_BLOCKS}" in tensors:
            continue
        name = key.removesuffix(_BLOCKS)
        scales = tensors.get(f"{name}{_SCALES}")
        if name == key or scales is None:
            found[key] = stored
            continue
        _check_formats(stored, scales)
        if len(stored.shape) != 4 or stored.shape != (*scales.shape, _GROUP // 2):
            problem = f"{key} has the shape {list(stored.shape)} for scales {list(scales.shape)}"
            raise BadInput(stored.file, problem, _REMEDY)
        experts, columns, groups, _ = stored.shape
        shape = experts, groups * _GROUP, columns
        found[name] = stored._replace(shape=shape, scales=Scales(scales.file, scales.key, None))
    return found


def _check_formats(stored: Stored, scales: Stored) -> None:
    if scales.dtype not in _FORMATS.get(stored.dtype, ()):
        problem = f"{stored.key} is stored as {stored.dtype} with scales as {scales.dtype}, which is not read"
        raise BadInput(stored.file, problem, _REMEDY)


# The tensors in a file.


AGAIN = "fetch the folder again"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The formats that tensors in files may have, by safetensors' names."""


def header(file: Path) -> dict[str, Stored]:
    """Return every tensor of a safetensors file by key, without reading any; raise BadInput if the file is invalid."""
    try:
        with safe_open(file, "numpy") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}
            return {key: Stored(file, key, tuple(x.get_shape()), x.get_dtype()) for key, x in slices.items()}
    except SafetensorError as error:
        raise BadInput(file, f"is not a valid safetensors file ({error})", AGAIN) from None
    except OSError as error:
        raise system_fault(error, file) from None


@contextmanager
def opened(file: Path, key: str = "") -> Iterator[Any]:
    """Open a safetensors file for reading tensors; raise BadInput, naming a key, if it has changed since."""
    try:
        with safe_open(file, "pt") as held:
            yield held
    except (SafetensorError, OSError) as error:
        raise BadInput(file, f"{key} cannot be read ({error})".lstrip(), AGAIN) from None


# Tensors that hold the rows of several parameters, such as queries, keys and values in one matrix.


Shape = tuple[int, ...]


def tensors_of_files(family: Family, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Return the parameters in each tensor of a file, in the order of their rows, with their shapes."""
    tensors = dict[str, dict[str, Shape]]()
    for name in sorted(shapes, key=lambda name: family.file_name(name)[1]):
        tensors.setdefault(family.file_name(name)[0], {})[name] = shapes[name]
    return tensors


def stacked_shape(shapes: Collection[Shape]) -> Shape:
    """Return the shape of a tensor that stacks the rows of tensors with these shapes."""
    first = next(iter(shapes))
    return first if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *first[1:])


def row_ranges(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, int, int]]:
    """Yield the names of stacked tensors with the half-open ranges of their rows."""
    begin = 0
    for name, shape in shapes.items():
        yield name, begin, begin + shape[0]
        begin += shape[0]


# Experts' parameters, which files store in pieces: a tensor for each expert and each of the matrices side by side.


_NUMBER = "*"
"""The placeholder for an expert's number in transformers' patterns."""


class Place(NamedTuple):
    """The place of a piece in its parameter."""

    expert: int
    matrix: int
    """Index among the matrices side by side."""


class Source(NamedTuple):
    """A matrix that files store for each expert, by the pattern of its name."""

    patterns: tuple[str, ...]
    """Patterns of all matrices that are side by side in the parameter."""
    matrix: int

    def place(self, key: str) -> Place | None:
        """Return the place of a tensor by its key in a file."""
        pattern = re.escape(self.patterns[self.matrix]).replace(re.escape(_NUMBER), r"(\d+)")
        match = re.search(pattern, key)
        return None if match is None else Place(int(match[1]), self.matrix)


def source_of(pattern: str | None, converters: Sequence[Any]) -> Source | None:
    """Return the matrix with this pattern in a conversion; None if its tensors are not experts' pieces."""
    for converter in converters:
        patterns = tuple(converter.source_patterns)
        if pattern in patterns and _merges_experts(converter, len(patterns)):
            return Source(patterns, patterns.index(pattern))
    return None


def piece_shape(shape: tuple[int, ...], source: Source) -> tuple[int, ...]:
    """Return the shape of each piece of a parameter [experts, rows, columns]."""
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
    """The tensors in a folder's files that make up one parameter of `shape` [experts, rows, columns]."""

    shape: tuple[int, ...]
    source: Source
    tensors: dict[Place, Stored]

    def wrong(self, name: str, stored_name: str, is_whole: bool) -> str | None:
        """Return what is wrong with the pieces, or None: missing, surplus, or the whole parameter exists, too.

        `stored_name`: the parameter's name in files, as `key_of` expects it.
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
            with opened(file) as held:
                for place, at, inside in group:
                    part = tuple(slice(low, high) for low, high in inside)
                    window[at].copy_(self.tensors[place].part(held, part))

    def _file_of(self, wanted: "_Wanted") -> Path:
        return self.tensors[wanted.place].file


class _Wanted(NamedTuple):
    """The part of a piece that a part of a parameter needs."""

    place: Place
    at: tuple[int, ...]
    """Indices of the piece's part in the parameter's part."""
    box: Box


def _windows(box: Box, matrices: int) -> Iterator[_Wanted]:
    """Yield the pieces, and the parts of them, that a block of a parameter needs.

    The parameter's shape is [experts, rows, columns], or [experts, matrices, rows, columns] if it fuses several
    matrices.
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
