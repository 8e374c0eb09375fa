"""The nodes of a run, from options or Slurm's variables, and their addresses."""

import fcntl
import itertools
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta

from shardwright.command import Options
from shardwright.io import BadInput
from shardwright.types import Cluster, Count

LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915
_NAME_BYTES, _REQUEST_BYTES, _ADDRESS_BYTES = 15, 256, slice(20, 24)
_ELSEWHERE = ("198.51.100.1", 9)
"""An address and port that do not belong to any machine (RFC 5737)."""
_MAX_PORT = 65535
_USUAL_PORT = 29500
"""Port that PyTorch uses by default."""
_SCONTROL_S = 60
_NODE_ADDRESS = re.compile(r"\bNodeAddr=(\S+)")
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """The address at which the first node listens for the other nodes' launchers and ranks."""

    host: str
    port: int


@dataclass(frozen=True)
class Meeting:
    """How the nodes of a run meet: a secret, and node 0's listening socket."""

    file: Path
    """File in which node 0 stores the secret, unless all nodes received it from the environment."""
    secret: bytes | None = field(default=None, repr=False)
    """The secret, if it was given or this is node 0."""
    server: socket.socket | None = None
    """The socket on which node 0 listens."""


@dataclass(frozen=True)
class Nodes:
    """The number of nodes, this node's number and the first node's address (`HOST:PORT`; None on a single node)."""

    count: int = 1
    rank: int = 0
    rendezvous: str | None = None
    all_here: bool = False
    """Whether this machine runs the ranks of all nodes of the cluster."""
    step: str = ""
    """Job and step of Slurm, if Slurm determines the nodes: then `rendezvous` is a host, and its port is random."""
    meeting: Meeting | None = field(default=None, compare=False)
    """How the nodes meet; set within `meeting_of`."""

    def __post_init__(self) -> None:
        if self.all_here and self.count > 1:
            raise BadInput("--all-nodes-here", f"--nnodes is {self.count}", "give one of the two")
        if self.count > 1 and self.rendezvous is None:
            raise BadInput("--rendezvous", f"{self.count} nodes need a place to meet", "give HOST:PORT of node 0")
        if not 0 <= self.rank < self.count:
            raise BadInput("--node-rank", f"{self.rank} is not below --nnodes {self.count}", "number nodes from 0")
        _ = self.address

    def ranks_here(self, cluster: Cluster) -> range:
        """Return the ranks that are started on this machine."""
        if self.all_here:
            return range(cluster.num_devices)
        first = cluster.node_of_rank.index(self.rank)
        return range(first, first + cluster.of_rank(first).devices_per_node)

    @property
    def address(self) -> Address | None:
        """Return the rendezvous as host and port; the port is 0 until the secret determines it.

        Raises BadInput if the rendezvous is not `HOST:PORT`.
        """
        if self.rendezvous is None:
            return None
        if self.step:
            return Address(self.rendezvous, 0)
        match = _ADDRESS.fullmatch(self.rendezvous)
        if match is None or not 1 <= int(match["port"]) <= _MAX_PORT:
            raise BadInput("--rendezvous", f"{self.rendezvous!r} is not HOST:PORT", f"give a port of 1 to {_MAX_PORT}")
        return Address(match["host"].strip("[]"), int(match["port"]))


def nodes_of(count: int | None, rank: int | None, rendezvous: str | None, environment: Mapping[str, str]) -> Nodes:
    """Return the nodes that the options specify; missing options are taken from the current srun step.

    Outside a step, there is one node. Raises BadInput if a step has several tasks on a node, or if the address of its
    first host cannot be determined.
    """
    if "SLURM_STEP_NODELIST" not in environment:
        return Nodes(1 if count is None else count, rank or 0, rendezvous)
    if count is None:
        count = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    if rank is None:
        rank = _number(environment, "SLURM_NODEID", "SLURM_PROCID")
    if count > 1 and _number(environment, "SLURM_LOCALID", default=0):
        raise BadInput("srun", "it started several tasks on one node", "pass --ntasks-per-node=1")
    if count > 1 and rendezvous is None:
        step = f"{_number(environment, 'SLURM_JOB_ID')}.{_number(environment, 'SLURM_STEP_ID', default=0)}"
        return Nodes(count, rank, _host_of_step(environment), step=step)
    return Nodes(count, rank, rendezvous)


def check_all_nodes(cluster: Cluster, nodes: Nodes, file: object) -> None:
    """Raise BadInput if a command for all nodes of a cluster is started on another number of nodes.

    If no option specifies nodes, first print the line to start on each node, with this machine as node 0.
    """
    count = cluster.num_nodes
    if nodes.all_here or nodes.count == count:
        return
    remedy = f"start it on every node with --nnodes {count}, --node-rank and --rendezvous"
    if nodes == Nodes():
        secret = "if they share no folder, set SHARDWRIGHT_SECRET on all to the same 32 or more random characters"
        print(f"# once on each node, of which node 0 is {name_for_others()} with port {_USUAL_PORT}; {secret}:")
        print("\n".join(lines_of_nodes(cluster, sys.argv)), flush=True)
        remedy = "start it on every node: the lines are printed"
    raise BadInput(file, f"is for {count} nodes, --nnodes is {nodes.count}", remedy)


def lines_of_nodes(cluster: Cluster, command: Sequence[str]) -> list[str]:
    """Return the command line for each node of a cluster, in order, with this machine as node 0."""
    program = shlex.join([Path(command[0]).name, *command[1:]])
    types = [group.node_type for group in cluster.nodes for _ in range(group.count)]
    meeting = f"--nnodes {len(types)} --rendezvous {name_for_others()}:{_USUAL_PORT}"
    return [f"{program} {meeting} --node-rank {node}  # a node of {name}" for node, name in enumerate(types)]


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address, or a loopback address (netdevice(7)).

    None if no interface has it, and for IPv6 addresses other than ::1.
    """
    if _is_loopback(address):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                request = name.encode()[:_NAME_BYTES].ljust(_REQUEST_BYTES, b"\0")
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[_ADDRESS_BYTES]) == address:
                    return name
    return None


def means_loopback(host: str) -> bool:
    """Return whether a host name other than `localhost` resolves to loopback here, as machines' names do on Debian."""
    with suppress(OSError):
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        return all(map(_is_loopback, addresses)) and host != "localhost" and host not in addresses
    return False


def name_for_others() -> str:
    """Return this machine's name, or its outgoing address if the name resolves to loopback here."""
    name = socket.gethostname()
    if means_loopback(name):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ELSEWHERE)  # this sends nothing
            return str(probe.getsockname()[0])
    return name


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _host_of_step(environment: Mapping[str, str]) -> str:
    """Return the address at which Slurm reaches the step's first node; the node's name may be known only to Slurm."""
    listed = environment["SLURM_STEP_NODELIST"]
    hosts = _hosts(listed)
    # Slurm sorts the step's list by name across a job's components, but the first task runs on the first component.
    components = (f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in itertools.count())
    firsts = (_hosts(environment[name])[0] for name in itertools.takewhile(environment.__contains__, components))
    first = next((host for host in firsts if host in hosts), hosts[0])
    address = _NODE_ADDRESS.search(_scontrol(listed, "node", first))
    if address is None:
        raise _unresolved(listed, f"it reports no NodeAddr of {first}")
    return address[1]


def _hosts(listed: str) -> list[str]:
    return _scontrol(listed, "hostnames", listed).split()


def _scontrol(listed: str, *asked: str) -> str:
    """Return the output of `scontrol show`; raise BadInput if there is none."""
    command = ["scontrol", "--oneliner", "show", *asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unresolved(listed, str(error)) from None
    if done.returncode or not done.stdout.strip():
        raise _unresolved(listed, done.stderr)
    return done.stdout


def _unresolved(listed: str, why: str) -> BadInput:
    return BadInput("SLURM_STEP_NODELIST", f"scontrol does not resolve {listed!r} ({why.strip()})", "pass --rendezvous")


def _number(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """Return the value of the first of these variables that is set, or the default; BadInput if it is not a number."""
    name = next((name for name in names if name in environment), names[0])
    value = environment.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        problem = "is not set" if value is None else f"is {value!r}, not a number"
        raise BadInput(name, problem, "pass --nnodes, --node-rank and --rendezvous")
    return int(value)


class NodeOptions(Options, frozen=True, kw_only=True):
    """Options of a command that is started once on each node."""

    nnodes: Count | None = None
    """Number of nodes on which this command is started; by default srun's, else 1."""
    node_rank: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """This node's number in the cluster's order, counted from 0; by default srun's, else 0."""
    rendezvous: Annotated[str, Meta(max_length=300)] | None = None
    """HOST:PORT of node 0 if there are several nodes; not needed under srun."""

    all_nodes_here: bool = False
    """Start the ranks of all nodes on this machine, to try plans for a cluster that is not available."""

    def nodes(self, environment: Mapping[str, str]) -> Nodes:
        """Return the nodes that the options specify."""
        if self.all_nodes_here:
            return Nodes(self.nnodes or 1, self.node_rank or 0, all_here=True)
        return nodes_of(self.nnodes, self.node_rank, self.rendezvous, environment)
