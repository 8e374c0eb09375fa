"""Model FLOP utilization (MFU): the share of the devices' published peak that a model's operations use."""

from typing import NamedTuple

from shardwright.devices.table import shipped_devices
from shardwright.models.facts import Family
from shardwright.models.registry import FAMILIES, facts_of_type
from shardwright.models.traits import Mask
from shardwright.types import EMBEDDING, HEAD, Heads, Model, Plan

MFU_COUNTS = (
    "MFU: 6 FLOPs a token for each weight of a matrix, the head's too, and 12 x width a layer for each position that "
    "attention sees, in causal attention none after its own; full-square MFU counts masked positions too (Chowdhery et "
    "al. 2022, Narayanan et al. 2021); no recomputation; over the GPUs' published peak"
)
"""The two counting conventions in words; full-square is used in PaLM's appendix B and Megatron-LM's equation 2."""


class Utilization(NamedTuple):
    """Model FLOP utilization (MFU): achieved over peak FLOP/s, by how attention's operations are counted."""

    causal: float
    """Counting pairs of positions that attention sees: about half of all pairs if attention is causal."""
    full_square: float
    """Counting all pairs of positions, including masked ones, except those outside a sliding window."""

    @property
    def words(self) -> str:
        """Return the utilization as `MFU 38.4% (full-square 57.1%)`, or one figure if no attention is causal."""
        other = "" if self.causal == self.full_square else f" (full-square {self.full_square:.1%})"
        return f"MFU {self.causal:.1%}{other}"


def model_flops_utilization(plan: Plan, step_time_s: float) -> Utilization | None:
    """Return the model FLOP utilization of a plan at a step time; None if a device's peak is not known.

    Each device's peak is the table's figure for the plan's number format. A backward pass counts as two forward passes,
    less for what is frozen; recomputation does not count.
    """
    products = "tf32" if plan.precision.tf32 else plan.precision.compute
    devices = [shipped_devices().get(plan.cluster.of_rank(rank).device) for rank in range(plan.world_size)]
    peaks = [None if device is None else device.peak(products) for device in devices]
    if None in peaks:
        return None
    layers = (EMBEDDING, *plan.model.layers, HEAD)
    possible = step_time_s / plan.global_batch_size * sum(filter(None, peaks))
    full = sum(plan.model.types[name].step_flops_per_sample for name in layers)
    masked = {name: _masked_flops(plan.model, name) for name in plan.model.types}
    left_out = sum(masked[name] * plan.model.types[name].passes for name in layers)
    return Utilization((full - left_out) / possible, full / possible)


def _masked_flops(model: Model, type_name: str) -> float:
    """Return the operations of a forward pass over a sample for scores that a causal mask leaves out.

    A window of w of n positions counts p = w (2 n - w) pairs, as many after a position as before it; a causal mask
    leaves (p + w) / 2 of them.
    """
    if model.family not in FAMILIES:
        return 0.0
    family, _ = facts_of_type(model, type_name)
    kind, flops = model.types[type_name], 0.0
    lengths = {tensor.name: tensor.sequence_length for tensor in kind.outputs}
    for heads in (region.attention for region in kind.regions):
        if heads is not None and _is_causal(family, heads):
            length = lengths[heads.queries]
            window = heads.window or length
            pairs = (window * (2 * length - window) - window) / 2
            flops += 2 * pairs * (heads.head_features + heads.features_of_values) * heads.heads
    return flops


def _is_causal(family: Family, heads: Heads) -> bool:
    """Return whether positions attend only to themselves and to earlier positions, as in a decoder.

    In some families, positions of an image also see later ones; this is ignored, as they are few.
    """
    decodes = len(family.states) > 1 and heads.queries == family.states[-1]
    return heads.queries == heads.keys and (decodes or family.attention.mask is Mask.CAUSAL)
