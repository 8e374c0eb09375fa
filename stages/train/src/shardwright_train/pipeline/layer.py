"""A layer on one rank (embedding, block or head): its stock module, parallelized, initialized and called."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.models.mtp import mtp_depth, mtp_layers
from shardwright.models.traits import Mask
from shardwright.plan.axes import axes_of, layout_of
from shardwright.plan.chunks import chunk_layers
from shardwright.plan.expert_placement import experts_by_place, neighbours
from shardwright.plan.layout import Box, parameter_box, position_order, zigzag
from shardwright.types import EMBEDDING, HEAD, Parameter, Plan, Recompute, Strategy, base_type
from shardwright_train.data.share import Batch, BatchShare
from shardwright_train.models.base import Family
from shardwright_train.models.initial_weights import fill
from shardwright_train.models.masks import Places
from shardwright_train.models.mtp import call_depth
from shardwright_train.models.stock import States, WithLoss, with_memory
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.collectives import Redistribution
from shardwright_train.parallel.context import StandIn
from shardwright_train.parallel.data import GradientAllReduce, default_dtype, local_tensor, torch_dtype
from shardwright_train.parallel.experts import ExpertOrder
from shardwright_train.parallel.fused import fuse
from shardwright_train.parallel.host_activations import HostActivations
from shardwright_train.parallel.low_rank import low_rank_rules
from shardwright_train.parallel.parallelize import ModuleStyle, ParallelModule, Sharing, WeightProducts, parallelize
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.rng import Randomness, RNGKey
from shardwright_train.parallel.sharding_rules import BUFFER
from shardwright_train.parallel.tensor import SHARED_ATTENTION, TensorParallel, share_of
from shardwright_train.torch_private import end_of_weight_pass, storage_key, tree_leaves


class GivenWeights(Protocol):
    """Initial weights read from a folder, instead of drawn ones."""

    def read(self, window: Tensor, name: str, shape: Sequence[int], box: Box) -> bool:
        """Fill a tensor with the block `box` of a stock parameter.

        Return False if the folder does not have it and it must be drawn.
        """


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """A rank's place in a plan, and the settings of its run, for building its pipeline stage."""

    plan: Plan
    family: Family
    rank: int
    groups: Groups
    attention: str
    device: torch.device
    seed: int | None
    """Seed of the initial weights; None leaves the parameters on the meta device."""
    resumes: bool = False
    """Whether the weights will be read from a checkpoint, so that none are drawn."""
    weights: GivenWeights | None = None
    """Given initial weights; None: all are drawn."""
    stands_for: int = 1
    """In a measurement, the size of the context-parallel group for which each rank stands; otherwise 1."""

    @cached_property
    def order(self) -> Tensor | None:
        """Return the positions of a sample [s] in the order in which ranks hold them; None if it is unchanged."""
        order = position_order(self.plan, self.family.facts.attention.mask is Mask.CAUSAL)
        return None if order is None else torch.tensor(order, device=self.device)

    @cached_property
    def host_activations(self) -> HostActivations | None:
        """Return the activations that this rank's layers keep in host memory; None if they keep none there."""
        ranges = self.plan.stages[self.stage_index].layers
        moves = any(layer.offloads_activations for low, high in ranges for layer in self.plan.layers[low:high])
        return HostActivations(self.device) if moves else None

    @cached_property
    def depths(self) -> int:
        """Return the number of the model's layers that predict further tokens."""
        return mtp_layers(self.plan.model.layers)

    @cached_property
    def embeds_further(self) -> bool:
        """Return whether this rank has any layer that predicts further tokens."""
        ranges = self.plan.stages[self.stage_index].layers
        return any(mtp_depth(layer.type) for low, high in ranges for layer in self.plan.layers[low:high])

    @cached_property
    def stand_in(self) -> StandIn | None:
        """Return the context-parallel group that this rank represents in a measurement; None if it represents none."""
        length, ranks = self.plan.model.sequence_length * self.stands_for, self.stands_for
        order = zigzag(length, ranks) if self.family.facts.attention.mask is Mask.CAUSAL else range(length)
        return StandIn(ranks, torch.tensor(order, device=self.device)) if ranks > 1 else None

    @property
    def stage_index(self) -> int:
        """Return the index of this rank's pipeline stage."""
        return self.plan.stage_of_rank(self.rank)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Return the ranks of this rank's pipeline stage."""
        return self.plan.stages[self.stage_index].ranks

    @property
    def me(self) -> int:
        """This rank's index inside its pipeline stage."""
        return self.stage_ranks.index(self.rank)

    @property
    def masks(self) -> tuple[tuple[int | None, Places], ...]:
        """Return the distinct (window, places) of this rank's blocks that need masks for a micro-batch.

        The window is None for blocks without one. An image tower's blocks read no mask. If ranks hold positions in
        another order, blocks without a window need none, either: they read the documents themselves.
        """
        facts, model, pairs = self.family.facts, self.plan.model, dict[tuple[int | None, int, int], Places]()
        for low, high in self.plan.stages[self.stage_index].layers:
            for layer in self.plan.layers[low:high]:
                if facts.joined_by is not None and not facts.stacks[-1].has(base_type(layer.type)):
                    continue
                window, axis = model.types[layer.type].window, axes_of(layer).context
                if window is not None or self.order is None:
                    rows = share_of(axis, self.me, model.sequence_length)
                    places = Places(model.sequence_length, rows, rows, self.order)
                    pairs.setdefault((window, rows.start, rows.stop), places)
        return tuple((window, places) for (window, *_), places in pairs.items())

    @cached_property
    def share(self) -> BatchShare:
        """Return this rank's share of a global batch: the samples that any of its layers computes."""
        plan, chunks = self.plan, range(len(self.plan.stages[self.stage_index].layers))
        layers = [layer for chunk in chunks for layer in chunk_layers(plan, self.stage_index, chunk)]
        shards = [layout_of(strategy).activation_shard(self.me, plan.microbatch_samples, 1) for *_, strategy in layers]
        first, kinds = min((s.batch_start for s in shards), default=0), {kind for _, kind, _ in layers}
        return BatchShare(
            microbatches=plan.num_microbatches,
            microbatch_samples=plan.microbatch_samples,
            first=first,
            samples=max((s.batch_end for s in shards), default=0) - first,
            left_out=frozenset(
                name for name, kind in self.family.learns(plan.model).read_by.items() if kind not in kinds
            ),
            depths=self.depths,
        )


LossHook = Callable[["Layer", WithLoss], None]
"""A function called with a block and its output, if the output has an auxiliary loss."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of a pipeline stage; `redistributions` convert inputs that arrive in another layout."""

    name: str
    kind: str
    """The layer's type in the family."""
    family: Family
    parallel: ParallelModule
    redistributions: tuple[Redistribution | None, ...]
    constants: dict[str, Any]
    samples: slice
    """Slice of the layer's samples in the samples that this rank reads of a microbatch."""
    compiled: bool
    """Whether the layer is a compiled block, whose selective recomputation is compiled with it."""
    randomness: Randomness | None
    """Random numbers of dropout; None if nothing is dropped."""
    replicas: int
    """Number of ranks that compute the same part of the layer's activations."""
    depth: int = 0
    """The layer's depth, from 1, if it predicts further tokens; 0 for all other layers."""
    host: HostActivations | None = None
    """The stage's activations in host memory; None if no layer of the stage keeps any there."""

    @property
    def module(self) -> nn.Module:
        """The module that computes; its parameters are this rank's shards."""
        return self.parallel.module

    @property
    def strategy(self) -> Strategy:
        """Return the strategy by which the layer is sharded."""
        return self.parallel.units[0].strategy

    @cached_property
    def reductions(self) -> tuple[GradientAllReduce, ...]:
        """The gradient reductions of the layer's replicated units."""
        return tuple(r for unit in self.parallel.units if (r := unit.gradient_all_reduce) is not None)

    def start_reductions(self) -> None:
        """Start to reduce the gradients of the replicated units, once the layer's backward pass is over."""
        for reduction in self.reductions:
            reduction.start()

    def make_weight_gradients(self, last: bool) -> None:
        """Compute the weight gradients that the oldest backward pass has left; reduce the step's last ones at once."""
        if (products := self.parallel.style.products) is not None:
            products.make()
        for unit in self.parallel.units:
            end_of_weight_pass(unit.module, reduces=last and unit.gradient_all_reduce is None)
        self.start_reductions()

    def described_name(self, name: str) -> str:
        """Return the name that the model description has for a parameter of the module."""
        return self.family.described_name(self.kind, name)

    def __call__(self, states: States, batch: Batch, rng_key: RNGKey, note_loss: LossHook) -> States | Tensor:
        """Run the layer on its layout's part of a microbatch; the head returns the loss."""
        states = tuple(x if move is None else move(x) for x, move in zip(states, self.redistributions, strict=False))
        batch = {name: x[self.samples] for name, x in batch.items()}
        differentiates = torch.is_grad_enabled() and self.parallel.style.has_backward
        if differentiates and not any(x.requires_grad for x in states):
            # FSDP2 and recomputation hook into the gradient of an input: the first trained layer needs one, too.
            states = tuple(x.detach().requires_grad_() for x in states)
        if self.reductions and states and states[0].requires_grad:
            # Autograd runs the latest node first. This view is the layer's first node, so its gradient comes after the
            # gradients of all of the layer's parameters; a received input is a leaf, which has no place in that order.
            states = (states[0].view_as(states[0]), *states[1:])
            states[0].register_hook(lambda _gradient: self.start_reductions())
        run: Callable[..., States | WithLoss | Tensor] = partial(self._run, batch=batch, rng_key=rng_key)
        recompute = getattr(self.strategy, "recompute", Recompute.NONE)
        recomputation = self.parallel.units[0].sharing.tensor_parallel.recomputation
        if differentiates and recompute is Recompute.FULL:
            run = partial(recomputation.full, run)
        elif differentiates and recompute is Recompute.SELECTIVE and not self.compiled:
            run = partial(recomputation.selective, run)
        elif differentiates and recompute.parts:
            run = partial(recomputation.by_part, run)
        if self.host is None:
            output = run(*states)
        elif differentiates and getattr(self.strategy, "offloads_activations", False):
            with self.host.moving(rng_key, lambda: self._staying(batch)):
                output = run(*states)
        else:
            self.host.settle()
            output = run(*states)
        if not isinstance(output, WithLoss):
            return output
        if not self.family.auxiliary_loss:
            raise TypeError(f"{type(self.family).__name__} returns auxiliary losses, but its `auxiliary_loss` is False")
        # Outside of what recomputation replays, so that no loss is noted twice.
        note_loss(self, output)
        return output.states

    def _staying(self, batch: Batch) -> set[int]:
        """Return the storages that stay on the device: of parameters, buffers and tensors that other layers read."""
        own = (*self.module.parameters(), *self.module.buffers())
        shared = (x for x in tree_leaves((self.constants, batch)) if isinstance(x, Tensor))
        return {storage_key(local_tensor(x)) for x in (*own, *shared)}

    def _run(self, *states: Tensor, batch: Batch, rng_key: RNGKey) -> States | WithLoss | Tensor:
        with nullcontext() if self.randomness is None else self.randomness.seeded(*rng_key):
            if self.kind == EMBEDDING:
                embedded: States = self.module(batch)
                return embedded
            if self.kind == HEAD:
                loss: Tensor = self.module(states, batch)
                return loss
            if self.depth:
                return call_depth(self.family.call, self.module, self.depth, states, batch, self.constants)
            return self.family.call(self.module, states, batch, self.constants)


def build_layer(
    context: RankContext,
    name: str,
    type_name: str,
    strategy: Strategy,
    redistributions: tuple[Redistribution | None, ...],
) -> Layer:
    """Build one layer of a rank's pipeline stage.

    Its initial weights depend only on the seed and the layer, not on the plan; only this rank's shards are ever
    allocated.
    """
    plan, family = context.plan, context.family
    config, described, kind = family.configuration(plan.model), plan.model.types[type_name], base_type(type_name)
    layout = layout_of(strategy)
    dp_index, part = layout.samples.part_of(context.me), layout.sharers.part_of(context.me)
    # Ranks with replicas of activations must drop the same values, ranks with other samples or positions others.
    replica = (dp_index, layout.sequence.part_of(context.me)) if layout.sequence.size > 1 else (dp_index,)
    randomness = Randomness(name, replica, part, context.device)
    is_block = kind not in (EMBEDDING, HEAD)
    compiled = plan.compile and is_block
    # A compiled graph draws from a single generator; `check_kernels` refuses plans that would need several.
    inside = Randomness(name, replica, part, context.device) if compiled else randomness
    depth = mtp_depth(type_name)
    keeps_last = depth > 0 or family.keeps_last_sum(kind, config, plan.precision.compute)
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    recomputation = Recomputation(keeps_last, plan.schedule.splits, recompute.parts)
    sharings = {
        root: _sharing(context, each, inside, recomputation, name if root else "")
        for root, each in {"": strategy, **family.units(kind, strategy)}.items()
    }
    module = _stock_module(context, name, sharings[""].tensor_parallel)
    named = {p.name: p for p in described.parameters}
    parameters = {local: named[family.described_name(kind, local)] for local, _ in module.named_parameters()}
    style = _style(context, type_name, strategy, parameters, compiled)
    parallel = parallelize(module, style, sharings, plan.precision)
    if context.seed is not None:
        _begin(context, parallel, name, parameters)
    shard = layout.activation_shard(context.me, plan.microbatch_samples, plan.model.sequence_length)
    return Layer(
        name=name,
        kind=kind,
        family=family,
        parallel=parallel,
        redistributions=redistributions,
        constants=_constants(context, name, type_name, sharings[""].tensor_parallel) if is_block else {},
        samples=slice(shard.batch_start - context.share.first, shard.batch_end - context.share.first),
        compiled=compiled,
        randomness=randomness if family.dropout(config) > 0 else None,
        replicas=layout.replicas,
        depth=depth,
        host=context.host_activations,
    )


def _style(
    context: RankContext, type_name: str, strategy: Strategy, parameters: Mapping[str, Parameter], compiled: bool
) -> ModuleStyle:
    """Return how a layer's module is parallelized; `parameters`: their descriptions by their names in the module."""
    family, kind, config = context.family, base_type(type_name), context.family.configuration(context.plan.model)
    buffers = {local: BUFFER for local, parameter in parameters.items() if parameter.is_buffer}
    splits = context.plan.schedule.splits
    return ModuleStyle(
        rules=family.rules | buffers | low_rank_rules(parameters, kind == HEAD),
        parts=family.parts_of(kind, strategy),
        after_split=lambda module, tensor_parallel: family.after_split(module, config, tensor_parallel),
        attention=family.kernel_name(context.attention),
        compile=compiled,
        frozen=frozenset(local for local, parameter in parameters.items() if not parameter.trained),
        has_backward=context.plan.model.types[type_name].has_backward,
        products=WeightProducts() if splits and kind not in (EMBEDDING, HEAD) else None,
    )


def _sharing(
    context: RankContext, strategy: Strategy, randomness: Randomness, recomputation: Recomputation, experts_of: str
) -> Sharing:
    """Return how a layer's unit is sharded; `experts_of`: the layer's name if the unit is its experts, else empty."""
    plan, groups = context.plan, context.groups
    mesh, experts = groups.mesh(plan, strategy), experts_by_place(plan, experts_of)
    tensor_parallel = TensorParallel(
        axis=mesh["tp"],
        sequence_group=groups.sequence_group(plan, strategy),
        context_group=groups.context_group(plan, strategy),
        axes=axes_of(strategy),
        place=context.me,
        randomness=randomness,
        recomputation=recomputation,
        fused_loss="cross_entropy" in plan.fused,
        loss_chunks=plan.loss_chunks or 1,
        order=context.order,
        stand_in=context.stand_in,
        expert_group=mesh["ep"].get_group() if "ep" in (mesh.mesh_dim_names or ()) else None,
        expert_order=None if experts is None else ExpertOrder.of(experts, context.device),
    )
    return Sharing(strategy, mesh, tensor_parallel)


def _stock_module(context: RankContext, name: str, tensor_parallel: TensorParallel) -> nn.Module:
    """Return the stock module of a layer on the meta device."""
    plan = context.plan
    with torch.device("meta"), default_dtype(torch_dtype(plan.precision.parameters)):
        module = context.family.build(
            plan.model, name, SHARED_ATTENTION if tensor_parallel.attends_apart else context.attention
        )
    fuse(module, plan.fused)
    return module


def _constants(context: RankContext, name: str, type_name: str, tensor_parallel: TensorParallel) -> dict[str, Any]:
    example = torch.zeros(1, dtype=torch_dtype(context.plan.precision.compute), device=context.device)
    model, heads, length = context.plan.model, tensor_parallel.heads, context.plan.model.sequence_length
    places = Places(
        length, tensor_parallel.positions_inside(length), tensor_parallel.attending(length), tensor_parallel.order
    )
    kernel = SHARED_ATTENTION if tensor_parallel.attends_across else context.attention
    return context.family.constants(model, type_name, places, example, kernel, heads) | {"layer": name}


def _begin(context: RankContext, parallel: ParallelModule, name: str, parameters: Mapping[str, Parameter]) -> None:
    """Allocate a layer's shards, and fill them with initial weights unless a checkpoint has them."""
    with_memory(parallel.module, context.device)
    for parameter in parallel.module.parameters():
        local_tensor(parameter.detach()).zero_()  # padding of uneven shards stays zero
    if not context.resumes:
        _fill(context, parallel, name, parameters)


def _fill(context: RankContext, parallel: ParallelModule, name: str, parameters: Mapping[str, Parameter]) -> None:
    """Fill the shards with their part of the layer's initial weights, given or drawn."""
    model, family = context.plan.model, context.family
    fillings, order = family.fillings(model, name), experts_by_place(context.plan, name)
    for local_name, parameter in parallel.module.named_parameters():
        description = parameters[local_name]
        held = parameter_box(description, parallel.unit_of[local_name].strategy, context.me)
        shard = local_tensor(parameter.detach())[tuple(slice(0, high - low) for low, high in held)]
        stock_name = family.hugging_face_name(model, name, local_name)
        key = context.seed, family.full_name(model, name, local_name)
        for here, box in _blocks(held, order if description.ep_dim == 0 else None):
            window = shard[here]
            if context.weights is None or not context.weights.read(window, stock_name, description.shape, box):
                fill(window, fillings[local_name], description.shape, box, *key)


def _blocks(box: Box, order: Sequence[int] | None) -> Iterator[tuple[Any, Box]]:
    """Yield the blocks of a parameter that a shard consists of: where each lies in the shard, and its box.

    `order`: the expert at each place along the parameter's first dim; None if experts are in natural order.
    """
    if order is None:
        yield ..., box
        return
    (low, high), *others = box
    for here, experts in neighbours(order, low, high):
        yield here, (experts, *others)
