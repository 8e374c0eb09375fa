"""A part of a layer: its operations, and the tensors that it saves for the backward pass."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shardwright.models.registry import facts_of
from shardwright.models.traits import ATTENDED
from shardwright.types import HEAD, BoundaryTensor, Model, Region, base_type


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a layer; numbers of elements and bytes are totals over all ranks for one sample.

    What is kept for the backward pass is counted as by Korthikanti et al. (2022), for any shapes. `inside` is what
    tensor-parallel ranks shard; `outside` is what each rank holds completely unless the sequence is split.
    """

    name: str
    flops: float
    """Operations of matrix products with parameters, without those in the fields below."""
    whole_flops: float = 0.0
    """Operations of matrix products with matrices that are not sharded, which every tensor-parallel rank repeats."""
    outside_flops: float = 0.0
    """Operations of matrix products with whole matrices outside the region, for the positions that a rank has there."""
    attention_flops: float = 0.0
    """Operations of scores and of the weighted sum of values, including masked ones."""
    causal: bool = False
    head_features: int = 0
    """Features of an attention head; 0 if there is no attention, or if they do not affect its time."""
    keys: int = 0
    """Number of positions that attention attends to."""
    undivided: bool = False
    """Whether each tensor-parallel rank multiplies by whole matrices."""
    tile_flops: float = 0.0
    """Operations on rows that pad the tiles of grouped matrix products, for any number of samples."""
    left_out: float = 0.0
    """Operations of scores that a window leaves out; a kernel that adds a mask to all scores computes them, too."""
    weights: int = 0
    """Number of elements of the matrices."""
    dense_gradient: int = 0
    """Number of elements of a table whose gradient is written completely, however few rows were looked up."""
    inside: int = 0
    """Number of elements inside the region that are kept in the compute format."""
    products: int = 0
    """The part of `inside` that is results of matrix products and attention: what selective recomputation keeps."""
    whole_products: int = 0
    """Number of elements of matrix products' results that every rank holds completely."""
    passing_bytes: int = 0
    """Additional bytes that are written and read, but not kept."""
    inside_bytes: int = 0
    """Additional bytes kept inside the region, split over ranks, such as for norms of queries and keys."""
    mask: int = 0
    """Number of elements of a mask that is added to the scores of all samples, split over ranks by heads."""
    weight_copies: int = 0
    """Number of elements of a matrix that is computed from the weights, and sharded like them."""
    scores: int = 0
    """Number of additional elements, the attention scores, if the kernel keeps them."""
    score_bytes: int = 0
    """Further bytes kept for the scores, if the kernel keeps them."""
    repeated: int = 0
    """Number of additional elements from repeating keys and values for all heads, if scores are kept or masked."""
    whole: int = 0
    """Number of elements inside the region that are kept in the compute format and held completely by each
    tensor-parallel rank, such as experts' rows."""
    whole_bytes: int = 0
    """Additional bytes that every rank keeps completely, such as the router's choices."""
    passing: int = 0
    """Number of additional elements in the compute format that are written and read, but not kept."""
    operator_bytes: int = 0
    """Additional bytes that separate operators between matrix products write and read, for what ranks shard:
    rotations."""
    outside_operator_bytes: int = 0
    """Additional bytes that separate operators write and read outside the region: norms in float32."""
    outside: int
    """Number of elements outside the region that are kept in the compute format: its input, and the stream after it."""
    outside_bytes: int = 0
    """Further bytes kept outside the region: dropout masks."""
    result: int = 0
    """Number of elements of the residual stream at the end: all that is kept of a layer that is recomputed as a
    whole."""
    keeps_result: bool = False
    """Whether the operation after the part, such as a norm or dropout, keeps the result of the sum over ranks, even at
    the end of a layer."""
    norm_inside: bool = False
    """Whether the norm after the part is recomputed with it, as in BERT, so that only the norm's result is kept."""
    redrawn_bytes: int = 0
    """Bytes of a dropout mask, among `outside_bytes`, which is drawn again if the part is recomputed by itself."""
    gate: int = 0
    """The part of `inside` that a fused kernel of activation and gate does not keep."""
    inputs: int = 0
    """The part of `inside` that is only kept as input of matrix products with parameters."""
    whole_inputs: int = 0
    """The part of `whole` that is only kept as input of matrix products with parameters."""
    outside_inputs: int = 0
    """The part of `outside` that is only kept as input of matrix products with parameters."""
    normed: int = 0
    """The part of `outside` that is norms' results for matrix products; recomputing norms frees it."""
    whole_normed: int = 0
    """The part of `whole` that is norms' results."""
    second_products: int = 0
    """The part of `products` that is the result of every second matrix product with parameters, in order."""
    from_latents: int = 0
    """Number of elements inside the region that are computed from latents."""
    latents: int = 0
    """Number of elements of the matrix products that compute latents, on each rank: what is kept if the rest is
    recomputed."""
    latent_flops: float = 0.0
    """The part of `flops` that computes queries, keys and values from latents."""
    is_expert: bool = False
    """Whether the part is experts, without the router."""
    logits: int = 0
    """Number of logits from which a loss is computed."""
    attended: int = 0
    """Number of elements of attention's result; Ulysses keeps it in two layouts, before and after exchanging heads."""
    widest: int = 0
    """Number of elements of the largest tensor that is split over ranks."""
    widest_whole: int = 0
    """Number of elements of the largest tensor inside the region that each rank holds completely."""
    widest_bytes: int = 0
    """Additional bytes of the largest float32 tensor."""
    kernels: int
    fused_kernels: int | None = None
    """Number of kernels if operations between matrix products are fused; None: `parts` has one number for all parts of
    this name."""
    trained: float = 1.0
    """Share of the matrices' elements that are trained; for the others, only the gradient of their inputs is
    computed."""

    def with_norms_of(self, other: "Part", inside: bool = True) -> "Part":
        """Return the part with what the norms of `other` keep and move: the same part, with other kernels for norms.

        `inside`: whether norms inside the region are included.
        """
        changed = {name: getattr(other, name) for name in ("outside", "outside_bytes", "outside_operator_bytes")}
        if inside and self.name == "attention":
            names = "inside", "inside_bytes", "operator_bytes", "whole", "whole_bytes"
            changed |= {name: getattr(other, name) for name in names}
        return msgspec.structs.replace(self, **changed)

    def scaled(self, share: float) -> "Part":
        """Return the part with its operations multiplied by `share`."""
        names = ("flops", "whole_flops", "outside_flops", "latent_flops", "attention_flops", "left_out", "tile_flops")
        operations: dict[str, float] = {name: getattr(self, name) for name in names}
        return msgspec.structs.replace(self, **{name: value * share for name, value in operations.items()})


# Sizes of the tensors that flow through a layer of a type; each stage of a pyramid such as Swin has other sizes.


class AttentionShape(NamedTuple):
    """Widths (features over all heads) and lengths (positions) of an attention."""

    query_width: int
    key_width: int
    result_width: int
    """Width of the attention's result."""
    queries: int
    """Number of positions that attend."""
    key_positions: int
    """Number of positions that have keys."""
    keys: int
    """Number of positions that each position attends to."""
    heads: int
    window: int | None
    alibi: bool

    @property
    def scores(self) -> int:
        """Return the number of attention scores per sample."""
        return self.heads * self.queries * self.keys

    @property
    def left_out(self) -> float:
        """Return the number of query-key pairs outside a sliding window, on both sides together."""
        return 0.0 if self.window is None else float(self.queries - self.window) ** 2


def tensors_of(model: Model, type_name: str) -> tuple[BoundaryTensor, ...]:
    """Return the output tensors of a layer type; for the head, its inputs."""
    return model.types[type_name].outputs or model.received_by(HEAD)


def attention_shape(model: Model, type_name: str, region: Region) -> AttentionShape:
    """Return the shape of a region's attention, within windows of an image if attention is limited to them."""
    heads = region.attention
    assert heads is not None
    lengths = {tensor.name: tensor.sequence_length for tensor in tensors_of(model, type_name)}
    return AttentionShape(
        heads.heads * heads.head_features,
        heads.kv_heads * heads.head_features,
        heads.heads * heads.features_of_values,
        lengths[heads.queries],
        lengths[heads.keys],
        attended_positions(model, type_name) or lengths[heads.keys],
        heads.heads,
        heads.window,
        heads.alibi,
    )


def attended_positions(model: Model, type_name: str) -> int | None:
    """Return the number of positions of the image windows in which a block attends, or None if it has none."""
    family = facts_of(model)
    attended: int | None = family.shapes(base_type(type_name), family.configured(model.config)).get(ATTENDED)
    return attended


def stream_elements(tensors: Sequence[BoundaryTensor], region: Region) -> int:
    """Return the number of elements of the residual stream to which a region adds its result."""
    tensor = next((t for t in tensors if t.name == region.leaves), tensors[0])
    return tensor.sequence_length * tensor.features
