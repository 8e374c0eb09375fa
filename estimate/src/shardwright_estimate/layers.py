"""Time and memory of one layer by a roofline over its parts.

A matrix product takes the longer of its operations over the reached rate and its bytes over the reached bandwidth
(Williams, Waterman and Patterson 2009). What lies between products is bound by memory: everything that is kept for the
backward pass is written once and read once. Kernels follow one another, so their times add up, and each adds what it
takes to start; no layer is faster than the host can start its kernels. A backward pass does twice the work of its
forward pass, a flash kernel two and a half times, repeats what was not kept, and adds its gradients to those of other
microbatches. Frozen matrices cost the gradient of their inputs alone, and layers before all that is trained nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from shardwright_estimate.expert_parts import expert_parameters, experts_of, experts_part
from shardwright_estimate.messages import Link, messages_time_s
from shardwright_estimate.part import Part
from shardwright_estimate.parts import layer_parts
from shardwright_formats.key import ExpertKey
from shardwright_formats.semantics.axes import axes_of
from shardwright_formats.semantics.communication import Message, loss_messages, region_messages
from shardwright_formats.semantics.expert_messages import shares_experts
from shardwright_formats.semantics.parameter_groups import parameter_groups
from shardwright_formats.semantics.schedules.passes import Pass
from shardwright_formats.types import HEAD, ITEMSIZE, Attention, LayerType, Model, Precision, Recompute, Strategy
from shardwright_formats.types.model_profile import LayerFigures
from shardwright_models.registry import facts_of

KERNEL_START_S = 5e-6
"""Time that every kernel adds on the device: filling and draining it."""
OPERATOR_S = 42e-6
"""Time that the host takes for a kernel of eager PyTorch: Python, autograd, dispatch and driver.

Fitted with the kernels of `parts`: it minimizes the median (14 %) and the mean error of the 272 layer times of
benchmarks/analytic.py, FASOP's among them, which the host bounds.
"""
ATTENTION_BACKWARD = 2.5
"""Five products in a flash kernel's backward pass, for two in the forward one (Dao 2023)."""

SCORES_KEPT = (Attention.EAGER, Attention.SDPA_MATH)
"""Attention kernels that keep all scores."""
_MASKED = (*SCORES_KEPT, Attention.SDPA)
"""Attention kernels that know no window: a mask is added to all scores."""


class Machine(NamedTuple):
    """The rates that a device and its links are taken to reach."""

    flops_per_s: float
    memory_bytes_per_s: float
    link: Link
    attention_flops_per_s: float | None = None
    """Rate of flash kernels; None: as other products."""
    operator_s: float = OPERATOR_S
    """Time of the host for each kernel; 0 where CUDA graphs replay them."""
    compiled: bool = False
    """Whether what lies between a block's products is fused into few kernels, as torch.compile does."""
    message_pieces: int = 1
    """Pieces of each tensor-parallel message of which all but one hide behind products; 1 hides nothing."""


class _Share(NamedTuple):
    """The part of a layer that one rank has."""

    samples: int
    itemsize: int
    inside: float
    """Part of what tensor-parallel ranks share out."""
    outside: float
    """Part of what lies outside; gathered for a region, it is `entering` for a moment."""
    entering: float
    weights: float
    scores_kept: bool
    adds_masks: bool
    exchanges_heads: bool = False

    def kept_bytes(self, part: Part) -> float:
        scores = part.scores * self.itemsize + part.scores // 2 + part.score_bytes if self.scores_kept else 0
        repeated = part.repeated * self.itemsize if self.scores_kept or self.masks(part) else 0
        # A kernel that keeps scores does not keep what it gives.
        exchanged = part.attended * self.itemsize if self.exchanges_heads and not self.scores_kept else 0
        inside = part.inside * self.itemsize + part.inside_bytes + scores + repeated + exchanged
        whole = part.whole * self.itemsize + part.whole_bytes
        return self.samples * (inside * self.inside + whole * self.entering) + self.outside_bytes(part)

    def outside_bytes(self, part: Part) -> float:
        """Return the bytes that are kept of what goes into a part and out of it, norms and dropout included."""
        return self.samples * (part.outside * self.itemsize + part.outside_bytes) * self.outside

    def between_bytes(self, part: Part) -> float:
        """Return the bytes that are kept of a part which is recomputed alone: norms are before it, but for BERT's."""
        if part.norm_inside:
            return self.result_bytes(part)
        return self.outside_bytes(part) - self.samples * part.redrawn_bytes * self.outside

    def masks(self, part: Part) -> bool:
        """Return whether a window's mask is added to all scores."""
        return self.adds_masks and part.left_out > 0

    def passing_bytes(self, part: Part) -> float:
        whole = part.passing * self.itemsize
        return self.samples * (part.passing_bytes * self.inside + whole * self.entering)

    def once_bytes(self, part: Part) -> float:
        """Return the bytes of what a part computes once for all samples."""
        return (part.mask * self.inside + part.weight_copies * self.weights) * self.itemsize

    def product_bytes(self, part: Part) -> float:
        return self.samples * self.itemsize * (part.products * self.inside + part.whole_products * self.entering)

    def selected_bytes(self, part: Part, ends: bool) -> float:
        """Return what selective recomputation keeps: also the sum over ranks, unless it ends the layer unused."""
        return self.product_bytes(part) + (0 if ends and not part.keeps_result else self.result_bytes(part))

    def result_bytes(self, part: Part) -> float:
        return self.samples * part.result * self.itemsize * self.outside

    def widest_bytes(self, part: Part) -> float:
        """Return the bytes of the largest tensor of a part and its gradient."""
        inside = (part.widest * self.itemsize + part.widest_bytes) * self.inside
        whole = max(part.result, part.widest_whole) * self.itemsize * self.entering
        return 2 * self.samples * max(inside, whole)


def estimate_layer(
    model: Model,
    type_name: str,
    strategy: Strategy,
    micro_batch_size: int,
    precision: Precision,
    attention: Attention,
    machine: Machine,
    fused: bool = False,
) -> LayerFigures[float]:
    """Return the figures of a layer under a strategy of one tensor-parallel group, which may be a `LayerStrategy`.

    Where that says how ranks share experts out, they are those of the rest of the layer, of which each rank routes its
    positions; `estimate_experts` gives those of experts.
    """
    share = _share(strategy, micro_batch_size, precision, attention)
    parts = layer_parts(model, type_name, fused, machine.compiled)
    if shares_experts(strategy):
        *before, router, experts = parts
        stream = Part(name=experts.name, flops=0, outside=0, result=experts.result, kernels=0)
        parts = (*before, _at_positions(router, share), stream)
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    replayed = _replayed(parts, recompute)
    there, back = (_messages(model, type_name, strategy, micro_batch_size, share.itemsize, way) for way in Pass)
    forward_s = sum(_part_time_s(part, share, machine) for part in parts)
    table_bytes = sum(part.dense_gradient for part in parts) * share.itemsize * share.weights
    kind, _ = parameter_groups(model.types[type_name], strategy)[0]
    accumulated = _accumulated_bytes(kind, strategy, precision)
    replay_time_s = _between_products_s if recompute is Recompute.SELECTIVE else _part_time_s
    backward_s = (
        sum(_part_backward_s(part, share, machine) for part in parts)
        + sum(replay_time_s(part, share, machine) for part in replayed)
        + (table_bytes + accumulated) / machine.memory_bytes_per_s
    )
    if not model.types[type_name].has_backward:
        there_s = max(
            forward_s + _exposed_s(there, forward_s, machine), sum(p.kernels for p in parts) * machine.operator_s
        )
        return LayerFigures(there_s, 0.0, 0, round(max(share.widest_bytes(part) for part in parts)))
    kernels, again_kernels = (sum(part.kernels for part in some) for some in (parts, replayed))
    return LayerFigures(
        max(forward_s + _exposed_s(there, forward_s, machine), kernels * machine.operator_s),
        max(backward_s + _exposed_s(back, backward_s, machine), (2 * kernels + again_kernels) * machine.operator_s),
        *_memory(parts, share, recompute),
    )


def estimate_experts(model: Model, key: ExpertKey, precision: Precision, machine: Machine) -> LayerFigures[float]:
    """Return the figures of experts on one rank for the rows of a key, without messages, at even load."""
    kind = model.types[key.type]
    experts, hidden, itemsize = experts_of(kind), model.boundary[0].features, ITEMSIZE[precision.compute]
    parts = key.etp_size
    here = replace(experts, number=key.experts, top_k=1, features=experts.features // parts)
    exchanged = key.experts < experts.number or parts > 1
    part = experts_part(model, here, key.rows, hidden, 0, exchanged)
    kernels = part.fused_kernels if machine.compiled and part.fused_kernels is not None else part.kernels
    part = replace(part, trained=kind.trained_share, kernels=kernels)
    share = _Share(1, itemsize, 1.0, 1.0, 1.0, 1.0, False, False)
    replayed = _replayed([part], key.recompute)
    forward_s = _part_time_s(part, share, machine)
    replay_s = _between_products_s if key.recompute is Recompute.SELECTIVE else _part_time_s
    parameters = expert_parameters(kind) * key.experts // parts
    backward_s = (
        _part_backward_s(part, share, machine)
        + sum(replay_s(each, share, machine) for each in replayed)
        + _accumulated(parameters, precision) / machine.memory_bytes_per_s
    )
    host_s = part.kernels * machine.operator_s
    return LayerFigures(
        max(forward_s, host_s),
        max(backward_s, (2 + len(replayed)) * host_s),
        *_memory([part], share, key.recompute),
    )


def _at_positions(router: Part, share: _Share) -> Part:
    """Return the part of a router that sees the positions of its rank between regions, not those inside."""
    ratio = share.outside / share.entering
    sizes = {name: round(getattr(router, name) * ratio) for name in ("whole_bytes", "passing")}
    scaled = router.scaled(ratio) if router.undivided else replace(router, whole_flops=router.whole_flops * ratio)
    return replace(scaled, **sizes)


def _exposed_s(messages: Iterable[Message], pass_s: float, machine: Machine) -> float:
    """Return what messages add to a pass: one piece of each, and what is longer than the pass that hides the others."""
    alone_s = messages_time_s(messages, machine.link)
    hidden_s = min(alone_s * (1 - 1 / machine.message_pieces), pass_s)
    return alone_s - hidden_s


def estimate_memory(
    model: Model, type_name: str, strategy: Strategy, micro_batch_size: int, precision: Precision, attention: Attention
) -> tuple[int, int]:
    """Return the bytes of a layer's activations and of its workspace, with norms and activations of one kernel each."""
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    return _memory(
        layer_parts(model, type_name, True), _share(strategy, micro_batch_size, precision, attention), recompute
    )


def masks_bytes(model: Model, precision: Precision, attention: Attention) -> int:
    """Return the bytes of the masks that a rank holds: one for each length of window, added to its layers' scores."""
    windows = {kind.window for kind in model.types.values()} if attention in _MASKED else set()
    # Where an image stands in its text, masks differ from sample to sample, and are of blocks without a window, too.
    windows -= set() if facts_of(model).images_ahead else {None}
    return len(windows) * model.sequence_length**2 * ITEMSIZE[precision.compute]


def _replayed(parts: Sequence[Part], recompute: Recompute) -> list[Part]:
    return [part for part in parts if recompute in (Recompute.FULL, Recompute.SELECTIVE, part.name)]


def _memory(parts: Sequence[Part], share: _Share, recompute: Recompute) -> tuple[int, int]:
    """Return the bytes that are held for the backward pass, and those for a moment beside them."""
    replayed = _replayed(parts, recompute)
    kept = sum(share.kept_bytes(part) for part in parts if part not in replayed)
    again = sum(share.kept_bytes(part) for part in replayed)
    if recompute is Recompute.FULL:
        held = share.result_bytes(parts[-1])
    elif recompute is Recompute.SELECTIVE:
        held = share.result_bytes(parts[-1]) + sum(share.selected_bytes(part, part is parts[-1]) for part in parts)
        again -= sum(share.product_bytes(part) for part in parts)
    else:
        between = sum(share.between_bytes(part) for part in replayed)
        held, again = kept + between, again - between
    once = sum(share.once_bytes(part) for part in parts)
    return round(held), round(again + once + max(share.widest_bytes(part) for part in parts))


def _accumulated_bytes(kind: LayerType, strategy: Strategy, precision: Precision) -> int:
    """Return the bytes that adding a microbatch's gradients to those of others reads and writes."""
    return _accumulated(kind.trained_count(axes_of(strategy).dense.tensor.size), precision)


def _accumulated(parameters: int, precision: Precision) -> int:
    return parameters * (2 * ITEMSIZE[precision.reduce] + ITEMSIZE[precision.compute])


def optimizer_time_s(kind: LayerType, parts: int, precision: Precision, machine: Machine) -> float:
    """Return the seconds of AdamW over one layer's parameters, bound by memory, clipping included.

    AdamW reads and writes the parameter and two moments and reads the gradient; clipping reads the gradient twice and
    writes it once.
    """
    stored, reduced = ITEMSIZE[precision.parameters], ITEMSIZE[precision.reduce]
    moved = kind.trained_count(parts) * (6 * stored + 4 * reduced)
    return moved / machine.memory_bytes_per_s


def _share(strategy: Strategy, samples: int, precision: Precision, attention: Attention) -> _Share:
    axes = axes_of(strategy)
    return _Share(
        samples=samples,
        itemsize=ITEMSIZE[precision.compute],
        inside=1 / axes.layout.sample_ranks,
        outside=1 / axes.layout.sequence.size,
        entering=1 / axes.heads.size,
        weights=1 / axes.dense.tensor.size,
        scores_kept=attention in SCORES_KEPT,
        adds_masks=attention in _MASKED,
        exchanges_heads=axes.exchanges_heads,
    )


def _part_time_s(part: Part, share: _Share, machine: Machine) -> float:
    """Return the seconds of the forward pass, without messages."""
    products_s = _products_s(part, share, machine)
    return products_s + _attention_s(part, share, machine) + _between_products_s(part, share, machine)


def _products_s(part: Part, share: _Share, machine: Machine) -> float:
    """Return the seconds of the forward pass's products with matrices."""
    kept = share.kept_bytes(part) + share.passing_bytes(part)
    weights, inside = (1.0, share.entering) if part.undivided else (share.weights, share.inside)
    product_bytes = part.weights * share.itemsize * weights + kept if part.weights else 0.0
    operations = (part.flops * inside + part.whole_flops * share.entering) * share.samples + part.tile_flops * weights
    return max(operations / machine.flops_per_s, product_bytes / machine.memory_bytes_per_s)


def _part_backward_s(part: Part, share: _Share, machine: Machine) -> float:
    """Return the seconds of the backward pass, without messages: two products for each, and flash scores again.

    Of a frozen matrix there is the product for its input alone.
    """
    more = 0.0 if share.scores_kept else ATTENTION_BACKWARD - 2
    spared_s = (1 - part.trained) * _products_s(part, share, machine)
    return 2 * _part_time_s(part, share, machine) + more * _attention_s(part, share, machine) - spared_s


def _attention_s(part: Part, share: _Share, machine: Machine) -> float:
    """Return the seconds of scores and what they weigh; a flash kernel leaves out what a causal mask does, or a window.

    Where a window's mask is added to the scores, it leaves out nothing.
    """
    masked = share.masks(part)
    operations = (part.attention_flops + masked * part.left_out) * share.samples * share.inside
    if share.scores_kept:
        return operations / machine.flops_per_s
    seen = 0.5 if part.causal and not masked else 1.0
    return operations * seen / (machine.attention_flops_per_s or machine.flops_per_s)


def _between_products_s(part: Part, share: _Share, machine: Machine) -> float:
    """Return the seconds of the forward pass between its products."""
    moved = share.kept_bytes(part) + share.passing_bytes(part) + share.once_bytes(part)
    return 2 * moved / machine.memory_bytes_per_s + part.kernels * KERNEL_START_S


def _messages(
    model: Model, type_name: str, strategy: Strategy, samples: int, itemsize: int, during: Pass
) -> Iterator[Message]:
    """Yield what tensor and sequence parallelism move in one pass, replays in the backward one."""
    messages = list(region_messages(model, type_name, strategy, samples, itemsize, 1))
    if type_name == HEAD:
        messages += loss_messages(model.types[type_name], strategy, samples, itemsize, 1)
    return (message for message in messages if message.during is during)
