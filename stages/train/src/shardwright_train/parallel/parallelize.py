"""The embedding, a block or the head on one rank: built on the meta device, cut, shared, and then given weights."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from shardwright_formats.semantics.layout import layout_of, parameter_box
from shardwright_formats.types.model import EMBEDDING, HEAD, Parameter
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.strategy import DataParallel, Recompute, SequenceParallel, Strategy
from shardwright_train.models.base import Batch, Family, States
from shardwright_train.parallel.data import apply_fsdp, torch_dtype
from shardwright_train.parallel.fused import fuse
from shardwright_train.parallel.gradient_all_reduce import GradientAllReduce
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.redistribute import Redistribution
from shardwright_train.parallel.rng import Randomness, RNGKey, seed_of
from shardwright_train.parallel.sequence import ULYSSES_ATTENTION, exchange_around_attention
from shardwright_train.parallel.sharded_parameters import local_tensor, shard_parameters
from shardwright_train.parallel.sharding_rules import Split, apply_activation_checkpointing, enter_before, split_module
from shardwright_train.parallel.tensor import TensorParallel

__all__ = ["Layer", "Site", "build_layer"]


@dataclass(frozen=True)
class Site:
    """Where layers are built: a rank's place under a plan, and what a run settles."""

    plan: Plan
    family: Family
    rank: int
    groups: Groups
    attention: str
    device: torch.device
    seed: int | None
    """Of the initial weights; None leaves the parameters on the meta device."""

    @property
    def me(self) -> int:
        """This rank's number inside its pipeline stage."""
        stage = next(stage for stage in self.plan.stages if self.rank in stage.ranks)
        return stage.ranks.index(self.rank)


@dataclass(frozen=True)
class Layer:
    """A layer of a pipeline stage; `enter` moves each of its inputs into its layout, where it must be moved."""

    name: str
    kind: str
    strategy: Strategy
    module: nn.Module
    family: Family
    enter: tuple[Redistribution | None, ...]
    constants: dict[str, Any]
    rows: slice
    """Which samples of a microbatch this rank works on."""
    randomness: Randomness | None
    """None where nothing is dropped."""
    tensor_parallel: TensorParallel
    gradient_all_reduce: GradientAllReduce | None
    """Sums the gradients of a replicated layer; None where FSDP2 reduces them, or nobody."""
    split: Split
    mesh: DeviceMesh

    @cached_property
    def sharded(self) -> dict[str, nn.Parameter]:
        """This rank's parameters as they lie on the mesh, by their names in the module; they take the gradients."""
        return shard_parameters(self.module, self.split.tp_dims, self.mesh)

    def __call__(self, states: States, batch: Batch, rng_key: RNGKey) -> States | Tensor:
        """Run the layer on its layout's part of a microbatch; the head returns the loss."""
        states = tuple(x if move is None else move(x) for x, move in zip(states, self.enter, strict=False))
        batch = {name: x[self.rows] for name, x in batch.items()}
        if self.gradient_all_reduce is not None and states and states[0].requires_grad:
            # Autograd works on what was computed last: this view is the first of the layer, so that its gradient comes
            # after those of the layer's parameters. What was received has no such order: it is a leaf, as they are.
            states = (states[0].view_as(states[0]), *states[1:])
            states[0].register_hook(self._backward_is_over)
        if getattr(self.strategy, "recompute", None) is Recompute.FULL:
            recomputed: States = checkpoint(
                lambda *states: self._run(states, batch, rng_key),
                *states,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            return recomputed
        return self._run(states, batch, rng_key)

    def _backward_is_over(self, _gradient: Tensor) -> None:
        assert self.gradient_all_reduce is not None
        self.gradient_all_reduce.start()

    def _run(self, states: States, batch: Batch, rng_key: RNGKey) -> States | Tensor:
        with nullcontext() if self.randomness is None else self.randomness.seeded(*rng_key):
            if self.kind == EMBEDDING:
                embedded: States = self.module(batch)
                return embedded
            if self.kind == HEAD:
                loss: Tensor = self.module(states, batch)
                return loss
            return self.family.call(self.module, states, batch, self.constants)


def build_layer(site: Site, name: str, strategy: Strategy, enter: tuple[Redistribution | None, ...]) -> Layer:
    """Build one layer of a rank's pipeline stage.

    Its initial weights depend on the seed and the layer alone, not on the plan; on this rank no more than one
    layer is ever whole, in host memory, while its shards are filled.
    """
    plan, family = site.plan, site.family
    model, me = plan.model, site.me
    config = family.configuration(model)
    kind = getattr(strategy, "type", name)
    layout = layout_of(strategy)
    dp_index, tp_index = layout.coordinates(me)
    # Ranks that hold copies of the activations draw the same numbers.
    holder = (dp_index, tp_index) if layout.sequence_split else (dp_index,)
    randomness = Randomness(name, holder, tp_index, site.device)
    mesh = site.groups.mesh(plan, strategy)
    sequence_axis = site.groups.sequence_axis(plan, strategy)
    fused_loss = "cross_entropy" in plan.fused
    tensor_parallel = TensorParallel(mesh["tp"], sequence_axis, strategy.sequence_parallel, randomness, fused_loss)
    module, split = _cut_module(site, name, kind, strategy, tensor_parallel)
    apply_fsdp(module, strategy.data_parallel, mesh["dp"], plan)
    if site.seed is not None:
        module.to_empty(device=site.device)
        _fill(site, module, name, kind, strategy)
    part = layout.activation_shard(me, plan.microbatch_samples, model.sequence_length)
    example = torch.zeros(1, dtype=torch_dtype(plan.precision.compute), device=site.device)
    positions = tensor_parallel.positions_inside(model.sequence_length)
    inside = kind in family.parts
    replicated = strategy.data_parallel is DataParallel.DDP and mesh["dp"].size() > 1
    return Layer(
        name=name,
        kind=kind,
        strategy=strategy,
        module=module,
        family=family,
        enter=enter,
        constants=family.constants(config, kind, positions, example, site.attention) if inside else {},
        rows=slice(part.batch_start, part.batch_end),
        randomness=randomness if family.dropout(config) > 0 else None,
        tensor_parallel=tensor_parallel,
        gradient_all_reduce=GradientAllReduce(module, mesh["dp"].get_group()) if replicated else None,
        split=split,
        mesh=mesh,
    )


def _cut_module(
    site: Site, name: str, kind: str, strategy: Strategy, tensor_parallel: TensorParallel
) -> tuple[nn.Module, Split]:
    """The stock modules on the meta device, cut and joined by collectives; and what became of their parameters."""
    plan, family = site.plan, site.family
    config = family.configuration(plan.model)
    ulysses = strategy.sequence_parallel is SequenceParallel.ULYSSES and strategy.tp_size > 1
    with torch.device("meta"), _default_dtype(torch_dtype(plan.precision.parameters)):
        module = family.build(plan.model, name, ULYSSES_ATTENTION if ulysses else site.attention)
    fuse(module, plan.fused)
    split = split_module(module, family.rules, tensor_parallel)
    module.tensor_parallel = tensor_parallel  # type: ignore[assignment]
    if kind in family.parts:
        family.after_split(module, config, tensor_parallel)
        if ulysses:
            kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            exchange_around_attention(module, tensor_parallel.sequence_axis.get_group(), site.attention, kv_heads)
        _prepare_parts(module, family, kind, strategy, tensor_parallel)
    return module, split


def _prepare_parts(
    module: nn.Module, family: Family, kind: str, strategy: Strategy, tensor_parallel: TensorParallel
) -> None:
    parts = family.parts[kind]
    for name in parts.enter:
        enter_before(module.get_submodule(name), tensor_parallel)
    recomputed = {Recompute.ATTENTION: parts.attention, Recompute.MLP: parts.mlp}
    again = recomputed.get(getattr(strategy, "recompute", Recompute.NONE), ())
    for name in (*parts.attention, *parts.mlp):
        apply_activation_checkpointing(module, name, tensor_parallel.randomness, name in again)


def _fill(site: Site, module: nn.Module, name: str, kind: str, strategy: Strategy) -> None:
    """Give the shards their part of the layer's initial weights, and the buffers their values."""
    model, family = site.plan.model, site.family
    with torch.random.fork_rng(devices=[]), _default_dtype(torch_dtype(site.plan.precision.parameters)):
        torch.manual_seed(seed_of(site.seed, name))
        whole = family.build(model, name, site.attention)
        family.initialize(model, whole)
    described: dict[str, Parameter] = {p.name: p for p in model.types[kind].parameters}
    with torch.no_grad():
        for local_name, parameter in module.named_parameters():
            description = described[family.described_name(kind, local_name)]
            box = parameter_box(description, strategy, site.me)
            source = whole.get_parameter(local_name).view(description.shape)
            target = local_tensor(parameter).zero_()
            window = tuple(slice(0, high - low) for low, high in box)
            target[window].copy_(source[tuple(slice(low, high) for low, high in box)])
        for local_name, buffer in module.named_buffers():
            buffer.copy_(whole.get_buffer(local_name))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
