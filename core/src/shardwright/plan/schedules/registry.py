"""All schedules, by name; each has its own file, or shares it with variants."""

from shardwright.plan.schedules.gpipe import GPipe
from shardwright.plan.schedules.interleaved_1f1b import Interleaved1F1B
from shardwright.plan.schedules.interleaved_zero_bubble import InterleavedZeroBubble
from shardwright.plan.schedules.one_f_one_b import OneFOneB
from shardwright.plan.schedules.schedule import PipelineSchedule
from shardwright.plan.schedules.v_shaped import VHalf, VMin, ZeroBubbleV
from shardwright.plan.schedules.zero_bubble import ZeroBubble, ZeroBubbleH2
from shardwright.types import Schedule

_JOINT = GPipe(), OneFOneB(), Interleaved1F1B()
_SPLIT = ZeroBubble(), ZeroBubbleH2(), InterleavedZeroBubble(), ZeroBubbleV(), VHalf(), VMin()
_SCHEDULES: dict[Schedule, PipelineSchedule] = {schedule.name: schedule for schedule in (*_JOINT, *_SPLIT)}


def schedule_of(name: Schedule) -> PipelineSchedule:
    """Return the schedule with a name."""
    return _SCHEDULES[name]
