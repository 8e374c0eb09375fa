"""One rank's part of a pipeline stage, built from a plan: the one way in which every command builds it."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright_formats.semantics.layout import layout_of
from shardwright_formats.semantics.step_communication import chunk_elements, incoming_layout
from shardwright_formats.semantics.tied_weights import ranks_of_ties, ties_of
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.strategy import DataParallel
from shardwright_train.models.base import Batch, States
from shardwright_train.parallel.collectives import sum_together
from shardwright_train.parallel.data import prefetch_in_backward, share_root
from shardwright_train.parallel.parallelize import Element, Site, build_element
from shardwright_train.parallel.redistribute import Redistribution
from shardwright_train.parallel.rng import Draw
from shardwright_train.parallel.sharded_parameters import local_tensor, placed_as
from shardwright_train.parallel.tied_weights import Ties

__all__ = ["Chunk", "Mark", "Stage", "build_stage"]

Mark = Callable[[str], None]


class Chunk(nn.Module):
    """The elements of one range of layers of a rank, called in order.

    Forward takes the states that the previous range hands over (none on the first) and the batch of a microbatch; it
    returns states, or at the end of the model the sum of cross entropy over the samples of this rank's group.
    """

    def __init__(self, elements: list[Element]) -> None:
        super().__init__()
        self.elements = elements
        self.children_by_name = nn.ModuleDict({str(i): e.module for i, e in enumerate(elements)})

    def forward(self, states: States, batch: Batch, draw: Draw, mark: Mark) -> States | Tensor:
        """One microbatch."""
        for element in self.elements:
            if element.kind == HEAD:
                return element(_marked_both_ways(states, mark, "layers", "head"), batch, draw)
            output = element(states, batch, draw)
            assert isinstance(output, tuple)
            states = output
            if element.kind == EMBEDDING:
                states = _marked_both_ways(states, mark, "embedding", "layers")
        return states

    def prepare_backward(self, reduce_gradients: bool, last: bool) -> None:
        """Say of the next backward pass whether it reduces gradients and whether it is the step's last.

        ZeRO-3 layers give their gathered parameters back after every backward pass, the others after the last.
        """
        if not self.elements:
            return
        assert isinstance(self, FSDPModule)
        self.set_requires_gradient_sync(reduce_gradients)
        self.set_is_last_backward(last)
        for element in self.elements:
            if element.replicas is not None:
                element.replicas.collect()
                element.replicas.armed = reduce_gradients
            if isinstance(element.module, FSDPModule):
                zero3 = element.strategy.data_parallel is DataParallel.ZERO3
                element.module.set_reshard_after_backward(last or zero3, recurse=False)
                if element.replicas is not None:
                    element.module.set_requires_gradient_sync(False)

    def start_reductions(self) -> None:
        """After a backward pass: begin to reduce the layers whose inputs have no gradient that could say so."""
        for element in self.elements:
            if element.replicas is not None:
                element.replicas.start()


@dataclass(frozen=True)
class Stage:
    """All that a rank holds: a chunk for each of its ranges of layers, and the copies it has of tied parameters."""

    site: Site
    chunks: tuple[Chunk, ...]
    ties: Ties

    @property
    def elements(self) -> Iterator[Element]:
        """The elements of all chunks."""
        return (element for chunk in self.chunks for element in chunk.elements)

    def parameters(self) -> Iterator[tuple[Element, str, nn.Parameter]]:
        """This rank's parameters, with their element and their name in the model description."""
        for element in self.elements:
            for name, parameter in element.stored.items():
                yield element, element.family.described_name(element.kind, name), parameter

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """This rank's parameters under their Hugging Face names."""
        model, family = self.site.plan.model, self.site.family
        return {
            family.full_name(model, element.name, name): parameter
            for element in self.elements
            for name, parameter in element.stored.items()
        }

    def copies(self) -> frozenset[str]:
        """Names of the parameters that are copies of what another element owns."""
        full = zip(self.parameters(), self.parameters_by_name(), strict=True)
        return frozenset(name for (e, described, _), name in full if (e.name, described) in self.ties.copies)

    def finish_gradients(self) -> None:
        """Make every gradient exist, and sum those that several ranks or elements have a part of."""
        gradients, partial = {}, defaultdict[dist.ProcessGroup, list[Tensor]](list)
        for element in self.elements:
            if element.replicas is not None:
                element.replicas.finish()
            for name, own in element.module.named_parameters():
                local = torch.zeros_like(local_tensor(own)) if own.grad is None else local_tensor(own.grad)
                parameter, own.grad = element.stored[name], None
                parameter.grad = placed_as(parameter, local)
                gradients[element.name, element.family.described_name(element.kind, name)] = local
                if name in element.split.partial:
                    partial[element.spread.group].append(local)
        for group, parts in partial.items():
            sum_together(parts, group)
        self.ties.sum_gradients(gradients)


def build_stage(site: Site) -> Stage:
    """Build what a rank holds, one element after the other."""
    plan = site.plan
    index = plan.stage_of_rank(site.rank)
    chunks = tuple(_build_chunk(site, index, number) for number in range(len(plan.stages[index].layers)))
    ties = Ties(plan, site.rank, _tie_group(site))
    stage = Stage(site, chunks, ties)
    if site.seed is not None:
        with torch.no_grad():
            ties.copy_owners({(e.name, name): local_tensor(p) for e, name, p in stage.parameters()})
    return stage


def _build_chunk(site: Site, stage: int, number: int) -> Chunk:
    plan = site.plan
    ranks = plan.stages[stage].ranks
    current = incoming_layout(plan, stage, number)
    elements = []
    for name, _, strategy in chunk_elements(plan, stage, number):
        wanted = layout_of(strategy)
        moves = tuple(
            Redistribution(
                current, wanted, plan.microbatch_samples, tensor.sequence_length, ranks, site.me, site.groups
            )
            if current is not None and current != wanted
            else None
            for tensor in plan.model.boundary
        )
        elements.append(build_element(site, name, strategy, moves))
        current = wanted
    chunk = Chunk(elements)
    if elements:
        share_root(chunk, [element.module for element in elements], site.groups.mesh(plan, elements[0].strategy)["dp"])
        prefetch_in_backward([(element.module, element.strategy.data_parallel) for element in elements])
    return chunk


def _tie_group(site: Site) -> dist.ProcessGroup | None:
    members = ranks_of_ties(ties_of(site.plan))
    return site.groups.among("ties", members) if site.rank in members else None


def _marked_both_ways(states: States, mark: Mark, ended: str, begun: str) -> States:
    """At the border of two segments: the forward pass ended the one, and their gradients will end the other.

    Views, because a state may have other uses before the border, and none behind it: the other segment's backward pass
    is over when the gradients are there that it makes.
    """
    mark(f"{ended}.forward")
    if not states[0].requires_grad:
        return states
    views = tuple(x.view_as(x) for x in states)
    for view in views:
        view.register_hook(lambda _grad: mark(f"{begun}.backward"))
    return views
