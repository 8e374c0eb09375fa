"""The parts of a plan's step: what each layer range of a pipeline stage does, and what each stage holds."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from shardwright_formats.semantics.canonical import effective
from shardwright_formats.semantics.layout import layout_of
from shardwright_formats.semantics.schedule import Pass, actions, in_flight
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import Strategy
from shardwright_search.cost_model.collectives import slowdowns_of
from shardwright_search.cost_model.layer import Cost, CostModel, LayerCost
from shardwright_search.cost_model.memory import Workspace, peak_bytes
from shardwright_search.cost_model.topology import stage_topology
from shardwright_search.simulation.reduction import Overlap, Reduction
from shardwright_search.simulation.simulator import StageTimes
from shardwright_search.solver.memory import phases

__all__ = ["RangeCosts", "StageCosts", "range_costs", "stage_costs"]


class RangeCosts(NamedTuple):
    """One layer range's elements and what passes between them, in picoseconds and bytes."""

    layers: tuple[LayerCost, ...]
    redistribution_forward_ps: int
    redistribution_backward_ps: int
    send_before_ps: int
    send_after_ps: int
    before_bytes: int
    """What a rank receives of one microbatch from the range before, and gives a gradient of the same size back."""
    after_bytes: int
    overlap: Overlap | None
    """How reductions and the backward pass slow each other down; None where that was not measured."""
    warnings: tuple[str, ...]

    @property
    def times(self) -> StageTimes:
        """What the simulator plays."""
        forward = self.sum_of("forward_ps") + self.sum_of("gather_forward_ps") + self.redistribution_forward_ps
        backward = self.sum_of("backward_ps") + self.sum_of("gather_backward_ps") + self.sum_of("sync_every_ps")
        backward += self.redistribution_backward_ps
        sync = self.sum_of("sync_ps")
        reductions: tuple[Reduction, ...] = ()
        if self.overlap is not None and any(element.reduction_ps for element in self.layers):
            sync -= self.sum_of("overlapped_ps")
            reductions = self._reductions()
        return StageTimes(
            forward,
            backward,
            self.send_after_ps,
            sync,
            self.sum_of("optimizer_ps"),
            reductions,
            overlap=self.overlap if reductions else None,
        )

    @property
    def microbatch_ps(self) -> int:
        """Forward and backward with the sends at both ends."""
        redistribution = self.redistribution_forward_ps + self.redistribution_backward_ps
        return sum(e.microbatch_ps for e in self.layers) + redistribution + self.send_before_ps + self.send_after_ps

    def sum_of(self, field: str) -> int:
        """Sum of one number over the elements."""
        return sum(getattr(element, field) for element in self.layers)

    def _reductions(self) -> tuple[Reduction, ...]:
        """The elements' backward passes and messages; redistribution goes to the first element, the last to run."""
        own = [e.backward_ps + e.gather_backward_ps + e.sync_every_ps for e in self.layers]
        own[0] += self.redistribution_backward_ps
        return tuple(Reduction(time, e.reduction_ps) for time, e in zip(own, self.layers, strict=True))


class StageCosts(NamedTuple):
    """One pipeline stage: its layer ranges, one unless it is interleaved, and its activations at their peak."""

    ranges: tuple[RangeCosts, ...]
    activation_bytes: int
    """The most held of activations at once."""
    working_bytes: int
    """The most held at once of activations, of gradients, and of what is held for a moment."""

    @property
    def microbatch_ps(self) -> int:
        """A': forward and backward with the sends at both ends of every range."""
        return sum(own.microbatch_ps for own in self.ranges)

    def sum_of(self, field: str) -> int:
        """Sum of one number over the elements of all ranges."""
        return sum(own.sum_of(field) for own in self.ranges)


def range_costs(plan: Plan, costs: CostModel) -> list[RangeCosts]:
    """Every layer range, in the order a microbatch goes through them."""
    ranks = [stage.ranks for _ in plan.stages[0].layers for stage in plan.stages]
    topologies = [stage_topology(plan.cluster, own) for own in ranks]
    elements, samples = _elements(plan), plan.microbatch_samples
    lasts = [(own or [_last_before(elements, i)])[-1] for i, own in enumerate(elements)]
    sends = [
        # One stage hands its chunks' outputs to itself.
        Cost(0, None) if here == there else costs.send(kind, layout_of(output_layout), costs.link(here, there), samples)
        for (kind, output_layout), (here, there) in zip(lasts, pairwise(ranks), strict=False)
    ]
    found = []
    for index, own in enumerate(elements):
        topology = topologies[index]
        priced = tuple(costs.layer(name, s, topology, samples, plan.num_microbatches) for name, s in own)
        chain = [lasts[index - 1]] * (index > 0) + own
        moves = [
            (
                costs.redistribution(name, layout_of(before), layout_of(after), topology, samples),
                costs.redistribution(name, layout_of(after), layout_of(before), topology, samples),
            )
            for (name, before), (_, after) in pairwise(chain)
        ]
        boundary = [costs.boundary_bytes(kind, layout_of(output_layout), samples) for kind, output_layout in lasts[:-1]]
        around = (sends[index - 1] if index else Cost(0, None), sends[index] if index < len(sends) else Cost(0, None))
        traffic = [cost for move in moves for cost in move] + list(around)
        found.append(
            RangeCosts(
                priced,
                sum(forward.time_ps for forward, _ in moves),
                sum(backward.time_ps for _, backward in moves),
                around[0].time_ps,
                around[1].time_ps,
                boundary[index - 1] if index else 0,
                boundary[index] if index < len(boundary) else 0,
                _overlap(costs, own),
                tuple(w for cost in priced for w in cost.warnings)
                + tuple(cost.warning for cost in traffic if cost.warning is not None),
            )
        )
    return found


def stage_costs(plan: Plan, stage: int, ranges: Sequence[RangeCosts]) -> StageCosts:
    """A pipeline stage's ranges, and the most that it holds at once beside its states.

    While a microbatch is on its way through a range, that range's own peak comes on top of what others hold. One range
    alone has the phases of the solver; of several ranges, gradients count as there from the start.
    """
    own = tuple(ranges[stage :: len(plan.stages)])
    kept = [here.sum_of("activation_bytes") + here.before_bytes for here in own]
    # The gradient that comes in, and the one that goes out.
    messages = max(here.before_bytes for here in own) + max(here.after_bytes for here in own)
    workspaces = [[element.workspace for element in here.layers] for here in own]
    num_stages, num_microbatches = len(plan.stages), plan.num_microbatches
    if len(own) == 1:
        max_in_flight = in_flight(plan.schedule, num_stages, num_microbatches, stage)
        working = max(
            (phase.in_flight - 1) * kept[0] + own[0].before_bytes + _working_bytes(workspaces[0], phase.late)
            for phase in phases(max_in_flight, num_microbatches)
        )
        return StageCosts(own, max_in_flight * kept[0], working + messages)
    gradients = sum(workspace.late_bytes for here in workspaces for workspace in here)
    peaks = [
        range_.before_bytes + _working_bytes(here, late=False) - sum(workspace.late_bytes for workspace in here)
        for range_, here in zip(own, workspaces, strict=True)
    ]
    resident = max_resident = most = 0
    for action in actions(plan.schedule, num_stages, num_microbatches, stage, len(own)):
        if action.kind is Pass.BACKWARD:
            resident -= kept[action.chunk]
        most = max(most, resident + peaks[action.chunk])
        if action.kind is Pass.FORWARD:
            resident += kept[action.chunk]
        max_resident = max(max_resident, resident)
    return StageCosts(own, max_resident, gradients + most + messages)


def _working_bytes(workspaces: Sequence[Workspace], late: bool) -> int:
    """The most on one microbatch's way, with gradients that come element by element or are there all along."""
    if late:
        return peak_bytes(workspaces)
    early = [workspace._replace(late_bytes=0) for workspace in workspaces]
    return peak_bytes(early) + sum(workspace.late_bytes for workspace in workspaces)


def _elements(plan: Plan) -> list[list[tuple[str, Strategy]]]:
    """Type and strategy of what each layer range holds, in order; the embedding and the head are at the ends."""
    bounds = [stage.layers[chunk] for chunk in range(len(plan.stages[0].layers)) for stage in plan.stages]
    found: list[list[tuple[str, Strategy]]] = [
        [(layer.type, _plain(layer)) for layer in plan.layers[low:high]] for low, high in bounds
    ]
    found[0].insert(0, (EMBEDDING, _plain(plan.embedding)))
    found[-1].append((HEAD, _plain(plan.head)))
    return found


def _plain(strategy: Strategy) -> Strategy:
    """The same strategy without the choices that do nothing at its sizes."""
    spelled = effective(strategy)
    return replace(strategy, **{name: getattr(spelled, name) for name in Strategy.__struct_fields__})


def _last_before(elements: Sequence[Sequence[tuple[str, Strategy]]], index: int) -> tuple[str, Strategy]:
    """What a range without elements passes on."""
    return next(own[-1] for own in reversed(elements[:index]) if own)


def _overlap(costs: CostModel, own: Sequence[tuple[str, Strategy]]) -> Overlap | None:
    """The slowdowns of the range's reductions; of several kinds the largest."""
    kinds = {costs.reduction_kind(strategy) for _, strategy in own} - {None}
    found = [slowdowns_of(costs.profiles, *kind) for kind in kinds if kind is not None]
    if not found or any(slowdowns is None for slowdowns in found):
        return None
    known = [slowdowns for slowdowns in found if slowdowns is not None]
    return Overlap(max(s.compute for s in known), max(s.message for s in known))
