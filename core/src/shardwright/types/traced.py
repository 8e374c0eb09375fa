"""Operations and tensors of a layer, recorded in one forward pass, for models without facts."""

from shardwright.io import Value
from shardwright.types.limits import Bytes, Elements, Flops, NonNegativeCount


class Traced(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Operations and kept tensors of a layer for one sample, of a pass in bfloat16 with a flash kernel on one rank.

    Elements are of tensors in the compute format; bytes are of all others, whatever that format is.
    """

    product_flops: Flops
    """Operations of products with parameters."""
    attention_flops: Flops
    """Operations of products of activations, those that a causal mask leaves out included."""
    multiplied: Elements
    """Elements of the parameters that are multiplied with."""
    kept: Elements
    """Elements kept for the backward pass, what the layer receives included where it is kept."""
    kept_bytes: Bytes
    """Further bytes kept: of norms in float32, of masks, of numbers."""
    products: Elements
    """Elements that products and attention give."""
    widest: Elements
    """Elements of the largest tensor that an operator gives; of a head, of the logits."""
    kernels: NonNegativeCount
    """Operators that start a kernel."""
    whole_flops: Flops = 0
    """Operations among those of products that every tensor-parallel rank repeats; omitted if nothing is shared out."""
    whole: Elements = 0
    """Elements among those kept that every tensor-parallel rank has whole; omitted if nothing is shared out."""
    whole_products: Elements = 0
    """Elements among those of products that every tensor-parallel rank has whole; omitted if nothing is shared out."""
    linear: tuple[str, ...] = ()
    """Modules that are a Linear, by their names in the layer; of the head, those of the embedding, too."""
    like_linear: tuple[str, ...] = ()
    """Modules that peft takes for a Linear, and that are a class of their own."""
    of_experts: tuple[str, ...] = ()
    """Of the head: names of modules that peft may take for parameters of experts, wherever they are."""
    path: str = ""
    """The list of blocks in the stock model that a block is in; empty if its parameters have their full names."""
