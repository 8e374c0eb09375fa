"""A rank's pipeline stage: its chunks of layers, its tied parameters, and gradient sums over ranks and layers."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.plan.axes import layout_of
from shardwright.plan.chunks import chunk_layers, has_backward, incoming_layout, needs_gradient
from shardwright.plan.expert_placement import expert_slices, experts_by_place
from shardwright.plan.layout import Box, parameter_box
from shardwright.plan.process_groups import Purpose
from shardwright.plan.schedules.passes import Action
from shardwright.plan.tied_weights import (
    Piece,
    Replica,
    pieces_from_owners,
    pieces_to_owners,
    ranks_of_replicas,
    tied_parameters,
    trained_ones,
)
from shardwright.types import EMBEDDING, HEAD, BoundaryTensor, DataParallel, Plan
from shardwright_train.data.share import Batch
from shardwright_train.models.stock import States
from shardwright_train.parallel.collectives import Redistribution, RedistributionSite, all_reduce_together
from shardwright_train.parallel.data import local_tensor, placed_as
from shardwright_train.parallel.experts import RouterBias, RouterBiases, corrected_bias
from shardwright_train.parallel.parallelize import Unit, parallelize_stage
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.rng import RNGKey
from shardwright_train.pipeline.layer import Layer, LossHook, RankContext, build_layer
from shardwright_train.torch_private import end_without_backward, gathered_bytes

# Tied parameters: replicas of one parameter in several layers, on any ranks and in any layouts, with one gradient.


class TiedParameters:
    """The replicas of tied parameters on one rank, and the two exchanges between them.

    Both exchanges are one all_to_all over the ranks that hold replicas; `group` is None when this rank holds none.
    """

    def __init__(self, plan: Plan, rank: int, groups: Groups) -> None:
        tied = tied_parameters(plan)
        self.rank, self.members = rank, ranks_of_replicas(tied)
        self.group = groups.among(Purpose.TIED_PARAMETERS, self.members) if rank in self.members else None
        self.replicas = frozenset(
            (replica.layer, replica.parameter.name) for one in tied for replica in one[1:] if rank in replica.ranks
        )
        """Layer and parameter of each replica on this rank that is not the owner: a norm counts only the owner."""
        trained = trained_ones(tied)
        self._from_owners = pieces_from_owners(tied)
        self._gradients = pieces_to_owners(trained), pieces_from_owners(trained)

    def alone(self) -> "TiedParameters":
        """Return a copy of these replicas that exchanges nothing."""
        alone = copy(self)
        alone.group = None
        return alone

    def sum_gradients(self, gradients: Mapping[tuple[str, str], Tensor], like: Tensor) -> None:
        """Give every replica the sum of all replicas' gradients: local shards by layer and parameter, in place.

        Frozen parameters have no gradients: a rank that has only frozen ones takes part with an empty tensor, with the
        dtype and the device of `like`. The owner adds in the order of the layers and sends out its sums, so that
        replicas stay equal to the bit.
        """
        to_owners, from_owners = self._gradients
        if self.group is not None and to_owners:
            self._exchange(to_owners, gradients, like, add=True)
            self._exchange(from_owners, gradients, like, add=False)

    def broadcast_owners(self, values: Mapping[tuple[str, str], Tensor]) -> None:
        """Give every replica its owner's values, in place."""
        if self.group is not None:
            self._exchange(self._from_owners, values, next(iter(values.values())), add=False)

    def _exchange(
        self, pieces: Sequence[Piece], tensors: Mapping[tuple[str, str], Tensor], like: Tensor, add: bool
    ) -> None:
        sends = sorted((p for p in pieces if p.source == self.rank != p.target), key=lambda p: p.target)
        receives = sorted((p for p in pieces if p.target == self.rank != p.source), key=lambda p: p.source)
        outgoing = [self._window(p.sender, p.box, tensors).reshape(-1) for p in sends]
        empty = like.new_empty(0)
        incoming = like.new_empty(sum(p.numel for p in receives))
        dist.all_to_all_single(
            incoming,
            torch.cat([empty, *outgoing]),
            [sum(p.numel for p in receives if p.source == member) for member in self.members],
            [sum(p.numel for p in sends if p.target == member) for member in self.members],
            group=self.group,
        )
        arrived = dict(zip(receives, incoming.split([p.numel for p in receives]), strict=True))
        for piece in (p for p in pieces if p.target == self.rank):
            target = self._window(piece.receiver, piece.box, tensors)
            value = arrived[piece] if piece in arrived else self._window(piece.sender, piece.box, tensors)
            value = value.view(target.shape)
            _ = target.add_(value) if add else target.copy_(value)

    def _window(self, replica: Replica, box: Box, tensors: Mapping[tuple[str, str], Tensor]) -> Tensor:
        mine = parameter_box(replica.parameter, replica.strategy, replica.ranks.index(self.rank))
        local = tensors[replica.layer, replica.parameter.name]
        return local[tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, mine, strict=True))]


# The chunks of a stage.


Hook = Callable[[str], None]


class Chunk(nn.Module):
    """A model chunk: one range of layers of a rank, called in order.

    Forward takes the states that the previous range passes on (none on the first) and the batch of a microbatch; it
    returns states, or at the end of the model the sum of cross entropy over the samples of this rank's group.
    `has_backward`: whether a backward pass goes through it; `needs_gradient`: whether it passes a gradient on.
    """

    def __init__(self, layers: list[Layer], has_backward: bool, needs_gradient: bool) -> None:
        super().__init__()
        self.layers, self.has_backward, self.needs_gradient = layers, has_backward, needs_gradient
        self.children_by_name = nn.ModuleDict({str(i): layer.module for i, layer in enumerate(layers)})
        self._is_last = False
        self.gathers = parallelize_stage(self, [layer.parallel for layer in layers])

    def forward(
        self, states: States, batch: Batch, rng_key: RNGKey, hook: Hook, note_loss: LossHook, before: Hook
    ) -> States | Tensor:
        """Run one microbatch through the chunk; `before` is called with the name of each layer before it runs."""
        for layer in self.layers:
            before(layer.name)
            if layer.kind == HEAD:
                return layer(_hooked_both_ways(states, hook, "layers", "head"), batch, rng_key, note_loss)
            output = layer(states, batch, rng_key, note_loss)
            assert isinstance(output, tuple)
            states = output
            if layer.kind == EMBEDDING:
                states = _hooked_both_ways(states, hook, "embedding", "layers", is_output=len(self.layers) == 1)
        return states

    @property
    def segments(self) -> tuple[str, ...]:
        """The segments of a pass that end with an event, in the order of the forward pass."""
        kinds = [layer.kind for layer in self.layers]
        return (*(["embedding"] if EMBEDDING in kinds else []), "layers", *(["head"] if HEAD in kinds else []))

    def prepare_backward(self, reduce_gradients: bool, last: bool) -> None:
        """Set whether the next pass that makes gradients reduces them and whether it is the step's last.

        ZeRO-3 units free their gathered parameters after every backward pass, other units after the step's last one.
        """
        self._is_last = last
        if not self.layers or not self.has_backward:
            return
        assert isinstance(self, FSDPModule)
        # Without this FSDP2 would reduce gradients after every microbatch, and reshard ZeRO-2 parameters each time.
        self.set_requires_gradient_sync(reduce_gradients)
        self.set_is_last_backward(last)
        for unit in (unit for layer in self.layers for unit in layer.parallel.units):
            if (reduction := unit.gradient_all_reduce) is not None:
                reduction.collect()
                reduction.armed = reduce_gradients
            if isinstance(unit.module, FSDPModule):
                zero3 = unit.strategy.data_parallel is DataParallel.ZERO3
                unit.module.set_reshard_after_backward(last or zero3, recurse=False)
                if reduction is not None:
                    # The unit's gradients go through `reduction`; FSDP2 must not reduce them a second time.
                    unit.module.set_requires_gradient_sync(False, recurse=False)

    def end_step(self) -> None:
        """End a step that no backward pass ends: FSDP2 forgets its forward passes, and shards the parameters again."""
        if self.layers:
            end_without_backward(self)

    def make_weight_gradients(self) -> None:
        """Compute the weight gradients that the oldest backward pass has left, from the last layer to the first.

        The step's last ones are reduced while the gradients of earlier layers are made.
        """
        for layer in reversed(self.layers):
            layer.make_weight_gradients(self._is_last)
        if self._is_last:
            self.end_step()

    def end_backward(self) -> None:
        """End a backward pass: the matrix products that it has left belong to one weight pass."""
        for layer in self.layers:
            if (products := layer.parallel.style.products) is not None:
                products.end_of_pass()

    def start_reductions(self) -> None:
        """After a backward pass, start to reduce gradients of layers whose inputs have no gradient to trigger that."""
        for layer in self.layers:
            layer.start_reductions()


@dataclass(frozen=True)
class Stage:
    """A rank's model: a chunk for each of its ranges of layers, and its replicas of tied parameters."""

    context: RankContext
    chunks: tuple[Chunk, ...]
    tied: TiedParameters

    @property
    def layers(self) -> Iterator[Layer]:
        """Yield the layers of all chunks."""
        return (layer for chunk in self.chunks for layer in chunk.layers)

    @property
    def units(self) -> Iterator[tuple[Layer, Unit]]:
        """Yield the parameter groups of all layers, each with its layer."""
        return ((layer, unit) for layer in self.layers for unit in layer.parallel.units)

    @property
    def has_blocks(self) -> bool:
        """Return whether any layer is neither the embedding nor the head."""
        return any(layer.kind not in (EMBEDDING, HEAD) for layer in self.layers)

    @property
    def has_backward(self) -> bool:
        """Return whether a backward pass goes through any chunk."""
        return any(chunk.has_backward for chunk in self.chunks)

    def computes(self, action: Action) -> bool:
        """Return whether an action computes something: layers before the first trained one make no gradients."""
        return self.chunks[action.chunk].has_backward or not action.kind.makes_gradients

    def gathers_for(self, action: Action) -> bool:
        """Return whether an action computes with parameters that ZeRO-3 gathers: weight passes do not."""
        return bool(action.kind.way) and self.computes(action)

    def parameters(self) -> Iterator[tuple[Layer, str, nn.Parameter]]:
        """Yield this rank's parameters, with their layer and their name in the model description."""
        for layer in self.layers:
            for name, parameter in layer.parallel.parameters.items():
                yield layer, layer.described_name(name), parameter

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters by their Hugging Face names."""
        full_name, model = self.context.family.full_name, self.context.plan.model
        return {full_name(model, layer.name, name): parameter for layer, name, parameter in self.parameters()}

    def stock_names(self) -> dict[str, str]:
        """Return the stock model's parameter name, by Hugging Face name: for replicas, the name of their owner."""
        owner_name, model = self.context.family.owner_name, self.context.plan.model
        owners = (owner_name(model, layer.name, name) for layer, name, _ in self.parameters())
        return dict(zip(self.parameters_by_name(), owners, strict=True))

    def expert_orders(self) -> dict[str, tuple[int, ...]]:
        """Return the experts along the first dim of parameters that reorder experts, by Hugging Face name."""
        model, plan, found = self.context.plan.model, self.context.plan, dict[str, tuple[int, ...]]()
        for (layer, name, _), full_name in zip(self.parameters(), self.parameters_by_name(), strict=True):
            order = experts_by_place(plan, layer.name)
            if order and any(p.name == name and p.ep_dim == 0 for p in model.type_of(layer.name).parameters):
                found[full_name] = order
        return found

    def replicas(self) -> frozenset[str]:
        """Return the Hugging Face names of the parameters that are replicas of another layer's parameter."""
        full = zip(self.parameters(), self.parameters_by_name(), strict=True)
        return frozenset(name for (e, described, _), name in full if (e.name, described) in self.tied.replicas)

    def router_biases(self) -> RouterBiases | None:
        """Return the router biases on this rank that each step corrects; None if the model has none."""
        model = self.context.plan.model
        corrected = {kind: bias.name for kind in model.types if (bias := corrected_bias(model.types[kind]))}
        if not corrected:
            return None
        slices = {f"layers[{number}]": part for number, part in expert_slices(model).items()}
        names = {f"layers[{number}]": corrected.get(kind) for number, kind in enumerate(model.layers)}
        held = {
            layer.name: RouterBias(local_tensor(parameter.detach()), slices[layer.name])
            for layer, name, parameter in self.parameters()
            if name == names.get(layer.name)
        }
        return RouterBiases(held)

    @property
    def gathered_ahead(self) -> frozenset[str]:
        """The names of the layers whose parameters ZeRO-3 gathers while the previous layer computes."""
        zero3 = DataParallel.ZERO3
        return frozenset(layer.name for layer, unit in self.units if unit.strategy.data_parallel is zero3)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of ZeRO-3 parameters gathered or being gathered; between passes, only the next pass's first layer."""
        zero3 = (unit for _, unit in self.units if unit.strategy.data_parallel is DataParallel.ZERO3)
        return sum(gathered_bytes(unit.module) for unit in zero3)

    def prepare_gathers(self, action: Action, following: Action | None) -> None:
        """Let an action gather the first layer of the next one, or keep a layer that both need."""
        then = None if following is None else (self.chunks[following.chunk].gathers, following.kind)
        self.chunks[action.chunk].gathers.prepare(action.kind, then)

    def finish_gradients(self) -> None:
        """Create missing gradients of trained parameters, and sum gradients that several ranks or layers have made."""
        gradients, partial = {}, defaultdict[dist.ProcessGroup, list[Tensor]](list)
        for layer, unit in self.units:
            if unit.gradient_all_reduce is not None:
                unit.gradient_all_reduce.finish()
            for name, used in unit.named_parameters():
                if not used.requires_grad:
                    continue
                local = torch.zeros_like(local_tensor(used)) if used.grad is None else local_tensor(used.grad)
                parameter, used.grad = layer.parallel.parameters[name], None
                parameter.grad = placed_as(parameter, local)
                gradients[layer.name, layer.described_name(name)] = local
                if name in unit.partial:
                    partial[unit.sharing.tensor_parallel.group].append(local)
        for group, parts in partial.items():
            all_reduce_together(parts, group)
        if self.tied.group is not None:
            _, _, parameter = next(self.parameters())
            self.tied.sum_gradients(gradients, local_tensor(parameter))


def build_stage(context: RankContext) -> Stage:
    """Build a rank's stage, one layer after the other."""
    chunks = range(len(context.plan.stages[context.stage_index].layers))
    tied = TiedParameters(context.plan, context.rank, context.groups)
    stage = Stage(context, tuple(_build_chunk(context, chunk) for chunk in chunks), tied)
    if context.seed is not None and not context.resumes:
        with torch.no_grad():
            # Weights are drawn by name and position, so a replica in another layer has drawn other values.
            tied.broadcast_owners({(layer.name, name): local_tensor(p) for layer, name, p in stage.parameters()})
    return stage


def _build_chunk(context: RankContext, chunk: int) -> Chunk:
    plan, stage = context.plan, context.stage_index
    current = incoming_layout(plan, stage, chunk)
    layers = []
    for name, kind, strategy in chunk_layers(plan, stage, chunk):
        wanted = layout_of(strategy)
        moves = tuple(
            None if current is None or current == wanted else Redistribution(current, wanted, _site(context, tensor))
            for tensor in plan.model.received_by(name)
        )
        layers.append(build_layer(context, name, kind, strategy, moves))
        current = wanted
    return Chunk(layers, has_backward(plan, stage, chunk), needs_gradient(plan, stage, chunk))


def _site(context: RankContext, tensor: BoundaryTensor) -> RedistributionSite:
    return RedistributionSite(
        context.stage_ranks, context.me, context.plan.microbatch_samples, tensor.sequence_length, context.groups
    )


def _hooked_both_ways(states: States, hook: Hook, ended: str, begun: str, is_output: bool = False) -> States:
    """Call the hook at the boundary of two segments when the forward pass reaches it, and when the gradients do.

    Returns views of the states, which only the later segment reads: when their gradients exist, its backward pass is
    over. A state itself may also be read before the boundary. An output of the chunk has no other reader, and FSDP2
    does not accept a view there.
    """
    hook(f"{ended}.forward")
    views = states if is_output else tuple(x.view_as(x) if x.requires_grad else x for x in states)
    for view in views:
        if view.requires_grad:
            view.register_hook(lambda _grad: hook(f"{begun}.backward"))
    return views
