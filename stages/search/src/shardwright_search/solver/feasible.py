"""Some plan of a configuration, quickly: so that a search that is stopped has an answer."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from shardwright_search.solver.partition import Found
from shardwright_search.solver.problem import Options, Problem, Solution, price


def plain_plan(problem: Problem) -> Found | None:
    """The best of the plans that cut the layers evenly and treat all of a type alike, in one layout of each width.

    For each layout every type takes its fastest option, or its leanest. None: none fits.
    """
    layers, p = len(problem.layers) - 2, problem.pp_size
    ends = (*(1 + max(stage, layers * (stage + 1) // p) for stage in range(p - 1)), len(problem.layers))
    groups = _even_groups(problem)
    budgets = [problem.device_groups[group].budget_bytes for group in groups]
    found = []
    stages = [stage for stage, (low, high) in enumerate(pairwise((0, *ends))) for _ in range(low, high)]
    for options in _alike(problem, groups):
        chosen = tuple(options[groups[stage]][kind] for stage, kind in zip(stages, problem.layers, strict=True))
        solution = Solution(ends, chosen, groups)
        own = price(problem, solution)
        if all(need <= budget for need, budget in zip(own.memory_bytes, budgets, strict=True)):
            found.append(Found(float(own.objective_ps), solution))
    return min(found, key=lambda plan: plan.objective_ps, default=None)


def _even_groups(problem: Problem) -> tuple[int, ...]:
    """Device groups that the stages can be on, each the first of those that are nearest to the mean width."""
    position, groups = problem.start_position, []
    for placements in problem.placements:
        group, position = min(placements[position], key=lambda move: abs(problem.relative_widths[move[0]] - 1))
        groups.append(group)
    return tuple(groups)


def _alike(problem: Problem, groups: Sequence[int]) -> Iterator[dict[int, tuple[int, ...]]]:
    """Options by device group and type: those of each layout that are fastest, and those that hold least."""
    layouts = {group: problem.layouts_of_width[problem.device_groups[group].width] for group in groups}
    for number in range(max(map(len, layouts.values()))):
        for lean in (False, True):
            yield {
                group: tuple(
                    _simplest(o, kind == problem.layers[0], int(own[min(number, len(own) - 1)]), lean)
                    for kind, o in enumerate(problem.device_groups[group].options)
                )
                for group, own in layouts.items()
            }


def _simplest(options: Options, is_embedding: bool, layout: int, lean: bool) -> int:
    layouts = options.output_layout if is_embedding else options.input_layout
    held = options.state_bytes + options.late_bytes + options.sum_bytes + options.activation_bytes
    order = held if lean else options.time_ps
    rows = [row for row in range(len(layouts)) if layouts[row] == layout] or list(range(len(layouts)))
    return min(rows, key=lambda row: float(order[row]))
