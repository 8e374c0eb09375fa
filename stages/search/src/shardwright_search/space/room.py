"""The room that a search leaves on every rank for its communicators, before it knows how many its plan makes."""

from collections.abc import Mapping
from math import ceil

from shardwright_formats.semantics.process_groups import Purpose, communicator_bytes
from shardwright_formats.types import Cluster, Model, Plan
from shardwright_search.cost_model.plan import Evaluation
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.cost_model.tied_weights import has_shared
from shardwright_search.space.budget import budgets_of_stages
from shardwright_search.space.configurations import narrowed
from shardwright_search.space.request import SearchRequest

_GRID = {Purpose.WORLD: 1, Purpose.TENSOR_PARALLEL: 1, Purpose.DATA_PARALLEL: 1}
_MIDDLE_EDGES, _END_EDGES = 4, 2


def room_bytes(request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles) -> int:
    """Return what a rank's communicators hold where all layers of its stage share a strategy; the request is narrowed.

    That of all ranks, of one tensor-parallel and one data-parallel group; with pipeline stages the edges of a middle
    stage to both neighbours, or of an end with the group of tied parameters, whichever is more.
    """
    of_each = max(own.communicator_bytes for own in profiles.used(cluster))
    if cluster.num_devices == 1:
        return 0
    room = communicator_bytes(_GRID, of_each)
    if len(model.layers) == 1 or not any(size > 1 for size in request.pp_sizes or (2,)):
        return room
    tied = bool(model.tied) or has_shared(model)
    end = {Purpose.EDGE: _END_EDGES, Purpose.TIED_PARAMETERS: int(tied)}
    return room + max(communicator_bytes(own, of_each) for own in ({Purpose.EDGE: _MIDDLE_EDGES}, end))


def least_bytes(request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles) -> int:
    """Return what the communicators of a rank hold at least, and no more than the room for them.

    That of all ranks, with a group or the two edges of an end of the pipeline.
    """
    of_each = max(own.communicator_bytes for own in profiles.used(cluster))
    least = communicator_bytes({Purpose.WORLD: 1, Purpose.EDGE: _END_EDGES}, of_each)
    return min(least, room_bytes(request, model, cluster, profiles))


def beyond_room(
    plan: Plan, evaluation: Evaluation, budgets: Mapping[str, int], request: SearchRequest, profiles: Profiles
) -> int:
    """Return the bytes of a plan's communicators beyond the room for them where they overfill a stage, else 0."""
    factor = max(own.memory_factor for own in profiles.used(plan.cluster))
    room = ceil(factor * room_bytes(narrowed(request, plan.cluster), plan.model, plan.cluster, profiles))
    pairs = zip(evaluation.estimate.stages, budgets_of_stages(plan, budgets), strict=True)
    return max(
        (
            max(stage.memory_terms_bytes["communicators"] - room, stage.memory_bytes - most)
            for stage, most in pairs
            if stage.memory_bytes > most and "communicators" in stage.memory_terms_bytes
        ),
        default=0,
    )
