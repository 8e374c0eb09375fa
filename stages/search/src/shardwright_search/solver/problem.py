"""A configuration as arrays of numbers: the solver's view of a model, a cluster and their costs.

All numbers are whole (picoseconds and bytes, in float64): sums are exact whatever their order, and plans of equal cost
are recognised as equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from shardwright.plan.schedules.schedule import ClosedForm
from shardwright_search.step.memory import LayerMemory, Phase, layer_memory, no_layers, phases
from shardwright_search.step.pareto import Ints, Numbers

_NEVER_FITS = 2.0**52
"""Bytes: more than any device or host has."""
Position = tuple[int, ...]
"""Resources that the stages so far take up, such as ranks; they determine what is left for the stages to come."""
Moves = Mapping[Position, tuple[tuple[int, Position], ...]]
"""By position before a stage: the device groups possible for the stage, each with the position after it."""


class Start(Enum):
    """How a pipeline stage receives the input of its first layer."""

    FIRST = "first"
    """The stage is the first: nothing is received."""
    REDISTRIBUTED = "redistributed"
    """Received in the output layout of the stage before, which is as wide, then redistributed for the first layer."""
    IN_PLACE = "in_place"
    """Received in the first layer's layout, from a stage of another width."""

    @classmethod
    def of_widths(cls, before: int, here: int) -> "Start":
        """Return how a stage of one width starts after a stage of another."""
        return cls.REDISTRIBUTED if before == here else cls.IN_PLACE


class Cut(NamedTuple):
    """The boundary between two neighbouring pipeline stages."""

    position: Position
    """The position after the first of them."""
    before: int
    """Device group of the first of them."""
    behind: int
    """Device group of the second of them."""


class Options(NamedTuple):
    """The strategies of one layer type on one kind of device group, one column each [options]."""

    time_ps: Numbers
    """A: forward and backward of one microbatch."""
    exposed_ps: Numbers
    """U: time once a step, the exposed part of gradient reduction and the optimizer."""
    state_bytes: Numbers
    """Bytes held all step long."""
    late_bytes: Numbers
    """Bytes held from the layer's first backward pass on: gradients."""
    sum_bytes: Numbers
    """Bytes held from the second backward pass on, in which the late bytes are created again: accumulated gradients."""
    activation_bytes: Numbers
    """Bytes of one microbatch in flight."""
    workspace_bytes: Numbers
    """Bytes held for a moment, in the layer's own forward or backward pass."""
    host_bytes: Numbers
    """Bytes of host memory, all step long."""
    host_activation_bytes: Numbers
    """Bytes of host memory of one microbatch in flight."""
    input_layout: Ints
    """Number of the layout that the layer works in; for the embedding, the class of tied parameters."""
    output_layout: Ints
    """Number of the output layout; for the head, the class of tied parameters."""

    @classmethod
    def none(cls, layout: int) -> "Options":
        """Return one option that never fits, for a type that is in no stage of a device group."""
        zero, number = np.zeros(1), np.array([layout])
        return cls(zero, zero, np.array([_NEVER_FITS]), zero, zero, zero, zero, zero, zero, number, number)

    def take(self, rows: Ints | int) -> "Options":
        """Return the options in these rows."""
        return Options._make(column[rows] for column in self)

    def hosted(self, in_flight: int) -> "Options":
        """Return the options with the host memory of `in_flight` microbatches included in `host_bytes`."""
        return self._replace(host_bytes=self.host_bytes + in_flight * self.host_activation_bytes)

    def without_moved_activations(self) -> "Options":
        """Return the options, changed so that those with activations in host memory never fit."""
        moves = self.host_activation_bytes > 0
        return self._replace(state_bytes=np.where(moves, _NEVER_FITS, self.state_bytes)) if moves.any() else self

    def memory(self, parts: Sequence[Phase]) -> LayerMemory:
        """Return each option's memory in each phase."""
        gradients = self.late_bytes, self.sum_bytes
        return layer_memory(parts, self.state_bytes, *gradients, self.activation_bytes, self.workspace_bytes)

    def cost(self, weights: tuple[float, float]) -> Numbers:
        """Return the weighted sum of A and U."""
        return weights[0] * self.time_ps + weights[1] * self.exposed_ps


class DeviceGroup(msgspec.Struct, frozen=True, dict=True, eq=False):
    """Costs on the ranks of one kind of pipeline stage: node type, width, and placement of its ranks on nodes."""

    options: tuple[Options, ...]
    """Strategies by type number."""
    redistribution_ps: Numbers
    """[types, layouts, layouts]: time to change a type's outputs from one layout to another, forward and backward."""
    budget_bytes: int
    """Budget of one rank, without the process's memory."""
    width: int = 1
    """Ranks of a stage; exactly the stages of equal width have the same layouts."""
    host_budget_bytes: float = _NEVER_FITS
    """Budget of one rank in host memory."""

    def without_moved_activations(self) -> "DeviceGroup":
        """Return the group, changed so that options with activations in host memory never fit."""
        return replace(self, options=tuple(each.without_moved_activations() for each in self.options))

    @cached_property
    def offloads(self) -> bool:
        """True if some option takes host memory."""
        return any(bool((o.host_bytes + o.host_activation_bytes).any()) for o in self.options)

    @cached_property
    def keeps_sums(self) -> bool:
        """True if some option keeps gradients of earlier microbatches in addition to the last one's."""
        return any(bool(o.sum_bytes.any()) for o in self.options)


class Problem(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A chain of layers, embedding and head included, to cut into stages on device groups, with one option each.

    The objective is the closed form plus the cost of tied parameters. A'_i is the time of a microbatch in stage i,
    including the redistribution before each of its layers and the sends at both of its ends; U_i is the sum of its
    `exposed_ps`. The memory of a stage is the largest over its phases, as `step/memory.py` counts it.
    """

    layers: tuple[int, ...]
    """Type number of each layer, the embedding first and the head last; either may be alone in its stage."""
    device_groups: tuple[DeviceGroup, ...]
    placements: tuple[Moves, ...]
    """Placements by pipeline stage that leave room for all later stages."""
    sends_ps: Mapping[Cut, Numbers]
    """[types, layouts given, layouts received]: time to send a type's outputs, one way; infinity: it is impossible.

    Cuts that are alike, of which there may be very many, share one array.
    """
    in_flight: tuple[int, ...]
    """Microbatches in flight by pipeline stage."""
    num_microbatches: int
    closed_form: ClosedForm
    """Coefficients of T, whole numbers."""
    boundary_bytes: Numbers
    """[types, layouts]: what a rank holds of one microbatch's outputs of that type and layout."""
    tied_ps: Numbers
    """[classes of the embedding, classes of the head]: the time that tied parameters take once a step."""
    weights: tuple[int, ...] | None = None
    """Weight of a stage on each device group; None: its number of ranks.

    It is the sum over its ranks of a positive number that is the same for all ranks of a node type. Bounds are the
    tightest if this number is the type's speed.
    """
    block_in_each_stage: bool = False
    """Whether every stage must have a block, in addition to the embedding or the head."""

    @property
    def pp_size(self) -> int:
        """Return the number of pipeline stages."""
        return len(self.in_flight)

    @property
    def num_layouts(self) -> int:
        """Return the number of layouts."""
        return int(self.device_groups[0].redistribution_ps.shape[1])

    def phases(self, stage: int) -> tuple[Phase, ...]:
        """Return the phases in which a pipeline stage may hold the most."""
        return phases(self.in_flight[stage], self.num_microbatches, self.keeps_sums)

    @cached_property
    def keeps_sums(self) -> bool:
        """True if some option keeps gradients of earlier microbatches in addition to the last one's."""
        return any(group.keeps_sums for group in self.device_groups)

    def objectives(self, time_ps: Numbers, exposed_ps: Numbers) -> list[Numbers]:
        """Return the numbers in which one choice for a stage must be no worse to dominate another.

        With one stage that is T. With several, replacing (A', U') by (A, U) with A <= A' lowers the sum of times by
        A' - A, does not raise the largest time, and raises the largest U by at most (U - U')+. So T does not rise if
        the sum of A and U, each times its coefficient, is no larger either.
        """
        form = self.closed_form
        if self.pp_size == 1:
            return [form.time(time_ps, time_ps, exposed_ps)]
        return [time_ps, form.fill * time_ps + form.once * exposed_ps]

    @cached_property
    def positions(self) -> tuple[dict[Position, tuple[int, ...]], ...]:
        """Positions before each stage and after the last, each with the device groups possible for the stage before."""
        levels: list[dict[Position, tuple[int, ...]]] = [dict.fromkeys(self.placements[0], (-1,))]
        for moves in self.placements:
            behind: dict[Position, dict[int, None]] = {}
            for ways in moves.values():
                for group, after in ways:
                    behind.setdefault(after, {})[group] = None
            levels.append({position: tuple(groups) for position, groups in behind.items()})
        return tuple(levels)

    @property
    def start_position(self) -> Position:
        """Return the position before the first stage."""
        return next(iter(self.placements[0]))

    @cached_property
    def relative_widths(self) -> tuple[float, ...]:
        """Ranks of a stage on each device group over the mean of all stages: 1 on average in any plan."""
        return self._over_mean([group.width for group in self.device_groups])

    @cached_property
    def relative_weights(self) -> tuple[float, ...]:
        """Weighted ranks of a stage on each device group over the mean of all stages: 1 on average in any plan."""
        return self._over_mean(self.weights or [group.width for group in self.device_groups])

    def _over_mean(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """Return the size of a stage on each group over the mean of all stages; the sum is the same in any plan."""
        # Any plan has this sum, so the first possible placement serves.
        position, total = self.start_position, 0.0
        for moves in self.placements:
            group, position = moves[position][0]
            total += sizes[group]
        return tuple(size / (total / self.pp_size) for size in sizes)

    @cached_property
    def layouts_of_width(self) -> dict[int, Ints]:
        """The input and output layouts of layers, by the width of the stages."""
        head, layouts_of = self.layers[-1], dict[int, list[Ints]]()
        for group in self.device_groups:
            output_layouts = [options.output_layout for kind, options in enumerate(group.options) if kind != head]
            input_layouts = [
                options.input_layout for kind, options in enumerate(group.options) if kind != self.layers[0]
            ]
            layouts_of.setdefault(group.width, []).extend((*output_layouts, *input_layouts))
        return {width: np.unique(np.concatenate(layouts)) for width, layouts in layouts_of.items()}

    @property
    def is_mixed(self) -> bool:
        """True if the device groups share several pools, such as node types."""
        return len(self.start_position) > 1

    @cached_property
    def min_send_ps(self) -> dict[Cut, float]:
        """The least time of a send between stages, over everything that can be sent; the head's outputs cannot."""
        # There are very many cuts but few distinct arrays: each array is searched once.
        kinds, arrays = sorted(set(self.layers[:-1])), {id(times): times for times in self.sends_ps.values()}
        least = {identity: float(times[kinds].min()) for identity, times in arrays.items()}
        return {cut: least[id(times)] for cut, times in self.sends_ps.items()}

    @cached_property
    def min_sends_ps(self) -> tuple[dict[tuple[int, int], float], ...]:
        """Return, for each cut, the least time to pass a micro-batch from one device group to another."""
        least = self.min_send_ps
        cuts: list[dict[tuple[int, int], float]] = []
        for stage in range(1, self.pp_size):
            min_ps: dict[tuple[int, int], float] = {}
            for position, moves in self.placements[stage].items():
                for before, (behind, _) in product(self.positions[stage][position], moves):
                    time = least[Cut(position, before, behind)]
                    if time < min_ps.get((before, behind), np.inf):
                        min_ps[before, behind] = time
            cuts.append(min_ps)
        return tuple(cuts)

    def on_each_placement(self) -> Iterator["Problem"]:
        """Yield the problem with its stages on one list of device groups, for each possible list."""

        def walks(stage: int, position: Position) -> Iterator[tuple[Moves, ...]]:
            if stage == self.pp_size:
                yield ()
                return
            for group, after in self.placements[stage].get(position, ()):
                yield from (({position: ((group, after),)}, *behind) for behind in walks(stage + 1, after))

        yield from (replace(self, placements=moves) for moves in walks(0, self.start_position))

    def groups_of(self, stage: int) -> tuple[int, ...]:
        """Return the device groups that a pipeline stage can be on."""
        return tuple(sorted({group for moves in self.placements[stage].values() for group, _ in moves}))

    def start(self, before: int, group: int) -> Start:
        """Return how a stage on one device group receives its input from a stage on another; -1: it is the first."""
        if before < 0:
            return Start.FIRST
        return Start.of_widths(self.device_groups[before].width, self.device_groups[group].width)

    def ends(self, stage: int, start: int) -> range:
        """Return where a pipeline stage that starts at layer `start` can end so that each stage has a layer."""
        total, later, more = len(self.layers), self.pp_size - 1 - stage, int(self.block_in_each_stage)
        if later == 0:
            return range(total, total + (start < total))
        return range(start + 1 + more * (stage == 0), total - later + 1 - more)

    def can_cut(self, ends: Sequence[int]) -> bool:
        """Return whether these cuts leave every pipeline stage with the layers that it must hold."""
        starts = (0, *ends)
        return all(end in self.ends(stage, start) for stage, (start, end) in enumerate(zip(starts, ends, strict=False)))


class Solution(NamedTuple):
    """A plan of a configuration, as indices."""

    ends: tuple[int, ...]
    """The layer after the last one of each pipeline stage."""
    options: tuple[int, ...]
    """The option of each layer."""
    device_groups: tuple[int, ...]
    """Device group of each pipeline stage."""


class PlanCost(NamedTuple):
    """The cost of a plan."""

    objective_ps: int
    memory_bytes: tuple[int, ...]
    """Bytes of a rank by pipeline stage, without the process's memory."""
    host_bytes: tuple[int, ...]
    """Bytes of host memory."""

    def fits(self, groups: Sequence[DeviceGroup]) -> bool:
        """Return whether each stage fits on its device group, in both memories."""
        stages = zip(self.memory_bytes, self.host_bytes, groups, strict=True)
        return all(used <= on.budget_bytes and host <= on.host_budget_bytes for used, host, on in stages)


def price(problem: Problem, solution: Solution) -> PlanCost:
    """Return step time T and memory of one plan, added up layer by layer."""
    numbers, position = solution.device_groups, problem.start_position
    (time, exposed, host), memory = np.zeros((3, problem.pp_size)), list[int]()
    before, layout = 0, 0
    for stage, (first, end) in enumerate(pairwise((0, *solution.ends))):
        group, parts = problem.device_groups[numbers[stage]], problem.phases(stage)
        sent = received = 0.0
        if stage:
            cut = Cut(position, *numbers[stage - 1 : stage + 1])
            given, kind = layout, problem.layers[first]
            if problem.start(*cut[1:]) is Start.IN_PLACE:
                layout = int(group.options[kind].input_layout[solution.options[first]])
            sent, received = float(problem.boundary_bytes[before, given]), float(problem.boundary_bytes[before, layout])
            time[stage - 1 : stage + 1] += problem.sends_ps[cut][before, given, layout]
            memory[-1] += int(sent)
        held = no_layers(parts, received)
        for number in range(first, end):
            kind = problem.layers[number]
            option = group.options[kind].take(solution.options[number]).hosted(problem.in_flight[stage])
            time[stage] += option.time_ps
            exposed[stage] += option.exposed_ps
            host[stage] += option.host_bytes
            held = held.then(option.memory(parts))
            if number:
                time[stage] += group.redistribution_ps[before, layout, option.input_layout]
            before, layout = kind, int(option.output_layout)
        position = dict(problem.placements[stage][position])[numbers[stage]]
        memory.append(int(held.peak.max()))
    embedding = problem.device_groups[numbers[0]].options[problem.layers[0]]
    tied_ps = problem.tied_ps[embedding.input_layout[solution.options[0]], layout]
    objective = problem.closed_form.time(float(time.sum()), float(time.max()), float(exposed.max()))
    return PlanCost(int(objective + tied_ps), tuple(memory), tuple(map(int, host)))
