"""One rank's part of a pipeline stage, built from a plan: the one way in which `run` and `measure` build it."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from shardwright_formats.model import EMBEDDING, HEAD
from shardwright_formats.placement import Layout, layout_of
from shardwright_formats.plan import Plan
from shardwright_formats.strategy import DataParallel, Recompute, Strategy
from shardwright_train.families import Family
from shardwright_train.parallel.data_parallel import share_root, share_states, torch_dtype
from shardwright_train.parallel.groups import Groups
from shardwright_train.parallel.redistribute import Redistribution
from shardwright_train.parallel.tensor_parallel import TensorParallel

__all__ = ["Element", "Mark", "StageModule", "build_stage", "incoming_layout"]

Mark = Callable[[str], None]


@dataclass(frozen=True)
class Element:
    """The embedding, a block or the head on this rank; `enter` moves its input into its layout, if it must be moved."""

    name: str
    strategy: Strategy
    module: nn.Module
    enter: Redistribution | None
    recompute: bool


class StageModule(nn.Module):
    """The elements of one rank, called in order.

    Forward takes the hidden states of the previous pipeline stage (None on the first), the tokens [samples, s] and
    labels [samples, s] of a microbatch; it returns hidden states, or on the last stage the sum of cross entropy over
    the samples of this rank's tensor-parallel group.
    """

    def __init__(self, elements: list[Element], me: int, block_inputs: dict[str, Any], samples: int) -> None:
        super().__init__()
        self.elements = elements
        self.children_by_name = nn.ModuleDict({str(i): e.module for i, e in enumerate(elements)})
        self.me, self.samples, self.block_inputs = me, samples, block_inputs

    def forward(self, x: Tensor | None, tokens: Tensor, labels: Tensor, mark: Mark) -> Tensor:
        """One microbatch."""
        for element in self.elements:
            if element.name == EMBEDDING:
                x = element.module(self._rows(element, tokens))
                _mark_both_ways(x, mark, "embedding", "layers")
                continue
            assert x is not None
            if element.name == HEAD:
                _mark_both_ways(x, mark, "layers", "head")
            if element.enter is not None:
                x = element.enter(x)
            if element.name == HEAD:
                x = element.module(x, self._rows(element, labels))
            elif element.recompute:
                x = checkpoint(element.module, x, use_reentrant=False, **self.block_inputs)
            else:
                x = element.module(x, **self.block_inputs)
        assert x is not None
        return x

    def parameters_by_name(self, family: Family) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their Hugging Face names."""
        for element in self.elements:
            for name, parameter in element.module.named_parameters():
                yield family.full_name(element.name, name), parameter

    def prepare_backward(self, reduce_gradients: bool, last: bool) -> None:
        """Say of the next backward pass whether it reduces gradients and whether it is the step's last.

        ZeRO-3 layers give their gathered parameters back after every backward pass, the others after the last.
        """
        assert isinstance(self, FSDPModule)
        self.set_requires_gradient_sync(reduce_gradients)
        self.set_is_last_backward(last)
        for element in self.elements:
            assert isinstance(element.module, FSDPModule)
            zero3 = element.strategy.data_parallel is DataParallel.ZERO3
            element.module.set_reshard_after_backward(last or zero3, recurse=False)

    def _rows(self, element: Element, tokens: Tensor) -> Tensor:
        part = layout_of(element.strategy).rectangle(self.me, self.samples, 1)
        return tokens[part.batch_start : part.batch_end]


def build_stage(
    plan: Plan, rank: int, family: Family, groups: Groups, attention: str, seed: int, device: torch.device
) -> StageModule:
    """Build what a rank holds, one element after the other, so that never more than one is whole in memory.

    Initial weights depend on the seed and the element alone, not on the plan.
    """
    index = next(i for i, stage in enumerate(plan.stages) if rank in stage.ranks)
    ranks = plan.stages[index].ranks
    me = ranks.index(rank)
    length, samples = plan.model.sequence_length, plan.microbatch_samples
    current = incoming_layout(plan, index)
    elements = []
    for name, strategy in _elements_of(plan, index):
        wanted = layout_of(strategy)
        move = None
        if current is not None and current != wanted:
            move = Redistribution(current, wanted, samples, length, ranks, me, groups)
        module = _build_element(plan, name, strategy, family, groups, attention, seed, device)
        recompute = getattr(strategy, "recompute", Recompute.NONE) is Recompute.FULL
        elements.append(Element(name, strategy, module, move, recompute))
        current = wanted
    example = torch.zeros(1, dtype=torch_dtype(plan.precision.compute), device=device)
    stage = StageModule(elements, me, family.block_inputs(plan.model, example), samples)
    share_root(stage, groups.mesh(plan, elements[0].strategy)["dp"])
    return stage


def incoming_layout(plan: Plan, stage: int) -> Layout | None:
    """The layout in which a pipeline stage receives its input: that of the layer before it; None on the first."""
    if stage == 0:
        return None
    first = plan.stages[stage].layers[0][0]
    return layout_of(plan.layers[first - 1] if first > 0 else plan.embedding)


def _elements_of(plan: Plan, stage: int) -> Iterator[tuple[str, Strategy]]:
    if stage == 0:
        yield EMBEDDING, plan.embedding
    ((low, high),) = plan.stages[stage].layers
    for i in range(low, high):
        yield f"layers[{i}]", plan.layers[i]
    if stage == len(plan.stages) - 1:
        yield HEAD, plan.head


def _build_element(
    plan: Plan,
    name: str,
    strategy: Strategy,
    family: Family,
    groups: Groups,
    attention: str,
    seed: int,
    device: torch.device,
) -> nn.Module:
    with torch.random.fork_rng(devices=[]), _default_dtype(torch_dtype(plan.precision.parameters)):
        torch.manual_seed(_seed_of(seed, name))
        module = family.build(plan.model, name, attention).to(device)
    mesh = groups.mesh(plan, strategy)
    kind = plan.model.types[getattr(strategy, "type", name)]
    described = {p.name: p.tp_dim for p in kind.parameters}
    inside = name not in (EMBEDDING, HEAD)
    tp_dims = {
        local: described[local if inside else family.full_name(name, local)] for local, _ in module.named_parameters()
    }
    family.split(module, name, tp_dims, TensorParallel(mesh["tp"], strategy.sequence_parallel))
    share_states(module, strategy.data_parallel, mesh["dp"], plan.precision)
    return module


def _mark_both_ways(x: Tensor, mark: Mark, ended: str, begun: str) -> None:
    """At the border of two segments: the forward pass ended the one, and its gradient will end the other."""
    mark(f"{ended}.forward")
    if x.requires_grad:
        x.register_hook(lambda _grad: mark(f"{begun}.backward"))


def _seed_of(seed: int, element: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{element}".encode()).digest()[:7])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
