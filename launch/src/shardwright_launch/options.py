"""How a command is told its nodes."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from shardwright_formats.command import Options
from shardwright_formats.types.limits import Count
from shardwright_launch.nodes import Nodes, nodes_of

_Text = Annotated[str, Meta(max_length=300)]


class NodeOptions(Options, frozen=True, kw_only=True):
    """Options of a command that is started once on each node."""

    nnodes: Count | None = None
    """Number of nodes this command is started on; without it as srun says, else 1."""
    node_rank: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """This node's number in the cluster's order, from 0; without it as srun says, else 0."""
    rendezvous: _Text | None = None
    """HOST:PORT of node 0 where several nodes meet; the port above it is used too. Not needed under srun."""

    def nodes(self, environment: Mapping[str, str]) -> Nodes:
        """The nodes that are meant."""
        return nodes_of(self.nnodes, self.node_rank, self.rendezvous, environment)
