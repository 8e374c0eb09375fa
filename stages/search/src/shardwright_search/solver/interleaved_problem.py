"""A configuration of the interleaved schedule as bare numbers."""

from typing import NamedTuple

import msgspec

from shardwright_formats.semantics.schedules.closed_form import ClosedForm
from shardwright_search.solver.pareto import Numbers
from shardwright_search.solver.problem import DeviceGroup


class InFlight(NamedTuple):
    """What is in flight at a moment of a stage's action list, beside the microbatch and chunk that is worked on."""

    chunks: int
    """Activations held, each of one microbatch in one chunk."""
    outer: int
    """How many of them are of the chunk that the embedding or the head is with."""
    at_outer: bool
    """Whether that chunk is the one worked on."""
    made: int
    """Chunks whose gradients are there: they have been through a backward pass before."""
    outer_made: bool
    """Whether that chunk is one of them."""
    makes: bool
    """Whether this is the first backward pass of the chunk worked on, which makes its gradients layer by layer."""


class InterleavedProblem(msgspec.Struct, frozen=True, eq=False):
    """Positions of a chunk, and how often and where a chunk is."""

    embedding: int
    """Type numbers."""
    positions: tuple[int, ...]
    head: int
    group: DeviceGroup
    pp_size: int
    num_chunks: int
    num_microbatches: int
    closed_forms: tuple[ClosedForm, ...]
    """Of T, which is the largest of them."""
    sends_ps: Numbers
    """[cuts, types, layouts]: over the cut after each stage, one way; the last from the last stage to the first."""
    moments_in_flight: tuple[tuple[InFlight, ...], ...]
    """Of the first stage, one in the middle (the first again if there is none), and the last."""
    boundary_bytes: Numbers
    """[types, layouts]: what a rank holds of one microbatch's outputs of that type and layout."""
    tie_ps: Numbers
