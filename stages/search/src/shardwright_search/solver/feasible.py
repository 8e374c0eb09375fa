"""Some plan of a configuration, quickly: so that a search that is stopped has an answer."""

from collections.abc import Iterator

from shardwright_search.solver.partition import Found
from shardwright_search.solver.problem import Options, Problem, Solution, price

__all__ = ["plain_plan"]


def plain_plan(problem: Problem) -> Found | None:
    """The best of the plans that cut the layers evenly and treat all of a type alike, in one layout; None: none fits.

    For each layout every type takes its fastest option, or its leanest.
    """
    layers, p = len(problem.layers) - 2, problem.pp_size
    ends = (*(1 + layers * (stage + 1) // p for stage in range(p - 1)), len(problem.layers))
    groups = _first_groups(problem)
    budgets = [problem.device_groups[group].budget_bytes for group in groups]
    found = []
    for options in _alike(problem):
        solution = Solution(ends, tuple(options[kind] for kind in problem.layers), groups)
        own = price(problem, solution)
        if all(need <= budget for need, budget in zip(own.memory_bytes, budgets, strict=True)):
            found.append(Found(float(own.objective_ps), solution))
    return min(found, key=lambda plan: plan.objective_ps, default=None)


def _first_groups(problem: Problem) -> tuple[int, ...]:
    """The first device groups that the stages can be on."""
    used, groups = problem.nothing_used, []
    for placements in problem.placements:
        group, used = placements[used][0]
        groups.append(group)
    return tuple(groups)


def _alike(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Options by type: those of each layout that are fastest, and those that hold least."""
    for layout in range(problem.num_layouts):
        for lean in (False, True):
            own = enumerate(problem.device_groups[0].options)
            yield tuple(_simplest(o, kind == problem.layers[0], layout, lean) for kind, o in own)


def _simplest(options: Options, is_embedding: bool, layout: int, lean: bool) -> int:
    layouts = options.output_layout if is_embedding else options.input_layout
    order = options.state_bytes + options.late_bytes + options.activation_bytes if lean else options.time_ps
    rows = [row for row in range(len(layouts)) if layouts[row] == layout] or list(range(len(layouts)))
    return min(rows, key=lambda row: float(order[row]))
