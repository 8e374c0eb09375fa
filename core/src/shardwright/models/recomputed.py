"""The kinds of recomputation that the word `parts` stands for, which a model's attention decides."""

from shardwright.io import BadInput
from shardwright.models.registry import FAMILIES
from shardwright.types import PARTS, RECOMPUTE_PARTS, Model, Recompute, RecomputeChoice, RecomputedPart


def recompute_kinds(asked: RecomputeChoice, model: Model) -> tuple[Recompute, ...]:
    """Return the kinds of recomputation that were asked for, listed or by the word `parts`.

    Of that word's sets those of latents only if the model has some. Raises BadInput if the parts of the model's blocks
    are not known.
    """
    if asked != PARTS:
        return asked
    facts = FAMILIES.get(model.family)
    if facts is None:
        problem = f"recompute {PARTS}: parts of {model.family} blocks are not known"
        raise BadInput(f"model {model.name}", problem, "list kinds such as none and full")
    latents = facts.attention.latents(facts.configured(model.config)) is not None
    return tuple(kind for kind in RECOMPUTE_PARTS if latents or RecomputedPart.LATENTS not in kind.parts)
