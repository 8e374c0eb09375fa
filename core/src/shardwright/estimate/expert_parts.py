"""Operations and saved tensors of a layer's experts, and of the router that chooses among them."""

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.estimate.part import Part
from shardwright.models.registry import facts_of
from shardwright.types import Experts, LayerType, Model

ROUTER_KERNELS = 27
"""Number of kernels of a forward pass that choose experts, sort rows by expert and back, and sum the balance loss."""
PRODUCT_KERNELS = 8
"""Number of kernels of experts: two grouped matrix products with the group offsets, and what lies between them."""
SHARED_KERNELS = 6
"""Number of further kernels of experts that compute every position."""
EXCHANGE_KERNELS = 20
"""Additional kernels if rows come from several ranks: rows are sorted by expert, and back."""
_FUSED_ROUTER_KERNELS, _FUSED_PRODUCT_KERNELS, _FUSED_EXCHANGE_KERNELS = 10, 3, 4
"""The same numbers if the router, the permutations and the activations are one kernel each, as with Megatron-LM's
fusions."""
_FLOAT32_BYTES = 4
_INDEX_BYTES = 8
_TILE_ROWS = 128
"""Rows of a tile of grouped matrix products: the last tile of each expert is half full on average."""


def router_part(model: Model, experts: Experts, stream: int, hidden: int) -> Part:
    """Return the router: it chooses each position's experts, sorts a row for each, and sums the results.

    Each rank has the whole router matrix. For each row it keeps the expert, the row's places sorted and back, and its
    weight, twice if weights are divided by their sum. Experts that compute every position are an additional
    feed-forward part.
    """
    family = facts_of(model)
    config = family.configured(model.config)
    positions = stream // hidden
    rows = positions * experts.top_k
    divided = 2 * rows + positions if config.get("norm_topk_prob", True) else 0
    router = Part(
        name="mlp",
        flops=2.0 * hidden * positions * experts.number,
        weights=hidden * experts.number,
        undivided=True,
        whole_bytes=_FLOAT32_BYTES * (positions * experts.number + divided) + rows * 3 * _INDEX_BYTES,
        passing=2 * rows * hidden,
        outside=2 * stream,
        normed=stream,
        result=stream,
        kernels=ROUTER_KERNELS,
        fused_kernels=_FUSED_ROUTER_KERNELS,
    )
    if experts.shared_features is UNSET:
        return router
    matrices = 3 if (gated := family.feed_forward(config).gated) else 2
    wide = positions * experts.shared_features
    return replace(
        router,
        flops=2.0 * hidden * matrices * wide,
        whole_flops=router.flops,
        weights=router.weights + hidden * matrices * experts.shared_features,
        undivided=False,
        inside=(matrices + gated) * wide,
        gate=gated * wide,
        inputs=wide,
        products=(matrices - 1) * wide,
        second_products=gated * wide,
        widest=wide,
        kernels=ROUTER_KERNELS + SHARED_KERNELS,
        fused_kernels=_FUSED_ROUTER_KERNELS + _FUSED_PRODUCT_KERNELS,
    )


def experts_part(model: Model, experts: Experts, rows: int, hidden: int, result: int, exchanged: bool = False) -> Part:
    """Return the experts of one rank for a number of rows under an even load; `result`: number of output elements.

    The input rows are kept, and the tensors between the matrices that the family's facts specify. If rows are
    `exchanged` among ranks, their places sorted and back are kept, too.
    """
    family = facts_of(model)
    assert family.experts is not None
    _, gated = family.feed_forward(family.configured(model.config))
    matrices = 3 if gated else 2
    wide = rows * experts.features
    return Part(
        name="mlp",
        flops=2.0 * hidden * matrices * wide,
        tile_flops=2.0 * hidden * matrices * experts.features * experts.number * _TILE_ROWS / 2,
        weights=hidden * experts.number * matrices * experts.features,
        inside=family.experts.kept * wide,
        # A grouped kernel of activation, gate and row weights keeps only its inputs.
        gate=(family.experts.kept - matrices) * wide,
        inputs=wide,
        products=(matrices - 1) * wide,
        whole=family.experts.rows * rows * hidden,
        whole_inputs=rows * hidden,
        is_expert=True,
        whole_bytes=rows * (_FLOAT32_BYTES + 2 * _INDEX_BYTES * exchanged),
        passing=2 * rows * hidden * exchanged,
        outside=0,
        result=result,
        # Instead: three gradients of weighted matrix products, in float32.
        widest=-wide // 2,
        widest_bytes=3 * _FLOAT32_BYTES * wide // 2,
        # Results, sorted back and as they are sent.
        widest_whole=(3 * rows * hidden if exchanged else 2 * rows * hidden) // 2,
        kernels=PRODUCT_KERNELS + EXCHANGE_KERNELS * exchanged,
        fused_kernels=_FUSED_PRODUCT_KERNELS + _FUSED_EXCHANGE_KERNELS * exchanged,
    )


def experts_of(kind: LayerType) -> Experts:
    """Return the experts of a layer type; the type must have experts."""
    assert kind.experts is not UNSET
    return kind.experts


def exchange_kernels(fused: bool) -> int:
    """Return the number of additional kernels of experts whose rows come from several ranks."""
    return _FUSED_EXCHANGE_KERNELS if fused else EXCHANGE_KERNELS


def has_biases(kind: LayerType) -> bool:
    """Return whether the experts of a layer type have biases."""
    return any(p.ep_dim is not UNSET and p.name.endswith("bias") for p in kind.parameters)


def expert_parameters(kind: LayerType) -> int:
    """Return the number of trained parameters of one expert."""
    experts = experts_of(kind)
    return sum(p.numel(1) for p in kind.trained_parameters if p.ep_dim is not UNSET) // experts.number
