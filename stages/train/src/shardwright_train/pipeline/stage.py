"""One rank's part of a pipeline stage, built from a plan: the one way in which every command builds it."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright_formats.semantics.communication import chunk_layers, incoming_layout
from shardwright_formats.semantics.layout import layout_of
from shardwright_formats.semantics.tied_weights import ranks_of_replicas, tied_parameters
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.strategy import DataParallel
from shardwright_train.models.base import Batch, States
from shardwright_train.parallel.collectives import sum_together
from shardwright_train.parallel.data import apply_fsdp_to_stage, prefetch_in_backward
from shardwright_train.parallel.parallelize import Layer, Site, build_layer
from shardwright_train.parallel.redistribute import Redistribution
from shardwright_train.parallel.rng import RNGKey
from shardwright_train.parallel.sharded_parameters import local_tensor, placed_as
from shardwright_train.parallel.tied_weights import TiedParameters

__all__ = ["Chunk", "Hook", "Stage", "build_stage"]

Hook = Callable[[str], None]


class Chunk(nn.Module):
    """The layers of one range of layers of a rank, called in order.

    Forward takes the states that the previous range hands over (none on the first) and the batch of a microbatch; it
    returns states, or at the end of the model the sum of cross entropy over the samples of this rank's group.
    """

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = layers
        self.children_by_name = nn.ModuleDict({str(i): e.module for i, e in enumerate(layers)})

    def forward(self, states: States, batch: Batch, rng_key: RNGKey, hook: Hook) -> States | Tensor:
        """One microbatch."""
        for layer in self.layers:
            if layer.kind == HEAD:
                return layer(_hooked_both_ways(states, hook, "layers", "head"), batch, rng_key)
            output = layer(states, batch, rng_key)
            assert isinstance(output, tuple)
            states = output
            if layer.kind == EMBEDDING:
                states = _hooked_both_ways(states, hook, "embedding", "layers")
        return states

    def prepare_backward(self, reduce_gradients: bool, last: bool) -> None:
        """Say of the next backward pass whether it reduces gradients and whether it is the step's last.

        ZeRO-3 layers give their gathered parameters back after every backward pass, the others after the last.
        """
        if not self.layers:
            return
        assert isinstance(self, FSDPModule)
        self.set_requires_gradient_sync(reduce_gradients)
        self.set_is_last_backward(last)
        for layer in self.layers:
            if layer.gradient_all_reduce is not None:
                layer.gradient_all_reduce.collect()
                layer.gradient_all_reduce.armed = reduce_gradients
            if isinstance(layer.module, FSDPModule):
                zero3 = layer.strategy.data_parallel is DataParallel.ZERO3
                layer.module.set_reshard_after_backward(last or zero3, recurse=False)
                if layer.gradient_all_reduce is not None:
                    layer.module.set_requires_gradient_sync(False)

    def start_reductions(self) -> None:
        """After a backward pass: begin to reduce the layers whose inputs have no gradient that could say so."""
        for layer in self.layers:
            if layer.gradient_all_reduce is not None:
                layer.gradient_all_reduce.start()


@dataclass(frozen=True)
class Stage:
    """All that a rank holds: a chunk for each of its ranges of layers, and the copies it has of tied parameters."""

    site: Site
    chunks: tuple[Chunk, ...]
    tied: TiedParameters

    @property
    def layers(self) -> Iterator[Layer]:
        """The layers of all chunks."""
        return (layer for chunk in self.chunks for layer in chunk.layers)

    def parameters(self) -> Iterator[tuple[Layer, str, nn.Parameter]]:
        """This rank's parameters, with their layer and their name in the model description."""
        for layer in self.layers:
            for name, parameter in layer.sharded.items():
                yield layer, layer.family.described_name(layer.kind, name), parameter

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """This rank's parameters under their Hugging Face names."""
        model, family = self.site.plan.model, self.site.family
        return {
            family.full_name(model, layer.name, name): parameter
            for layer in self.layers
            for name, parameter in layer.sharded.items()
        }

    def replicas(self) -> frozenset[str]:
        """Names of the parameters that are replicas of what another layer owns."""
        full = zip(self.parameters(), self.parameters_by_name(), strict=True)
        return frozenset(name for (e, described, _), name in full if (e.name, described) in self.tied.replicas)

    def finish_gradients(self) -> None:
        """Make every gradient exist, and sum those that several ranks or layers have a part of."""
        gradients, partial = {}, defaultdict[dist.ProcessGroup, list[Tensor]](list)
        for layer in self.layers:
            if layer.gradient_all_reduce is not None:
                layer.gradient_all_reduce.finish()
            for name, own in layer.module.named_parameters():
                local = torch.zeros_like(local_tensor(own)) if own.grad is None else local_tensor(own.grad)
                parameter, own.grad = layer.sharded[name], None
                parameter.grad = placed_as(parameter, local)
                gradients[layer.name, layer.family.described_name(layer.kind, name)] = local
                if name in layer.split.partial:
                    partial[layer.tensor_parallel.group].append(local)
        for group, parts in partial.items():
            sum_together(parts, group)
        self.tied.sum_gradients(gradients)


def build_stage(site: Site) -> Stage:
    """Build what a rank holds, one layer after the other."""
    plan = site.plan
    index = plan.stage_of_rank(site.rank)
    chunks = tuple(_build_chunk(site, index, number) for number in range(len(plan.stages[index].layers)))
    tied = TiedParameters(plan, site.rank, _replica_group(site))
    stage = Stage(site, chunks, tied)
    if site.seed is not None:
        with torch.no_grad():
            tied.broadcast_owners({(e.name, name): local_tensor(p) for e, name, p in stage.parameters()})
    return stage


def _build_chunk(site: Site, stage: int, number: int) -> Chunk:
    plan = site.plan
    ranks = plan.stages[stage].ranks
    current = incoming_layout(plan, stage, number)
    layers = []
    for name, _, strategy in chunk_layers(plan, stage, number):
        wanted = layout_of(strategy)
        moves = tuple(
            Redistribution(
                current, wanted, plan.microbatch_samples, tensor.sequence_length, ranks, site.me, site.groups
            )
            if current is not None and current != wanted
            else None
            for tensor in plan.model.boundary
        )
        layers.append(build_layer(site, name, strategy, moves))
        current = wanted
    chunk = Chunk(layers)
    if layers:
        apply_fsdp_to_stage(chunk, [layer.module for layer in layers], site.groups.mesh(plan, layers[0].strategy)["dp"])
        prefetch_in_backward([(layer.module, layer.strategy.data_parallel) for layer in layers])
    return chunk


def _replica_group(site: Site) -> dist.ProcessGroup | None:
    members = ranks_of_replicas(tied_parameters(site.plan))
    return site.groups.among("tied parameters", members) if site.rank in members else None


def _hooked_both_ways(states: States, hook: Hook, ended: str, begun: str) -> States:
    """At the border of two segments: the forward pass ended the one, and their gradients will end the other.

    Views, because a state may have other uses before the border, and none behind it: the other segment's backward pass
    is over when the gradients are there that it makes.
    """
    hook(f"{ended}.forward")
    if not states[0].requires_grad:
        return states
    views = tuple(x.view_as(x) for x in states)
    for view in views:
        view.register_hook(lambda _grad: hook(f"{begun}.backward"))
    return views
