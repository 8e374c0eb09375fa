"""States of heterogeneous jobs, for Snakemake's plugin for Slurm (2.8.0), which looks for a job by its number alone."""

from types import ModuleType

_FIRST = "+0"
"""Suffix of squeue after a heterogeneous job's number for its first component, with which the job ends."""


def know_heterogeneous_jobs(plugin: ModuleType) -> None:
    """Let the plugin find the state of a job 7 that squeue calls 7+0; without this, it waits on after the job's end."""
    query = plugin.query_job_status

    async def by_number(*arguments: object) -> tuple[dict[str, str] | None, float | None]:
        states, took_s = await query(*arguments)
        return states and {name.removesuffix(_FIRST): state for name, state in states.items()}, took_s

    plugin.query_job_status = by_number  # type: ignore[attr-defined]
