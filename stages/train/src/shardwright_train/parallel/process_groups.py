"""Process groups and device meshes, made once each and by every rank in the same order."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright_formats.semantics.layout import Layout, closed_groups, layout_of, parameter_layout
from shardwright_formats.semantics.tied_weights import ranks_of_replicas, tied_parameters
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import Strategy

__all__ = ["Groups"]

MeshKey = tuple[tuple[tuple[int, ...], ...], int, bool, int]
RankSets = tuple[tuple[int, ...], ...]

_DIRECTIONS = ("forward", "backward")
_AROUND = tuple(f"{direction} around" for direction in _DIRECTIONS)


class Groups:
    """The process groups of one launch, kept across its plans so that equal ones are shared.

    Making a group is collective over the whole world: `prepare` makes all groups a plan needs, in an order that
    follows from the plan alone, and the look-ups after it never make any.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._meshes: dict[MeshKey, DeviceMesh] = {}
        self._sets: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}

    def prepare(self, plan: Plan) -> None:
        """Make every mesh and group of a plan; collective over the world."""
        for strategy in (plan.embedding, *plan.layers, plan.head):
            self._make_mesh(_key(plan, parameter_layout(strategy), strategy.shard_size))
            self._make_mesh(_key(plan, layout_of(strategy)))
        columns = tuple(zip(*(stage.ranks for stage in plan.stages), strict=True))
        if len(plan.stages) > 1:
            several = len(plan.stages[0].layers) > 1
            for direction in _DIRECTIONS + (_AROUND if several else ()):
                self._make_sets(direction, columns)
        for ranks in (stage.ranks for stage in plan.stages):
            self._make_sets("redistribute", _exchange_sets(plan, ranks))
        if tied := ranks_of_replicas(tied_parameters(plan)):
            self._make_sets("tied parameters", (tied,))

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

        `forward` and `backward` (with ` around` for those from the last stage to the first) carry sends, `redistribute`
        activations, `tied parameters` gradients of parameters that have replicas.
        """
        return self._sets[purpose, tuple(ranks)]

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


def _key(plan: Plan, layout: Layout, shard_size: int = 0) -> MeshKey:
    return tuple(stage.ranks for stage in plan.stages), layout.tp_size, layout.consecutive, shard_size


def _exchange_sets(plan: Plan, ranks: tuple[int, ...]) -> RankSets:
    layouts = {layout_of(s) for s in (plan.embedding, *plan.layers, plan.head)}
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
