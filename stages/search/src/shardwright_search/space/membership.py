"""Whether a given plan is in a search's space, and if not, which part of it is outside."""

from collections.abc import Iterator

from msgspec.structs import replace

from shardwright.display.plan_words import shape_words, strategy_words
from shardwright.types import EMBEDDING, HEAD, Plan
from shardwright_search.solver.problem import Solution
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.search_space import SearchSpace
from shardwright_search.space.split_problem import split_targets

_REQUESTED = "gradient_reduction", "precision", "attention", "compile"


def outside(space: SearchSpace, plan: Plan) -> str | None:
    """Return which part of a plan the space does not contain, in words; None: the plan is in it."""
    reasons = list[str]()
    for reason in _outside(space, plan):
        if reason is None:
            return None
        reasons.append(reason)
    return reasons[-1] if reasons else f"batch {plan.global_batch_size}, {shape_words(plan)}"


def _outside(space: SearchSpace, plan: Plan) -> Iterator[str | None]:
    """Yield, for each configuration of the plan's shape, which part of the plan it does not contain."""
    instance, request = space.instance, space.instance.request
    for field in _REQUESTED:
        if getattr(plan, field) != getattr(request, field):
            yield f"another {field} than the search file's"
            return
    if (plan.loss_chunks or 1) != request.loss_chunks:
        yield "other loss_chunks than the search file's"
        return
    if plan.optimizer not in request.optimizers:
        yield "another optimizer than the search file's"
        return
    if plan.schedule.splits and plan.schedule not in request.schedules:
        yield "another schedule than the search file's"
        return
    targets = (split_targets(space, plan.schedule) or ()) if plan.schedule.splits else space.targets
    for configuration in (target.configuration for target in targets):
        if _shape(plan) == configuration[: len(_shape(plan))]:
            solution = _solution(instance, configuration, plan)
            if isinstance(solution, str):
                yield solution
            else:
                same = instance.plan(configuration, solution) == replace(plan, name=request.name)
                yield None if same else "options that no search sets"


def _shape(plan: Plan) -> tuple[object, ...]:
    """Return the plan's shape, as a configuration's first fields."""
    shape = Configuration(
        plan.global_batch_size, plan.num_microbatches, len(plan.stages), plan.schedule, len(plan.stages[0].layers)
    )
    return shape[:5]


def _solution(instance: Instance, configuration: Configuration, plan: Plan) -> Solution | str:
    """Return the solution that equals a plan, or which part of the plan the configuration does not contain."""
    placed, groups = instance.choices.placed(configuration), list[int]()
    (position,) = placed.moves[0]
    for number, (stage, moves) in enumerate(zip(plan.stages, placed.moves, strict=True)):
        ways = (way for way in moves[position] if placed.ranks_behind(position, way[0]) == stage.ranks)
        if (way := next(ways, None)) is None:
            return f"the ranks of stage {number}"
        group, position = way
        groups.append(group)
    shardings, options = instance.choices.layers.shardings(instance.choices.choice(configuration)), list[int]()
    blocks = ((f"layers[{i}]", layer.type, layer) for i, layer in enumerate(plan.layers))
    for place, name, strategy in ((EMBEDDING, EMBEDDING, plan.embedding), *blocks, (HEAD, HEAD, plan.head)):
        listed = shardings.of_type(name, len(plan.stages[plan.stage_of(place)].ranks))
        if strategy not in listed:
            return f"{place} as {strategy_words(strategy)}"
        options.append(listed.index(strategy))
    ends = (*(stage.layers[-1][1] + 1 for stage in plan.stages[:-1]), len(options))
    return Solution(ends, tuple(options), tuple(groups))
