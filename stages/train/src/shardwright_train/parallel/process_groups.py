"""Process groups and device meshes, made once each and by every rank in the same order."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.launch.backend import edge_options, synchronize
from shardwright.plan.axes import Axis, ParameterAxes, axes_of
from shardwright.plan.process_groups import EDGE_CHANNELS, PlannedGroup, Purpose, planned_group, process_groups
from shardwright.plan.schedules.passes import Pass
from shardwright.types import Plan, Strategy

_MeshKey = tuple[tuple[int, ...], ParameterAxes]
_ALL_TO_ALL = (Purpose.EXCHANGE, Purpose.TIED_PARAMETERS)


class Groups:
    """The process groups of a plan, or of several plans in one launch; equal groups are created once.

    Making a group is collective over the whole world: `prepare` makes all groups a plan needs, in an order that
    follows only from the plan, and the look-ups after it never make any.
    """

    def __init__(self, device_type: str) -> None:
        self._device = torch.device(device_type)
        self._made: dict[PlannedGroup, dist.ProcessGroup | None] = {}
        self._meshes: dict[_MeshKey, DeviceMesh] = {}

    def prepare(self, plan: Plan, further: Iterable[PlannedGroup] = ()) -> None:
        """Make the groups of a plan and some further ones, and open their connections; collective over the world."""
        new = [group for group in dict.fromkeys((*process_groups(plan), *further)) if group not in self._made]
        for group in new:
            self._made[group] = dist.new_group(
                list(group.ranks),
                group_desc=group.description,
                pg_options=edge_options(self._device, EDGE_CHANNELS) if group.purpose is Purpose.EDGE else None,
            )
        self._warm_up(new)

    def close(self) -> None:
        """Destroy all groups, and free their communicators' buffers on devices.

        All ranks destroy groups in the order in which they were made: NCCL may wait there for a group's other ranks.
        """
        for group in self._made.values():
            if isinstance(group, dist.ProcessGroup):  # the others are for other ranks
                dist.destroy_process_group(group)
        self._made, self._meshes = {}, {}

    def mesh(self, plan: Plan, strategy: Strategy) -> DeviceMesh:
        """Return the mesh (dp, tp): tp shards a layer's parameters, dp replicates or shards them.

        If groups of ranks hold replicas of each other's shards (HSDP), two axes take the place of dp: replicate, shard.
        If whole experts are distributed over ranks, these lie along another axis, ep, between dp and tp.
        """
        axes, ranks = axes_of(strategy).dense, _stage_ranks(plan)
        key = ranks, axes
        if key not in self._meshes:
            grid = torch.tensor(axes.tensor.groups(ranks))
            purpose_of = {"dp": Purpose.DATA_PARALLEL}
            if axes.experts.size > 1:
                grid = grid.unflatten(0, (-1, axes.experts.size))
            if axes.replicates_shards:
                grid = grid.unflatten(0, (-1, axes.shards))
                purpose_of = dict.fromkeys(("replicate", "shard"), Purpose.DATA_PARALLEL)
            purpose_of |= {"ep": Purpose.EXCHANGE} if axes.experts.size > 1 else {}
            purpose_of |= {"tp": Purpose.TENSOR_PARALLEL}
            groups = [self._along(grid, axis, each) for axis, each in enumerate(purpose_of.values())]
            names = tuple(purpose_of)
            self._meshes[key] = DeviceMesh.from_group(groups, self._device.type, grid, mesh_dim_names=names)
        return self._meshes[key]

    def sequence_group(self, plan: Plan, strategy: Strategy) -> dist.ProcessGroup:
        """Return this rank's group that splits heads and features of a layer, or that exchanges positions for heads."""
        axes = axes_of(strategy)
        if axes.exchanges_heads:
            return self._in_stage(plan, Purpose.EXCHANGE, axes.heads)
        return self._in_stage(plan, Purpose.TENSOR_PARALLEL, axes.dense.tensor)

    def context_group(self, plan: Plan, strategy: Strategy) -> dist.ProcessGroup:
        """Return this rank's context-parallel group, whose ranks' positions attend to each other."""
        return self._in_stage(plan, Purpose.CONTEXT, axes_of(strategy).context)

    def along(self, mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
        """Return this rank's group along an axis of a layer's mesh; equal groups are created once."""
        assert mesh.mesh_dim_names is not None
        purposes = {"tp": Purpose.TENSOR_PARALLEL, "ep": Purpose.EXCHANGE}
        return self._along(mesh.mesh, axis, purposes.get(mesh.mesh_dim_names[axis], Purpose.DATA_PARALLEL))

    def _in_stage(self, plan: Plan, purpose: Purpose, axis: Axis) -> dist.ProcessGroup:
        """Return this rank's group along an axis of its pipeline stage."""
        groups = axis.groups(_stage_ranks(plan))
        return self.among(purpose, next(group for group in groups if dist.get_rank() in group))

    def among(self, purpose: Purpose, ranks: Iterable[int]) -> dist.ProcessGroup:
        """Return the group of these ranks, which include this one, for a purpose."""
        return self._of_this_rank(planned_group(purpose, tuple(ranks)))

    def edge(self, kind: Pass, around: bool, ranks: tuple[int, int]) -> dist.ProcessGroup:
        """Return the group of a sender and a receiver in neighbouring pipeline stages, in one direction.

        `around`: from the last pipeline stage to the first (forward; backward the reverse), when it is interleaved.
        """
        return self._of_this_rank(PlannedGroup(Purpose.EDGE, ranks, kind, around))

    def _of_this_rank(self, group: PlannedGroup) -> dist.ProcessGroup:
        made = self._made[group]
        assert made is not None
        return made

    def _along(self, grid: torch.Tensor, axis: int, purpose: Purpose) -> dist.ProcessGroup:
        """Return the group of this rank along an axis of a grid of ranks."""
        place: list[Any] = (grid == dist.get_rank()).nonzero()[0].tolist()
        place[axis] = slice(None)
        return self.among(purpose, grid[tuple(place)].tolist())

    def _warm_up(self, groups: Sequence[PlannedGroup]) -> None:
        """Send a number over each group and over the group of all ranks, one after the other.

        NCCL connects two ranks at their first message. There each waits for the other, or until its device has done
        all that it was given: in the middle of a schedule, with receives posted ahead, two ranks could wait for each
        other forever. Here they cannot: all ranks of the first group that is not done yet have finished all groups
        before it.
        """
        rank = dist.get_rank()
        for group in groups:
            if rank in group.ranks and len(group.ranks) > 1:
                _send_a_number(group, self._of_this_rank(group), torch.zeros(1, device=self._device))
        if dist.get_world_size() > 1:
            dist.all_reduce(torch.zeros(1, device=self._device))
        synchronize(self._device)


def _send_a_number(planned: PlannedGroup, group: dist.ProcessGroup, number: torch.Tensor) -> None:
    """Exchange one number within a group, to open the connections that it will use later.

    A context-parallel group also passes it around the ring, because an all-reduce does not open those connections.
    """
    if planned.purpose is Purpose.EDGE:
        source, target = planned.ranks
        if dist.get_rank() == source:
            dist.send(number, target, group=group)
        else:
            dist.recv(number, source, group=group)
    elif planned.purpose in _ALL_TO_ALL:
        numbers = number.expand(len(planned.ranks)).contiguous()
        dist.all_to_all_single(torch.empty_like(numbers), numbers, group=group)
    elif planned.purpose is Purpose.CONTEXT:
        dist.all_reduce(number, group=group)
        pass_on(number, group).wait()
    else:
        dist.all_reduce(number, group=group)


def _stage_ranks(plan: Plan) -> tuple[int, ...]:
    return plan.stages[plan.stage_of_rank(dist.get_rank())].ranks


# Sends around a ring.


class Travelling(NamedTuple):
    """A tensor in transit to the next rank of the ring, and the tensor arriving from the previous rank."""

    works: Sequence[dist.Work]
    sent: Tensor
    arriving: Tensor

    def wait(self) -> Tensor:
        """Return the tensor from the previous rank, once it has arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


def pass_on(x: Tensor, group: dist.ProcessGroup) -> Travelling:
    """Start sending a tensor to the next rank of a group, and return the transfer."""
    rank, size = group.rank(), group.size()
    sent, arriving = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    there, here = (dist.get_global_rank(group, (rank + i) % size) for i in (1, -1))
    ways = [dist.P2POp(dist.isend, sent, there, group), dist.P2POp(dist.irecv, arriving, here, group)]
    return Travelling(dist.batch_isend_irecv(ways), sent, arriving)
