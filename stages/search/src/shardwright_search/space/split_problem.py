"""Configurations with split backward passes as problems of the solver: no plan's simulated time is below the optimum.

Let stage j have m forward, backward and weight passes of times F, B and W, the time U at the end of a step, and a send
of time s after it. It begins when a micro-batch has come through the stages before it. Its first backward pass begins
when a micro-batch has come through all stages and back to it, after at most n forward passes, as it holds at most n.
After its last backward pass a gradient must go back to the first stage. So a step takes no less than any of

    1  sum of F + s before j + m (F + B + W) of j + U of j,
    2  sum of F + s of all + sum of B + s after j + m (F + B + W) of j - n F of j + U of j,
    3  the same with W and U of the first stage for m W and U of j, and with the sum of B + s before j.

`largest_problem` keeps m (F + B + W) + U of the slowest stage, `weighted_problem` a weighted mean of all bounds. Each
counts no more memory than any plan needs: in a forward or backward pass after the first weight pass.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import islice, product
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from shardwright.plan.schedules.passes import Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.plan.schedules.schedule import ClosedForm
from shardwright.types import Schedule
from shardwright_search.solver.problem import Cut, DeviceGroup, Moves, Options, Problem
from shardwright_search.solver.targets import Target
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.search_space import SearchSpace
from shardwright_search.space.stage_prices import SplitPasses
from shardwright_search.step.memory import pass_counts
from shardwright_search.step.pareto import Numbers

_LEAST_SHARE = 1 - 2.0**-40
"""A computed weighted time times this is less than the exact one, as it has only a few roundings."""
_MAX_PIVOTS = 20
"""The most pivots for each stage."""
_SMALL = 1e-9
_MAX_ROUNDS = 12
"""How many of a stage's first actions, for each stage of the pipeline, are searched for the most memory."""


def split_targets(space: SearchSpace, schedule: Schedule) -> tuple[Target[Configuration], ...] | None:
    """Return the pipelines of a space under a schedule that splits backward passes; None: not all can be listed."""
    instance = space.instance
    joint = Instance(
        replace(instance.request, schedules=(Schedule.ONE_F_ONE_B,)), instance.costs, instance.budgets, instance.prices
    )
    pipelines = SearchSpace(joint, space.file, space.demands)
    if pipelines.unlisted is not None:
        return None
    listed = (target.configuration for target in pipelines.listed)
    return tuple(instance.target(each._replace(schedule=schedule)) for each in listed if each.pp_size > 1)


class Weights(NamedTuple):
    """How often a bound, or a weighted mean of bounds, counts each time."""

    passes: Numbers
    """[stages, 4]: of a stage's forward, backward and weight pass, and its end."""
    sends: Numbers
    """[cuts]: of a send."""


class SplitConfiguration:
    """The numbers of a configuration whose backward passes are split."""

    def __init__(self, instance: Instance, configuration: Configuration) -> None:
        self.configuration = configuration
        joint = configuration._replace(schedule=Schedule.ONE_F_ONE_B)
        choice, topologies = instance.choices.choice(joint), instance.choices.placed(joint).topologies
        self._joint, single = instance.problem(joint), configuration.num_microbatches == 1
        self._passes = [instance.prices.split_passes(choice, on, single) for on in topologies]
        self._one_way = [instance.prices.moves_one_way(choice.free, on) for on in topologies]

    def most_alone(self, below_ps: Fraction | float) -> int:
        """Return how many stages may hold one block and nothing else in a plan whose step takes less than `below_ps`.

        The remaining stages must do the work of all other layers in that time.
        """
        p, m, least = self.configuration.pp_size, self.configuration.num_microbatches, list[float]()
        every = [m] * 3
        for kind in self._joint.layers:
            groups = zip(self._joint.device_groups, self._passes, strict=True)
            times = [_time_ps(group.options[kind], of[kind], (*every, 1), True) for group, of in groups]
            least.append(min(float(each.min()) for each in times))
        whole, most = int(sum(least)), int(max(least[1:-1], default=0.0))
        # Neither the first stage nor the last is such a stage: they hold embedding and head.
        return max((k for k in range(p - 1) if k == 0 or Fraction(whole - k * most, p - k) < below_ps), default=0)

    def largest_problem(self, gathers: bool) -> Problem:
        """Return the problem of the slowest stage, T = max A; `gathers`: no stage holds only one block."""
        p, m = self.configuration.pp_size, self.configuration.num_microbatches
        every = Weights(np.tile([m, m, m, 1.0], (p, 1)), np.zeros(p - 1))
        return self._problem(every, ClosedForm(fill=0, steady=1, once=0), gathers)

    def weighted_problem(self, weights: Weights) -> Problem:
        """Return the problem of a weighted mean of bounds, T = sum A, for stages that hold more than one block."""
        return self._problem(weights, ClosedForm(fill=1, steady=0, once=0), True)

    def too_much_ps(self, weights: Weights) -> float:
        """Return the most that `weighted_problem` counts too much for a stage that holds only one block."""
        longest = max(float(each.gather_ps.max()) for of_group in self._passes for each in of_group)
        return float(np.ceil(weights.passes[:, :2].max() * longest)) + 1

    def _problem(self, weights: Weights, form: ClosedForm, gathers: bool) -> Problem:
        """Return the problem with weighted times, in which each stage has device groups of its own."""
        problem, count = self._joint, len(self._joint.device_groups)
        sends, placements = dict[Cut, Numbers](), list[Moves]()
        for stage, moves in enumerate(problem.placements):
            ways = {at: tuple((stage * count + group, after) for group, after in on) for at, on in moves.items()}
            placements.append(ways)
            for at, on in moves.items() if stage else ():
                for before, (behind, _) in product(problem.positions[stage][at], on):
                    cut = Cut(at, (stage - 1) * count + before, stage * count + behind)
                    sends[cut] = _sent(problem.sends_ps[Cut(at, before, behind)], float(weights.sends[stage - 1]))
        moments = self._moments()
        groups = [
            self._group(group, weights.passes[stage].tolist(), moments[stage], gathers)
            for stage, group in product(range(problem.pp_size), range(count))
        ]
        return replace(
            problem,
            device_groups=tuple(groups),
            placements=tuple(placements),
            sends_ps=sends,
            in_flight=tuple(moment.in_flight for moment in moments),
            closed_form=form,
            boundary_bytes=np.zeros_like(problem.boundary_bytes),
            weights=None if problem.weights is None else problem.weights * problem.pp_size,
        )

    def _group(self, number: int, weights: Sequence[float], moment: "Moment", gathers: bool) -> DeviceGroup:
        """Return the costs of a stage on a device group, with its memory at one moment."""
        group, one_way, options = self._joint.device_groups[number], self._one_way[number], list[Options]()
        for own, passes in zip(group.options, self._passes[number], strict=True):
            time_ps = _time_ps(own, passes, weights, gathers)
            none, gradients = np.zeros_like(time_ps), moment.summed * (own.late_bytes + own.sum_bytes)
            state_bytes = own.state_bytes + gradients + moment.deferred * passes.deferred_bytes
            options.append(
                own._replace(
                    time_ps=time_ps,
                    exposed_ps=none,
                    state_bytes=state_bytes,
                    late_bytes=none,
                    sum_bytes=none,
                    host_activation_bytes=none,
                )
            )
        moves = weights[0] * one_way + weights[1] * one_way.transpose(0, 2, 1)
        return replace(group, options=tuple(options), redistribution_ps=np.floor(moves))

    def _moments(self) -> list["Moment"]:
        """Return for each stage the moment at which it would hold the most if it had only usual blocks."""
        kind, option = self._usual
        own, passes = self._joint.device_groups[0].options[kind].take(option), self._passes[0][kind]

        def held_bytes(moment: Moment) -> float:
            gradients = moment.summed * (own.late_bytes + own.sum_bytes)
            deferred = moment.deferred * passes.deferred_bytes[option]
            return float(moment.in_flight * own.activation_bytes + deferred + gradients)

        asked = self.configuration
        each = held(asked.schedule, asked.pp_size, asked.num_microbatches)
        return [max(of_stage, key=held_bytes) for of_stage in each]

    @property
    def _usual(self) -> tuple[int, int]:
        """Return the type of most blocks, and its quickest option."""
        blocks = self._joint.layers[1:-1] or self._joint.layers
        kind = max(sorted(set(blocks)), key=blocks.count)
        return kind, int(self._joint.device_groups[0].options[kind].time_ps.argmin())

    @property
    def weights(self) -> Weights:
        """Return weights for `weighted_problem`, from the usual block's passes."""
        asked = self.configuration
        most = schedule_of(asked.schedule).num_ahead(asked.pp_size, asked.num_microbatches, 0, 1) + 1
        return weights_of(asked.pp_size, asked.num_microbatches, most, self.usual_passes)

    @property
    def usual_passes(self) -> tuple[float, float, float]:
        """Return the picoseconds of the forward, backward and weight pass of a usual block."""
        kind, option = self._usual
        passes = self._passes[0][kind]
        return float(passes.forward_ps[option]), float(passes.backward_ps[option]), float(passes.weight_ps[option])


def _time_ps(own: Options, passes: SplitPasses, weights: Sequence[float], gathers: bool) -> Numbers:
    """Return a layer's weighted time of passes and of the step's end [strategies], in whole picoseconds."""
    forward, backward, weight, end = weights
    times = forward * passes.forward_ps + backward * passes.backward_ps + weight * passes.weight_ps
    # If a stage holds two layers or more, each is gathered for one of its passes at least.
    return np.asarray(np.floor(times + gathers * min(forward, backward) * passes.gather_ps + end * own.exposed_ps))


def _sent(times: Numbers, weight: float) -> Numbers:
    """Return weighted sends, which a problem counts at both ends."""
    possible = np.isfinite(times)
    return np.where(possible, np.floor(weight / 2 * np.where(possible, times, 0)), np.inf)


def weights_of(pp_size: int, num_microbatches: int, most_held: int, usual: tuple[float, float, float]) -> Weights:
    """Return weights by which a layer counts about as much on each stage, so that no cut evades the bounds.

    `most_held`: the micro-batches that a stage holds at most. The weights are the best mixture in a game of bounds
    against stages with usual passes; any weights with a sum of at most 1 are valid.
    """
    bounds = _bounds(pp_size, num_microbatches, most_held)
    pays = bounds[:, :, :3] @ np.array(usual)
    mean = np.tensordot(_best_mixture(pays / pays.max()) * _LEAST_SHARE, bounds, 1)
    return Weights(mean[:, :4], mean[:-1, 4])


def _best_mixture(pays: Numbers) -> Numbers:
    """Return the mixture of rows whose least mean over columns is the largest, by the simplex method (Dantzig 1951)."""
    rows, columns = pays.shape
    tableau = np.zeros((rows + 1, columns + rows + 1))
    tableau[:rows, :columns], tableau[:rows, columns:-1], tableau[:rows, -1] = pays, np.eye(rows), 1
    tableau[-1, :columns] = -1
    for _ in range(_MAX_PIVOTS * columns):
        column = int(tableau[-1, :-1].argmin())
        if tableau[-1, column] > -_SMALL:
            break
        raised = tableau[:rows, column]
        ratios = np.divide(tableau[:rows, -1], raised, out=np.full(rows, np.inf), where=raised > _SMALL)
        row = int(ratios.argmin())
        tableau[row] /= tableau[row, column]
        others = np.where(np.arange(rows + 1) == row, 0, tableau[:, column])
        tableau -= np.outer(others, tableau[row])
    mixture = np.maximum(0, tableau[-1, columns:-1])
    return np.asarray(mixture / mixture.sum())


def _bounds(pp_size: int, num_microbatches: int, most_held: int) -> Numbers:
    """Return the coefficients [bounds, stages, 5] of each stage's F, B, W and U, and of the send after it."""
    m, n = num_microbatches, min(most_held, num_microbatches)
    bounds = np.zeros((3, pp_size, pp_size, 5))
    for j in range(pp_size):
        first, second, third = bounds[:, j]
        first[:j, [0, 4]] = 1
        for each in second, third:
            each[:, [0, 4]] = 1
            each[j + 1 :, 1] = 1
            each[j:, 4] += 1
            each[j, 0] -= n
        third[:j, [1, 4]] += 1
        third[0, [2, 3]] += 1
        bounds[:, j, j, :2] += m
        bounds[:2, j, j, 2:4] += m, 1
    return bounds.reshape(3 * pp_size, pp_size, 5)


class Moment(NamedTuple):
    """What a stage holds in a forward or backward pass."""

    in_flight: int
    """Micro-batches in flight, including the one on its way."""
    deferred: int
    """Micro-batches whose weight passes are still to come."""
    summed: bool
    """Whether all gradients exist, as they do from the first weight pass on."""


@lru_cache(maxsize=256)
def held(schedule: Schedule, num_stages: int, num_microbatches: int) -> tuple[tuple[Moment, ...], ...]:
    """Return for each stage the moments with the most micro-batches before and after its first weight pass.

    They are searched in its first actions, after which the order of actions repeats itself.
    """
    stages = list[tuple[Moment, ...]]()
    for stage in range(num_stages):
        made, most = False, dict[bool, Moment]()
        passes = pass_counts(schedule_of(schedule), num_stages, num_microbatches, stage, 1)
        for counts in islice(passes, _MAX_ROUNDS * num_stages):
            if counts.kind.way:
                here = Moment(counts.in_flight[0] + 1, counts.deferred[0], made)
                most[made] = max(most.get(made, here), here, key=_size)
            made |= counts.kind is Pass.WEIGHT
        stages.append(tuple(most.values()))
    return tuple(stages)


def _size(moment: Moment) -> tuple[int, int]:
    return moment.in_flight + moment.deferred, moment.in_flight
