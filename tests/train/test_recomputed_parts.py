"""Parts recomputed one by one: results that nobody keeps, the same gradients, the memory that is predicted."""

import weakref
from itertools import product
from typing import Any

import pytest
import torch
from estimated_memory import CLUSTER, FLOAT32, estimated_profiles, held_bytes
from msgspec.structs import replace
from random_plans import random_plan
from tiny_models import tiny
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, silu

from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.plan.communication import step_messages
from shardwright.types import (
    RECOMPUTE_SETS,
    RECOMPUTE_WHOLE,
    Attention,
    LayerStrategy,
    Offload,
    PipelineStage,
    Plan,
    Recompute,
    RecomputedPart,
    Schedule,
    SequenceParallel,
    Strategy,
    misfit,
)
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.systems.registry import SYSTEMS
from shardwright_train.dry_run import simulate_step
from shardwright_train.models.base import family_named
from shardwright_train.models.support import check_supported
from shardwright_train.parallel.checkpointing import Recomputation

WIDE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
MODEL = model_of_config(WIDE, "wide", 256, "config.json")


class _Block(nn.Module):
    """A norm and a gated feed-forward part, written with a layer's recomputation."""

    def __init__(self, recomputation: Recomputation) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"scale": (8,), "gate": (24, 8), "up": (24, 8), "down": (8, 24)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)))
        self.recomputation = recomputation
        self.computed = 0
        self.freed: list[weakref.ref[Any]] = []

    def _norm(self, x: Tensor) -> Tensor:
        self.computed += 1
        return layer_norm(x, (8,), self.scale)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.recomputation.freed(self._norm, x)
        products = linear(normed, self.gate), linear(normed, self.up)
        inner = self.recomputation.freed(lambda gate, up: silu(gate) * up, *products)
        self.freed += [weakref.ref(each.untyped_storage()) for each in (normed, inner)]
        return x + linear(inner, self.down)


def _stepped(frees: bool) -> tuple[_Block, list[Tensor]]:
    block = _Block(Recomputation(False, False, Recompute.NORMS_ACTIVATIONS.parts))
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = block.recomputation.by_part(block, x) if frees else block(x)
    assert [each() is None for each in block.freed] == [frees, frees]
    y.square().sum().backward()
    assert x.grad is not None
    return block, [x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]


def test_results_are_freed_computed_once_again_and_give_the_same_gradients_to_the_bit() -> None:
    (plain, wanted), (freed, found) = _stepped(False), _stepped(True)
    assert (plain.computed, freed.computed) == (1, 2)  # though two products read the norm
    assert len(wanted) == len(found) == 5
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_a_result_that_is_changed_in_place_is_refused() -> None:
    recomputation, x = Recomputation(False), torch.ones(2, 8, requires_grad=True)

    def changed(x: Tensor) -> Tensor:
        result = recomputation.freed(lambda x: 2 * x, x)
        with torch.no_grad():
            result.add_(1)
        return result * x

    with pytest.raises(RuntimeError, match="was changed in place"):
        recomputation.by_part(changed, x)


class _HalfBlock(_Block):
    """The same block, whose feed-forward part is recomputed as a whole, with norms inside and outside it."""

    def _fed(self, hidden_states: Tensor) -> Tensor:
        inside = self.recomputation.freed(self._norm, hidden_states)
        return linear(silu(linear(inside, self.gate)) * linear(inside, self.up), self.down)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.recomputation.freed(self._norm, x)
        self.freed.append(weakref.ref(normed.untyped_storage()))
        states = {"hidden_states": normed} if self.by_name else {}
        return x + self.recomputation.full(self._fed, *(() if states else (normed,)), **states)

    by_name = False


@pytest.mark.parametrize("by_name", [False, True])
def test_a_norm_that_enters_what_is_recomputed_as_a_whole_is_freed_and_computed_once_again(by_name: bool) -> None:
    found = []
    for frees in (False, True):
        block = _HalfBlock(Recomputation(False, False, Recompute.MLP_NORMS.parts))
        block.by_name = by_name
        x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = block.recomputation.by_part(block, x) if frees else block(x)
        assert [each() is None for each in block.freed] == [frees]
        y.square().sum().backward()
        assert block.computed == 3 + frees  # that inside is computed twice in any case
        found.append([x.grad, *(p.grad for p in block.parameters())])
    assert all(a is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_sets_name_their_parts() -> None:
    named = {kind: {part.value for part in kind.parts} - {"expert_activations"} for kind in RECOMPUTE_SETS}
    assert named.pop(Recompute.LIGHT) == {RecomputedPart.NORMS, RecomputedPart.LATENTS}
    for kind, parts in named.items():
        assert "+".join(filter(None, (kind.half, *sorted(parts, key=kind.value.index)))) == kind.value
        assert not parts & {None: set(), "attention": {"latents"}, "mlp": {"activations"}}[kind.half]
    assert len({(kind.half, frozenset(parts)) for kind, parts in named.items()}) == len(named) == 13
    assert {kind.half for kind in RECOMPUTE_WHOLE} == {None, Recompute.ATTENTION, Recompute.MLP}


def test_messages_are_those_of_the_half_that_is_recomputed_as_a_whole() -> None:
    for family, split in product(("llama", "bert", "mixtral"), SequenceParallel):
        plan = random_plan(tiny(family), 0, 4, stages=1)
        sharding = {"tp_size": 2, "dp_size": 2, "sequence_parallel": split}
        if misfit(plan.model, plan.model.layers[0], Strategy(**sharding)) is not None:
            continue
        for kind in (kind for kind in RECOMPUTE_SETS if kind.half):
            sent = [
                list(
                    step_messages(
                        replace(
                            plan,
                            layers=tuple(
                                LayerStrategy(type=name, recompute=each, **sharding) for name in plan.model.layers
                            ),
                        ),
                        0,
                    )
                )
                for each in (kind, kind.half)
            ]
            assert sent[0] == sent[1] != []


def _plan(recompute: Recompute) -> Plan:
    sharding: dict[str, Any] = {"tp_size": 1, "dp_size": 4}
    return Plan(
        name="parts", model=MODEL, cluster=CLUSTER, global_batch_size=16, num_microbatches=1, precision=FLOAT32,
        schedule=Schedule.ONE_F_ONE_B, attention=Attention.SDPA, embedding=Strategy(**sharding),
        stages=(PipelineStage(ranks=(0, 1, 2, 3), layers=((0, 4),)),), head=Strategy(**sharding),
        layers=(LayerStrategy(type="block", recompute=recompute, **sharding),) * 4,
    )  # fmt: skip


def test_peak_memory_is_predicted_within_three_percent_and_less_memory_takes_no_less_time() -> None:
    kinds = Recompute.NONE, Recompute.ACTIVATIONS, Recompute.NORMS, Recompute.NORMS_ACTIVATIONS
    profiles = estimated_profiles(FLOAT32, (4,), MODEL)
    held, peaks, stepped = [], [], []
    for kind in kinds:
        plan = _plan(kind)
        held.append(held_bytes(plan, profiles))
        peaks.append(simulate_step(plan, 0, family_named("llama", "test"), "sdpa").peak_bytes)
        stepped.append(evaluate(plan, profiles).estimate.stages[0].time_s)
    assert held == pytest.approx(peaks, rel=0.03)
    assert peaks[0] > max(peaks[1:3]) > min(peaks[1:3]) > peaks[3]
    # The host's kernels bind so small a model's time.
    assert stepped[0] <= min(stepped[1:3]) and max(stepped[1:3]) <= stepped[3]


def test_what_does_not_free_results_refuses_sets_by_name() -> None:
    plan = random_plan(tiny("llama"), 0, 2)
    plan = replace(plan, layers=tuple(replace(layer, recompute=Recompute.NORMS) for layer in plan.layers))
    check_supported(plan, "plan.json")
    with pytest.raises(BadInput, match=r"compile: recompute norms frees results"):
        check_supported(replace(plan, compile=True), "plan.json")
    with pytest.raises(ValueError, match="offload activations needs recompute full, or none"):
        replace(plan.layers[0], offload=Offload.ACTIVATIONS)
    for name in ("megatron", "torchtitan"):
        with pytest.raises(BadInput, match=r"layers\[0\]: recompute norms"):
            SYSTEMS[name].export(plan, "plan")
        halves = tuple(replace(layer, recompute=Recompute.MLP_NORMS) for layer in plan.layers)
        with pytest.raises(BadInput, match=r"layers\[0\]: recompute mlp\+norms"):
            SYSTEMS[name].export(replace(plan, layers=halves), "plan")
