"""One strategy for all layers of a plan, and the plan that it makes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import asdict, replace

from shardwright_formats.io import BadInput
from shardwright_formats.semantics.axes import effective
from shardwright_formats.types import (
    Cluster,
    ContextParallel,
    DataParallel,
    ExpertStrategy,
    GradientReduction,
    LayerStrategy,
    Model,
    PipelineStage,
    Plan,
    Recompute,
    SequenceParallel,
    Strategy,
)


class UniformStrategy(NamedTuple):
    """One strategy for all layers, and how it divides ranks, samples and layers."""

    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    micro_batch_size: int = 1
    """Samples of a data-parallel rank in a microbatch."""
    data_parallel: DataParallel = DataParallel.DDP
    shard_size: int = 0
    """Ranks that ZeRO shares states out among; 0 for all data-parallel ranks."""
    sequence_parallel: SequenceParallel = SequenceParallel.NONE
    recompute: Recompute = Recompute.NONE
    cp_size: int = 1
    context: ContextParallel = ContextParallel.GATHER
    """Way in which positions attend to those of other ranks, where cp_size is above 1."""
    experts: ExpertStrategy | None = None
    """Sharing of experts in layers that have some; None where each rank has its share of the features of all."""
    tp_consecutive: bool = True
    gradient_reduction: GradientReduction = GradientReduction.DEFERRED
    chunks: int = 1
    """Layer ranges of a pipeline stage."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Layers of each pipeline stage and chunk, in the order of the layers; empty where they are cut evenly."""
    nodes: tuple[int, ...] = ()
    """Index of the node type of each node in rank order; empty where nodes are taken in the cluster's order."""

    @property
    def strategy(self) -> Strategy:
        """Return the strategy of each layer, without what does nothing at its sizes."""
        return effective(
            Strategy(
                tp_size=self.tp_size,
                tp_consecutive=self.tp_consecutive,
                cp_size=self.cp_size,
                dp_size=self.dp_size,
                data_parallel=self.data_parallel,
                shard_size=self.shard_size,
                sequence_parallel=self.sequence_parallel,
            )
        )

    def with_experts(self, ep_size: int, etp_size: int) -> "UniformStrategy":
        """Return the choice with experts shared out, their states as those of the rest of a layer.

        Where each rank has its share of the features of all, this is how layers are without.
        """
        if (ep_size, etp_size) == (1, self.tp_size):
            return self
        experts = ExpertStrategy(ep_size=ep_size, etp_size=etp_size, data_parallel=self.data_parallel)
        return self._replace(experts=experts)

    @property
    def shard_groups(self) -> int:
        """Return the number of groups of data-parallel ranks that hold replicas of each other's shards."""
        return self.replicas // self.shard_size if self.shard_size else 1

    @property
    def replicas(self) -> int:
        """Return the number of ranks that have the same parts of the weights: data-parallel and context-parallel."""
        return self.dp_size * self.cp_size

    @property
    def shares_context(self) -> bool:
        """Return whether ranks share out positions that attend to one another."""
        return self.cp_size > 1

    def num_microbatches(self, global_batch_size: int) -> int:
        """Return the number of microbatches of a step."""
        return global_batch_size // (self.dp_size * self.micro_batch_size)


def plan_of_uniform(
    name: str,
    uniform: UniformStrategy,
    model: Model,
    cluster: Cluster,
    vocabulary: UniformStrategy | None = None,
    stage_ranks: Sequence[tuple[int, ...]] = (),
    **settings: Any,  # noqa: ANN401 (the types are those of the plan's fields)
) -> Plan:
    """Return the plan whose layers all have one strategy.

    `vocabulary` shards embedding and head, by default as the layers; `stage_ranks` are the ranks of each
    pipeline stage, by default equal blocks in order; `settings` are the other fields of the plan. Raises BadInput where
    the numbers do not divide one another.
    """
    ranges = uniform.pp_size * uniform.chunks
    if ranges > len(model.layers):
        kind = "pipeline stages" if uniform.chunks == 1 else "layer ranges"
        raise BadInput(f"model {model.name}", f"{ranges} {kind} for {len(model.layers)} layers", "lower pp")
    if uniform.experts is not None and all(model.types[kind].experts is UNSET for kind in model.layers):
        raise BadInput(f"model {model.name}", "has no experts to share out", "leave out ep and etp")
    cut = uniform.ranges or tuple(pairwise(even_cuts(len(model.layers), ranges)))
    try:
        outer, layer = (vocabulary or uniform).strategy, uniform.strategy
        return Plan(
            name=name,
            model=model,
            cluster=cluster,
            stages=stages_of(cut, uniform.pp_size, uniform.tp_size * uniform.cp_size * uniform.dp_size, stage_ranks),
            embedding=outer,
            head=outer,
            layers=tuple(_layer(layer, kind, uniform, model) for kind in model.layers),
            **settings,
        )
    except ValueError as error:
        raise BadInput(f"uniform plan {name}", str(error), "choose sizes that divide one another") from None


def even_cuts(layers: int, pp_size: int) -> tuple[int, ...]:
    """Return where to cut layers evenly: pp_size + 1 layer numbers, from 0.

    What is left over goes to stages in the middle, later ones first, then to the last: the first also holds the
    embedding, and the most microbatches.
    """
    share, left = divmod(layers, pp_size)
    order = [*range(pp_size - 2, 0, -1), pp_size - 1]
    sizes = [share + (i in order[:left]) for i in range(pp_size)]
    return tuple(sum(sizes[:i]) for i in range(pp_size + 1))


def stages_of(
    ranges: Sequence[tuple[int, int]], pp_size: int, width: int, stage_ranks: Sequence[tuple[int, ...]] = ()
) -> tuple[PipelineStage, ...]:
    """Return pipeline stages that hold layer ranges by turns, on equal blocks of ranks where none are given."""
    ranks = stage_ranks or [tuple(range(i * width, (i + 1) * width)) for i in range(pp_size)]
    return tuple(PipelineStage(ranks=ranks[i], layers=tuple(ranges[i::pp_size])) for i in range(pp_size))


def layer_of(
    strategy: Strategy,
    kind: str,
    recompute: Recompute,
    context: ContextParallel = ContextParallel.GATHER,
    experts: ExpertStrategy | None = None,
) -> LayerStrategy:
    """Return the strategy of a layer of a type; `experts` are those that it has, shared out.

    States of experts that one rank holds alone are not sharded: they are spelled as a search spells them.
    """
    shared = UNSET if experts is None else experts
    layer = LayerStrategy(**asdict(strategy), type=kind, recompute=recompute, context=context, experts=shared)
    if experts is None or (grid := layer.expert_grid) is None or grid.dp_size > 1:
        return layer
    return replace(layer, experts=replace(experts, data_parallel=DataParallel.DDP))


def _layer(strategy: Strategy, kind: str, uniform: UniformStrategy, model: Model) -> LayerStrategy:
    experts = None if model.types[kind].experts is UNSET else uniform.experts
    return layer_of(strategy, kind, uniform.recompute, uniform.context, experts)
