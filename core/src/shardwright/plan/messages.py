"""Messages of a step: their cause, collective, size and number."""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from shardwright.plan.schedules.passes import Pass
from shardwright.types.hardware_profile import Collective
from shardwright.types.model import LayerType


class Cause(StrEnum):
    """The causes of messages."""

    PARAMETERS = "parameters"
    """ZeRO gathers parameters."""
    GRADIENTS = "gradients"
    """Data-parallel ranks sum gradients."""
    PARTIAL_GRADIENTS = "partial_gradients"
    """Tensor-parallel ranks sum the gradients of replicated parameters that each applied to its own part."""
    TENSOR_PARALLEL = "tensor_parallel"
    """Activations enter and leave matrices that ranks share."""
    ULYSSES = "ulysses"
    """Positions are exchanged for heads."""
    CONTEXT = "context"
    """Keys and values go to the ranks whose positions attend to them, and gradients back."""
    EXPERTS = "experts"
    """Positions go to the ranks of their experts and back; ranks that share a sequence count what was chosen."""
    LOSS = "loss"
    """Ranks that share a vocabulary sum their parts of the cross entropy."""
    REDISTRIBUTION = "redistribution"
    """Two layers lie differently over the ranks."""
    PIPELINE = "pipeline"
    """Sends between pipeline stages."""
    TIED_PARAMETERS = "tied_parameters"
    """Gradients of parameters that several layers hold replicas of."""
    NORM = "norm"
    """Loss, gradient norm and the wish to stop, over all ranks."""


class Message(NamedTuple):
    """A collective or a send in which a rank takes part a number of times."""

    cause: Cause
    collective: Collective
    group_size: int
    bytes: int
    during: Pass | None
    """The pass to which it belongs; None at the end of a step."""
    times: int = 1


def sent_through(kind: LayerType, messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages of passes through a layer; without a backward pass, only those that carry activations."""
    return (m for m in messages if kind.has_backward or m.during is None or not m.during.makes_gradients)
