"""The schedules that there are: one file each."""

from shardwright_formats.semantics.schedules.gpipe import GPipe
from shardwright_formats.semantics.schedules.interleaved_1f1b import Interleaved1F1B
from shardwright_formats.semantics.schedules.one_f_one_b import OneFOneB
from shardwright_formats.semantics.schedules.schedule import PipelineSchedule
from shardwright_formats.types import Schedule

_SCHEDULES: dict[Schedule, PipelineSchedule] = {
    schedule.name: schedule for schedule in (GPipe(), OneFOneB(), Interleaved1F1B())
}


def schedule_of(name: Schedule) -> PipelineSchedule:
    """Return the schedule of a name."""
    return _SCHEDULES[name]
