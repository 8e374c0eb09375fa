"""Operations and saved tensors of the parts of a layer, from the shapes in the model's description and family facts.

The parts are the description's regions: attention, feed-forward (mlp), lookup, logits. Each matrix, except the lookup's
table, multiplies the residual stream of `hidden` features. Matrices of attention are as wide as all of its heads;
matrices of a feed-forward part are as wide as the length that tensor parallelism divides.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from shardwright.estimate.expert_parts import PRODUCT_KERNELS, ROUTER_KERNELS, experts_part, router_part
from shardwright.estimate.latents import latent_attention_part
from shardwright.estimate.part import Part, attended_positions, attention_shape, stream_elements, tensors_of
from shardwright.io import BadInput
from shardwright.models.facts import Family
from shardwright.models.low_rank import LOW_RANK_KERNELS
from shardwright.models.mtp import mtp_depth, mtp_layers
from shardwright.models.registry import facts_of, facts_of_type
from shardwright.models.traits import MULTIPLIED, SINK_FEATURES, Mask
from shardwright.plan.communication import LOSS_ELEMENTS, low_rank_pairs
from shardwright.types import EMBEDDING, HEAD, LOW_RANK, LayerType, Model, Region, base_type
from shardwright.types.model import Traced

_KERNELS = {"attention": 20, "mlp": 15, "lookup": 5, "logits": 15, "merge": 5, "join": 12}
"""Number of kernels of a part's forward pass, approximately as an unfused Hugging Face model launches them."""
_COMPILED_KERNELS = _KERNELS | {"attention": 8, "mlp": 5}
"""Number of kernels of a part in a compiled block: matrix products and attention, and one kernel between two of
them."""
_NORM_KERNELS = 7
"""Number of kernels of a norm made of single operators."""
_FLOAT32_BYTES = 4
_NORM_KEEPS = {
    "LayerNorm": (1, 0),
    "LayerNorm in float32": (0, 3 * _FLOAT32_BYTES),
    "RMSNorm": (1, _FLOAT32_BYTES),
    "RMSNorm in float32": (0, 2 * _FLOAT32_BYTES),
}
"""Elements and further bytes that a norm made of single operators keeps for each feature.

A LayerNorm keeps its input; an RMSNorm keeps its input in float32, and what it multiplies by its weights. A LayerNorm
in float32 is not torch's: it keeps the distance from the mean, once for the variance and once for the division.
"""
_NORM_MOVES = {"RMSNorm": 12, "RMSNorm in float32": 10}
"""Additional bytes that an RMSNorm made of single operators writes and reads per feature in a forward pass.

Cast to float32, square, mean, product with the root, cast back and product with the weights move 36 bytes per 16-bit
element (transformers' LlamaRMSNorm, aten's `rms_norm`): 18 are written and read, minus those that are kept.
"""
_ROTATION_BYTES = 10
"""Bytes per feature of queries and keys that rotary positions of single operators write and read in a forward pass.

Two products, a negated copy and a sum in 16 bits (transformers' `apply_rotary_pos_emb`), or a cast to float32, a
complex product and a cast back (torchtitan's `apply_rotary_emb`), move 20 bytes.
"""
_SOFT_CAP_BYTES = 6
"""Bytes kept for each 16-bit attention score that is soft-capped: its hyperbolic tangent, and a softmax in float32."""
_GELU_COPIES = {"gelu_new": 3, "quick_gelu": 1}
"""Number of tensors that unfused forms of GELU (Hendrycks and Gimpel 2016) keep in addition to input and output."""
_ID_BYTES = 8
_QUERY_NORM = "q_norm.weight"
"""End of the name of a parameter that exists only in layers whose queries and keys are normed."""


def layer_parts(model: Model, type_name: str, fused: bool = False, compiled: bool = False) -> tuple[Part, ...]:
    """Return the parts of one layer of a type, in order; together they have the type's floating-point operations.

    `fused`: norms and activation functions are one kernel each, which keeps only its input. `compiled`: torch.compile
    has fused them, together with everything else between a block's matrix products; embedding and head are not
    compiled. Raises BadInput if the description does not state what flows between layers.
    """
    if not compiled or type_name in (EMBEDDING, HEAD):
        return _parts(model, type_name, fused)
    blocks = _parts(model, type_name, fused=True)
    return tuple(
        msgspec.structs.replace(part, kernels=_COMPILED_KERNELS[part.name] - _KERNELS[part.name] + part.kernels)
        if part.fused_kernels is None
        else msgspec.structs.replace(part, kernels=part.fused_kernels)
        for part in blocks
    )


def _parts(model: Model, type_name: str, fused: bool) -> tuple[Part, ...]:
    if not model.boundary:
        raise BadInput(f"model {model.name}", "its embedding has no output", "describe it again")
    kind = model.types[type_name]
    if type_name == EMBEDDING:
        return tuple(_lookup(model, kind))
    if kind.traced is not UNSET:
        return (_traced_head(model, kind, kind.traced) if type_name == HEAD else _traced_part(kind, kind.traced),)
    if type_name == HEAD:
        facts = facts_of(model)
        logits = _logits(model, kind)
        # Layers that predict further tokens norm their states themselves.
        normed = logits.result // len(model.received_by(HEAD)) if mtp_layers(model.layers) else logits.result
        return (_as_trained(_with_norms(facts, logits, 1, fused, normed), kind, model, facts, fused),)
    if (base := base_type(type_name)) in (facts := facts_of(model)).merging:
        part = _join(model, type_name) if base == facts.joined_by else _merge(kind)
        return (_as_trained(part, kind, model, facts, fused),)
    regions: Sequence[Region] = kind.regions or (Region(name="mlp", leaves=model.boundary[0].name),)
    facts, _ = facts_of_type(model, type_name)
    before = [_mtp_part(model, type_name, facts, fused) for region in regions if region.name == "lookup"]
    made = [_block_part(model, type_name, region, fused) for region in regions[len(before) :]]
    parts = [
        _as_trained(_with_norms(facts, part, facts.norm.of_part, fused), kind, model, facts, fused, region)
        for region, part in enumerate(made)
    ]
    if facts.norm.shared:
        # The first part's norm is also used by the others, which keep nothing outside their regions.
        parts[1:] = [msgspec.structs.replace(part, outside=0, outside_bytes=0, normed=0) for part in parts[1:]]
    if facts.norm.ends and facts.norm.of_part == 1:
        # Norms come last: the first part reads the layer's input without a norm, and so do others unless norms end
        # them.
        first = 1 if "attention" in facts.norm.ends else len(parts)
        parts[:first] = [msgspec.structs.replace(part, normed=0) for part in parts[:first]]
    if kind.experts is not UNSET:
        parts += _experts(model, kind, parts)
    parts = before + parts
    # The description's number of operations is used; the shapes only determine how it is divided among the parts.
    counted = sum(part.flops + part.whole_flops + part.outside_flops + part.attention_flops for part in parts)
    share = kind.forward_flops_per_sample / counted if counted else 0.0
    return tuple(part.scaled(share) for part in parts)


def _traced_part(kind: LayerType, seen: Traced) -> Part:
    """Return the single part of a traced block; it is not known where the block's code fuses operations."""
    attention = next((region.attention for region in kind.regions if region.attention is not None), None)
    (tensor,) = kind.outputs
    length, result = tensor.sequence_length, tensor.sequence_length * tensor.features
    window = None if attention is None else attention.window
    left_out = 0 if window is None else (length - window) ** 2
    features = 0 if attention is None else attention.head_features + attention.features_of_values
    heads = 0 if attention is None else attention.heads
    further = 0 if attention is None else (heads - attention.kv_heads) * features * length
    return Part(
        name="block",
        flops=float(seen.product_flops - seen.whole_flops),
        whole_flops=float(seen.whole_flops),
        attention_flops=float(seen.attention_flops),
        left_out=2.0 * left_out * features * heads,
        causal=attention is not None,
        head_features=0 if attention is None else attention.head_features,
        keys=length,
        weights=seen.multiplied,
        inside=max(seen.kept - max(seen.whole, result), 0),
        whole=max(seen.whole - result, 0),
        inside_bytes=seen.kept_bytes,
        products=seen.products - seen.whole_products,
        whole_products=seen.whole_products,
        scores=heads * length**2,
        repeated=further,
        outside=min(seen.kept, result),
        result=result,
        widest=seen.widest,
        kernels=seen.kernels,
        fused_kernels=seen.kernels,
        trained=kind.trained_share,
    )


def _traced_head(model: Model, kind: LayerType, seen: Traced) -> Part:
    """Return the part of a head whose norms were traced; its loss is not traced, as the runtime replaces it."""
    (tensor,) = model.received_by(HEAD)
    logits = seen.widest
    return Part(
        name="logits",
        flops=float(kind.forward_flops_per_sample),
        weights=seen.multiplied,
        inside=logits,
        logits=logits,
        passing_bytes=_FLOAT32_BYTES * logits,
        outside=seen.kept,
        outside_bytes=seen.kept_bytes,
        result=tensor.sequence_length * tensor.features,
        widest_bytes=_FLOAT32_BYTES * min(logits, LOSS_ELEMENTS),
        kernels=_KERNELS["logits"],
        trained=kind.trained_share,
    )


def _experts(model: Model, kind: LayerType, parts: list[Part]) -> list[Part]:
    """Return the parts of router and experts; the experts come last, and their output replaces the router's output.

    `parts`: parts of the layer, of which the router, the last one, is removed.
    """
    assert kind.experts is not UNSET
    router, hidden = parts.pop(), model.boundary[0].features
    rows = router.result // hidden * kind.experts.top_k
    experts = experts_part(model, kind.experts, rows, hidden, router.result)
    return [
        msgspec.structs.replace(router, result=0),
        msgspec.structs.replace(experts, trained=kind.trained_share),
    ]


def block_kernels(kind: LayerType) -> int:
    """Return the approximate number of kernels in a block's forward pass."""
    names = (region.name for region in kind.regions)
    more = ROUTER_KERNELS + PRODUCT_KERNELS if kind.experts is not UNSET else 0
    return (sum(_KERNELS[name] for name in names) or _KERNELS["mlp"]) + more


def _block_part(model: Model, type_name: str, region: Region, fused: bool) -> Part:
    kind, tensors = model.types[type_name], tensors_of(model, type_name)
    stream, hidden = stream_elements(tensors, region), tensors[0].features
    if region.attention is not None:
        family = facts_of(model)
        if (latents := family.attention.latents(family.configured(model.config))) is not None:
            keeps = _norm_keeps(family, fused)
            return latent_attention_part(model, type_name, region, stream, latents, keeps, _KERNELS["attention"])
        return _attention_part(model, type_name, region, stream, hidden, fused)
    if kind.experts is not UNSET:
        router = router_part(model, kind.experts, stream, hidden)
        fewest = _COMPILED_KERNELS["mlp"] + (router.fused_kernels or 0)
        return msgspec.structs.replace(router, kernels=router.kernels + _KERNELS["mlp"], fused_kernels=fewest)
    return _mlp_part(model, type_name, region, stream, hidden, fused)


def _with_norms(facts: Family, part: Part, norms: int, fused: bool, normed: int | None = None) -> Part:
    """Return a part that saves the input of its first norm, with the additional tensors of its `norms` norms.

    `normed`: number of elements that are normed; None for all elements of the part's result.
    """
    elements, more = _norm_keeps(facts, fused)
    each = part.result if normed is None else normed
    return msgspec.structs.replace(
        part,
        outside=part.outside + (norms * elements - 1) * each,
        outside_bytes=part.outside_bytes + norms * more * each,
        outside_operator_bytes=norms * _norm_moves(facts, fused) * each,
        normed=part.normed or part.outside_inputs,
    )


def _mtp_part(model: Model, type_name: str, facts: Family, fused: bool) -> Part:
    """Return the part before the block of a layer that predicts further tokens, including the norm after it.

    Rows of a copy of the token table and the states are normed, joined, and multiplied by a matrix that each rank
    holds.
    """
    kind, (stream, *_) = model.types[type_name], model.types[type_name].outputs
    hidden, size = stream.features, stream.sequence_length * stream.features
    elements, more = _norm_keeps(facts, fused)
    norms = 4 if mtp_depth(type_name) == 1 else 3
    return Part(
        name="lookup",
        flops=0.0,
        outside_flops=4.0 * hidden * size,
        undivided=True,
        weights=2 * hidden**2,
        dense_gradient=sum(p.numel(1) for p in kind.copies if p.tp_dim is not None),
        whole_products=size,
        outside=2 * size + norms * elements * size,
        outside_bytes=norms * more * size + _ID_BYTES * stream.sequence_length,
        outside_operator_bytes=norms * _norm_moves(facts, fused) * size,
        result=size,
        kernels=_KERNELS["lookup"] + norms * _NORM_KERNELS,
    )


def _norm_moves(facts: Family, fused: bool) -> int:
    norm = facts.norm
    return 0 if fused else _NORM_MOVES.get(f"{norm.kind}{' in float32' if norm.in_float32 else ''}", 0)


def _as_trained(part: Part, kind: LayerType, model: Model, facts: Family, fused: bool, region: int = 0) -> Part:
    """Return a part of a layer with the effect of frozen parameters; `region`: the number of the part's region.

    If all parameters are frozen, nothing is kept that only gradients of weights need: what norms multiply by their
    weights, and the inputs of matrices. What activation functions and attention (a flash kernel: its result) need is
    kept. Low-rank matrices keep their input and the result of the first one. If other parameters are trained,
    everything counts as kept.
    """
    trained = kind.trained_share
    if any(LOW_RANK not in p.name for p in kind.trained_parameters):
        return msgspec.structs.replace(part, trained=trained)
    norms = 1 if part.name == "logits" else facts.norm.of_part
    scaled, scaled_bytes = _norm_scales(facts, fused)
    pairs = low_rank_pairs(kind)[region] if kind.regions else ()
    # Norms of queries and keys are the only further things kept inside.
    _, more = _norm_keeps(facts, fused)
    normed = part.inside_bytes // more if more else 0
    enters, leaves = (any(by_inputs is last for _, by_inputs in pairs) for last in (False, True))
    features = (kind.outputs or model.received_by(HEAD))[0].features
    ranks, positions = sum(rank for rank, _ in pairs), part.result // features
    return msgspec.structs.replace(
        part,
        trained=trained,
        inside=part.inside - scaled * normed - (part.widest if part.name == "mlp" and not leaves else 0),
        inside_bytes=part.inside_bytes - scaled_bytes * normed,
        outside=part.outside - (norms * scaled + (not enters)) * part.result + ranks * positions,
        outside_bytes=part.outside_bytes - norms * scaled_bytes * part.result,
        normed=part.normed * enters,
        kernels=part.kernels + LOW_RANK_KERNELS * len(pairs),
    )


def _norm_scales(facts: Family, fused: bool) -> tuple[int, int]:
    """Return the elements and bytes for each feature that a norm keeps only for its weights' gradient."""
    norm = facts.norm
    if fused or (norm.kind == "LayerNorm" and not norm.in_float32):
        return 0, 0
    return (0, _FLOAT32_BYTES) if norm.in_float32 else (1, 0)


def _norm_keeps(facts: Family, fused: bool) -> tuple[int, int]:
    """Return the elements and further bytes for each feature that a norm keeps; a fused one keeps only its input."""
    norm = facts.norm
    return _NORM_KEEPS["LayerNorm" if fused else f"{norm.kind}{' in float32' if norm.in_float32 else ''}"]


def _attention_part(model: Model, type_name: str, region: Region, stream: int, hidden: int, fused: bool) -> Part:
    """Return attention's part: queries, keys, values and output projection, with 2 (q + k) features in total.

    Every kernel keeps what it adds to the scores of an image's windows: a learned bias and a mask.
    """
    a, (family, config) = attention_shape(model, type_name, region), facts_of_type(model, type_name)
    facts = family.attention
    biases = a.scores if attended_positions(model, type_name) is not None and facts.mask is Mask.BIAS else 0
    width = 2 * a.query_width * a.queries + 2 * a.key_width * a.key_positions
    norms_heads = any(p.name.endswith(_QUERY_NORM) for p in model.types[type_name].parameters)
    elements, more = (width // 2 * n * norms_heads for n in _norm_keeps(family, fused))
    copies = a.query_width * a.queries * facts.joins_features + width // 2 * facts.keeps_unrotated
    # Heads are wider by the features of a sink, and so is what is kept of them; the result is kept without them, too.
    copies += (width * a.heads // a.query_width * SINK_FEATURES + a.query_width * a.queries) * facts.sinks
    # A norm without weights keeps its input in float32: twice a 16-bit element of queries and keys.
    copies += width * facts.normed_heads(base_type(type_name), config)
    drops = _drops(model, type_name, region)
    moves = _norm_moves(family, fused) * norms_heads + _ROTATION_BYTES * (not fused and facts.positions == "rope")
    return Part(
        name="attention",
        flops=2.0 * hidden * width,
        attention_flops=4.0 * (a.queries * a.keys - a.left_out) * a.query_width,
        left_out=4.0 * a.left_out * a.query_width,
        causal=facts.mask is Mask.CAUSAL and not a.alibi and not facts.images_ahead,
        head_features=a.query_width // a.heads,
        keys=a.keys,
        mask=a.scores * a.alibi,
        weights=2 * hidden * (a.query_width + a.key_width),
        inside=width + elements + copies + biases,
        inside_bytes=more,
        products=width,
        operator_bytes=moves * (width // 2),
        second_products=a.key_width * a.key_positions,
        scores=(2 if drops else 1) * a.scores,
        score_bytes=_SOFT_CAP_BYTES * facts.soft_caps * a.scores,
        repeated=2 * (a.query_width - a.key_width) * a.key_positions,
        outside=2 * stream,
        outside_inputs=stream,
        outside_bytes=stream if drops else 0,
        result=stream,
        **_end(model, type_name, region, stream),
        attended=a.query_width * a.queries,
        widest=max(a.query_width * a.queries, a.key_width * a.key_positions),
        kernels=_KERNELS["attention"],
    )


def _mlp_part(model: Model, type_name: str, region: Region, stream: int, hidden: int, fused: bool) -> Part:
    """Return a feed-forward part, which keeps input and output of the activation function, and a gate's product."""
    (family, config), kind = facts_of_type(model, type_name), model.types[type_name]
    activation, gated = family.feed_forward(config)
    copies = 0 if fused else _GELU_COPIES.get(activation, 0)
    matrices = 3 if gated else 2
    if (inner := kind.tp_must_divide.get(family.divided.lengths[-1])) is None:
        raise BadInput(f"model {model.name}", f"its blocks have no {family.divided.lengths[-1]}", "describe it again")
    wide = inner * stream // hidden
    drops = _drops(model, type_name, region)
    return Part(
        name="mlp",
        flops=2.0 * matrices * hidden * wide,
        weights=matrices * hidden * inner,
        inside=(matrices + gated + copies) * wide,
        gate=gated * wide,
        inputs=wide,
        products=(matrices - 1) * wide,
        second_products=gated * wide,
        outside=2 * stream,
        outside_inputs=stream,
        outside_bytes=stream if drops else 0,
        result=stream,
        **_end(model, type_name, region, stream),
        widest=wide,
        kernels=_KERNELS["mlp"],
    )


def _merge(kind: LayerType) -> Part:
    """Return Swin's patch merging: a norm over four joined positions, and a matrix product to half the features."""
    (tensor,) = kind.outputs
    size = tensor.sequence_length * tensor.features
    return Part(
        name="merge",
        flops=float(kind.forward_flops_per_sample),
        weights=sum(p.numel(1) for p in kind.parameters if len(p.shape) > 1),
        undivided=True,
        outside=5 * size,
        result=size,
        widest_whole=2 * size,
        kernels=_KERNELS["merge"],
    )


def _join(model: Model, type_name: str) -> Part:
    """Return the part that projects an image's states and inserts them into a text's positions.

    It keeps the inputs of its two matrices and of the activation function between them, the features that it inserts
    into the text, and the places where it inserts them.
    """
    kind, (_, config) = model.types[type_name], facts_of_type(model, type_name)
    (tensor,) = kind.outputs
    first, *_ = (p for p in kind.parameters if len(p.shape) > 1)
    size, (wide, narrow) = tensor.sequence_length * tensor.features, first.shape
    return Part(
        name="merge",
        flops=float(kind.forward_flops_per_sample),
        weights=sum(p.numel(1) for p in kind.parameters if len(p.shape) > 1),
        undivided=True,
        outside=size + config[MULTIPLIED] * (narrow + 3 * wide),
        outside_bytes=(_ID_BYTES + 1) * tensor.sequence_length,
        result=size,
        widest_whole=size,
        kernels=_KERNELS["join"],
    )


def _lookup(model: Model, kind: LayerType) -> Iterator[Part]:
    """Yield a lookup for every tensor that the embedding outputs; the first one writes the gradient of all tables."""
    for number, tensor in enumerate(kind.outputs):
        size = tensor.sequence_length * tensor.features
        regions = [region for region in kind.regions if region.leaves == tensor.name]
        drops = any(region.replays_sum for region in regions)
        yield Part(
            name="lookup",
            flops=kind.forward_flops_per_sample / len(kind.outputs),
            dense_gradient=kind.trained_count() if number == 0 else 0,
            outside=size,
            outside_bytes=(size if drops else 0) + _ID_BYTES * tensor.sequence_length,
            result=size,
            kernels=_KERNELS["lookup"],
        )


def _logits(model: Model, kind: LayerType) -> Part:
    """Return the part of the last norm and the logits, some of which are temporarily in float32.

    Their input is counted in the part before, and their gradient takes their memory.
    """
    received, family = tensors_of(model, HEAD), facts_of(model)
    names = {name for region in kind.regions for name in region.enters}
    tensor = next((t for t in received if t.name in names), received[-1])
    weights = sum(p.numel(1) for p in kind.parameters if len(p.shape) > 1)
    positions = kind.labels or tensor.sequence_length
    logits = weights // tensor.features * positions
    # Losses of further tokens are computed one after the other.
    at_once = logits // (1 + mtp_layers(model.layers))
    return Part(
        name="logits",
        flops=float(kind.forward_flops_per_sample),
        weights=weights,
        weight_copies=weights * family.norm.of_head(family.configured(model.config)),
        inside=(1 + family.attention.soft_caps) * logits,
        logits=logits,
        passing_bytes=_FLOAT32_BYTES * logits,
        outside=positions * tensor.features,
        result=positions * tensor.features,
        widest_bytes=_FLOAT32_BYTES * min(at_once, LOSS_ELEMENTS),
        kernels=_KERNELS["logits"] * (1 + mtp_layers(model.layers)),
    )


def _end(model: Model, type_name: str, region: Region, stream: int) -> dict[str, Any]:
    """Return the fields of a part that describe what follows its final sum: norm and dropout."""
    family, _ = facts_of_type(model, type_name)
    redrawn = _drops(model, type_name, region) and region.name in region.replays_sum
    end = {"keeps_result": "full" in region.replays_sum, "norm_inside": region.name in family.norm.ends}
    return {**end, "redrawn_bytes": stream * redrawn}


def _drops(model: Model, type_name: str, region: Region) -> bool:
    """Return whether dropout, which saves a mask, applies to a part's output."""
    family, config = facts_of_type(model, type_name)
    return bool(region.replays_sum) and family.drops(config)
