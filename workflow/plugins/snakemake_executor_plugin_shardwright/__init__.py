"""`snakemake --executor shardwright`: Snakemake's plugin for Slurm, also for jobs on nodes of several types.

It inherits from that plugin through its public interface. It has the same options under another prefix, such as
`--shardwright-qos`. The differences:

- squeue calls the first component of a heterogeneous job 7 `7+0`, and the job ends with that component: its state is
  asked for under that name, too.
- The time between two checks of the jobs stays below a bound; in Snakemake's plugin it grows to three minutes.
- For a cancelled job sacct reports who cancelled it (`CANCELLED by 1000`), a state for whose end Snakemake's plugin
  waits forever: here such a job has failed.
"""

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from snakemake_executor_plugin_slurm import Executor as SlurmExecutor
from snakemake_executor_plugin_slurm import ExecutorSettings as SlurmSettings
from snakemake_executor_plugin_slurm import common_settings
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

__all__ = ["Executor", "ExecutorSettings", "common_settings"]

_SACCT_LIMIT_S = 60.0
"""Seconds after which sacct is given up, as in Snakemake's plugin."""


@dataclass
class ExecutorSettings(SlurmSettings):  # type: ignore[misc]
    """The settings of Snakemake's plugin for Slurm, and the bound on the time between two checks."""

    max_seconds_between_status_checks: int = field(
        default=30,
        metadata={"help": "The most seconds between two looks at the jobs.", "env_var": False, "required": False},
    )


class Executor(SlurmExecutor):  # type: ignore[misc]
    """An executor that submits jobs to Slurm and waits for them."""

    @property
    def next_seconds_between_status_checks(self) -> float:
        """Return the seconds until the next check of the jobs' status."""
        most = self.workflow.executor_settings.max_seconds_between_status_checks
        return float(min(SlurmExecutor.next_seconds_between_status_checks.fget(self), most))

    @next_seconds_between_status_checks.setter
    def next_seconds_between_status_checks(self, value: float) -> None:
        SlurmExecutor.next_seconds_between_status_checks.fset(self, value)

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """Report the jobs that have ended, and yield the others."""
        still = [job async for job in self._not_ended(active_jobs)]
        cancelled = await _cancelled_of(still) if still and self.get_status_command() == "sacct" else {}
        for job in still:
            if (state := cancelled.get(job.external_jobid)) is None:
                yield job
            else:
                log = job.aux.get("slurm_logfile")
                problem = f"SLURM-job '{job.external_jobid}' failed, SLURM status is: '{state}'."
                self.report_job_error(job, msg=problem, aux_logs=[] if log is None else [str(log)])

    async def _not_ended(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """Report the jobs whose end Snakemake's plugin recognizes, and yield the others."""
        unknown = dict[str, SubmittedJobInfo]()
        async for job in super().check_active_jobs(active_jobs):
            if is_heterogeneous(job):
                unknown[f"{job.external_jobid}+0"] = job
            else:
                yield job
        named = [replace(job, external_jobid=name) for name, job in unknown.items()]
        if named:
            async for job in super().check_active_jobs(named):
                yield unknown[job.external_jobid]


async def _cancelled_of(jobs: Sequence[SubmittedJobInfo]) -> dict[str, str]:
    """Return the states of the jobs that someone has cancelled, by job number, as sacct reports them.

    The result is empty if sacct does not answer in time: the next check asks again.
    """
    numbers = ",".join(str(job.external_jobid) for job in jobs)
    options = "--allocations", "--noheader", "--parsable2", "--format=JobID,State"
    asked = await asyncio.create_subprocess_exec("sacct", *options, f"--jobs={numbers}", stdout=PIPE, stderr=DEVNULL)
    try:
        said, _ = await asyncio.wait_for(asked.communicate(), _SACCT_LIMIT_S)
    except TimeoutError:
        asked.kill()
        return {}
    rows = (line.split("|") for line in said.decode().splitlines())
    return {number.removesuffix("+0"): state for number, state in rows if state.startswith("CANCELLED by ")}


def is_heterogeneous(job: SubmittedJobInfo) -> bool:
    """Return whether a job has several components; a colon separates their options."""
    return " : " in str(job.job.resources.get("slurm_extra", ""))
