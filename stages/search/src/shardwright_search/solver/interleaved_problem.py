"""A configuration of the interleaved schedule as bare numbers."""

import msgspec

from shardwright_formats.semantics.schedules.closed_form import ClosedForm
from shardwright_search.solver.in_flight import InFlight
from shardwright_search.solver.problem import DeviceGroup
from shardwright_search.step.arrays import Numbers


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
