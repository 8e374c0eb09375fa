"""The least time that a runtime takes for a block inside of a pipeline between nodes, whatever its devices do."""

from collections.abc import Sequence

from accuracy_parts.public.runs import Run
from accuracy_parts.public.runtimes import runtime_of

from shardwright_formats.types.plan import Plan
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.stage_costs import range_costs
from shardwright_search.simulation.simulator import StageTimes, step_time_ps

__all__ = ["added_s"]

_PER_MS, _PER_S = 10**9, 10**12


def added_s(run: Run, plan: Plan, costs: CostModel) -> float:
    """Return by how much the floor makes a run's step longer, of one layer range on each stage."""
    floor_ms = runtime_of(run).pipelined_block_ms.get(run.tp_size, 0.0)
    if run.pp_size == 1 or run.devices <= run.machine.devices_per_node or not floor_ms:
        return 0.0
    times = [each.times for each in range_costs(plan, costs)]
    blocks = [high - low for stage in plan.stages for low, high in stage.layers]
    longer = [_at_least(each, round(floor_ms * _PER_MS) * count) for each, count in zip(times, blocks, strict=True)]
    return (_step_ps(longer, plan) - _step_ps(times, plan)) / _PER_S


def _step_ps(times: Sequence[StageTimes], plan: Plan) -> int:
    return step_time_ps(times, plan.schedule, plan.num_microbatches, 1)


def _at_least(times: StageTimes, floor_ps: int) -> StageTimes:
    """Return a stage's times with both passes together as long as the floor, each by the same factor."""
    factor = max(1.0, floor_ps / (times.forward_ps + times.backward_ps))
    reductions, early = (
        tuple(one._replace(backward_ps=round(one.backward_ps * factor)) for one in layers)
        for layers in (times.reductions, times.early_reductions)
    )
    layers = reductions or early
    backward_ps = sum(one.backward_ps for one in layers) if layers else round(times.backward_ps * factor)
    return times._replace(
        forward_ps=round(times.forward_ps * factor),
        backward_ps=backward_ps,
        reductions=reductions,
        early_reductions=early,
    )
