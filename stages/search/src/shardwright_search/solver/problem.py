"""A configuration as bare numbers: what the solver sees of a model, a cluster and their costs.

All numbers are whole (picoseconds and bytes, in float64): sums are exact whatever their order, and plans of equal cost
are recognised as equal.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright_search.solver.memory import LayerMemory, Phase, layer_memory, no_layers, phases
from shardwright_search.solver.objective import step_time
from shardwright_search.solver.pareto import Ints, Numbers

__all__ = ["DeviceGroup", "Options", "Price", "Problem", "Solution", "Usage", "price"]

Usage = tuple[int, ...]
"""How many stages are on each device group."""


class Options(NamedTuple):
    """The strategies of one layer type on one kind of device group, one column each [options]."""

    time_ps: Numbers
    """Forward and backward of one microbatch."""
    exposed_ps: Numbers
    """What comes once a step: gradient sync as far as it is exposed, and the optimizer."""
    state_bytes: Numbers
    """Held all step long."""
    late_bytes: Numbers
    """Held from the layer's own first backward pass on: gradients."""
    activation_bytes: Numbers
    """Of one microbatch in flight."""
    workspace_bytes: Numbers
    """Held for a moment, in the layer's own forward or backward pass."""
    input_layout: Ints
    """Number of the layout the layer works in; of the embedding the class that ties tell apart."""
    output_layout: Ints
    """Number of the layout of what it gives out; of the head the class that ties tell apart."""

    def take(self, rows: Ints | int) -> "Options":
        """Some of the options."""
        return Options._make(column[rows] for column in self)

    def memory(self, parts: Sequence[Phase]) -> LayerMemory:
        """What each holds in each phase."""
        return layer_memory(parts, self.state_bytes, self.late_bytes, self.activation_bytes, self.workspace_bytes)

    def cost(self, weights: tuple[float, float]) -> Numbers:
        """A sum of A and U with these weights."""
        return weights[0] * self.time_ps + weights[1] * self.exposed_ps


class DeviceGroup(msgspec.Struct, frozen=True, eq=False):
    """Costs on the ranks of one kind of pipeline stage: node type, width, and how its ranks lie on the nodes."""

    options: tuple[Options, ...]
    """By type number."""
    redistribution_ps: Numbers
    """[types, layouts, layouts]: outputs of that type from a layout to another, forward and backward together."""
    budget_bytes: int
    """Of one rank, without the process's own memory."""


class Problem(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A chain of layers, embedding and head included, to cut into stages on device groups, with one option each.

    Minimised is `step_time` and the tie, with A'_i the time of a microbatch in stage i, with the redistribution before
    each of its layers and the sends at both of its ends, and U_i the sum of its `exposed_ps`. The memory of a stage is
    the most of its phases, as `memory` counts it.
    """

    layers: tuple[int, ...]
    """Type number of each; the first is in the first stage and the last in the last, each with one more at least."""
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

    def phases(self, stage: int) -> tuple[Phase, ...]:
        """When a pipeline stage may hold the most."""
        return phases(self.in_flight[stage], self.num_microbatches)

    def objectives(self, time_ps: Numbers, exposed_ps: Numbers) -> list[Numbers]:
        """The numbers in which one way to treat a stage must be no worse to replace another.

        With one stage T is m A + U. With several, taking (A, U) for (A', U') with A <= A' lowers the sum of times by
        A' - A, raises no largest time, and raises the largest U by at most (U - U')+: it never hurts if A + U is no
        larger either.
        """
        if self.pp_size == 1:
            return [self.num_microbatches * time_ps + exposed_ps]
        return [time_ps, time_ps + exposed_ps]

    @cached_property
    def placements(self) -> tuple[dict[Usage, tuple[tuple[int, Usage], ...]], ...]:
        """By stage and what the stages before it use: the groups it can be on, and what is used then.

        Only those after which all other stages can be placed, too.
        """
        levels: list[set[Usage]] = [{(0,) * len(self.device_groups)}]
        for allowed in self.allowed:
            levels.append({after for used in levels[-1] for _, after in self._next(used, allowed)})
        found: list[dict[Usage, tuple[tuple[int, Usage], ...]]] = []
        alive = levels[-1]
        for stage in range(self.pp_size - 1, -1, -1):
            here = {
                used: tuple(move for move in self._next(used, self.allowed[stage]) if move[1] in alive)
                for used in sorted(levels[stage])
            }
            found.insert(0, {used: moves for used, moves in here.items() if moves})
            alive = set(found[0])
        return tuple(found)

    @property
    def nothing_used(self) -> Usage:
        """Before the first stage is placed."""
        return (0,) * len(self.device_groups)

    def ends(self, stage: int, start: int) -> range:
        """Where a pipeline stage that starts at layer `start` can end, so that each stage gets a layer."""
        total, later = len(self.layers), self.pp_size - 1 - stage
        if later == 0:
            return range(total, total + 1) if start <= total - 2 else range(0)
        return range(2 if stage == 0 else start + 1, total - 1 - later + 1)

    def _next(self, used: Usage, allowed: Sequence[int]) -> list[tuple[int, Usage]]:
        return [
            (group, tuple(n + (i == group) for i, n in enumerate(used)))
            for group in allowed
            if used[group] < self.available[group]
        ]


class Solution(NamedTuple):
    """One plan of a configuration."""

    ends: tuple[int, ...]
    """The layer after the last of each pipeline stage."""
    options: tuple[int, ...]
    """The option of each layer."""
    device_groups: tuple[int, ...]
    """Of each pipeline stage."""


class Price(NamedTuple):
    """What a plan costs."""

    objective_ps: int
    memory_bytes: tuple[int, ...]
    """By pipeline stage, without the process's own memory."""


def price(problem: Problem, solution: Solution) -> Price:
    """T and memory of one plan, added up layer by layer."""
    numbers = solution.device_groups
    time, exposed, memory = np.zeros(problem.pp_size), np.zeros(problem.pp_size), []
    before, layout, received = 0, 0, 0.0
    for stage, (first, end) in enumerate(pairwise((0, *solution.ends))):
        group, parts = problem.device_groups[numbers[stage]], problem.phases(stage)
        held = no_layers(parts, received)
        for number in range(first, end):
            kind = problem.layers[number]
            own = group.options[kind].take(solution.options[number])
            time[stage] += own.time_ps
            exposed[stage] += own.exposed_ps
            held = held.then(own.memory(parts))
            if number:
                time[stage] += group.redistribution_ps[before, layout, own.input_layout]
            before, layout = kind, int(own.output_layout)
        received = 0.0
        if stage < problem.pp_size - 1:
            received = float(problem.boundary_bytes[before, layout])
            time[stage : stage + 2] += problem.sends_ps[stage, numbers[stage], numbers[stage + 1], before, layout]
        memory.append(int(held.peak.max() + received))
    embedding = problem.device_groups[numbers[0]].options[problem.layers[0]]
    tie = problem.tie_ps[embedding.input_layout[solution.options[0]], layout]
    objective = step_time(float(time.sum()), float(time.max()), float(exposed.max()), problem.num_microbatches)
    return Price(int(objective + tie), tuple(memory))
