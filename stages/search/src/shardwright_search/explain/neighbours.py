"""The searches beside the one that made a plan: what the best plan of each other kind would cost."""

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import Recompute
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.explain.answers import Question
from shardwright_search.space.configurations import configurations, narrowed
from shardwright_search.space.request import OuterSpace, SearchRequest, Space

__all__ = ["neighbours"]


def neighbours(plan: Plan, request: SearchRequest, profiles: Profiles, file: Path) -> tuple[Question, ...]:
    """One kind of plan each: no recomputation, one strategy, data parallelism, ZeRO, pipeline degrees, microbatches.

    Degrees and counts are those of the request's space but the plan's own; counts are of the plan's batch size.
    """
    asked = narrowed(request, plan.cluster.num_devices)
    return tuple(
        Question(what, own, plan.model, plan.cluster, profiles, file) for what, own in _kinds(plan, asked, file)
    )


def _kinds(plan: Plan, asked: SearchRequest, file: Path) -> Iterator[tuple[str, SearchRequest]]:
    """`asked` is narrowed; data parallelism alone is a named space, in which nothing else is asked of the ends."""
    yield "no recomputation", replace(asked, recompute=(Recompute.NONE,))
    yield "one strategy for all layers", replace(asked, fine_grained=False)
    alone = replace(asked, embedding=OuterSpace(), head=OuterSpace(), max_pp_size=None, max_dp_size=None)
    yield "data parallelism only", replace(alone, space=Space.DP)
    yield "ZeRO only", replace(alone, space=Space.ZERO)
    every = configurations(asked, plan.model, plan.cluster, file)
    for pp_size in sorted({configuration.pp_size for configuration in every} - {len(plan.stages)}):
        yield f"pp_size {pp_size}", replace(asked, pp_sizes=(pp_size,))
    fixed = replace(asked, global_batch_size=plan.global_batch_size)
    counts = {
        configuration.num_microbatches
        for configuration in every
        if configuration.global_batch_size == plan.global_batch_size
    }
    for count in sorted(counts - {plan.num_microbatches}):
        yield f"{count} microbatch(es)", replace(fixed, num_microbatches=(count,))
