"""One case as bare numbers: what the solver sees of a model, a cluster and their costs.

All numbers are whole (picoseconds and bytes, in float64): sums are exact whatever their order, and plans of equal cost
are recognised as equal.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import msgspec

from shardwright_search.solver.pareto import Ints, Numbers

__all__ = ["DeviceGroup", "Options", "Phase", "Price", "Problem", "Solution", "phases", "price"]


class Phase(NamedTuple):
    """A part of a step in which a pipeline stage may hold the most."""

    in_flight: int
    late: bool
    """Whether late bytes come element by element, and are not all there from the start."""


def phases(in_flight: int, num_microbatches: int) -> tuple[Phase, ...]:
    """When a stage with that many microbatches in flight may hold the most.

    Where all microbatches are in flight before the first backward pass, that pass has them all but makes the gradients
    only now; the passes after it have one less and all gradients.
    """
    if in_flight < num_microbatches:
        return (Phase(in_flight, False),)
    first = Phase(in_flight, True)
    return (first,) if in_flight == 1 else (first, Phase(in_flight - 1, False))


class Options(NamedTuple):
    """The strategies of one element type on one kind of device group, one column each [options]."""

    time_ps: Numbers
    """Forward and backward of one microbatch."""
    exposed_ps: Numbers
    """What comes once a step: reduction of the gradients as far as it is exposed, and the optimizer."""
    state_bytes: Numbers
    """Held all step long."""
    late_bytes: Numbers
    """Held from the element's own first backward pass on: gradients."""
    activation_bytes: Numbers
    """Of one microbatch in flight."""
    workspace_bytes: Numbers
    """Held for a moment, in the element's own forward or backward pass."""
    input_layout: Ints
    """Number of the layout the element works in; of the embedding the class that ties tell apart."""
    output_layout: Ints
    """Number of the layout of what it gives out; of the head the class that ties tell apart."""

    def take(self, rows: Ints) -> "Options":
        """Some of the options."""
        return Options._make(column[rows] for column in self)


class DeviceGroup(NamedTuple):
    """Costs on the ranks of one kind of pipeline stage: node type, width, and how its ranks lie on the nodes."""

    options: tuple[Options, ...]
    """By type number."""
    redistribution_ps: Numbers
    """[types, layouts, layouts]: outputs of that type from a layout to another, forward and backward together."""
    budget_bytes: int
    """Of one rank, without the process's own memory."""


class Problem(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A chain of layers, embedding and head included, to cut into stages on device groups, with one option each.

    Minimised is T = sum A' + (m - 1) max A' + max U + tie, with m microbatches. A'_i: time of a microbatch in stage i,
    with the redistribution before each of its elements and the sends at both of its ends; U_i: the sum of its `end_ps`.

    The memory of a stage is the most of its `phases`. In each, with k microbatches in flight, it holds its state,
    (k - 1) times its activations and the most that a microbatch holds on its way: at element j the activations of the
    elements up to j, j's transient, and late bytes: of all elements, or in the first backward pass of those from j on,
    whose backward passes are over or in progress. Besides it holds what it received of each microbatch in flight, and
    of one microbatch the gradients of what it received and of what it gave out.
    """

    elements: tuple[int, ...]
    """Type number of each; the first is in the first stage and the last in the last, each with one layer or more."""
    device_groups: tuple[DeviceGroup, ...]
    available: tuple[int, ...]
    """How many stages can be on each device group."""
    allowed: tuple[tuple[int, ...], ...]
    """By pipeline stage: the device groups it can be on."""
    sends_ps: Numbers
    """[stages - 1, groups, groups, types, layouts]: outputs of that type and layout over the cut after the stage."""
    in_flight: tuple[int, ...]
    """By pipeline stage."""
    num_microbatches: int
    boundary_bytes: Numbers
    """[types, layouts]: what a rank holds of one microbatch's outputs of that type and layout."""
    tie_ps: Numbers
    """[classes of the embedding, classes of the head]: what tied parameters cost once a step."""

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return len(self.in_flight)

    @property
    def num_layouts(self) -> int:
        """Number of layouts."""
        return int(self.device_groups[0].redistribution_ps.shape[1])

    def objectives(self, time_ps: Numbers, exposed_ps: Numbers) -> list[Numbers]:
        """The numbers in which one way to treat a stage must be no worse to replace another.

        With one stage T is m A + U. With several, taking (A, U) for (A', U') with A <= A' lowers the sum of times by
        A' - A, raises no largest time, and raises the largest U by at most (U - U')+: it never hurts if A + U is no
        larger either.
        """
        return [self.num_microbatches * time_ps + exposed_ps] if self.pp_size == 1 else [time_ps, time_ps + exposed_ps]

    @cached_property
    def usages(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By number of stages placed: how many can be on each device group, such that the rest can be placed too."""
        found: list[set[tuple[int, ...]]] = [{(0,) * len(self.device_groups)}]
        for allowed in self.allowed:
            found.append({after for used in found[-1] for _, after in self._next(used, allowed)})
        for stage in range(self.pp_size - 1, -1, -1):
            alive = found[stage + 1]
            found[stage] = {
                used
                for used in found[stage]
                if any(after in alive for _, after in self._next(used, self.allowed[stage]))
            }
        return tuple(tuple(sorted(used)) for used in found)

    def placements(self, stage: int, used: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Where a stage can be when the ones before it use so many of each device group, and what is used then."""
        alive = set(self.usages[stage + 1])
        return tuple((group, after) for group, after in self._next(used, self.allowed[stage]) if after in alive)

    def ends(self, stage: int, start: int) -> range:
        """Where a pipeline stage that starts at element `start` can end, so that each stage gets a layer."""
        total, later = len(self.elements), self.pp_size - 1 - stage
        if later == 0:
            return range(total, total + 1) if start <= total - 2 else range(0)
        return range(2 if stage == 0 else start + 1, total - 1 - later + 1)

    def _next(self, used: tuple[int, ...], allowed: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        return [
            (group, tuple(n + (i == group) for i, n in enumerate(used)))
            for group in allowed
            if used[group] < self.available[group]
        ]


class Solution(NamedTuple):
    """One plan of a case."""

    ends: tuple[int, ...]
    """The element after the last of each pipeline stage."""
    options: tuple[int, ...]
    """The option of each element."""
    device_groups: tuple[int, ...]
    """The device group of each pipeline stage."""


class Price(NamedTuple):
    """What a plan costs."""

    objective_ps: int
    memory_bytes: tuple[int, ...]
    """By pipeline stage, without the process's own memory."""


def price(problem: Problem, solution: Solution) -> Price:
    """T and memory of one plan, added up element by element."""
    bounds = (0, *solution.ends)
    time, end, memory = [0.0] * problem.pp_size, [0.0] * problem.pp_size, []
    for stage, ((first, last), number) in enumerate(zip(pairwise(bounds), solution.device_groups, strict=True)):
        group = problem.device_groups[number]
        for e in range(first, last):
            kind, option = problem.elements[e], solution.options[e]
            own = group.options[kind]
            time[stage] += own.time_ps[option]
            end[stage] += own.exposed_ps[option]
            if e:
                before = problem.elements[e - 1]
                source = solution.device_groups[stage - 1] if e == first else number
                output_layout = problem.device_groups[source].options[before].output_layout[solution.options[e - 1]]
                time[stage] += group.redistribution_ps[before, output_layout, own.input_layout[option]]
                if e == first:
                    send = problem.sends_ps[stage - 1, source, number, before, output_layout]
                    time[stage] += send
                    time[stage - 1] += send
        chosen = [(group.options[problem.elements[e]], solution.options[e]) for e in range(first, last)]
        found = phases(problem.in_flight[stage], problem.num_microbatches)
        received, given = (_boundary(problem, solution, cut) for cut in (stage - 1, stage))
        most = max(_held(chosen, phase) + (phase.in_flight + 1) * received for phase in found)
        memory.append(int(most + given))
    first_class = (
        problem.device_groups[solution.device_groups[0]].options[problem.elements[0]].input_layout[solution.options[0]]
    )
    last_class = (
        problem.device_groups[solution.device_groups[-1]]
        .options[problem.elements[-1]]
        .output_layout[solution.options[-1]]
    )
    objective = sum(time) + (problem.num_microbatches - 1) * max(time) + max(end)
    return Price(int(objective + problem.tie_ps[first_class, last_class]), tuple(memory))


def _boundary(problem: Problem, solution: Solution, stage: int) -> float:
    """What a rank holds of one microbatch that goes over the cut after a stage; 0 where there is no cut."""
    if not 0 <= stage < problem.pp_size - 1:
        return 0.0
    last = solution.ends[stage] - 1
    kind = problem.elements[last]
    output_layout = (
        problem.device_groups[solution.device_groups[stage]].options[kind].output_layout[solution.options[last]]
    )
    return float(problem.boundary_bytes[kind, output_layout])


def _held(chosen: Sequence[tuple[Options, int]], phase: Phase) -> float:
    """The most that a stage holds in a phase."""
    most = resident = 0.0
    for own, option in chosen:
        activation, late = own.activation_bytes[option], own.late_bytes[option]
        state = own.state_bytes[option] + (phase.in_flight - 1) * activation + (0 if phase.late else late)
        workspace = resident + activation + own.workspace_bytes[option]
        most = state + (late if phase.late else 0) + max(most, workspace)
        resident += state + activation
    return most
