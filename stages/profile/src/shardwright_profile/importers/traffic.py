"""Time of the messages that tensor parallelism adds to a layer, priced with a hardware profile."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright_formats.io.errors import BadInput
from shardwright_formats.semantics.communication import Cause, Message, loss_messages, region_messages
from shardwright_formats.types.hardware_profile import Collective, CollectiveKey, HardwareProfile
from shardwright_formats.types.model import EMBEDDING, HEAD, Model
from shardwright_formats.types.strategy import LayerStrategy, Recompute, SequenceParallel

__all__ = ["Hardware", "LayerTraffic", "layer_traffic"]


class Hardware(NamedTuple):
    """A hardware profile and the file it is from."""

    file: Path
    profile: HardwareProfile


class LayerTraffic(NamedTuple):
    """Seconds that a microbatch of one layer spends on messages inside its tensor-parallel group."""

    forward_s: float
    backward_s: float


def layer_traffic(
    hardware: Hardware,
    model: Model,
    type_name: str,
    tp_size: int,
    sequence_parallel: SequenceParallel,
    recompute: Recompute,
    samples: int,
    itemsize: int,
) -> LayerTraffic:
    """What `placement.region_messages` counts, split over the two passes; `samples` are those of the group.

    Forward has a layer's sums, or with Megatron's sequence parallelism its gathers and scatters; backward the rest,
    with what recomputation repeats. The cross entropy of a shared vocabulary is counted forward.
    """
    strategy = LayerStrategy(
        type=type_name, tp_size=tp_size, dp_size=1, sequence_parallel=sequence_parallel, recompute=recompute
    )
    kind = model.types[type_name]
    # Levels of a pyramid hand on other sizes than the embedding does: a layer's messages are of its own outputs.
    outputs = kind.outputs or model.boundary
    embedding = msgspec.structs.replace(model.types[EMBEDDING], outputs=outputs)
    alone = msgspec.structs.replace(model, types={**model.types, EMBEDDING: embedding})
    every_s = _sum_s(hardware, region_messages(alone, type_name, strategy, samples, itemsize, 1))
    forward_s = _sum_s(hardware, _forward_messages(alone, type_name, strategy, samples * itemsize))
    loss_s = 0.0
    if type_name == HEAD:
        loss_s = _sum_s(hardware, loss_messages(kind, strategy, samples, itemsize, 1))
    # Sums in another order may differ in the last digit.
    return LayerTraffic(forward_s + loss_s, max(0.0, every_s - forward_s))


def _forward_messages(model: Model, type_name: str, strategy: LayerStrategy, bytes_a_number: int) -> Iterator[Message]:
    sizes = {t.name: t.sequence_length * t.features * bytes_a_number for t in model.boundary}
    megatron = strategy.sequence_parallel is SequenceParallel.MEGATRON
    if strategy.tp_size == 1:
        return
    for region in model.types[type_name].regions:
        entering = region.enters if megatron else ()
        leaving = () if region.leaves is None else (region.leaves,)
        for names, collective in (
            (entering, Collective.ALL_GATHER),
            (leaving, Collective.REDUCE_SCATTER if megatron else Collective.ALL_REDUCE),
        ):
            for name in names:
                yield Message(Cause.TENSOR_PARALLEL, collective, strategy.tp_size, sizes[name])


def _sum_s(hardware: Hardware, messages: Iterable[Message]) -> float:
    return sum((_time_s(hardware, message) * message.times for message in messages), 0.0)


def _time_s(hardware: Hardware, message: Message) -> float:
    """On neighbouring ranks, inside a node where one holds them all; the planner's own rule between and beyond sizes.

    Constant below the smallest size, linear between, and with the last segment's slope above the largest.
    """
    for across in (False, True):
        curve = hardware.profile.curves.get(CollectiveKey(message.collective, message.group_size, True, across))
        if curve is not None:
            break
    else:
        what = f"no {message.collective} among {message.group_size} neighbouring ranks"
        raise BadInput(hardware.file, what, "leave that size out of --tp-sizes, or give another profile")
    sizes, times_s = curve
    if message.bytes <= sizes[-1]:
        return float(np.interp(message.bytes, sizes, times_s))
    slope = times_s[-1] / sizes[-1]
    if len(sizes) > 1 and times_s[-1] > times_s[-2]:
        slope = (times_s[-1] - times_s[-2]) / (sizes[-1] - sizes[-2])
    return float(times_s[-1] + (message.bytes - sizes[-1]) * slope)
