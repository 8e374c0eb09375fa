"""What to search: the batch, the memory budget and the space of plans."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shardwright_formats.errors import BadInput
from shardwright_formats.files import Document
from shardwright_formats.plan import Attention, GradientReduction, Precision, Schedule
from shardwright_formats.strategy import DataParallel, Recompute, SequenceParallel

__all__ = ["SearchRequest", "check_supported"]

Count = Annotated[int, Meta(ge=1)]
Counts = Annotated[tuple[Count, ...], Meta(min_length=1)]


class SearchRequest(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search file: everything that bounds the space of plans besides the model and the cluster."""

    FORMAT = "shardwright.search"

    name: Annotated[str, Meta(min_length=1)]
    global_batch_size: Count
    memory_gib: Annotated[float, Meta(gt=0)] | None = None
    """Budget of one device in GiB; null: all of the device's memory."""
    num_microbatches: Counts | None = None
    """Null: every divisor of the batch."""
    pp_sizes: Counts | None = None
    """Null: every divisor of the number of devices that leaves each pipeline stage a layer."""
    tp_sizes: Counts | None = None
    """Null: every divisor of a pipeline stage's number of ranks."""
    data_parallel: Annotated[tuple[DataParallel, ...], Meta(min_length=1)] = tuple(DataParallel)
    sequence_parallel: Annotated[tuple[SequenceParallel, ...], Meta(min_length=1)] = (
        SequenceParallel.NONE,
        SequenceParallel.MEGATRON,
    )
    recompute: Annotated[tuple[Recompute, ...], Meta(min_length=1)] = (Recompute.NONE, Recompute.FULL)
    schedules: Annotated[tuple[Schedule, ...], Meta(min_length=1)] = (Schedule.ONE_F_ONE_B,)
    precision: Precision = Precision()
    attention: Attention = Attention.AUTO
    gradient_reduction: GradientReduction = GradientReduction.DEFERRED


def check_supported(request: SearchRequest, file: Path) -> None:
    """Raise BadInput when the request names something that is not planned yet."""
    asked: list[tuple[str, str, bool]] = [
        *(("sequence_parallel", str(v), v is SequenceParallel.ULYSSES) for v in request.sequence_parallel),
        *(("recompute", str(v), v in (Recompute.ATTENTION, Recompute.MLP)) for v in request.recompute),
        *(("schedules", str(v), v is Schedule.INTERLEAVED_1F1B) for v in request.schedules),
        (
            "gradient_reduction",
            str(request.gradient_reduction),
            request.gradient_reduction is GradientReduction.EVERY_MICROBATCH,
        ),
    ]
    for field, value, unsupported in asked:
        if unsupported:
            raise BadInput(file, f"{field} {value} is not planned yet", f"take {value} out of {field}")
