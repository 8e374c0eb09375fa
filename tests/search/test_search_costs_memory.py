"""Memory of a rank, term by term: numbers worked out by hand."""

from functools import reduce
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.types import GIB, DataParallel, LayerStrategy, LayerType, Precision, SequenceParallel, Strategy
from shardwright_search.cost_model.collectives import StageTopology
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.parameters import ParameterMemory, parameter_memory
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.search import Infeasible, SearchAnswer, find_best
from shardwright_search.step.memory import Phase, StageMemory, layer_memory, no_layers, phases

MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")


def sharding(kind: str, tp_size: int = 1, dp_size: int = 4, split: str = "none", shard_size: int = 0) -> Strategy:
    return Strategy(
        shard_size=shard_size,
        tp_size=tp_size,
        dp_size=dp_size,
        data_parallel=DataParallel(kind),
        sequence_parallel=SequenceParallel(split),
    )


def held(
    kind: LayerType,
    strategy: Strategy,
    precision: Precision,
    deferred: bool = False,
    every: bool = False,
    first: bool = False,
) -> ParameterMemory:
    flags = {"deferred": deferred, "reduce_every_microbatch": every, "is_first_layer": first}
    return parameter_memory(kind, strategy, precision, **flags)


def test_shard_groups_hold_as_if_they_were_alone_and_what_they_have_summed_in_another_format(make):
    block, narrow = make.model().types["block"], Precision(parameters="float32", reduce="bfloat16")
    for kind in ("zero2", "zero3"):
        in_pairs = sharding(kind, shard_size=2)
        for precision in (MIXED, Precision()):
            for deferred in (False, True):
                alone = held(block, sharding(kind, dp_size=2), precision, deferred)
                assert held(block, in_pairs, precision, deferred) == alone
        alone = held(block, sharding(kind, dp_size=2), narrow)
        assert held(block, in_pairs, narrow).gradients == alone.gradients + 2 * 16384 // 2


@pytest.mark.parametrize(
    ("kind", "deferred", "resident", "workspace"),
    [
        # 16384 parameters over 4 ranks: stored, gathered for compute, gradients, two moments; and while they last
        ("ddp", False, (65536, 32768, 65536, 131072), (0, 0)),
        ("ddp", True, (65536, 32768, 65536, 131072), (0, 0)),
        ("zero2", False, (16384, 32768, 16384, 32768), (65536, 65536)),
        ("zero2", True, (16384, 32768, 65536, 32768), (16384, 0)),
        ("zero3", False, (16384, 0, 16384, 32768), (2 * 32768 + 65536, 65536)),
        ("zero3", True, (16384, 0, 65536, 32768), (2 * 32768 + 16384, 0)),
    ],
)
def test_memory_terms_by_kind_of_data_parallelism(make, kind, deferred, resident, workspace):
    block, strategy = make.model().types["block"], sharding(kind)
    found = held(block, strategy, MIXED, deferred=deferred)
    assert resident == (found.parameters, found.gathered_parameters, found.gradients, found.optimizer)
    assert workspace == (found.buffers, found.unreduced_gradients)


def test_replicated_layers_are_computed_as_they_are_stored_where_all_is_in_one_format(make):
    block = make.model().types["block"]
    assert held(block, sharding("ddp"), Precision()).gathered_parameters == 0
    assert held(block, sharding("zero2"), Precision()).gathered_parameters == 65536
    assert held(block, sharding("zero2", dp_size=1), Precision()).gathered_parameters == 0


def test_replicas_that_reduce_every_microbatch_keep_the_sum_beside_what_is_being_reduced(make):
    block = make.model().types["block"]
    for precision in (MIXED, Precision()):
        for strategy, gradients, sums in (
            (sharding("ddp"), 65536, 65536),
            (sharding("zero2"), 16384, 0),
            (sharding("ddp", dp_size=1), 65536, 0),
        ):
            found = held(block, strategy, precision, every=True)
            assert (found.gradients, found.gradient_sums) == (gradients, sums)


def test_the_messages_of_the_first_element_are_kept_until_the_next_ones(make):
    """After the embedding's gather and its reduction nothing else may be gathered or reduced for most of a pass."""
    block = make.model().types["block"]
    assert held(block, sharding("zero3"), MIXED, first=True).gathered_parameters == 32768
    assert held(block, sharding("zero2"), MIXED, first=True).gathered_parameters == 32768
    assert held(block, sharding("ddp"), Precision(), first=True).gathered_parameters == 0
    for kind in ("zero2", "zero3"):
        assert held(block, sharding(kind), MIXED, every=True, first=True).gradients == 16384 + 65536
        assert held(block, sharding(kind), MIXED, first=True).gradients == 16384
        assert held(block, sharding(kind), MIXED, deferred=True, first=True).gradients == 65536


def test_a_shard_is_rounded_up_to_whole_rows(make):
    # 256 rows over 3 ranks: 86 rows of 64
    assert held(make.model().types["block"], sharding("zero3", dp_size=3), MIXED).parameters == 4 * 86 * 64
    # tensor parallelism halves the rows first: 128 over 3 ranks are 43
    assert held(make.model().types["block"], sharding("zero3", 2, 3), MIXED).parameters == 4 * 43 * 64


def test_parameters_are_shared_over_the_whole_stage_under_ulysses(make):
    """Two groups of two: four ranks share 65536 bytes; tensor parallelism and two ranks of each half the same."""
    block = make.model().types["block"]
    ulysses, megatron = sharding("zero3", 2, 2, "ulysses"), sharding("zero3", 2, 2, "megatron")
    assert held(block, ulysses, MIXED).parameters == held(block, megatron, MIXED).parameters == 16384
    # but a layer is gathered whole under the one, its half under the other
    for strategy, whole in ((ulysses, 16384), (megatron, 8192)):
        assert held(block, strategy, MIXED).buffers == (2 * 2 + 4) * whole
    assert held(block, sharding("ddp", 2, 2, "ulysses"), MIXED).parameters == 65536
    assert held(block, sharding("ddp", 2, 2, "megatron"), MIXED).parameters == 32768


def peak_of_one_microbatch(*layers: tuple[int, int, int]) -> float:
    """In its only backward pass, of layers told as activation, workspace and gradients."""
    parts = (Phase(1, late=True, summed=False),)
    kinds = (layer_memory(parts, 0, late, 0, activation, workspace) for activation, workspace, late in layers)
    return reduce(StageMemory.then, kinds, no_layers(parts, 0)).peak.item()


def test_the_peak_is_where_a_layer_with_its_workspace_meets_what_others_hold():
    """Forward to each layer, and back: what follows it has given its gradients by then."""
    assert peak_of_one_microbatch() == 0
    # at the layers: 4+1+(2+3+1), 14+5+(3+1), 16+20+1
    assert peak_of_one_microbatch((4, 1, 2), (10, 5, 3), (2, 20, 1)) == 37
    # 4+50+(2+3) in the first backward pass, 14+5+3 in the second
    assert peak_of_one_microbatch((4, 50, 2), (10, 5, 3)) == 59
    # 4+0+(1+9), 10+6+9
    assert peak_of_one_microbatch((4, 0, 1), (6, 6, 9)) == 25


SUMMED = [(4, 1, 2, 6), (10, 5, 3, 0), (2, 20, 1, 7)]
"""Layers told as activation, workspace, and gradients, and sums of earlier microbatches beside them."""


@pytest.mark.parametrize(
    ("in_flight", "microbatches", "held_bytes"),
    [
        # GPipe. The first backward pass: 16 of the other microbatch, 16 + 20 + 1 of this one and of gradients. The
        # second one: no other microbatch, 6 + 7 of sums, 3 that are made in place, and 16 + 20 + 1.
        (2, 2, 16 + 37),
        # The forward pass after the first backward pass: 16 + 20 with 2 + 3 + 1. The second backward pass, as above.
        (1, 2, 53),
        # The forward pass after the second backward pass: 16 + 20, 2 + 3 + 1 on their way and 6 + 7 of sums.
        (1, 3, 55),
        (2, 5, 16 + 55),
    ],
)
def test_sums_of_earlier_microbatches_stand_beside_gradients_that_come_anew(in_flight, microbatches, held_bytes):
    parts = phases(in_flight, microbatches, keeps_sums=True)
    kinds = (layer_memory(parts, 0, made, sums, activation, workspace) for activation, workspace, made, sums in SUMMED)
    assert reduce(StageMemory.then, kinds, no_layers(parts, 0)).peak.max() == held_bytes


def test_gradients_come_with_the_first_backward_pass(make):
    model, cluster = make.model(), make.cluster()
    costs = CostModel(model, cluster, make.profiles(model, cluster), Precision())
    layer = LayerStrategy(tp_size=1, dp_size=2, type="block")
    for microbatches in (1, 2):
        found = costs.layer("block", layer, StageTopology("n", (2,)), 2, microbatches == 1)
        assert (found.activation_bytes, found.workspace_bytes) == (120 * 2048, 24 * 2048)
        assert found.memory.gradients == 65536
        assert found.state_bytes == 3 * 65536, "parameters and two moments"


def test_a_stage_holds_microbatches_in_flight_and_one_peak(make):
    """A sample a rank in each of two microbatches; in units of 2048 bytes the elements keep 4, 120, 120 and 24.

    The most is held in the second block's first backward pass: 268 of one microbatch, 244 of the other, 24 for that
    moment, and 32 of gradients for the block and for the head. Later there are all gradients, but one microbatch.
    """
    model, cluster = make.model(2), make.cluster()
    request = make.request(
        global_batch_size=4, num_microbatches=[2], recompute=["none"], schedules=["gpipe"], pp_sizes=[1],
        tp_sizes=[1], data_parallel=["ddp"],
    )  # fmt: skip
    found = find_best(request, model, cluster, make.profiles(model, cluster), Path("s.json"), lambda line: None)
    (stage,) = found.chosen.evaluation.estimate.stages
    assert stage.memory_terms_bytes == {
        "parameters": 4 * 65536,
        "gathered_parameters": 0,
        "optimizer": 8 * 65536,
        "gradients": 2 * 65536,
        "activations": 2 * 268 * 2048,
        "workspace": 0,
        "process": 1 << 20,
    }
    assert stage.memory_bytes == (1 << 20) + 12 * 65536 + (268 + 244 + 24 + 2 * 32) * 2048


def test_megatrons_gather_buffer_is_counted_all_step_long(make):
    """One microbatch of 2 samples of 32 tokens, 64 features, 4 bytes: 16384 bytes."""
    model, cluster = make.model(2), make.cluster()
    profiles = make.profiles(model, cluster)
    plain = make.request(
        global_batch_size=2, num_microbatches=[1], pp_sizes=[1], tp_sizes=[2], sequence_parallel=["megatron"],
        recompute=["none"],
    )  # fmt: skip

    def answer(memory_bytes: int, buffer: bool) -> SearchAnswer | Infeasible:
        request = replace(plain, memory_gib=memory_bytes / GIB, megatron_gather_buffer=buffer)
        return find_best(request, model, cluster, profiles, Path("s.json"), lambda line: None)

    best = find_best(plain, model, cluster, profiles, Path("s.json"), lambda line: None)
    need = evaluate(best.chosen.plan, profiles).estimate.memory_bytes
    assert isinstance(answer(need, False), SearchAnswer)
    assert isinstance(answer(need + 16384, True), SearchAnswer)
    short = answer(need + 16383, True)
    assert isinstance(short, Infeasible) and short.missing_bytes == 1


def test_chunks_make_their_gradients_in_their_first_backward_pass(make):
    """Two samples in each of two microbatches; in units of 2048 bytes elements keep 8, 240, ..., 240 and 48.

    A message is 8, so that each chunk keeps 248, the last one 296; a block's backward pass takes 48 for a moment, of
    which the gradient that came takes 8 in the place of the block's output, and makes 32. The first stage has four
    chunks in flight when it goes backward: 3 * 248 of others, 248 and 40 of its own, and 32. Both outputs of its first
    chunk are freed by then, for the last stage has sent back what it made of them. The last stage has two of its first
    chunk in flight, 496. It goes backward with one of their outputs freed, and makes 64. Then the other one is freed,
    too, and the head works, with 296 of the chunk and 19660 bytes for a moment. Three messages come on top: two
    gradients, and what comes for the next pass.
    """
    model, cluster = make.model(4), make.cluster()
    request = make.request(
        global_batch_size=4, num_microbatches=[2], recompute=["none"], schedules=["interleaved_1f1b"], pp_sizes=[2],
        tp_sizes=[1], data_parallel=["ddp"],
    )  # fmt: skip
    found = find_best(request, model, cluster, make.profiles(model, cluster), Path("s.json"), lambda line: None)
    first, last = found.chosen.evaluation.estimate.stages
    assert first.memory_terms_bytes["gradients"] == 3 * 32 * 2048
    states = (1 << 20) + 3 * 3 * 65536
    assert first.memory_bytes == states + (3 * 248 - 2 * 8 + 248 + 40 + 32 + 3 * 8) * 2048
    assert last.memory_bytes == states + (496 - 2 * 8 + 64 + 296 + 3 * 8) * 2048 + 19660
