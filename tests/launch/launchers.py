"""Launchers of nodes in processes of their own, whose ranks do what they are told (`launched_rank.py`)."""

import itertools
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwright.io import one_line_errors
from shardwright.launch.heartbeat import RankFiles
from shardwright.launch.meeting import SECRET_VARIABLE, meeting_of
from shardwright.launch.nodes import Nodes
from shardwright.launch.ranks import launch

RANK = Path(__file__).with_name("launched_rank.py")
STARTED_S = 300.0
HANG_S = 2.0
SEVERAL = {"SEVERAL_NODES": "1", SECRET_VARIABLE: "0123456789abcdef" * 2}
"""What launchers of several nodes, and their ranks, have in their environment."""


def start_node(
    folder: Path,
    node: int,
    actions: Sequence[str],
    nodes: int = 1,
    port: int = 0,
    *,
    terminal: bool = False,
    **streams: Any,
) -> "subprocess.Popen[str]":
    """Start the launcher of a node of so many, each with as many ranks as this one has actions."""
    command = [sys.executable, __file__, str(nodes), str(node), str(port), *actions]
    if terminal:  # the terminal of its standard error becomes its controlling one
        command = ["setsid", "--ctty", *command]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    if terminal:
        streams["stdin"] = streams["stderr"]
    variables = {"STARTED_BY": str(folder)} | (SEVERAL if nodes > 1 else {})
    return subprocess.Popen(command, env=os.environ | variables, text=True, **streams)


def until_there(file: Path) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + STARTED_S
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.02)


def let_act(folder: Path, ranks: int = 2) -> None:
    """Let the ranks of several nodes act, once so many are there: their launchers have met by then."""
    deadline = time.monotonic() + STARTED_S
    while len([*folder.glob("there*")]) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (folder / "met").touch()


def started_by(folder: Path) -> dict[int, dict[str, str]]:
    """The living ranks that launchers of a folder's name have started, by process: their environments."""
    found = {}
    for process in Path("/proc").iterdir():
        try:
            pairs = (process / "environ").read_bytes().split(b"\0") if process.name.isdigit() else []
        except OSError:
            continue
        environment = dict(pair.decode().split("=", 1) for pair in pairs if b"=" in pair)
        if environment.get("STARTED_BY") == str(folder) and "RANK" in environment:
            found[int(process.name)] = environment
    return found


def until_in_a_step(folder: Path, ranks: int = 1) -> dict[int, dict[str, str]]:
    """Wait until so many ranks of the folder's launchers are in a step."""
    deadline = time.monotonic() + STARTED_S
    while time.monotonic() < deadline:
        found = started_by(folder)
        files = [RankFiles(Path(environment["SHARDWRIGHT_RANK_FILES"])) for environment in found.values()]
        if len(found) >= ranks and all(file.step() is not None for file in files):
            return found
        time.sleep(0.02)
    raise AssertionError("the ranks did not begin a step")


_TAKEN = itertools.count()


def free_port() -> int:
    """A port that is free, and stays so: the kernel gives none of these to a connection, and this process each once."""
    while True:
        port = 10_000 + (os.getpid() * 101 + next(_TAKEN)) % 20_000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def met(count: int) -> Iterator[list[Nodes]]:
    """So many nodes with an address and a secret, in this process."""
    alone = [Nodes(count, node, f"127.0.0.1:{port}") for port in (free_port(),) for node in range(count)]
    with ExitStack() as stack:
        yield [stack.enter_context(meeting_of(node, Path("secret"), SEVERAL)) for node in alone]


Place = tuple[tuple[str, ...], dict[str, str]]
"""Options and variables of a command that is started on one node."""


def by_address(nodes: int, _folder: Path) -> list[Place]:
    """Each node by number and address."""
    rendezvous = ("--rendezvous", f"127.0.0.1:{free_port()}")
    return [(("--nnodes", str(nodes), "--node-rank", str(node), *rendezvous), {}) for node in range(nodes)]


def by_slurm(nodes: int, folder: Path) -> list[Place]:
    """Each node by the variables that srun sets, with a stand-in for `scontrol` that knows this machine alone."""
    said = {"hostnames node[1-2]": "node1\\nnode2\\n", "node node1": "NodeName=node1 NodeAddr=127.0.0.1\\n"}
    cases = "".join(f'"--oneliner show {asked}") printf "{told}" ;;\n' for asked, told in said.items())
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}*) exit 1 ;;\nesac\n')
    scontrol.chmod(0o755)
    shared = {
        "PATH": f"{scontrol.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid() * 7 % 5000),
        "SLURM_NNODES": str(nodes),
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_LOCALID": "0",
    }
    return [((), shared | {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node)}) for node in range(nodes)]


def main(nodes: int, node: int, port: int, actions: Sequence[str]) -> None:
    """Launch the ranks of one node."""
    first = node * len(actions)
    alone = Nodes(nodes, node, f"127.0.0.1:{port}" if nodes > 1 else None)
    hang_timeout_s = HANG_S if any(re.fullmatch("sleep|hang", action) for action in actions) and nodes > 1 else None
    with one_line_errors(), meeting_of(alone, Path("secret"), os.environ) as where:
        command, ranks = [sys.executable, str(RANK), *actions], range(first, first + len(actions))
        kept = Path(os.environ["KEPT_IN"]) if "KEPT_IN" in os.environ else None
        launch(command, ranks, nodes * len(actions), where, hang_timeout_s=hang_timeout_s, log_folder=kept)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4:])
