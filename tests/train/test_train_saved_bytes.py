"""What the forward pass keeps for the backward pass, counted on one rank of a fake world."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from random_plans import cluster_of, precision_of
from rest_long import rest_long
from tiny_models import LAYERS, SEQUENCE_LENGTH, tiny
from torch import Tensor

from shardwright.estimate.hardware import Link
from shardwright.estimate.layers import Machine, estimate_layer
from shardwright.types.plan import Attention, PipelineStage, Plan, Schedule
from shardwright.types.strategy import LayerStrategy, Recompute, SequenceParallel, Strategy
from shardwright_train.dry_run import simulate_step
from shardwright_train.models.base import family_named
from shardwright_train.parallel import tensor, vocab
from shardwright_train.parallel.collectives import gather_sequence
from shardwright_train.parallel.vocab import IGNORED, sum_of_cross_entropy
from shardwright_train.parallel.world import World

RANKS, SAMPLES, HIDDEN, ITEMSIZE = 4, 2, 32, 2
WHOLE = SAMPLES * SEQUENCE_LENGTH * HIDDEN * ITEMSIZE
"""Bytes of a tensor of all positions."""


def plan_of(family: str, classes: int = 64, **layer: Any) -> Plan:
    """One strategy for all layers of one stage, in bfloat16."""
    model, sharding = tiny(family, vocab_size=classes), {"tp_size": RANKS, "dp_size": 1, **layer}
    outer = {name: value for name, value in sharding.items() if name != "recompute"}
    return Plan(
        name=family,
        model=model,
        cluster=cluster_of(RANKS),
        global_batch_size=2 * SAMPLES,
        num_microbatches=2,
        schedule=Schedule.GPIPE,
        precision=precision_of("bfloat16"),
        stages=(PipelineStage(ranks=tuple(range(RANKS)), layers=((0, len(model.layers)),)),),
        embedding=Strategy(**outer),
        head=Strategy(**outer),
        layers=tuple(LayerStrategy(type=kind, **sharding) for kind in model.layers),
    )


def kept_bytes(plan: Plan, segment: str = "layers") -> int:
    """What a microbatch's way through a segment leaves behind."""
    found = simulate_step(plan, 0, family_named(plan.model.family, "test"), "sdpa").resident_bytes
    ends = [size for (name, at), size in found.items() if name.endswith(".forward") and at[0] == 1]
    names = [name for (name, at) in found if name.endswith(".forward") and at[0] == 1]
    index = names.index(f"{segment}.forward")
    return ends[index] - ends[index - 1]


@contextmanager
def gathered_for_good(inputs: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[list[Tensor]]:
    yield [gather_sequence(x, group) for x in inputs]


@pytest.mark.parametrize("family", rest_long(1, ("llama", "bert", "gpt2")))
def test_megatron_keeps_its_own_positions_of_what_it_gathers(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    plan = plan_of(family, sequence_parallel=SequenceParallel.MEGATRON)
    kept = kept_bytes(plan)
    monkeypatch.setattr(tensor, "gathered_again", gathered_for_good)
    # For good, a gathered tensor is kept in place of this rank's share of it: in attention and feed-forward.
    assert kept_bytes(plan) - kept == 2 * LAYERS * (WHOLE - WHOLE // RANKS)


def test_the_head_keeps_of_each_logit_one_number_in_the_compute_format() -> None:
    few, many = (kept_bytes(plan_of("llama", classes), "head") for classes in (64, 128))
    assert many - few == SAMPLES * SEQUENCE_LENGTH * 64 // RANKS * ITEMSIZE


@pytest.mark.parametrize("elements", [1 << 24, 5 * 61, 7])
def test_cross_entropy_in_parts_is_that_of_the_whole(
    one_rank: World, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    monkeypatch.setattr(vocab, "LOSS_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, SEQUENCE_LENGTH, 61, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, 61, (2, SEQUENCE_LENGTH), generator=generator)
    labels[0, 3:5] = IGNORED
    wanted = torch.nn.functional.cross_entropy(inputs.flatten(0, 1), labels.flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(3 * wanted, inputs)
    found = sum_of_cross_entropy(inputs * 1, labels, 0, dist.group.WORLD)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(3 * found, inputs)[0], gradient)


@pytest.mark.parametrize(("split", "parts"), [(SequenceParallel.NONE, 1), (SequenceParallel.MEGATRON, RANKS)])
def test_selective_recomputation_keeps_products_attention_and_one_sum(split: SequenceParallel, parts: int) -> None:
    kept = kept_bytes(plan_of("llama", sequence_parallel=split, recompute=Recompute.SELECTIVE))
    tokens = SAMPLES * SEQUENCE_LENGTH
    # Query and attended values, half as many heads of keys and values, gate and up; attention also keeps a sum of
    # exponentials for each of 8 heads, in float32.
    inside = tokens * (2 * HIDDEN + 2 * HIDDEN // 2 + 2 * 48) * ITEMSIZE // RANKS + tokens * 8 // RANKS * 4
    # What enters the layer, and the sum behind attention.
    assert kept == LAYERS * (inside + 2 * WHOLE // parts)


SPLITS: tuple[dict[str, Any], ...] = (
    {"sequence_parallel": SequenceParallel.ULYSSES},
    {"sequence_parallel": SequenceParallel.MEGATRON, "recompute": Recompute.SELECTIVE},
    {"recompute": Recompute.SELECTIVE},
    {"sequence_parallel": SequenceParallel.ULYSSES, "recompute": Recompute.ATTENTION},
    {"recompute": Recompute.MLP},
    {"sequence_parallel": SequenceParallel.ULYSSES, "recompute": Recompute.SELECTIVE},
    {"sequence_parallel": SequenceParallel.ULYSSES, "recompute": Recompute.MLP},
    {"recompute": Recompute.ATTENTION},
)
KEPT = ("llama", "gpt2", "bert", "qwen3", "roberta", "smollm3")


@pytest.mark.parametrize(("family", "layer"), rest_long(5, ((family, layer) for family in KEPT for layer in SPLITS)))
def test_layers_keep_what_is_estimated(family: str, layer: dict[str, Any]) -> None:
    plan = plan_of(family, **layer)
    machine = Machine(1e12, 1e12, Link(1e12, 0.0))
    given = SAMPLES, plan.precision, Attention.SDPA, machine
    estimated = sum(estimate_layer(plan.model, each.type, each, *given).activation_bytes for each in plan.layers)
    # The estimate has no float32 sums of a softmax or a norm, of which there is one a position and head.
    sums = LAYERS * SAMPLES * plan.model.sequence_length * 4 * 8
    kept = kept_bytes(plan)
    assert kept - sums <= estimated <= kept


PARTS = tuple(
    (family, {"recompute": kind, "sequence_parallel": split})
    for family in ("llama", "gpt2", "bert", "glm4", "cohere")
    for kind in (Recompute.NORMS, Recompute.ACTIVATIONS, Recompute.NORMS_ACTIVATIONS)
    for split in (SequenceParallel.MEGATRON, SequenceParallel.ULYSSES, SequenceParallel.NONE)
)
HALVES = tuple(
    (family, {"recompute": kind, "sequence_parallel": split})
    for kind in (Recompute.MLP_NORMS, Recompute.ATTENTION_NORMS, Recompute.ATTENTION_NORMS_ACTIVATIONS)
    for family, split in zip(
        ("llama", "bert", "glm4", "cohere", "qwen3", "gpt2"), (*SequenceParallel, *SequenceParallel), strict=True
    )
)


@pytest.mark.parametrize(("family", "layer"), (*rest_long(4, PARTS), *rest_long(2, HALVES)))
def test_parts_recomputed_one_by_one_free_what_is_estimated(family: str, layer: dict[str, Any]) -> None:
    """All but the float32 sums of norms, of which there is one a position."""
    beside = layer["recompute"].half or Recompute.NONE
    plans = plan_of(family, **layer), plan_of(family, **layer | {"recompute": beside})
    machine = Machine(1e12, 1e12, Link(1e12, 0.0))
    estimated = [
        sum(
            estimate_layer(
                plan.model, each.type, each, SAMPLES, plan.precision, Attention.SDPA, machine
            ).activation_bytes
            for each in plan.layers
        )
        for plan in plans
    ]
    freed, kept = estimated[1] - estimated[0], kept_bytes(plans[1]) - kept_bytes(plans[0])
    sums = LAYERS * SAMPLES * SEQUENCE_LENGTH * 4 * 12
    assert freed <= kept <= freed + sums
    # BERT's norms end its halves: no other enters attention, or what follows it.
    assert (freed == 0) == (family == "bert" and layer["recompute"] is Recompute.ATTENTION_NORMS)


def test_an_output_is_kept_no_longer_than_its_message() -> None:
    """Of four microbatches in flight the next stage has taken three before it sends the first one's gradient back."""
    plan = plan_of("llama")
    layers = tuple(msgspec.structs.replace(layer, tp_size=1) for layer in plan.layers)
    stages = tuple(PipelineStage(ranks=(rank,), layers=((rank, rank + 1),)) for rank in range(RANKS))
    plan = msgspec.structs.replace(
        plan,
        stages=stages,
        embedding=Strategy(tp_size=1, dp_size=1),
        head=Strategy(tp_size=1, dp_size=1),
        layers=layers,
        schedule=Schedule.ONE_F_ONE_B,
        num_microbatches=2 * RANKS,
        global_batch_size=2 * RANKS * SAMPLES,
    )
    for rank in (0, 1):
        resident = simulate_step(plan, rank, family_named("llama", "test"), "sdpa").resident_bytes
        in_flight = RANKS - rank
        freed = resident["backward.begin", (0, 0)] - resident["backward.wait", (0, 0)]
        # A middle stage has begun to receive the next microbatch meanwhile.
        assert freed == (in_flight - 1 - rank) * WHOLE


PACKED = (
    {"sequence_parallel": SequenceParallel.MEGATRON},
    {"tp_size": 2, "dp_size": 2},
    {"recompute": Recompute.SELECTIVE},
    {"sequence_parallel": SequenceParallel.ULYSSES},
    {"recompute": Recompute.FULL},
)


@pytest.mark.parametrize("layer", rest_long(3, PACKED))
def test_all_layers_of_a_microbatch_keep_one_mask_of_its_documents(layer: dict[str, Any]) -> None:
    plan = plan_of("gpt2", **layer)
    kept = [activation_bytes(plan, reset_attention_mask) for reset_attention_mask in (False, True)]
    samples = SAMPLES // layer.get("dp_size", 1)
    assert kept[1] - kept[0] == samples * SEQUENCE_LENGTH**2 * ITEMSIZE


def activation_bytes(plan: Plan, reset_attention_mask: bool) -> int:
    """What a microbatch's forward pass leaves behind on rank 0."""
    family = family_named(plan.model.family, "test")
    found = simulate_step(plan, 0, family, "sdpa", reset_attention_mask).resident_bytes
    return found["forward.end", (1, 0)] - found["forward.wait", (1, 0)]
