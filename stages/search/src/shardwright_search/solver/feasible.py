"""Some plan of a case, quickly: so that a search that is stopped has an answer."""

from collections.abc import Iterator

from shardwright_search.solver.partition import Found
from shardwright_search.solver.problem import Problem, Solution, price

__all__ = ["plain_plan"]


def plain_plan(problem: Problem) -> Found | None:
    """The best of the plans that cut the layers evenly and treat all of a type alike, in one layout; None: none fits.

    For each layout every type takes its fastest option, or its leanest.
    """
    best: Found | None = None
    cuts, device_groups = _even_ends(problem), _first_groups(problem)
    for options in _alike(problem):
        solution = Solution(cuts, tuple(options[kind] for kind in problem.elements), device_groups)
        own = price(problem, solution)
        fits = all(
            resident <= problem.device_groups[group].budget_bytes
            for resident, group in zip(own.memory_bytes, device_groups, strict=True)
        )
        if fits and (best is None or own.objective_ps < best.objective_ps):
            best = Found(float(own.objective_ps), solution)
    return best


def _even_ends(problem: Problem) -> tuple[int, ...]:
    layers, p = len(problem.elements) - 2, problem.pp_size
    return (*(1 + layers * (stage + 1) // p for stage in range(p - 1)), len(problem.elements))


def _first_groups(problem: Problem) -> tuple[int, ...]:
    """The first device groups that the stages can be on."""
    used, device_groups = problem.usages[0][0], []
    for stage in range(problem.pp_size):
        group, used = problem.placements(stage, used)[0]
        device_groups.append(group)
    return tuple(device_groups)


def _alike(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Options by type: those of each layout that are fastest, and those that hold least."""
    group = problem.device_groups[0]
    outer = (problem.elements[0], problem.elements[-1])
    for layout in range(problem.num_layouts):
        for lean in (False, True):
            chosen = []
            for kind, o in enumerate(group.options):
                layouts = o.output_layout if kind == outer[0] else o.input_layout
                order = o.state_bytes + o.late_bytes + o.activation_bytes if lean else o.time_ps
                rows = [row for row in range(len(layouts)) if layouts[row] == layout] or list(range(len(layouts)))
                chosen.append(min(rows, key=lambda row, order=order: float(order[row])))  # type: ignore[misc]
            yield tuple(chosen)
