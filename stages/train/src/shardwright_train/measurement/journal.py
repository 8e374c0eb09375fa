"""The journal of an interrupted measurement: the plans it had finished."""

from shardwright_formats.io import Value
from shardwright_formats.types import PlanMeasurement
from shardwright_launch.journal import Journal, JournalKind, Kept
from shardwright_train.options import MeasureJob
from shardwright_train.parallel.world import World


class MeasureIdentity(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that must be equal for a plan's earlier measurement to be reused."""

    steps: int
    warmup_steps: int
    min_time_s: float
    device: str
    backend: str
    versions: str


_KIND: JournalKind[MeasureIdentity, PlanMeasurement] = JournalKind(
    format="shardwright.measure_journal",
    run="measurement",
    identity=MeasureIdentity,
    entry=PlanMeasurement,
    key=lambda found: (found.plan.sha256,),
)


def open_journal(
    job: MeasureJob, world: World, device: str, versions: str
) -> Journal[MeasureIdentity, PlanMeasurement]:
    """Open a measurement's journal, the same on every rank; it starts anew for other settings, device or versions."""
    identity = MeasureIdentity(
        steps=job.steps,
        warmup_steps=job.warmup_steps,
        min_time_s=job.min_time_s,
        device=device,
        backend=world.backend,
        versions=versions,
    )
    kept = world.first_says(lambda: _KIND.read(job.journal, identity, anew=True), Kept[PlanMeasurement])
    return Journal(job.journal if world.rank == 0 else None, _KIND, identity, kept)
