"""A part of a layer: its operations, and the tensors that it keeps for the backward pass."""

import msgspec


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a layer; numbers of elements and bytes are those of one sample over all ranks.

    What is kept for the backward pass is counted as Korthikanti et al. (2022) do, of any shape: `inside` is what
    tensor-parallel ranks share out, `outside` what each holds whole unless the sequence is split.
    """

    name: str
    flops: float
    """Operations of matrix products."""
    whole_flops: float = 0.0
    """Those that each tensor-parallel rank computes whole: of matrices that none shares out."""
    attention_flops: float = 0.0
    """Operations of scores and of what they weigh, those that a causal mask leaves out included."""
    causal: bool = False
    head_features: int = 0
    """Features of a head of attention; 0: there is none, or they make no difference."""
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
    """Bytes that are written and read beside them, and not kept."""
    inside_bytes: int = 0
    """Further bytes kept of what ranks share out: norms of queries and keys."""
    mask: int = 0
    """Elements of a mask that is added to the scores of all samples, and that ranks share out by heads."""
    weight_copies: int = 0
    """Elements of a matrix that is computed from the weights, and that ranks share out as these."""
    scores: int = 0
    """Further elements kept of attention scores, where the kernel keeps them."""
    score_bytes: int = 0
    """Further bytes kept of them there."""
    repeated: int = 0
    """Further elements kept where keys and values are repeated for all heads: where scores are kept, or masked."""
    whole: int = 0
    """Elements kept in the compute format that each tensor-parallel rank has whole inside the region: experts' rows."""
    whole_bytes: int = 0
    """Further bytes kept so: what a router tells."""
    passing: int = 0
    """Elements of the compute format that are written and read beside these, and not kept."""
    operator_bytes: int = 0
    """Bytes that single operators between products write and read besides of what ranks share out: rotations."""
    outside_operator_bytes: int = 0
    """The same outside: norms in float32."""
    outside: int
    """Elements kept in the compute format: what enters the region, and the stream behind it."""
    outside_bytes: int = 0
    """Further bytes kept: dropout masks."""
    result: int = 0
    """Elements of the stream that leaves: all that is kept of a layer that is recomputed whole."""
    keeps_result: bool = False
    """Whether something behind the sum over ranks keeps it, such as a norm or dropout, even at the end of a layer."""
    norm_inside: bool = False
    """Whether the norm behind a part is recomputed with it, as BERT's is: then its result alone is kept."""
    redrawn_bytes: int = 0
    """Bytes of a dropout mask among those outside, which is drawn again where the part is recomputed alone."""
    gate: int = 0
    """Elements among those inside that a kernel of activation and gate does not keep."""
    inputs: int = 0
    """Elements among those inside that are inputs of products with matrices, and of nothing else."""
    whole_inputs: int = 0
    """The same among those that each rank has whole."""
    outside_inputs: int = 0
    """The same among those outside."""
    second_products: int = 0
    """Elements among `products` that every second product with a matrix gives, in the order of the products."""
    from_latents: int = 0
    """Elements among those inside that are computed from latents."""
    is_expert: bool = False
    """Whether it is of experts, without the router."""
    logits: int = 0
    """Elements that a loss is computed from."""
    attended: int = 0
    """Elements of attention's result, of which Ulysses keeps two layouts: before and after heads are exchanged."""
    widest: int = 0
    """Elements of the largest tensor that ranks share out."""
    widest_whole: int = 0
    """Elements of the largest tensor that each of them has whole inside the region."""
    widest_bytes: int = 0
    """Bytes of the largest float32 tensor beside them."""
    kernels: int
    fused_kernels: int | None = None
    """Kernels where what lies between products is fused; None: as of other parts of its name."""
    trained: float = 1.0
    """Share of the matrices' elements that have gradients: the others cost the gradient of their inputs alone."""

    def scaled(self, share: float) -> "Part":
        """Return the part with so many times the operations."""
        names = ("flops", "whole_flops", "attention_flops", "left_out", "tile_flops")
        operations: dict[str, float] = {name: getattr(self, name) for name in names}
        return msgspec.structs.replace(self, **{name: value * share for name, value in operations.items()})
