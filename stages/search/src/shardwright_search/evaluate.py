"""Predicted time and memory of any plan, from the same cost functions that the search uses."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from shardwright_formats.errors import BadInput
from shardwright_formats.model import EMBEDDING, HEAD
from shardwright_formats.placement import layout_of
from shardwright_formats.plan import GradientReduction, Plan
from shardwright_formats.prediction import Estimate, StagePrediction, TimelineEvent
from shardwright_formats.schedule import Pass, actions
from shardwright_formats.strategy import SequenceParallel, Strategy
from shardwright_search.closed_form import step_time
from shardwright_search.costs.memory import stage_memory_bytes
from shardwright_search.costs.table import (
    Cost,
    ElementCost,
    Setting,
    element_cost,
    picoseconds,
    redistribution_cost,
    send_cost,
)
from shardwright_search.marks import marks
from shardwright_search.profiles import Profiles, check_profiles
from shardwright_search.simulate import Simulation, StageTimes, lower_bound_ps, simulate

__all__ = ["Evaluation", "evaluate"]

_PER_SECOND = 1e12


class Evaluation(NamedTuple):
    """An estimate, its closed form as the exact integer that plans are compared by, and what is doubtful about it."""

    estimate: Estimate
    objective_ps: int
    warnings: tuple[str, ...]


class _RangeCosts(NamedTuple):
    """One layer range's elements and what passes between them, in picoseconds and bytes."""

    elements: tuple[ElementCost, ...]
    redistribution_forward_ps: int
    redistribution_backward_ps: int
    send_before_ps: int
    send_after_ps: int
    warnings: tuple[str, ...]

    @property
    def times(self) -> StageTimes:
        gathers = self.sum_of("gather_ps")
        return StageTimes(
            self.sum_of("forward_ps") + gathers + self.redistribution_forward_ps,
            self.sum_of("backward_ps") + gathers + self.redistribution_backward_ps,
            self.send_after_ps,
            self.sum_of("gradient_sync_ps"),
            self.sum_of("optimizer_ps"),
        )

    @property
    def microbatch_ps(self) -> int:
        """Forward and backward with the sends at both ends."""
        return self.times.forward_ps + self.times.backward_ps + self.send_before_ps + self.send_after_ps

    def sum_of(self, field: str) -> int:
        """Sum of one number over the elements."""
        return sum(getattr(element, field) for element in self.elements)


class _StageCosts(NamedTuple):
    """One pipeline stage: its layer ranges, one unless it is interleaved, and its activations at their peak."""

    ranges: tuple[_RangeCosts, ...]
    activation_bytes: int

    @property
    def microbatch_ps(self) -> int:
        """A': forward and backward with the sends at both ends of every range."""
        return sum(own.microbatch_ps for own in self.ranges)

    def sum_of(self, field: str) -> int:
        """Sum of one number over the elements of all ranges."""
        return sum(own.sum_of(field) for own in self.ranges)


def evaluate(plan: Plan, profiles: Profiles) -> Evaluation:
    """Price a plan.

    Raises BadInput when a profile is of another model, device or precision, lacks a point, or the plan holds
    something that is not priced yet.
    """
    _check_priced(plan)
    check_profiles(profiles, plan.model, plan.cluster, plan.precision, plan.attention)
    ranges = _range_costs(plan, profiles)
    stages = [_stage_costs(plan, index, ranges) for index in range(len(plan.stages))]
    overhead_ps = picoseconds(profiles.step_overhead_s)
    times, num_chunks = [own.times for own in ranges], len(plan.stages[0].layers)
    simulation = simulate(times, plan.schedule, plan.num_microbatches, num_chunks)
    objective_ps = overhead_ps + _closed_form_ps(stages, plan.num_microbatches, num_chunks)
    step_s = (simulation.step_ps + overhead_ps) / _PER_SECOND
    bound_ps = lower_bound_ps(times, plan.num_microbatches, num_chunks) + overhead_ps
    estimate = Estimate(
        simulated_step_time_s=step_s,
        simulated_lower_bound_s=bound_ps / _PER_SECOND,
        objective_s=objective_ps / _PER_SECOND,
        samples_per_s=plan.global_batch_size / step_s,
        usd_per_step=_usd_per_step(plan, step_s),
        stages=tuple(_stage_prediction(stage, profiles.process_bytes) for stage in stages),
        timeline=_timeline(simulation),
    )
    doubts = {doubt for own in ranges for doubt in own.warnings}
    if plan.model.tied:
        doubts.add("tied weights are counted as separate ones, and adding up their gradients is not priced")
    return Evaluation(estimate, objective_ps, (*marks(plan, profiles), *sorted(doubts)))


def _closed_form_ps(stages: Sequence[_StageCosts], num_microbatches: int, num_chunks: int) -> int:
    """The closed form of a step without its overhead.

    v chunks divide the time that the pipeline takes to fill and drain by v, as long as there are as many microbatches
    as stages (Narayanan et al. 2021); with fewer, all but the first take a chunk's time on the slowest stage.
    """
    microbatch_ps = [stage.microbatch_ps for stage in stages]
    total, slowest = sum(microbatch_ps), max(microbatch_ps)
    filling, chunk = (-(-time_ps // num_chunks) for time_ps in (total - slowest, slowest))
    sync, optimizer = (max(stage.sum_of(field) for stage in stages) for field in ("gradient_sync_ps", "optimizer_ps"))
    return max(
        step_time(filling + slowest, slowest, sync, optimizer, num_microbatches),
        step_time(total, chunk, sync, optimizer, num_microbatches),
    )


def _check_priced(plan: Plan) -> None:
    name = f"plan {plan.name}"
    if plan.gradient_reduction is not GradientReduction.DEFERRED:
        raise BadInput(name, f"gradient_reduction {plan.gradient_reduction} is not priced yet", "take deferred")
    if any(s.sequence_parallel is SequenceParallel.ULYSSES for s in (plan.embedding, *plan.layers, plan.head)):
        raise BadInput(name, "sequence_parallel ulysses is not priced yet", "take none or megatron")
    if len({len(stage.ranks) for stage in plan.stages}) > 1:
        raise BadInput(name, "pipeline stages of unequal width are not priced yet", "give each as many ranks")
    if any(low == high for stage in plan.stages for low, high in stage.layers):
        raise BadInput(name, "a pipeline stage without layers is not priced yet", "give each a layer")


def _range_costs(plan: Plan, profiles: Profiles) -> list[_RangeCosts]:
    """Every layer range, in the order a microbatch goes through them."""
    setting = Setting(
        plan.model, plan.cluster, profiles, plan.precision, plan.microbatch_samples, plan.num_microbatches
    )
    ranks = [stage.ranks for _ in plan.stages[0].layers for stage in plan.stages]
    elements = _elements(plan)
    sends = [
        # One stage hands its chunks' outputs to itself.
        Cost(0, None) if here == following else send_cost(setting, own[-1][0], layout_of(own[-1][1]), here, following)
        for own, (here, following) in zip(elements, pairwise(ranks), strict=False)
    ]
    found = []
    for index, own in enumerate(elements):
        costs = tuple(element_cost(setting, name, strategy, ranks[index]) for name, strategy in own)
        chain = [elements[index - 1][-1]] * (index > 0) + own
        moves = [
            (
                redistribution_cost(setting, name, layout_of(before), layout_of(after), ranks[index]),
                redistribution_cost(setting, name, layout_of(after), layout_of(before), ranks[index]),
            )
            for (name, before), (_, after) in pairwise(chain)
        ]
        around = (sends[index - 1] if index else None, sends[index] if index < len(sends) else None)
        traffic = [cost for move in moves for cost in move] + [send for send in around if send is not None]
        found.append(
            _RangeCosts(
                costs,
                sum(forward.time_ps for forward, _ in moves),
                sum(backward.time_ps for _, backward in moves),
                0 if around[0] is None else around[0].time_ps,
                0 if around[1] is None else around[1].time_ps,
                tuple(w for cost in costs for w in cost.warnings)
                + tuple(cost.warning for cost in traffic if cost.warning is not None),
            )
        )
    return found


def _elements(plan: Plan) -> list[list[tuple[str, Strategy]]]:
    """Type and strategy of what each layer range holds, in order; the embedding and the head are at the ends."""
    bounds = [stage.layers[chunk] for chunk in range(len(plan.stages[0].layers)) for stage in plan.stages]
    found: list[list[tuple[str, Strategy]]] = [
        [(layer.type, layer) for layer in plan.layers[low:high]] for low, high in bounds
    ]
    found[0].insert(0, (EMBEDDING, plan.embedding))
    found[-1].append((HEAD, plan.head))
    return found


def _stage_costs(plan: Plan, stage: int, ranges: Sequence[_RangeCosts]) -> _StageCosts:
    """A pipeline stage's ranges, and the most bytes of activations that its action list holds at once."""
    own = tuple(ranges[stage :: len(plan.stages)])
    kept = [here.sum_of("activation_bytes") for here in own]
    held = most = 0
    for action in actions(plan.schedule, len(plan.stages), plan.num_microbatches, stage, len(own)):
        held += kept[action.chunk] if action.kind is Pass.FORWARD else -kept[action.chunk]
        most = max(most, held)
    return _StageCosts(own, most)


def _stage_prediction(stage: _StageCosts, process_bytes: int) -> StagePrediction:
    elements = [element for own in stage.ranges for element in own.elements]
    times_ps = {
        "forward": stage.sum_of("forward_ps"),
        "backward": stage.sum_of("backward_ps"),
        "gathers": 2 * stage.sum_of("gather_ps"),
        "redistribution": sum(r.redistribution_forward_ps + r.redistribution_backward_ps for r in stage.ranges),
        "sends": sum(r.send_before_ps + r.send_after_ps for r in stage.ranges),
        "gradient_sync": stage.sum_of("gradient_sync_ps"),
        "optimizer": stage.sum_of("optimizer_ps"),
    }
    memory_terms = {
        "parameters": stage.sum_of("parameters_bytes"),
        "gathered_parameters": stage.sum_of("gathered_parameters_bytes"),
        "gradients": stage.sum_of("gradients_bytes"),
        "optimizer": stage.sum_of("optimizer_bytes"),
        "activations": stage.activation_bytes,
        "transient": max(element.transient_bytes for element in elements),
        "process": process_bytes,
    }
    return StagePrediction(
        time_s=stage.microbatch_ps / _PER_SECOND,
        time_terms_s={name: time_ps / _PER_SECOND for name, time_ps in times_ps.items()},
        memory_bytes=stage_memory_bytes(
            process_bytes,
            (element.state_bytes for element in elements),
            (stage.activation_bytes,),
            1,
            (element.transient_bytes for element in elements),
        ),
        memory_terms_bytes=memory_terms,
    )


def _timeline(simulation: Simulation) -> tuple[TimelineEvent, ...]:
    return tuple(
        TimelineEvent(
            stage=event.stage,
            kind=event.kind,
            microbatch=event.microbatch,
            chunk=event.chunk,
            start_s=event.start_ps / _PER_SECOND,
            end_s=event.end_ps / _PER_SECOND,
        )
        for event in simulation.events
    )


def _usd_per_step(plan: Plan, step_s: float) -> float | None:
    """Price of all nodes for one step; None where one has no price."""
    prices: Sequence[float | None] = [
        plan.cluster.node_types[group.node_type].usd_per_hour for group in plan.cluster.nodes
    ]
    usd_per_hour = 0.0
    for price, group in zip(prices, plan.cluster.nodes, strict=True):
        if price is None:
            return None
        usd_per_hour += price * group.count
    return usd_per_hour * step_s / 3600
