"""Memory of a rank by phase, by segment and by category, from the intervals of a recorded step."""

from collections.abc import Sequence

from shardwright_formats.types.measurement import Phase, PhaseMemory, ResidentMemory, SegmentMemory
from shardwright_train.measurement.memory_account import MemoryInterval

__all__ = ["phases_of_memory", "segments_of_memory"]

_FORWARD, _BACKWARD = ".forward", ".backward"


def phases_of_memory(building: Sequence[MemoryInterval], step: Sequence[MemoryInterval]) -> tuple[PhaseMemory, ...]:
    """What building the model and each kind of pass of a step held at its end and at its most.

    A pass begins where the one before ends: what is sent after a pass counts in the next one.
    """
    forward = [i for i in step if _is_of(i, Phase.FORWARD)]
    backward = [i for i in step if _is_of(i, Phase.BACKWARD) or i.name == "reduced"]
    optimizer = [i for i in step if i.name == "optimizer"]
    fullest = max((i.after for i in forward if i.name == "forward.end"), key=_total)
    return (
        _phase(Phase.MODEL, building, building[-1].after),
        _phase(Phase.FORWARD, forward, fullest),
        _phase(Phase.BACKWARD, backward, backward[-1].after),
        _phase(Phase.OPTIMIZER, optimizer, optimizer[-1].after),
    )


def segments_of_memory(intervals: Sequence[MemoryInterval]) -> tuple[SegmentMemory, ...]:
    """What the second microbatch (or the only one) left behind and held for a moment in each segment.

    The first microbatch also gathers parameters and makes gradients, which are counted as states. What is left behind
    is added up over the chunks of a pipeline stage; of what is held for a moment the most counts.
    """
    second = min(1, max(i.at[0] for i in intervals if i.at is not None))
    mine = [i for i in intervals if i.at is not None and i.at[0] == second]
    found = []
    for name in dict.fromkeys(i.name.removesuffix(_FORWARD) for i in mine if i.name.endswith(_FORWARD)):
        forward = [i for i in mine if i.name == name + _FORWARD]
        backward = [i for i in mine if i.name == name + _BACKWARD]
        found.append(
            SegmentMemory(
                name=name,
                activation_bytes=sum(max(0, _total(i.after) - _total(i.before)) for i in forward),
                forward_workspace_bytes=max(_total(i.peak) - max(_total(i.before), _total(i.after)) for i in forward),
                backward_workspace_bytes=max(_total(i.peak) - _total(i.before) for i in backward),
            )
        )
    return tuple(found)


def _phase(phase: Phase, intervals: Sequence[MemoryInterval], held: ResidentMemory) -> PhaseMemory:
    return PhaseMemory(phase=phase, resident=held, peak=max((i.peak for i in intervals), key=_total))


def _is_of(interval: MemoryInterval, kind: Phase) -> bool:
    return interval.at is not None and kind in interval.name.split(".")


def _total(held: ResidentMemory) -> int:
    return held.total_bytes
