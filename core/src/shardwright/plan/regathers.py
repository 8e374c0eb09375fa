"""Regions that gather their input again for weight gradients, under Megatron's sequence parallelism."""

from msgspec import UNSET

from shardwright.types.low_rank import LOW_RANK
from shardwright.types.model import LayerType, Parameter

_FIRST = f"{LOW_RANK}A."


def regathers(kind: LayerType) -> tuple[bool, ...]:
    """Return, for each region of a layer type, whether a matrix that multiplies its input is trained.

    A region ends with a matrix that is cut by its inputs, and the parameters are in the order of the modules. If
    there are not as many such matrices as regions, all regions are taken to be as the layer is. If all is trained,
    all gather again, however the family lays its matrices out.
    """
    if all(p.trained or p.is_buffer for p in kind.parameters):
        return (True,) * len(kind.regions)
    ends = [i for i, p in enumerate(kind.parameters) if _is_cut_by_inputs(p)]
    if len(ends) != len(kind.regions):
        return (any(map(_keeps_its_input, kind.parameters)),) * len(kind.regions)
    stretches = zip([0, *ends], ends, strict=False)
    return tuple(any(map(_keeps_its_input, kind.parameters[first:end])) for first, end in stretches)


def low_rank_pairs(kind: LayerType) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Return the low-rank pairs inside each region of a layer type: the rank, and whether W is cut by its inputs.

    Pairs of experts are left out. If regions cannot be told apart, the first one has all.
    """
    firsts = [(i, p) for i, p in enumerate(kind.parameters) if _FIRST in p.name and p.ep_dim is UNSET]
    ends = [i for i, p in enumerate(kind.parameters) if _is_cut_by_inputs(p)]
    if len(ends) != len(kind.regions):
        everything = tuple((p.shape[0], p.tp_dim is not None) for _, p in firsts)
        return (everything, *((),) * (len(kind.regions) - 1))
    # The pair beside the matrix that ends a region stands behind it.
    regions = (min(sum(end < i - (p.tp_dim is not None) * 2 for end in ends), len(ends) - 1) for i, p in firsts)
    placed = list(zip(regions, firsts, strict=True))
    return tuple(
        tuple((p.shape[0], p.tp_dim is not None) for region, (_, p) in placed if region == number)
        for number in range(len(ends))
    )


def _is_cut_by_inputs(parameter: Parameter) -> bool:
    """Return whether a parameter is a matrix [outputs, inputs] sharded by inputs; biases may have two dims too."""
    is_matrix = len(parameter.shape) == 2 and not parameter.name.endswith(".bias") and not parameter.shared
    return is_matrix and LOW_RANK not in parameter.name and parameter.tp_dim == 1


def _keeps_its_input(parameter: Parameter) -> bool:
    """Return whether the gradient of a parameter needs the input of its region."""
    if not parameter.trained or len(parameter.shape) < 2:
        return False
    is_cut = (parameter.tp_dim is not None or parameter.inside) and not parameter.name.endswith(".bias")
    return is_cut if LOW_RANK not in parameter.name else _FIRST in parameter.name and parameter.inside
