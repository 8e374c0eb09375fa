"""Folders in which the workflow runs on the Slurm of loopback.sh, and what that Slurm says of its jobs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NODES = 2
_STATUS = ("--shardwright-status-command", "sacct") if os.environ.get("ACCOUNTING") == "1" else ()
"""Where loopback.sh has accounting, states of jobs are asked of it, as the plugin does by itself."""
COMMAND_S = 300.0
"""What a command of Slurm's may take."""


def slurm(*command: str) -> str:
    """What a command of Slurm's prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMMAND_S)
    return done.stdout.strip()


def until(holds: Callable[[], Any], what: str, at_most_s: float = 240.0) -> Any:
    """Wait until something holds, and return it."""
    end_s = time.monotonic() + at_most_s
    while not (found := holds()):
        assert time.monotonic() < end_s, f"not within {at_most_s:g} s: {what}\n{slurm('squeue')}"
        time.sleep(0.2)
    return found


def _heed_ctrl_c() -> None:
    """A shell has what it starts in the background ignore SIGINT, and so what that starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Workspace:
    """A folder in which the workflow of this repository runs on Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = folder / "results"

    def configure(self, *, mixed: bool = False, **run: Any) -> None:
        """Write the configuration, with keys of its run changed, and its nodes of two types: n2's, then n1's."""
        config = yaml.safe_load((HERE / "config.yaml").read_text())
        config["runs"]["run"].update(run)
        if mixed:
            slow = config["node_types"]["cpu"]
            slow = slow | {"device": "cpu/2", "slurm": slow["slurm"] | {"partition": "last", "mem_mb": 3000}}
            config["node_types"]["slow"] = slow
            config["clusters"]["pair"]["nodes"] = [{"node_type": name, "count": 1} for name in ("slow", "cpu")]
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def start(self, *arguments: str, into: str = "said.txt") -> "subprocess.Popen[str]":
        """`snakemake --profile slurm`, as from a clone, beside the test; what it says goes into a file."""
        command = [
            "snakemake", "--profile", "slurm", "--snakefile", str(ROOT / "Snakefile"),
            "--configfile", "config.yaml",
            "--shardwright-init-seconds-before-status-checks", "1", *_STATUS, *arguments,
        ]  # fmt: skip
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "workflow/plugins"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }
        with (self.folder / into).open("w") as said:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=said, stderr=said, text=True, preexec_fn=_heed_ctrl_c
            )

    def call(self, *arguments: str, at_most_s: float = 420.0) -> int:
        """The same to its end: its exit status."""
        return ended(self.start(*arguments), at_most_s)

    def said(self) -> str:
        """What the last call has said."""
        return (self.folder / "said.txt").read_text()

    @property
    def out(self) -> Path:
        """Folder of the run as it is configured."""
        (folder,) = self.results.glob("runs/run-*")
        return folder

    def done(self) -> dict[str, Any]:
        """DONE.json of the run."""
        return json.loads((self.out / "DONE.json").read_text())

    def checkpoints(self) -> list[str]:
        """Names of the run's whole checkpoints, oldest first."""
        return sorted(path.parent.name for path in self.results.glob("checkpoints/run-*/*/step-*/checkpoint.json"))

    def job(self) -> str:
        """Number of the run's last job."""
        return re.findall(r"SLURM jobid (\d+) \(log: \S+/rule_run/", self.said())[-1]


def ranks(folder: Path) -> dict[int, dict[str, str]]:
    """The environments of the ranks that train in a folder, by rank; `PID` is the number of the process."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"shardwright_train.worker" in (process / "cmdline").read_bytes() and (process / "cwd").samefile(folder):
                environment = _environment(process)
                found[int(environment["RANK"])] = environment | {"PID": process.name}
        except OSError:
            continue  # it has ended
    return found


def _environment(process: Path) -> dict[str, str]:
    lines = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def fail(node: str, *, steps_report: bool = False) -> None:
    """Let a node fail without a word: its slurmd and all that runs on it are killed, and Slurm is told nothing.

    Where the steps report, as on a node that is shut down, srun learns that the tasks there have ended.
    """
    (pids,) = re.findall(r"^SlurmdPidFile\s*=\s*(\S+)$", slurm("scontrol", "show", "config"), re.MULTILINE)
    tasks = {pid for pid, environment in _environments() if environment.get("SLURMD_NODENAME") == node}
    steps = {parent for parent in map(_parent, tasks) if _name(parent) == "slurmstepd"}
    for pid in (int(Path(pids.replace("%n", node)).read_text()), *(() if steps_report else steps), *tasks):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    """All processes by number, with their environments."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            yield int(process.name), _environment(process)


def _parent(pid: int) -> int:
    with suppress(OSError):  # it has ended
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")[0]
    return ""


def hold_back(job: str) -> None:
    """Keep a queued job from beginning until a test gives it another time.

    One that Slurm queues again because its node is down can begin in the moment in which the node is back.
    """
    slurm("scontrol", "update", f"jobid={job}", "starttime=now+600")


def bring_back(node: str) -> None:
    """Start a node that had failed, which Slurm takes back when it registers."""
    subprocess.run(
        ["slurmd", "-N", node], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=COMMAND_S
    )
    seen = ("sinfo", "--noheader", "--partition=main", f"--nodes={node}", "--format=%T")
    until(lambda: slurm(*seen) == "idle", f"{node} is back")


def ended(process: "subprocess.Popen[str]", at_most_s: float = 420.0) -> int:
    """The exit status of a call; where it takes too long it is interrupted, so that its jobs end too."""
    try:
        return process.wait(at_most_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        raise


def state(job: str) -> str:
    """What Slurm says of a job, in one word where all components of a heterogeneous one are in the same state."""
    return " ".join(set(slurm("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job).split()))


def detail(job: str, key: str) -> str:
    """A value of `scontrol show job`."""
    fields = slurm("scontrol", "--oneliner", "show", "job", job).split()
    return next(field.partition("=")[2] for field in fields if field.startswith(f"{key}="))
