"""Where the nodes of a Slurm job step meet."""

import subprocess
from collections.abc import Mapping

from shardwright_formats.io.errors import BadInput

__all__ = ["rendezvous_of_step"]

_FIRST_PORT, _PORTS = 20000, 10000


def rendezvous_of_step(environment: Mapping[str, str]) -> str | None:
    """HOST:PORT of the first node of the step that srun started this process in; None outside a step.

    The port follows from the job's number, so that all nodes know it and jobs that share a node differ.
    """
    nodes, job = environment.get("SLURM_STEP_NODELIST"), environment.get("SLURM_JOB_ID")
    if nodes is None or job is None:
        return None
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise _unknown(nodes, str(error)) from None
    hosts = listed.stdout.split()
    if listed.returncode or not hosts:
        raise _unknown(nodes, listed.stderr)
    return f"{hosts[0]}:{_FIRST_PORT + int(job) % _PORTS}"


def _unknown(nodes: str, why: str) -> BadInput:
    return BadInput("SLURM_STEP_NODELIST", f"scontrol does not resolve {nodes!r} ({why.strip()})", "pass --rendezvous")
