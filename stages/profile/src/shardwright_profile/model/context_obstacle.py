"""Models whose layers cannot be probed with keys of several ranks on one device."""

from shardwright_estimate.settings import ProfileSettings, block_types
from shardwright_formats.types import Attention, ContextParallel, LayerStrategy, Model, misfit
from shardwright_models.facts import Mask
from shardwright_models.registry import facts_of

_KERNELS = (Attention.AUTO, Attention.SDPA, Attention.SDPA_MATH)


def context_obstacle(model: Model, settings: ProfileSettings, cp_size: int) -> str | None:
    """Return why no probe of a share of positions attends to the keys of `cp_size` ranks, or None where one can.

    Such a probe attends in blocks without masks. Raises BadInput for a family that nothing is known of.
    """
    if settings.compile or settings.attention not in _KERNELS:
        return "attention across ranks is neither compiled nor computed by other kernels than sdpa's"
    facts = facts_of(model)
    if facts.mask not in (Mask.CAUSAL, Mask.NONE) or Attention.SDPA not in facts.kernels or facts.joined_by is not None:
        return f"{model.family} models attend under masks"
    if facts.configured(model.config).get(facts.dropouts.attention):
        return "attention across ranks drops nothing"
    types = block_types(model)
    attentions = [region.attention for name in types for region in model.types[name].regions]
    if any(heads is not None and heads.keys != heads.queries for heads in attentions):
        return "decoders attend to keys of an encoder"
    rings = (
        LayerStrategy(type=name, tp_size=1, cp_size=cp_size, dp_size=1, context=ContextParallel.RING) for name in types
    )
    return next((problem for ring in rings if (problem := misfit(model, ring.type, ring)) is not None), None)
