"""What a system that is to run a plan demands of it, beside what a request says."""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from shardwright_search.space.configurations import Configuration


class Outer(StrEnum):
    """How the strategies of embedding and head depend on others."""

    FREE = "free"
    """Each has its own."""
    ALIKE = "alike"
    """Both share one."""
    AS_LAYERS = "as_layers"
    """They share the one strategy of all layers, where these have one."""


def _any(configuration: Configuration) -> bool:
    return True


class Demands(NamedTuple):
    """What a plan must be that no field of a request says; by default nothing."""

    outer: Outer = Outer.FREE
    block_in_each_stage: bool = False
    """Whether no pipeline stage has the embedding or the head alone."""
    allows: Callable[[Configuration], bool] = _any
    """Whether a configuration may be searched; its `layers` are the strategy that all layers share, if they do."""
    elsewhere: bool = False
    """Whether another system runs the plan, whose context parallelism is not limited as this project's is."""


NO_DEMANDS = Demands()
