"""Process groups and device meshes, made once each and by every rank in the same order."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright_formats.semantics.chunks import cuts
from shardwright_formats.semantics.layout import Layout, closed_groups, layout_of, parameter_layout
from shardwright_formats.semantics.schedule import Pass
from shardwright_formats.semantics.tied_weights import ranks_of_replicas, tied_parameters
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import Strategy

MeshKey = tuple[tuple[tuple[int, ...], ...], int, bool, int]
RankSets = tuple[tuple[int, ...], ...]

Edge = tuple[Pass, bool, tuple[int, int]]
"""The pass whose messages go over it, whether they go from the last stage to the first, and their two ranks."""


class Groups:
    """The process groups of a plan, or of several in one launch, which share those that are equal.

    Making a group is collective over the whole world: `prepare` makes all groups a plan needs, in an order that
    follows from the plan alone, and the look-ups after it never make any.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._meshes: dict[MeshKey, DeviceMesh] = {}
        self._sets: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._edge_groups: dict[Edge, dist.ProcessGroup] = {}

    def prepare(self, plan: Plan) -> None:
        """Make every mesh and group of a plan; collective over the world."""
        for strategy in (plan.embedding, *plan.layers, plan.head):
            self._make_mesh(_key(plan, parameter_layout(strategy), strategy.shard_size))
            self._make_mesh(_key(plan, layout_of(strategy)))
        self._make_edges(dict.fromkeys(_edges(plan)))
        for ranks in (stage.ranks for stage in plan.stages):
            self._make_sets("redistribute", _exchange_sets(plan, ranks))
        if tied := ranks_of_replicas(tied_parameters(plan)):
            self._make_sets("tied parameters", (tied,))

    def close(self) -> None:
        """Destroy all groups, and the buffers that their communicators hold on devices."""
        meshes = [group for mesh in self._meshes.values() for group in mesh.get_all_groups()]
        every = (*meshes, *self._sets.values(), *self._edge_groups.values())
        own = {group for group in every if isinstance(group, dist.ProcessGroup)}  # others are for other ranks
        for group in own - {dist.group.WORLD}:  # which a mesh over all ranks takes
            dist.destroy_process_group(group)
        self._meshes, self._sets, self._edge_groups = {}, {}, {}

    def mesh(self, plan: Plan, strategy: Strategy) -> DeviceMesh:
        """The mesh (pp, dp, tp) whose tp axis shards a layer's parameters, and whose dp axis replicates or shards them.

        Where groups of ranks hold replicas of each other's shards, two axes take the place of dp: replicate, shard.
        """
        return self._meshes[_key(plan, parameter_layout(strategy), strategy.shard_size)]

    def sequence_axis(self, plan: Plan, strategy: Strategy) -> DeviceMesh:
        """The axis of the tp_size ranks that one sample is spread over."""
        return self._meshes[_key(plan, layout_of(strategy))]["tp"]

    def among(self, purpose: str, ranks: Iterable[int]) -> dist.ProcessGroup:
        """The group of some ranks for a purpose.

        `redistribute` is for activations, `tied parameters` for gradients of parameters that have replicas.
        """
        return self._sets[purpose, tuple(ranks)]

    def edge(self, kind: Pass, around: bool, ranks: tuple[int, int]) -> dist.ProcessGroup:
        """The group of a sender and a receiver of neighbouring pipeline stages, in one direction.

        `around`: from the last pipeline stage to the first (forward; backward the reverse), when it is interleaved.
        """
        return self._edge_groups[kind, around, ranks]

    def _make_mesh(self, key: MeshKey) -> None:
        if key in self._meshes:
            return
        stages, tp_size, consecutive, shard_size = key
        grid = torch.tensor(stages)
        pp_size, size = grid.shape
        if consecutive:
            grid = grid.view(pp_size, size // tp_size, tp_size)
        else:
            grid = grid.view(pp_size, tp_size, size // tp_size).transpose(1, 2)
        names: tuple[str, ...] = ("pp", "dp", "tp")
        if shard_size:
            grid, names = grid.unflatten(1, (-1, shard_size)), ("pp", "replicate", "shard", "tp")
        self._meshes[key] = DeviceMesh(self._device_type, grid, mesh_dim_names=names)

    def _make_sets(self, purpose: str, sets: RankSets) -> None:
        for ranks in sets:
            if (purpose, ranks) not in self._sets:
                self._sets[purpose, ranks] = dist.new_group(list(ranks))

    def _make_edges(self, edges: Iterable[Edge]) -> None:
        new = [edge for edge in edges if edge not in self._edge_groups]
        self._edge_groups.update({edge: dist.new_group(list(edge[-1])) for edge in new})
        self._warm_up(new)

    def _warm_up(self, edges: Iterable[Edge]) -> None:
        """Send a number over each edge, one after the other.

        NCCL makes a communicator at the first message of two ranks, and both wait there for the other: in the midst of
        a schedule two ranks could wait for each other at different messages, for ever.
        """
        number = torch.zeros(1, device=self._device_type)
        for edge in edges:
            source, target = edge[-1]
            if dist.get_rank() == source:
                dist.send(number, target, group=self._edge_groups[edge])
            elif dist.get_rank() == target:
                dist.recv(number, source, group=self._edge_groups[edge])


def _edges(plan: Plan) -> Iterator[Edge]:
    """What messages between pipeline stages go over, in an order that all ranks know."""
    for cut in cuts(plan):
        for kind, (source, target) in ((Pass.FORWARD, cut[:2]), (Pass.BACKWARD, cut[1::-1])):
            senders, receivers = plan.stages[source[0]].ranks, plan.stages[target[0]].ranks
            for tensor in plan.model.boundary:
                for transfer in cut.transfers(kind, plan.microbatch_samples, tensor.sequence_length):
                    yield kind, cut.around, (senders[transfer.source], receivers[transfer.target])


def _key(plan: Plan, layout: Layout, shard_size: int = 0) -> MeshKey:
    """All pipeline stages of one width share a mesh."""
    stages = tuple(stage.ranks for stage in plan.stages if len(stage.ranks) == layout.stage_size)
    return stages, layout.tp_size, layout.consecutive, shard_size


def _exchange_sets(plan: Plan, ranks: tuple[int, ...]) -> RankSets:
    layouts = {layout_of(s) for s in (plan.embedding, *plan.layers, plan.head) if s.tp_size * s.dp_size == len(ranks)}
    lengths = {tensor.sequence_length for kind in plan.model.types.values() for tensor in kind.outputs}
    sets = {
        tuple(ranks[i] for i in group)
        for source in layouts
        for target in layouts
        if source != target
        for length in lengths
        for group in closed_groups(source, target, plan.microbatch_samples, length)
        if len(group) > 1
    }
    return tuple(sorted(sets))
