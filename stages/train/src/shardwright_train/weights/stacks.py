"""Tensors of files that hold the rows of several parameters, such as queries, keys and values in one matrix."""

from collections.abc import Collection, Iterator, Mapping

from shardwright_train.models.base import Family

Shape = tuple[int, ...]


def tensors_of_files(family: Family, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Return the parameters that each tensor of a file holds, in the order of their rows, with their shapes."""
    tensors = dict[str, dict[str, Shape]]()
    for name in sorted(shapes, key=lambda name: family.file_name(name)[1]):
        tensors.setdefault(family.file_name(name)[0], {})[name] = shapes[name]
    return tensors


def stacked_shape(shapes: Collection[Shape]) -> Shape:
    """Return the shape of a tensor that holds the rows of tensors of some shapes."""
    first = next(iter(shapes))
    return first if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *first[1:])


def row_ranges(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, int, int]]:
    """Yield the names of stacked tensors with the half-open ranges of their rows."""
    begin = 0
    for name, shape in shapes.items():
        yield name, begin, begin + shape[0]
        begin += shape[0]
