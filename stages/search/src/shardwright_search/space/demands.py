"""Demands of another system on a plan, in addition to the request."""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from shardwright_search.space.configurations import Configuration


class Outer(StrEnum):
    """How the strategies of embedding and head depend on those of layers."""

    FREE = "free"
    """Each has its own."""
    ALIKE = "alike"
    """Both share one."""
    AS_LAYERS = "as_layers"
    """They share the one strategy of all layers, where these have one."""


def _any(configuration: Configuration) -> bool:
    return True


class Demands(NamedTuple):
    """Demands on a plan for which a request has no field; by default none."""

    outer: Outer = Outer.FREE
    block_in_each_stage: bool = False
    """Whether no pipeline stage has the embedding or the head alone."""
    allows: Callable[[Configuration], bool] = _any
    """Whether a configuration may be searched; its `layers` are the strategy that all layers share, if they do."""
    elsewhere: bool = False
    """Whether another system runs the plan, whose context parallelism is not limited as this project's is."""


NO_DEMANDS = Demands()
