"""Axes of a stage's ranks as a few numbers say them."""

from shardwright.plan.axes import Layout, ParameterAxes
from shardwright_search.cost_model.collectives import StageTopology


def stage_axes(topology: StageTopology, tp_size: int, consecutive: bool, shards: int = 1) -> ParameterAxes:
    layout = Layout(topology.size, tp_size, consecutive, 1)
    return ParameterAxes(layout.sharers, layout.samples, shards)
