"""Time and memory of one layer by a roofline over its parts.

A matrix product takes the longer of its operations over the reached rate and its bytes over the reached bandwidth
(Williams, Waterman and Patterson 2009). What lies between matrix products is bound by memory: everything that is kept
for the backward pass is written once and read once. Kernels run one after another, so their times add up, and each adds
its start-up time; no layer is faster than the host can start its kernels. A backward pass does twice the work of its
forward pass (a flash kernel two and a half times), repeats what was not kept, and adds its gradients to the gradients
of other micro-batches. For frozen matrices only the gradient of their inputs is computed, and for layers before the
first trained one nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.estimate.expert_parts import exchange_kernels, expert_parameters, experts_of, experts_part, has_biases
from shardwright.estimate.hardware import Link, messages_time_s
from shardwright.estimate.held import OURS, Held, Module
from shardwright.estimate.part import Part
from shardwright.estimate.parts import layer_parts
from shardwright.estimate.runtimes import OPERATOR_S, Graphs
from shardwright.key import ExpertKey
from shardwright.models.registry import FAMILIES
from shardwright.optimizers.registry import ADAMW, Optimizer, shards_of
from shardwright.plan.axes import axes_of
from shardwright.plan.communication import Message, loss_messages, region_messages, shares_experts
from shardwright.plan.layout import parameter_groups
from shardwright.plan.schedules.passes import Pass
from shardwright.types.hardware_profile import Collective
from shardwright.types.model import EMBEDDING, HEAD, LayerType, Model
from shardwright.types.model_profile import LayerFigures
from shardwright.types.plan import FUSED_SDPA, ITEMSIZE, NARROW_BITS, Attention, Precision
from shardwright.types.strategy import Recompute, RecomputedPart, SequenceParallel, Strategy

KERNEL_START_S = 5e-6
"""Seconds that every kernel adds on the device, for filling and draining it."""
ATTENTION_BACKWARD = 2.5
"""Ratio of a flash kernel's backward to its forward time: five matrix products against two (Dao 2023)."""
FLASH2_BACKWARD = 1.25 * ATTENTION_BACKWARD
"""The same ratio for FlashAttention-2, whose backward products are a quarter slower than its forward ones (Dao
2023)."""
_NARROW_HEAD, _WIDE_HEAD = 64, 128
"""Head widths for which flash kernels are compiled; widths between them take the time of the wide one."""
_NARROW_HEADS = 1.2
"""Ratio of the time per operation of attention scores with heads of 64 to heads of 128 (Shah et al. 2024, figure 5)."""

_ALONG_THE_SEQUENCE = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
"""Collectives of sequence parallelism, whose dimension is not the first one of a tensor."""
SCORES_KEPT = (Attention.EAGER, Attention.SDPA_MATH)
"""Attention kernels that keep all scores."""
_MASKED = (*SCORES_KEPT, *FUSED_SDPA)
"""Attention kernels without support for windows: a mask is added to all scores."""


class ExpertHabits(NamedTuple):
    """How a runtime starts and computes the experts of a rank."""

    graphs: Graphs = Graphs.NONE
    kernels: int = 0
    """Number of kernels of each local expert in a forward pass."""
    fused: bool = False
    """Whether experts are one operator, including the permutation and quantization of their rows."""
    bias_bytes: int = 0
    """Bytes for each element of a row if experts have biases, which are added in float32 unless experts are one
    operator."""


class Machine(NamedTuple):
    """The achievable rates of a device and its links."""

    flops_per_s: float
    memory_bytes_per_s: float
    link: Link
    attention_flops_per_s: float | None = None
    """Rate of flash kernels in FLOP/s; None if it is the rate of other matrix products."""
    operator_s: float = OPERATOR_S
    """Seconds of the host for each kernel; 0 if CUDA graphs replay them."""
    compiled: bool = False
    """Whether the operations between a block's matrix products are fused into few kernels, as by torch.compile."""
    message_pieces: int = 1
    """Number of pieces of each tensor-parallel message; all except one overlap with matrix products. 1: nothing
    overlaps."""
    attention_backward: float = ATTENTION_BACKWARD
    """Ratio of a flash kernel's backward time to its forward time."""
    whole_scores_from: int | None = None
    """Sequence length from which masked scores are computed, too; None if they never are."""
    copies_gathers: bool = False
    """Whether messages along the sequence are copied on the device before or after they are sent."""
    experts: ExpertHabits = ExpertHabits()
    held: Held = OURS
    """The runtime's habits in memory."""


class _Share(NamedTuple):
    """The share of a layer's part that one rank computes; floats are shares of the total over all ranks."""

    samples: int
    itemsize: int
    inside: float
    """Share of what tensor-parallel ranks split."""
    outside: float
    """Share of what lies outside a region; gathered for a region, it is temporarily `entering`."""
    entering: float
    weights: float
    scores_kept: bool
    adds_masks: bool
    exchanges_heads: bool = False

    def kept_bytes(self, part: Part) -> float:
        scores = part.scores * self.itemsize + part.scores // 2 + part.score_bytes if self.scores_kept else 0
        repeated = part.repeated * self.itemsize if self.scores_kept or self.masks(part) else 0
        # A kernel that keeps scores does not keep its result.
        exchanged = part.attended * self.itemsize if self.exchanges_heads and not self.scores_kept else 0
        inside = part.inside * self.itemsize + part.inside_bytes + scores + repeated + exchanged
        whole = part.whole * self.itemsize + part.whole_bytes
        return self.samples * (inside * self.inside + whole * self.entering) + self.outside_bytes(part)

    def outside_bytes(self, part: Part) -> float:
        """Return the bytes saved of a part's inputs and outputs, including norms and dropout."""
        return self.samples * (part.outside * self.itemsize + part.outside_bytes) * self.outside

    def normed_bytes(self, part: Part) -> float:
        """Return the bytes, among `outside_bytes`, of norms' results that matrix products read."""
        return self.samples * self.itemsize * part.normed * self.outside

    def between_bytes(self, part: Part) -> float:
        """Return the bytes saved of a part that is recomputed by itself: its input, after the norm except in BERT."""
        if part.norm_inside:
            return self.result_bytes(part)
        return self.outside_bytes(part) - self.samples * part.redrawn_bytes * self.outside

    def masks(self, part: Part) -> bool:
        """Return whether a window is applied as a mask that is added to all scores."""
        return self.adds_masks and part.left_out > 0

    def passing_bytes(self, part: Part) -> float:
        whole = part.passing * self.itemsize
        return self.samples * (part.passing_bytes * self.inside + whole * self.entering)

    def operator_bytes(self, part: Part) -> float:
        """Return the bytes that separate operators between matrix products write and read in addition."""
        return self.samples * (part.operator_bytes * self.inside + part.outside_operator_bytes * self.outside)

    def once_bytes(self, part: Part) -> float:
        """Return the bytes that a part needs once for all samples, such as a mask."""
        return (part.mask * self.inside + part.weight_copies * self.weights) * self.itemsize

    def product_bytes(self, part: Part) -> float:
        return self.samples * self.itemsize * (part.products * self.inside + part.whole_products * self.entering)

    def selected_bytes(self, part: Part, ends: bool) -> float:
        """Return the bytes saved under selective recomputation, including the sum over ranks if something uses it."""
        return self.product_bytes(part) + (0 if ends and not part.keeps_result else self.result_bytes(part))

    def every_second_bytes(self, part: Part, _ends: bool) -> float:
        """Return the bytes saved if only every second matrix product is kept, including the sums over ranks."""
        return self.product_bytes(part) - self.samples * self.itemsize * part.second_products * self.inside

    def result_bytes(self, part: Part) -> float:
        return self.samples * part.result * self.itemsize * self.outside

    def widest_bytes(self, part: Part) -> float:
        """Return the bytes of a part's largest tensor together with its gradient."""
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

    If the strategy shards experts, the figures describe the rest of the layer, in which each rank routes its own
    positions; `estimate_experts` returns the figures of the experts.
    """
    share = _share(strategy, micro_batch_size, precision, attention)
    parts = layer_parts(model, type_name, fused, machine.compiled)
    if shares_experts(strategy):
        *before, router, experts = parts
        stream = Part(name=experts.name, flops=0, outside=0, result=experts.result, kernels=0)
        parts = (*before, _at_positions(router, share), stream)
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    machine = machine._replace(held=machine.held.under(recompute))
    # Recomputed norms keep only what a norm of a single kernel keeps.
    normed = parts = _with_half(parts, recompute)
    if RecomputedPart.NORMS in recompute.parts:
        single = layer_parts(model, type_name, True, machine.compiled)
        normed = tuple(
            part.with_norms_of(each, recompute.half != part.name) for part, each in zip(parts, single, strict=True)
        )
    replayed = _replayed(parts, recompute)
    both = Pass.FORWARD, Pass.BACKWARD
    there, back = (_messages(model, type_name, strategy, micro_batch_size, share.itemsize, way) for way in both)
    forward_s = sum(_part_time_s(part, share, machine) for part in parts)
    pieces = goes_in_pieces(model, strategy)
    table_bytes = sum(part.dense_gradient for part in parts) * share.itemsize * share.weights
    kind, _ = parameter_groups(model.types[type_name], strategy)[0]
    accumulated = _accumulated_bytes(kind, strategy, precision)
    replay_time_s = _between_products_s if recompute is Recompute.SELECTIVE else _part_time_s
    moe = parts[-2:] if model.types[type_name].experts is not UNSET else ()
    backward_s = (
        sum(_part_backward_s(part, share, machine) for part in parts)
        + sum(replay_time_s(part, share, machine) for part in replayed)
        + sum(_modules_s(part, part in moe, share, recompute, machine) for part in parts)
        + _unfused_s(parts, normed, share, machine)
        + (table_bytes + accumulated) / machine.memory_bytes_per_s
    )
    if not model.types[type_name].has_backward:
        there_s = max(
            forward_s + _exposed_s(there, forward_s, machine, pieces),
            sum(p.kernels for p in parts) * machine.operator_s,
        )
        return LayerFigures(there_s, 0.0, 0, round(max(share.widest_bytes(part) for part in parts)))
    forward_s, backward_s = (
        pass_s + _exposed_s(messages, pass_s, machine, pieces)
        for pass_s, messages in ((forward_s, there), (backward_s, back))
    )
    if not shares_experts(strategy):
        # An exchange of experts, which is added to this layer's time, overlaps with the host's time, too: see `host_s`.
        least = host_s(model, type_name, recompute, machine, _local_experts(model, type_name))
        forward_s, backward_s = max(forward_s, least[0]), max(backward_s, least[1])
    kept = _kept(normed, type_name, precision, machine.held, share)
    return LayerFigures(forward_s, backward_s, *_memory(kept, share, recompute, machine.held, normed))


def weight_share(
    model: Model,
    type_name: str,
    strategy: Strategy,
    micro_batch_size: int,
    precision: Precision,
    attention: Attention,
    machine: Machine,
) -> float:
    """Return the share of a layer's backward time in which gradients of its matrices are computed, without experts.

    Messages are not included, nor kernels' start-up times, which would make the share of small layers on a large device
    nearly 0.
    """
    share = _share(strategy, micro_batch_size, precision, attention)
    parts = [replace(part, kernels=0) for part in layer_parts(model, type_name, False)]
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    again_s = _between_products_s if recompute is Recompute.SELECTIVE else _part_time_s
    whole_s = sum(_part_backward_s(part, share, machine) for part in parts)
    whole_s += sum(again_s(part, share, machine) for part in _replayed(parts, recompute))
    return sum(part.trained * _products_s(part, share, machine) for part in parts if not part.is_expert) / whole_s


def host_s(
    model: Model, type_name: str, recompute: Recompute, machine: Machine, experts: int | None = None
) -> tuple[float, float]:
    """Return the seconds that the host needs to launch all kernels of a layer's forward and backward pass.

    No pass is shorter. `experts`: number of the rank's experts; None for the layer without them.
    """
    parts, habits = layer_parts(model, type_name, True, machine.compiled), machine.experts
    sparse = model.types[type_name].experts is not UNSET
    # A graph of parts of a layer does not contain what is recomputed (`TransformerConfig` of megatron-core).
    replays = recompute.replays_experts or bool(recompute.parts)
    partial = habits.graphs is Graphs.PARTIAL and replays
    graphs = Graphs.NONE if partial else habits.graphs
    kernels = again = 0
    for part in parts[: -1 if sparse else None] if graphs is Graphs.NONE or not sparse else ():
        kernels += part.kernels
        again += part.kernels * (part in _replayed(parts, recompute))
    if experts is not None and sparse and not habits.fused:
        own = parts[-1].kernels + habits.kernels * experts
        own += exchange_kernels(machine.compiled) * (experts < experts_of(model.types[type_name]).number)
        kernels, again = kernels + own, again + own * bool(_replayed(parts[-1:], recompute))
    if graphs is Graphs.FULL:
        kernels = again = 0
    return kernels * machine.operator_s, (2 * kernels + again) * machine.operator_s


def _local_experts(model: Model, type_name: str) -> int | None:
    experts = model.types[type_name].experts
    return None if experts is UNSET else experts.number


def _kept(parts: Sequence[Part], type_name: str, precision: Precision, held: Held, share: _Share) -> list[Part]:
    """Return the parts with the tensors that a runtime saves; embedding and head are always as in 16 bits."""
    bits = None if type_name in (EMBEDDING, HEAD) else NARROW_BITS.get(precision.compute)
    return [held.part(part, share.itemsize, bits, share.inside < 1) for part in parts]


def estimate_experts(model: Model, key: ExpertKey, precision: Precision, machine: Machine) -> LayerFigures[float]:
    """Return the figures of experts on one rank for the rows of a key, without messages, at an even load."""
    kind = model.types[key.type]
    experts, hidden, itemsize = experts_of(kind), model.boundary[0].features, ITEMSIZE[precision.compute]
    parts = key.etp_size
    here = replace(experts, number=key.experts, top_k=1, features=experts.features // parts)
    exchanged = key.experts < experts.number or parts > 1
    part = experts_part(model, here, key.rows, hidden, 0, exchanged)
    if machine.experts.fused:
        part = replace(part, passing=0)
    if has_biases(kind):
        # A fused operator adds biases in the compute format, others add them in float32.
        added = machine.experts.bias_bytes * key.rows * hidden
        added = added * itemsize // ITEMSIZE["float32"] if machine.experts.fused else added
        part = replace(part, passing_bytes=part.passing_bytes + added)
    kernels = part.fused_kernels if machine.compiled and part.fused_kernels is not None else part.kernels
    part = replace(part, trained=kind.trained_share, kernels=kernels)
    share = _Share(1, itemsize, 1.0, 1.0, 1.0, 1.0, False, False)
    machine = machine._replace(held=machine.held.under(key.recompute))
    replayed = _replayed([part], key.recompute)
    forward_s = _part_time_s(part, share, machine)
    replay_s = _between_products_s if key.recompute is Recompute.SELECTIVE else _part_time_s
    parameters = expert_parameters(kind) * key.experts // parts
    backward_s = (
        _part_backward_s(part, share, machine)
        + sum(replay_s(each, share, machine) for each in replayed)
        + _modules_s(part, True, share, key.recompute, machine)
        + _accumulated(parameters, precision) / machine.memory_bytes_per_s
    )
    return LayerFigures(
        forward_s,
        backward_s,
        *_memory(_kept([part], key.type, precision, machine.held, share), share, key.recompute, machine.held, [part]),
    )


def _at_positions(router: Part, share: _Share) -> Part:
    """Return a router's part outside tensor-parallel regions, where it sees only its rank's positions."""
    ratio = share.outside / share.entering
    sizes = {name: round(getattr(router, name) * ratio) for name in ("whole_bytes", "passing")}
    scaled = router.scaled(ratio) if router.undivided else replace(router, whole_flops=router.whole_flops * ratio)
    return replace(scaled, **sizes)


def _exposed_s(messages: Iterable[Message], pass_s: float, machine: Machine, in_pieces: bool) -> float:
    """Return the message time that a pass does not hide: one piece of each message, and what exceeds the pass."""
    messages = list(messages)
    alone_s = messages_time_s(messages, machine.link)
    if machine.copies_gathers:
        along = sum(m.times * m.bytes for m in messages if m.collective in _ALONG_THE_SEQUENCE)
        alone_s += 2 * along / machine.memory_bytes_per_s
    pieces = machine.message_pieces if in_pieces else 1
    hidden_s = min(alone_s * (1 - 1 / pieces), pass_s)
    return alone_s - hidden_s


def goes_in_pieces(model: Model, strategy: Strategy) -> bool:
    """Return whether tensor-parallel messages of a model's layers can be split into pieces that overlap with products.

    Megatron-LM requires sequence parallelism (`--tp-comm-overlap` in megatron/training/arguments.py), and Transformer
    Engine has user buffers for queries, the projection and the feed-forward layers (`initialize_ub`), but not for
    projections from latents.
    """
    family = FAMILIES.get(model.family)
    latents = None if family is None else family.attention.latents(family.configured(model.config))
    return strategy.sequence_parallel is SequenceParallel.MEGATRON and latents is None


def estimate_memory(
    model: Model, type_name: str, strategy: Strategy, micro_batch_size: int, precision: Precision, attention: Attention
) -> tuple[int, int]:
    """Return the bytes of a layer's activations and workspace, if norms and activation functions are fused."""
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    parts, share = layer_parts(model, type_name, True), _share(strategy, micro_batch_size, precision, attention)
    parts, habits = _with_half(parts, recompute), OURS.under(recompute)
    kept = [habits.part(part, share.itemsize, None, share.inside < 1) for part in parts]
    return _memory(kept, share, recompute, habits, parts)


def masks_bytes(model: Model, precision: Precision, attention: Attention) -> int:
    """Return the bytes of the masks that a rank holds: one for each window length, added to its layers' scores."""
    windows = {kind.window for kind in model.types.values()} if attention in _MASKED else set()
    # If an image is inside its text, masks differ from sample to sample, and blocks without a window have them, too.
    family = FAMILIES.get(model.family)
    windows -= set() if family is not None and family.attention.images_ahead else {None}
    return len(windows) * model.sequence_length**2 * ITEMSIZE[precision.compute]


def _with_half(parts: Sequence[Part], recompute: Recompute) -> tuple[Part, ...]:
    """Return the parts without norms inside a half that is recomputed as a whole: none is freed separately."""
    if recompute.half is None:
        return tuple(parts)
    inside = [part.name == recompute.half for part in parts]
    # The norm at the end of a half produces the input of the next part.
    given = [False, *(each and part.norm_inside for each, part in zip(inside, parts, strict=True))]
    return tuple(
        replace(part, normed=0 if of_norm else part.normed, whole_normed=0 if within else part.whole_normed)
        for part, within, of_norm in zip(parts, inside, given, strict=False)
    )


def _replayed(parts: Sequence[Part], recompute: Recompute) -> list[Part]:
    return [part for part in parts if recompute.replays(part.name)]


def _memory(
    parts: Sequence[Part], share: _Share, recompute: Recompute, habits: Held = OURS, computed: Sequence[Part] = ()
) -> tuple[int, int]:
    """Return the bytes saved for the backward pass, and the bytes needed only temporarily.

    `computed`: the parts before freed results were removed; the freed results of one part at a time exist again.
    """
    replayed = _replayed(parts, recompute)
    kept = sum(share.kept_bytes(part) for part in parts if part not in replayed)
    again = sum(share.kept_bytes(part) for part in replayed)
    if recompute is Recompute.FULL:
        held = share.result_bytes(parts[-1])
    elif recompute is Recompute.SELECTIVE:
        selected = share.every_second_bytes if habits.every_second_product else share.selected_bytes
        held = share.result_bytes(parts[-1]) + sum(selected(part, part is parts[-1]) for part in parts)
        again -= sum(share.product_bytes(part) for part in parts)
    else:
        between = sum(share.between_bytes(part) for part in replayed)
        if RecomputedPart.NORMS in recompute.parts:
            between -= sum(part.norm_inside * share.normed_bytes(part) for part in replayed)
        held, again = kept + between, again - between
    if recompute.parts:
        rest = ((part, each) for part, each in zip(parts, computed, strict=True) if part not in replayed)
        # A norm's results exist again only when more memory has been released.
        freed = max((each.inside - habits.fused_gate * each.gate - part.inside for part, each in rest), default=0)
        again = max(again, share.samples * share.itemsize * freed * share.inside)
    once = sum(share.once_bytes(part) for part in parts)
    return round(held), round(again + once + max(share.widest_bytes(part) for part in parts))


def _accumulated_bytes(kind: LayerType, strategy: Strategy, precision: Precision) -> int:
    """Return the bytes read and written to add a micro-batch's gradients to the accumulated gradients."""
    return _accumulated(kind.trained_count(axes_of(strategy).dense.tensor.size), precision)


def _accumulated(parameters: int, precision: Precision) -> int:
    return parameters * (2 * ITEMSIZE[precision.reduce] + ITEMSIZE[precision.compute])


def optimizer_time_s(
    kind: LayerType, parts: int, precision: Precision, machine: Machine, optimizer: Optimizer = ADAMW
) -> float:
    """Return the seconds of an optimizer's step over one layer's parameters, bound by memory, including clipping."""
    optimizer.demand_shards("the estimate of a step")
    return optimizer.step_bytes(shards_of(kind, parts), precision) / machine.memory_bytes_per_s


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
    """Return the seconds of a part's forward pass, without messages."""
    products_s = _products_s(part, share, machine)
    return products_s + _attention_s(part, share, machine) + _between_products_s(part, share, machine)


def _products_s(part: Part, share: _Share, machine: Machine) -> float:
    """Return the seconds of the matrix products with parameters in a part's forward pass."""
    kept = share.kept_bytes(part) + share.passing_bytes(part)
    weights, inside = (1.0, share.entering) if part.undivided else (share.weights, share.inside)
    product_bytes = part.weights * share.itemsize * weights + kept if part.weights else 0.0
    multiplied = part.flops * inside + part.whole_flops * share.entering + part.outside_flops * share.outside
    operations = multiplied * share.samples + part.tile_flops * weights
    return max(operations / machine.flops_per_s, product_bytes / machine.memory_bytes_per_s)


def _part_backward_s(part: Part, share: _Share, machine: Machine) -> float:
    """Return the seconds of a part's backward pass without messages: two matrix products for each forward one.

    A flash kernel computes its scores again, too. For a frozen matrix, only the product for its input's gradient
    counts.
    """
    backward = ATTENTION_BACKWARD if _is_whole(part, machine) else machine.attention_backward
    more = 0.0 if share.scores_kept else backward - 2
    spared_s = (1 - part.trained) * _products_s(part, share, machine)
    return 2 * _part_time_s(part, share, machine) + more * _attention_s(part, share, machine) - spared_s


def _attention_s(part: Part, share: _Share, machine: Machine) -> float:
    """Return the seconds of attention; a flash kernel skips pairs outside a causal mask or a window.

    If a window's mask is added to the scores, nothing is skipped.
    """
    masked = share.masks(part)
    operations = (part.attention_flops + masked * part.left_out) * share.samples * share.inside
    if share.scores_kept:
        return operations / machine.flops_per_s
    whole = _is_whole(part, machine)
    seen = 0.5 if part.causal and not masked and not whole else 1.0
    operations *= seen * _slower_heads(part.head_features, narrow=not whole)
    return operations / (machine.attention_flops_per_s or machine.flops_per_s)


def _is_whole(part: Part, machine: Machine) -> bool:
    """Return whether masked scores are computed, too, so that the kernel skips no blocks."""
    return machine.whole_scores_from is not None and part.keys >= machine.whole_scores_from


def _slower_heads(features: int, narrow: bool) -> float:
    """Return the time per operation of scores with heads of this width, relative to heads of 128 features.

    `narrow`: whether kernels for heads of 64 are slower.
    """
    if features == _NARROW_HEAD:
        return _NARROW_HEADS if narrow else 1.0
    return _WIDE_HEAD / features if _NARROW_HEAD < features < _WIDE_HEAD else 1.0


def _modules_s(part: Part, in_moe: bool, share: _Share, recompute: Recompute, machine: Machine) -> float:
    """Return the seconds in which a backward pass recomputes modules of a part, once each (`Held.recomputed`).

    `in_moe`: whether the part is a router or experts. What the plan's recomputation already computes is not counted,
    nor that rows are sent to experts again. A module's inputs and outputs move once each.
    """
    asked = set(machine.held.recomputed)
    if recompute is Recompute.SELECTIVE:
        asked -= {Module.LAYERNORM, Module.MOE_ACT}
    elif part in _replayed([part], recompute):
        return 0.0
    if in_moe and Module.MOE in asked:
        return _part_time_s(part, share, machine)
    moved = flops = attention_s = 0.0
    if Module.LAYERNORM in asked:
        moved += 2 * part.outside_inputs * share.outside
    if Module.MLA_UP_PROJ in asked:
        moved, flops = moved + 2 * part.from_latents * share.inside, part.latent_flops * share.inside
    if (Module.MOE_ACT in asked or not part.is_expert) and machine.held.frees_activation(part):
        results = part.inputs if machine.held.fused_gate else 2 * (part.inside - part.products) - part.inputs
        moved += (part.products + results) * share.inside
    if Module.CORE_ATTN in asked:
        attention_s = _attention_s(part, share, machine)
    moved_s = share.itemsize * moved / machine.memory_bytes_per_s
    return share.samples * (moved_s + flops / machine.flops_per_s) + attention_s


def _unfused_s(parts: Sequence[Part], single: Sequence[Part], share: _Share, machine: Machine) -> float:
    """Return how many seconds longer recomputed norms of several kernels take than norms of single kernels."""
    moved = [sum(share.kept_bytes(p) + share.operator_bytes(p) for p in each) for each in (parts, single)]
    return max(0.0, 2 * (moved[0] - moved[1]) / machine.memory_bytes_per_s)


def _between_products_s(part: Part, share: _Share, machine: Machine) -> float:
    """Return the seconds of a forward pass between its matrix products."""
    moved = share.kept_bytes(part) + share.passing_bytes(part) + share.once_bytes(part) + share.operator_bytes(part)
    return 2 * moved / machine.memory_bytes_per_s + part.kernels * KERNEL_START_S


def _messages(
    model: Model, type_name: str, strategy: Strategy, samples: int, itemsize: int, during: Pass
) -> Iterator[Message]:
    """Yield the messages of tensor and sequence parallelism in one pass; the backward pass includes recomputation."""
    messages = list(region_messages(model, type_name, strategy, samples, itemsize, 1))
    if type_name == HEAD:
        messages += loss_messages(model.types[type_name], strategy, samples, itemsize, 1)
    return (message for message in messages if message.during is during)
