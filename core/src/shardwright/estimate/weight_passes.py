"""Weight passes of a split backward pass: their share of its time, and what is kept for them.

A weight pass has one matrix product for each trained matrix, which is as much work as in the forward pass. The matrix
products of experts stay in the backward pass. The share is computed from the operations, kernels and bytes of a layer
on one kind of device. It is applied to a backward pass whose time is estimated or measured, and is an estimate in both
cases.
"""

from typing import NamedTuple

from msgspec import UNSET

from shardwright.estimate.hardware import Link
from shardwright.estimate.layers import Machine, weight_share
from shardwright.plan.axes import axes_of
from shardwright.types import EMBEDDING, HEAD, ITEMSIZE, LayerType, Model, Parameter, Precision, Strategy
from shardwright.types.plan import Attention

_DEVICE = Machine(220.0, 1.0, Link(0.0, 0.0))
"""A device that computes 220 operations of matrix products in the time in which it moves a byte, as recent devices do
in 16 bits."""


class WeightPass(NamedTuple):
    """The weight pass of one microbatch through a layer."""

    share: float
    """The weight pass's share of the time of the whole backward pass."""
    deferred_bytes: int
    """Bytes of inputs and of outputs' gradients that a rank keeps for the weight pass after the backward pass."""


NO_WEIGHT_PASS = WeightPass(0.0, 0)


def weight_pass(
    model: Model, type_name: str, strategy: Strategy, samples: int, precision: Precision, attention: Attention
) -> WeightPass:
    """Return the weight pass of a layer for micro-batches of `samples` samples; embedding and head have none."""
    kind = model.types[type_name]
    if type_name in (EMBEDDING, HEAD) or not kind.has_backward:
        return NO_WEIGHT_PASS
    axes = axes_of(strategy)
    here = axes.rank_samples(samples)
    share = weight_share(model, type_name, strategy, here, precision, attention, _DEVICE)
    positions = kind.outputs[0].sequence_length // (axes.heads.size * axes.context.size)
    kept = here * positions * _features(kind, axes.dense.tensor.size) * ITEMSIZE[precision.compute]
    return WeightPass(share, kept)


def _features(kind: LayerType, parts: int) -> int:
    """Return the features per position that are kept for a weight pass: inputs of matrices, and gradients of outputs.

    Matrices of one module with equally many inputs share their input: queries, keys and values; gate and up.
    """
    found, inputs = 0, set[tuple[str, int]]()
    for parameter in kind.parameters:
        if not _is_matrix(parameter, kind):
            continue
        lengths, cut = list(parameter.shape), parameter.tp_dim
        if cut is not None:
            lengths[cut] = -(-lengths[cut] // parts)
        if len(lengths) == 3 and cut:  # several matrices in one, along the dim before the one that is cut
            several = lengths.pop(cut - 1)
            cut -= 1
            lengths[cut] *= several
        module, entered = parameter.name.removesuffix(".weight").rpartition(".")[0], lengths[-1]
        is_known = cut in (0, None) and (module, entered) in inputs
        inputs.add((module, entered))
        found += sum(lengths) - is_known * entered
    return found


def _is_matrix(parameter: Parameter, kind: LayerType) -> bool:
    """Return whether a parameter is a matrix whose gradient the runtime computes in a weight pass."""
    routes = kind.experts is not UNSET and parameter.shape[0] == kind.experts.number
    if not parameter.name.endswith(".weight") or not parameter.trained or parameter.shared or routes:
        return False
    return len(parameter.shape) > 1 and parameter.ep_dim is UNSET and parameter.copy_of is UNSET
