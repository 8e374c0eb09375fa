"""What one forward pass through a layer was seen to do, where no facts say what its kind of model does."""

from shardwright.io import Value
from shardwright.types.limits import Flops, NonNegativeCount


class Traced(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Operations and kept tensors of a layer for one sample, of a pass in bfloat16 with a flash kernel on one rank.

    Elements are of tensors in the compute format; bytes are of all others, whatever that format is.
    """

    product_flops: Flops
    """Operations of products with parameters."""
    attention_flops: Flops
    """Operations of products of activations, those that a causal mask leaves out included."""
    multiplied: NonNegativeCount
    """Elements of the parameters that are multiplied with."""
    kept: NonNegativeCount
    """Elements kept for the backward pass, what the layer receives included where it is kept."""
    kept_bytes: NonNegativeCount
    """Further bytes kept: of norms in float32, of masks, of numbers."""
    products: NonNegativeCount
    """Elements that products and attention give."""
    widest: NonNegativeCount
    """Elements of the largest tensor that an operator gives; of a head, of the logits."""
    kernels: NonNegativeCount
    """Operators that start a kernel."""
    whole_flops: Flops = 0
    """Operations among those of products that every tensor-parallel rank repeats; omitted if nothing is shared out."""
    whole: NonNegativeCount = 0
    """Elements among those kept that every tensor-parallel rank has whole; omitted if nothing is shared out."""
    whole_products: NonNegativeCount = 0
    """Elements among those of products that every tensor-parallel rank has whole; omitted if nothing is shared out."""
