"""Operations and saved tensors of attention whose keys and values come from one latent (MLA, DeepSeek-AI 2024)."""

from shardwright.estimate.part import Part, attention_shape
from shardwright.models.registry import facts_of
from shardwright.models.traits import Latents, Mask
from shardwright.types import Model, Region

_KERNELS = 20
"""Number of additional kernels of attention with latents: the latents, their norms, and the features that are rotated
separately."""


def latent_attention_part(
    model: Model, type_name: str, region: Region, stream: int, latents: Latents, keeps: tuple[int, int], kernels: int
) -> Part:
    """Return the part that computes latents, replicated on each rank, and queries, keys and values from them.

    `keeps`: elements and further bytes that a norm keeps for each feature. Values are kept together with the part of
    keys that comes from the same matrix product.
    """
    a, family = attention_shape(model, type_name, region), facts_of(model)
    tensor = next(t for t in model.types[type_name].outputs if t.name == region.leaves)
    hidden, positions, heads = tensor.features, tensor.sequence_length, a.heads
    width = a.key_width - heads * latents.rotated + a.result_width
    from_latents = latents.keys * width + (latents.queries or hidden) * a.query_width
    to_latents = hidden * (latents.keys + latents.rotated + (latents.queries or 0))
    normed = latents.keys + (latents.queries or 0)
    return Part(
        name="attention",
        flops=2.0 * positions * (from_latents + hidden * a.result_width),
        whole_flops=2.0 * positions * to_latents,
        attention_flops=2.0 * positions * a.keys * (a.query_width + a.result_width),
        causal=family.attention.mask is Mask.CAUSAL,
        weights=from_latents + to_latents + hidden * a.result_width,
        inside=positions
        * (a.query_width + a.key_width + width + (1 + family.attention.joins_features) * a.result_width),
        from_latents=positions * (a.query_width + a.key_width + width),
        latent_flops=2.0 * positions * from_latents,
        products=positions * (a.query_width + width + a.result_width),
        whole=positions * normed * (1 + keeps[0]),
        whole_bytes=positions * normed * keeps[1],
        whole_normed=positions * normed,
        latents=positions * (normed + latents.rotated),
        whole_products=positions * (normed + latents.rotated),
        scores=a.scores,
        outside=2 * stream,
        outside_inputs=stream,
        result=stream,
        attended=positions * a.result_width,
        widest=positions * max(a.query_width, width),
        kernels=kernels + _KERNELS,
    )
