"""A part of a layer: its operations, and the tensors that it saves for the backward pass."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shardwright.models.registry import facts_of
from shardwright.models.traits import ATTENDED
from shardwright.types import HEAD, BoundaryTensor, Model, Region, base_type


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a layer; numbers of elements and bytes are totals of one sample over all ranks.

    What is kept for the backward pass is counted as Korthikanti et al. (2022) do, of any shape: `inside` is what
    tensor-parallel ranks shard, `outside` what each holds whole unless the sequence is split.
    """

    name: str
    flops: float
    """Operations of matrix products."""
    whole_flops: float = 0.0
    """Operations that every tensor-parallel rank repeats, of matrices that are not sharded."""
    outside_flops: float = 0.0
    """Operations of products with whole matrices outside the region, at the positions that a rank has there."""
    attention_flops: float = 0.0
    """Operations of scores and of the weighted sum of values, masked ones included."""
    causal: bool = False
    head_features: int = 0
    """Features of a head of attention; 0: there is none, or it does not matter."""
    keys: int = 0
    """Positions that attention looks at."""
    undivided: bool = False
    """Whether each tensor-parallel rank multiplies by whole matrices."""
    tile_flops: float = 0.0
    """Operations on rows that fill up tiles of grouped products, however many samples there are."""
    left_out: float = 0.0
    """Operations of scores that a window leaves out: a kernel to whose scores a mask is added computes them, too."""
    weights: int = 0
    """Elements of the matrices."""
    dense_gradient: int = 0
    """Elements of a table whose gradient is written whole, however few rows were looked up."""
    inside: int = 0
    """Elements kept in the compute format."""
    products: int = 0
    """Elements among them that matrix products and attention give: what selective recomputation keeps."""
    whole_products: int = 0
    """Elements that products give on each rank whole."""
    passing_bytes: int = 0
    """Additional bytes that are written and read, and not kept."""
    inside_bytes: int = 0
    """Additional bytes kept inside a region, split over ranks: norms of queries and keys."""
    mask: int = 0
    """Elements of a mask that is added to the scores of all samples, split over ranks by heads."""
    weight_copies: int = 0
    """Elements of a matrix that is computed from the weights, and sharded like them."""
    scores: int = 0
    """Additional elements of attention scores, if the kernel keeps them."""
    score_bytes: int = 0
    """Further bytes kept of them there."""
    repeated: int = 0
    """Additional elements if keys and values are repeated for all heads: if scores are kept, or masked."""
    whole: int = 0
    """Elements kept in the compute format that each tensor-parallel rank has whole inside the region: experts' rows."""
    whole_bytes: int = 0
    """Additional bytes that every rank keeps completely: the router's choices."""
    passing: int = 0
    """Additional elements in the compute format that are written and read, and not kept."""
    operator_bytes: int = 0
    """Bytes that single operators between products write and read in addition, of what ranks shard: rotations."""
    outside_operator_bytes: int = 0
    """The same outside the region: norms in float32."""
    outside: int
    """Elements kept in the compute format outside the region: its input, and the stream after it."""
    outside_bytes: int = 0
    """Further bytes kept: dropout masks."""
    result: int = 0
    """Elements of the stream that leaves: all that is kept of a layer that is recomputed whole."""
    keeps_result: bool = False
    """Whether the result of the sum over ranks is kept by what follows, such as a norm or dropout, even at a layer's
    end."""
    norm_inside: bool = False
    """Whether the norm after a part is recomputed with it, as in BERT, so that only its result is kept."""
    redrawn_bytes: int = 0
    """Bytes of a dropout mask among those outside the region, which is drawn again if the part is recomputed by
    itself."""
    gate: int = 0
    """Elements inside the region that a fused kernel of activation and gate does not keep."""
    inputs: int = 0
    """Elements inside the region that are only kept as inputs of products with matrices."""
    whole_inputs: int = 0
    """The same for elements that every rank has completely."""
    outside_inputs: int = 0
    """The same for elements outside the region."""
    normed: int = 0
    """Elements among `outside` that norms give to products, which recomputed norms free."""
    whole_normed: int = 0
    """The same among `whole`."""
    second_products: int = 0
    """Elements among `products` that every second product with a matrix gives, in the order of the products."""
    from_latents: int = 0
    """Elements inside the region that are computed from latents."""
    latents: int = 0
    """Elements that each rank has of products that give latents: what is kept if the others are recomputed."""
    latent_flops: float = 0.0
    """Operations among `flops` of the products that compute them."""
    is_expert: bool = False
    """Whether it is of experts, without the router."""
    logits: int = 0
    """Elements that a loss is computed from."""
    attended: int = 0
    """Elements of attention's result; Ulysses keeps it in two layouts, before and after heads are exchanged."""
    widest: int = 0
    """Elements of the largest tensor that is split over ranks."""
    widest_whole: int = 0
    """Elements of the largest tensor that each of them has whole inside the region."""
    widest_bytes: int = 0
    """Additional bytes of the largest float32 tensor."""
    kernels: int
    fused_kernels: int | None = None
    """Number of kernels if operations between products are fused; None: that of other parts with this name."""
    trained: float = 1.0
    """Share of the matrices' elements that are trained; for the others only the gradient of their inputs is
    computed."""

    def with_norms_of(self, other: "Part", inside: bool = True) -> "Part":
        """Return the part with what the norms of the same part, of other kernels, keep and move.

        `inside`: whether those of its region, too.
        """
        changed = {name: getattr(other, name) for name in ("outside", "outside_bytes", "outside_operator_bytes")}
        if inside and self.name == "attention":
            names = "inside", "inside_bytes", "operator_bytes", "whole", "whole_bytes"
            changed |= {name: getattr(other, name) for name in names}
        return msgspec.structs.replace(self, **changed)

    def scaled(self, share: float) -> "Part":
        """Return the part with its operations multiplied by a factor."""
        names = ("flops", "whole_flops", "outside_flops", "latent_flops", "attention_flops", "left_out", "tile_flops")
        operations: dict[str, float] = {name: getattr(self, name) for name in names}
        return msgspec.structs.replace(self, **{name: value * share for name, value in operations.items()})


# Sizes of the tensors that flow through a layer of a type; each stage of a pyramid such as Swin has other sizes.


class AttentionShape(NamedTuple):
    """Widths and lengths of an attention, over all its heads."""

    query_width: int
    key_width: int
    result_width: int
    """Width of what its heads give."""
    queries: int
    """Positions that attend."""
    key_positions: int
    """Positions that have keys."""
    keys: int
    """Positions that each attends to."""
    heads: int
    window: int | None
    alibi: bool

    @property
    def scores(self) -> int:
        """Return the number of attention scores of a sample."""
        return self.heads * self.queries * self.keys

    @property
    def left_out(self) -> float:
        """Return the number of query-key pairs outside a sliding window, which extends equally to both sides."""
        return 0.0 if self.window is None else float(self.queries - self.window) ** 2


def tensors_of(model: Model, type_name: str) -> tuple[BoundaryTensor, ...]:
    """Return the output tensors of a type of layer; of the head, its inputs."""
    return model.types[type_name].outputs or model.received_by(HEAD)


def attention_shape(model: Model, type_name: str, region: Region) -> AttentionShape:
    """Return the shape of a region's attention, over a window of an image if attention is limited to one."""
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
    """Return the number of positions of the image window in which a block attends; None: there is no window."""
    family = facts_of(model)
    attended: int | None = family.shapes(base_type(type_name), family.configured(model.config)).get(ATTENDED)
    return attended


def stream_elements(tensors: Sequence[BoundaryTensor], region: Region) -> int:
    """Return the number of elements of the stream that a region adds to."""
    tensor = next((t for t in tensors if t.name == region.leaves), tensors[0])
    return tensor.sequence_length * tensor.features
