"""Predicted time and memory of any plan, from the same cost functions that the search uses."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from shardwright_formats.errors import BadInput
from shardwright_formats.model import EMBEDDING, HEAD
from shardwright_formats.placement import layout_of
from shardwright_formats.plan import GradientReduction, Plan, Schedule
from shardwright_formats.prediction import Estimate, StagePrediction, TimelineEvent
from shardwright_formats.schedule import in_flight
from shardwright_formats.strategy import SequenceParallel, Strategy
from shardwright_search.closed_form import step_time
from shardwright_search.costs.memory import stage_memory_bytes
from shardwright_search.costs.table import (
    ElementCost,
    Setting,
    element_cost,
    picoseconds,
    redistribution_cost,
    send_cost,
)
from shardwright_search.profiles import Profiles, check_profiles
from shardwright_search.simulate import Simulation, StageTimes, lower_bound_ps, simulate

__all__ = ["Evaluation", "evaluate"]

_PER_SECOND = 1e12


class Evaluation(NamedTuple):
    """An estimate, its closed form as the exact integer that plans are compared by, and what is doubtful about it."""

    estimate: Estimate
    objective_ps: int
    warnings: tuple[str, ...]


class _StageCosts(NamedTuple):
    """One pipeline stage's elements and what passes between them, in picoseconds and bytes."""

    elements: tuple[ElementCost, ...]
    redistribution_forward_ps: int
    redistribution_backward_ps: int
    send_before_ps: int
    send_after_ps: int
    in_flight: int
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
        """A': forward and backward with the sends at both ends."""
        return self.times.forward_ps + self.times.backward_ps + self.send_before_ps + self.send_after_ps

    def sum_of(self, field: str) -> int:
        """Sum of one number over the elements."""
        return sum(getattr(element, field) for element in self.elements)


def evaluate(plan: Plan, profiles: Profiles) -> Evaluation:
    """Price a plan.

    Raises BadInput when a profile is of another model, device or precision, lacks a point, or the plan holds
    something that is not priced yet.
    """
    _check_priced(plan)
    check_profiles(profiles, plan.model, plan.cluster, plan.precision, plan.attention)
    stages = _stage_costs(plan, profiles)
    overhead_ps = picoseconds(profiles.step_overhead_s)
    times = [stage.times for stage in stages]
    simulation = simulate(times, plan.schedule, plan.num_microbatches)
    microbatch_ps = [stage.microbatch_ps for stage in stages]
    objective_ps = overhead_ps + step_time(
        sum(microbatch_ps),
        max(microbatch_ps),
        max(stage.gradient_sync_ps for stage in times),
        max(stage.optimizer_ps for stage in times),
        plan.num_microbatches,
    )
    step_s = (simulation.step_ps + overhead_ps) / _PER_SECOND
    estimate = Estimate(
        simulated_step_time_s=step_s,
        simulated_lower_bound_s=(lower_bound_ps(times, plan.num_microbatches) + overhead_ps) / _PER_SECOND,
        objective_s=objective_ps / _PER_SECOND,
        samples_per_s=plan.global_batch_size / step_s,
        usd_per_step=_usd_per_step(plan, step_s),
        stages=tuple(_stage_prediction(stage, profiles.process_bytes) for stage in stages),
        timeline=_timeline(simulation),
    )
    doubts = {doubt for stage in stages for doubt in stage.warnings}
    if plan.model.tied:
        doubts.add("tied weights are counted as separate ones, and adding up their gradients is not priced")
    return Evaluation(estimate, objective_ps, tuple(sorted(doubts)))


def _check_priced(plan: Plan) -> None:
    name = f"plan {plan.name}"
    if plan.schedule is Schedule.INTERLEAVED_1F1B:
        raise BadInput(name, f"schedule {plan.schedule} is not priced yet", "evaluate a gpipe or 1f1b plan")
    if plan.gradient_reduction is not GradientReduction.DEFERRED:
        raise BadInput(name, f"gradient_reduction {plan.gradient_reduction} is not priced yet", "take deferred")
    if any(s.sequence_parallel is SequenceParallel.ULYSSES for s in (plan.embedding, *plan.layers, plan.head)):
        raise BadInput(name, "sequence_parallel ulysses is not priced yet", "take none or megatron")
    if len({len(stage.ranks) for stage in plan.stages}) > 1:
        raise BadInput(name, "pipeline stages of unequal width are not priced yet", "give each as many ranks")
    if any(low == high for stage in plan.stages for low, high in stage.layers):
        raise BadInput(name, "a pipeline stage without layers is not priced yet", "give each a layer")


def _stage_costs(plan: Plan, profiles: Profiles) -> list[_StageCosts]:
    setting = Setting(
        plan.model, plan.cluster, profiles, plan.precision, plan.microbatch_samples, plan.num_microbatches
    )
    elements = [_elements(plan, index) for index in range(len(plan.stages))]
    sends = [
        send_cost(setting, here[-1][0], layout_of(here[-1][1]), stage.ranks, following.ranks)
        for here, stage, following in zip(elements, plan.stages, plan.stages[1:], strict=False)
    ]
    found = []
    for index, stage in enumerate(plan.stages):
        costs = tuple(element_cost(setting, name, strategy, stage.ranks) for name, strategy in elements[index])
        chain = [elements[index - 1][-1]] * (index > 0) + elements[index]
        moves = [
            (
                redistribution_cost(setting, name, layout_of(before), layout_of(after), stage.ranks),
                redistribution_cost(setting, name, layout_of(after), layout_of(before), stage.ranks),
            )
            for (name, before), (_, after) in pairwise(chain)
        ]
        around = (sends[index - 1] if index else None, sends[index] if index < len(sends) else None)
        traffic = [cost for move in moves for cost in move] + [send for send in around if send is not None]
        found.append(
            _StageCosts(
                costs,
                sum(forward.time_ps for forward, _ in moves),
                sum(backward.time_ps for _, backward in moves),
                0 if around[0] is None else around[0].time_ps,
                0 if around[1] is None else around[1].time_ps,
                in_flight(plan.schedule, len(plan.stages), plan.num_microbatches, index),
                tuple(w for cost in costs for w in cost.warnings)
                + tuple(cost.warning for cost in traffic if cost.warning is not None),
            )
        )
    return found


def _elements(plan: Plan, index: int) -> list[tuple[str, Strategy]]:
    """Type and strategy of what a pipeline stage holds, in order."""
    found: list[tuple[str, Strategy]] = [(EMBEDDING, plan.embedding)] if index == 0 else []
    for low, high in plan.stages[index].layers:
        found += [(layer.type, layer) for layer in plan.layers[low:high]]
    return [*found, (HEAD, plan.head)] if index == len(plan.stages) - 1 else found


def _stage_prediction(stage: _StageCosts, process_bytes: int) -> StagePrediction:
    times_ps = {
        "forward": stage.sum_of("forward_ps"),
        "backward": stage.sum_of("backward_ps"),
        "gathers": 2 * stage.sum_of("gather_ps"),
        "redistribution": stage.redistribution_forward_ps + stage.redistribution_backward_ps,
        "sends": stage.send_before_ps + stage.send_after_ps,
        "gradient_sync": stage.sum_of("gradient_sync_ps"),
        "optimizer": stage.sum_of("optimizer_ps"),
    }
    memory_terms = {
        "parameters": stage.sum_of("parameters_bytes"),
        "gathered_parameters": stage.sum_of("gathered_parameters_bytes"),
        "gradients": stage.sum_of("gradients_bytes"),
        "optimizer": stage.sum_of("optimizer_bytes"),
        "activations": stage.in_flight * stage.sum_of("activation_bytes"),
        "transient": max((element.transient_bytes for element in stage.elements), default=0),
        "process": process_bytes,
    }
    return StagePrediction(
        time_s=stage.microbatch_ps / _PER_SECOND,
        time_terms_s={name: time_ps / _PER_SECOND for name, time_ps in times_ps.items()},
        memory_bytes=stage_memory_bytes(
            process_bytes,
            (element.state_bytes for element in stage.elements),
            (element.activation_bytes for element in stage.elements),
            stage.in_flight,
            (element.transient_bytes for element in stage.elements),
        ),
        memory_terms_bytes=memory_terms,
    )


def _timeline(simulation: Simulation) -> tuple[TimelineEvent, ...]:
    return tuple(
        TimelineEvent(
            stage=event.stage,
            kind=event.kind,
            microbatch=event.microbatch,
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
