"""The roofline of analytic profiles: by hand on a toy model, and what must grow and what must fall."""

from itertools import pairwise

import msgspec
import pytest

from shardwright.estimate.hardware import START_S, Link
from shardwright.estimate.held import Held, Module
from shardwright.estimate.layers import (
    ATTENTION_BACKWARD,
    KERNEL_START_S,
    Machine,
    estimate_layer,
    masks_bytes,
    optimizer_time_s,
)
from shardwright.estimate.parts import layer_parts
from shardwright.estimate.runtimes import OPERATOR_S
from shardwright.io import BadInput
from shardwright.models.families.bert import BERT
from shardwright.models.registry import FAMILIES
from shardwright.models.traits import FeedForward
from shardwright.types.model import BoundaryTensor, Heads, LayerType, Model, Parameter, Region
from shardwright.types.plan import Attention, Precision
from shardwright.types.strategy import LayerStrategy, Recompute, SequenceParallel, Strategy

HIDDEN, LENGTH, HEADS, VOCABULARY = 64, 32, 8, 256
TOKENS = HIDDEN * LENGTH
MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")
MACHINE = Machine(flops_per_s=1e12, memory_bytes_per_s=1e11, link=Link(bytes_per_s=1e10, step_s=2e-6), operator_s=0.0)
SPLIT = {"none": SequenceParallel.NONE, "megatron": SequenceParallel.MEGATRON, "ulysses": SequenceParallel.ULYSSES}


@pytest.fixture(autouse=True)
def toy_families(monkeypatch):
    """Families with LayerNorms, positions that attend to all others and no activation that keeps more."""
    for name, gated in (("toy", False), ("gated toy", True)):
        feed_forward = FeedForward("gelu", gated)
        facts = msgspec.structs.replace(BERT, model_type=name, feed_forward=lambda _, kind=feed_forward: kind)
        monkeypatch.setitem(FAMILIES, name, facts)


def decoder(gated=False, dropout=True):
    """A block of the shapes of GPT-2, or of Llama where gated; with what Korthikanti et al. count as dropout."""
    stream = (BoundaryTensor(name="hidden", sequence_length=LENGTH, features=HIDDEN),)
    replays = ("full",) if dropout else ()
    attention = Region(
        name="attention", enters=("hidden",), leaves="hidden", replays_sum=replays,
        attention=Heads(queries="hidden", keys="hidden", heads=HEADS, kv_heads=HEADS, head_features=HIDDEN // HEADS),
    )  # fmt: skip
    feed_forward = Region(name="mlp", enters=("hidden",), leaves="hidden", replays_sum=replays)
    wide = 4 * HIDDEN
    matrices = [("qkv", (HIDDEN, 3, HIDDEN), 2), ("out", (HIDDEN, HIDDEN), 0), ("up", (HIDDEN, wide), 1)]
    matrices += [("gate", (HIDDEN, wide), 1)] * gated + [("down", (wide, HIDDEN), 0)]
    block = LayerType(
        parameters=(
            *(Parameter(name=name, shape=shape, tp_dim=dim) for name, shape, dim in matrices),
            Parameter(name="norm", shape=(HIDDEN,)),
        ),
        forward_flops_per_sample=LENGTH * (24 + 8 * gated) * HIDDEN**2 + 4 * LENGTH**2 * HIDDEN,
        tp_must_divide={"num_attention_heads": HEADS, "intermediate_size": wide, "n_inner": wide},
        outputs=stream,
        regions=(attention, feed_forward),
    )
    table = Parameter(name="table", shape=(VOCABULARY, HIDDEN), tp_dim=0)
    return Model(
        name="toy", family="gated toy" if gated else "toy", config={}, sequence_length=LENGTH, layers=("block",) * 2,
        types={
            "embedding": LayerType(
                parameters=(table,), forward_flops_per_sample=0, outputs=stream,
                regions=(Region(name="lookup", leaves="hidden"),),
            ),
            "block": block,
            "head": LayerType(
                parameters=(table,), forward_flops_per_sample=2 * LENGTH * HIDDEN * VOCABULARY, labels=LENGTH,
                regions=(Region(name="logits", enters=("hidden",)),),
            ),
        },
    )  # fmt: skip


def estimate(model, samples=1, machine=MACHINE, attention=Attention.SDPA, precision=MIXED, **strategy):
    spread = LayerStrategy(type="block", dp_size=1, **({"tp_size": 1} | strategy))
    return estimate_layer(model, "block", spread, samples, precision, attention, machine)


def test_a_block_without_recomputation_keeps_what_korthikanti_count():
    sbh = TOKENS
    assert estimate(decoder()).activation_bytes == 34 * sbh
    scores = HEADS * LENGTH**2
    assert estimate(decoder(), attention=Attention.EAGER).activation_bytes == 34 * sbh + 5 * scores
    assert estimate(decoder(), samples=3).activation_bytes == 3 * 34 * sbh
    tensor_parallel = estimate(decoder(), tp_size=4).activation_bytes
    assert tensor_parallel == (10 + 24 / 4) * sbh
    # Ulysses keeps what attention gives in both layouts.
    for kind, kept in (("megatron", 34), ("ulysses", 36)):
        assert estimate(decoder(), tp_size=4, sequence_parallel=SPLIT[kind]).activation_bytes == kept * sbh / 4


def test_a_gate_keeps_its_product_too_and_no_dropout_no_masks():
    assert estimate(decoder(dropout=False)).activation_bytes == 32 * TOKENS
    assert estimate(decoder(gated=True, dropout=False)).activation_bytes == (32 + 2 * 4 + 2 * 4) * TOKENS


def test_full_recomputation_keeps_the_stream_alone_and_partial_what_the_other_part_keeps():
    model = decoder()
    full = estimate(model, recompute=Recompute.FULL)
    assert full.activation_bytes == 2 * TOKENS
    assert full.workspace_bytes - estimate(model).workspace_bytes == 34 * TOKENS
    # Attention keeps 8 + 5, the feed-forward part 16 + 5; the recomputed one leaves its stream, 2.
    assert estimate(model, recompute=Recompute.ATTENTION).activation_bytes == (21 + 2) * TOKENS
    assert estimate(model, recompute=Recompute.MLP).activation_bytes == (13 + 2) * TOKENS


def test_selective_recomputation_keeps_products_attention_and_sums_and_repeats_what_lies_between():
    model = decoder()
    found, plain = estimate(model, recompute=Recompute.SELECTIVE), estimate(model)
    # What enters, query, key, value and attended values, two sums (a dropout follows them) and the wide product.
    assert found.activation_bytes == (2 + 8 + 2 * 2 + 8) * TOKENS
    assert estimate(decoder(dropout=False), recompute=Recompute.SELECTIVE).activation_bytes == (2 + 8 + 2 + 8) * TOKENS
    assert found.workspace_bytes - plain.workspace_bytes == (34 - 16) * TOKENS
    kernels = sum(part.kernels for part in layer_parts(model, "block"))
    assert found.forward_s == plain.forward_s
    between = 2 * 34 * TOKENS / 1e11 + kernels * KERNEL_START_S
    assert found.backward_s - plain.backward_s == pytest.approx(between, rel=1e-9)


def test_modules_that_are_recomputed_by_themselves_take_their_time_once_more():
    model = decoder()

    def backward_s(*modules, **strategy):
        return estimate(model, machine=MACHINE._replace(held=Held(recomputed=modules)), **strategy).backward_s

    # Both norms read and write the stream, in two bytes; attention computes scores and what they weigh.
    took_s = {Module.LAYERNORM: 2 * 2 * 2 * TOKENS / 1e11, Module.CORE_ATTN: 4 * LENGTH**2 * HIDDEN / 1e12}
    for module, again_s in took_s.items():
        assert backward_s(module) - backward_s() == pytest.approx(again_s, rel=1e-6)
        assert backward_s(module, recompute=Recompute.FULL) == backward_s(recompute=Recompute.FULL)
    between = {"recompute": Recompute.SELECTIVE}
    assert backward_s(Module.LAYERNORM, **between) == backward_s(**between) < backward_s(Module.CORE_ATTN, **between)
    assert backward_s(Module.MOE, Module.MOE_ACT, Module.MLA_UP_PROJ) == backward_s(), "it has none of them"


def test_a_forward_pass_is_its_products_what_is_kept_twice_and_its_kernels():
    model, slow_products = decoder(), MACHINE._replace(flops_per_s=1e9)
    found = estimate(model, machine=slow_products)
    flops = model.types["block"].forward_flops_per_sample
    kernels = sum(part.kernels for part in layer_parts(model, "block"))
    by_hand = flops / 1e9 + 2 * 34 * TOKENS / 1e11 + kernels * KERNEL_START_S
    assert found.forward_s == pytest.approx(by_hand, rel=1e-12)
    scores = 4 * LENGTH**2 * HIDDEN / 1e9
    summed = (12 * HIDDEN**2 + HIDDEN) * (4 + 2 + 4) / 1e11
    backward = 2 * by_hand + (ATTENTION_BACKWARD - 2) * scores + summed
    assert found.backward_s == pytest.approx(backward, rel=1e-12)
    again = estimate(model, machine=slow_products, recompute=Recompute.FULL)
    assert again.forward_s == found.forward_s
    assert again.backward_s == pytest.approx(backward + by_hand, rel=1e-12)
    eager = estimate(model, machine=slow_products, attention=Attention.EAGER)
    kept = 2 * 5 * HEADS * LENGTH**2 / 1e11
    assert eager.backward_s == pytest.approx(2 * (by_hand + kept) + summed, rel=1e-12)


def test_a_causal_flash_kernel_computes_half_of_the_scores_at_its_own_rate():
    model = decoder()
    slow = MACHINE._replace(flops_per_s=1e9, attention_flops_per_s=5e8)
    scores = 4 * LENGTH**2 * HIDDEN
    causal = msgspec.structs.replace(model, family="llama")
    # Scores are kept again once dropout has changed them, which Llama has none of.
    for kind, computed, times in ((model, scores, 2), (causal, scores / 2, 1)):
        flash, eager = (estimate_fused(kind, slow, how).forward_s for how in (Attention.SDPA, Attention.EAGER))
        kept = times * 5 * HEADS * LENGTH**2 / 1e11
        assert eager - flash == pytest.approx(scores / 1e9 + kept - computed / 5e8, rel=1e-9)


def windowed(model, window):
    """The toy, causal, whose positions attend within a window, described as the facts would."""
    kind = model.types["block"]
    attention, feed_forward = kind.regions
    heads = msgspec.structs.replace(attention.attention, window=window)
    block = msgspec.structs.replace(
        kind,
        regions=(msgspec.structs.replace(attention, attention=heads), feed_forward),
        forward_flops_per_sample=kind.forward_flops_per_sample - 4 * (LENGTH - window) ** 2 * HIDDEN,
    )
    return msgspec.structs.replace(model, family="llama", types={**model.types, "block": block})


def test_a_flash_kernel_leaves_out_what_a_window_does_and_others_add_a_mask_to_all_scores():
    causal = msgspec.structs.replace(decoder(gated=True), family="llama")
    slow = MACHINE._replace(flops_per_s=1e9, attention_flops_per_s=5e8)
    scores, left_out = 4 * LENGTH**2 * HIDDEN, 4 * (LENGTH - 8) ** 2 * HIDDEN
    kernels = {Attention.FLASH_ATTENTION_2: -left_out / 2, Attention.SDPA: scores / 2}
    for kernel, more in kernels.items():
        whole, part = (estimate_fused(model, slow, kernel).forward_s for model in (causal, windowed(causal, 8)))
        assert part - whole == pytest.approx(more / 5e8, rel=1e-9)
    whole, part = (estimate_fused(model, slow, Attention.EAGER) for model in (causal, windowed(causal, 8)))
    assert part == pytest.approx(whole, rel=1e-9)
    # One mask of all scores in the compute format, whatever the number of layers.
    assert masks_bytes(windowed(causal, 8), MIXED, Attention.SDPA) == 2 * LENGTH**2
    for model, kernel in ((windowed(causal, 8), Attention.FLASH_ATTENTION_2), (causal, Attention.SDPA)):
        assert masks_bytes(model, MIXED, kernel) == 0


def estimate_fused(model, machine, attention=Attention.SDPA):
    plain = LayerStrategy(type="block", dp_size=1, tp_size=1)
    return estimate_layer(model, "block", plain, 1, MIXED, attention, machine, fused=True)


def test_no_layer_is_faster_than_its_host():
    model, instant = decoder(), Machine(1e30, 1e30, Link(1e30, 0.0))
    kernels = sum(part.kernels for part in layer_parts(model, "block"))
    found, again = (estimate(model, machine=instant, recompute=kind) for kind in (Recompute.NONE, Recompute.FULL))
    assert found[:2] == pytest.approx((kernels * OPERATOR_S, 2 * kernels * OPERATOR_S))
    assert again[:2] == pytest.approx((kernels * OPERATOR_S, 3 * kernels * OPERATOR_S))
    compiled = estimate(model, machine=instant._replace(compiled=True))
    assert compiled[:2] == pytest.approx((13 * OPERATOR_S, 26 * OPERATOR_S))
    busy = MACHINE._replace(flops_per_s=1e6)
    assert estimate(model, machine=busy) == estimate(model, machine=busy._replace(operator_s=OPERATOR_S))


def test_single_operators_keep_more_than_fused_norms_and_activations():
    gated, plain = decoder(gated=True, dropout=False), decoder(dropout=False)
    # Two norms with a float32 input and a product; three more of GELU's wide tensors.
    for model, family, more in ((gated, "llama", 2 * 4 * TOKENS), (plain, "gpt2", 3 * 2 * 4 * TOKENS)):
        known, fused = msgspec.structs.replace(model, family=family), estimate(model).activation_bytes
        assert estimate(known).activation_bytes == fused + more
        assert estimate_fused(known, MACHINE).activation_bytes == fused


def test_a_block_without_a_width_is_refused_in_one_line():
    model = decoder()
    block = msgspec.structs.replace(model.types["block"], tp_must_divide={})
    narrow = msgspec.structs.replace(model, types=model.types | {"block": block})
    with pytest.raises(BadInput, match="model toy: its blocks have no intermediate_size: describe it again"):
        estimate(narrow)


def test_a_family_that_nothing_is_known_of_is_refused_in_one_line():
    model = msgspec.structs.replace(decoder(), family="mamba")
    with pytest.raises(BadInput, match="model toy: unknown model family 'mamba': use a model of baichuan, bert"):
        estimate(model)


def test_products_of_few_operations_are_bound_by_their_bytes():
    model, fast = decoder(), MACHINE._replace(flops_per_s=1e18)
    kernels = sum(part.kernels for part in layer_parts(model, "block"))
    weights = 12 * HIDDEN**2 * 2
    by_hand = (weights + 34 * TOKENS + 2 * 34 * TOKENS) / 1e11 + kernels * KERNEL_START_S
    assert estimate(model, machine=fast).forward_s == pytest.approx(by_hand, rel=1e-12)


def test_messages_of_tensor_parallelism_are_shared_out_between_the_passes():
    model = decoder()
    message = TOKENS * 2
    free = Machine(1e30, 1e30, Link(1e30, 0.0), operator_s=0.0)
    kernels = KERNEL_START_S * sum(part.kernels for part in layer_parts(model, "block"))

    def traffic(**strategy):
        with_link = estimate(model, tp_size=2, machine=free._replace(link=MACHINE.link), **strategy)
        replays = 1 if strategy.get("recompute") else 0
        return with_link.forward_s - kernels, with_link.backward_s - (2 + replays) * kernels

    # Two sums forward (each region's output), two backward (each region's input); 2(n-1)/n of the message each.
    one_sum = START_S + 2 * 2e-6 + message / 1e10
    assert traffic() == pytest.approx((2 * one_sum, 2 * one_sum), rel=1e-6)
    # Megatron: a gather and a scatter a region, each way, and its input gathered again backward.
    # Ulysses: four exchanges, of half a rank's features.
    one_way = START_S + 2e-6 + message / 2 / 1e10
    megatron = traffic(sequence_parallel=SequenceParallel.MEGATRON)
    assert megatron == pytest.approx((4 * one_way, 6 * one_way), rel=1e-6)
    exchange = START_S + 2e-6 + message / 2 / 2 / 1e10
    ulysses = traffic(sequence_parallel=SequenceParallel.ULYSSES)
    assert ulysses == pytest.approx((4 * exchange, 4 * exchange), rel=1e-6)
    # A replayed forward pass gathers and scatters again, its last sum too where a dropout follows it.
    replayed = traffic(sequence_parallel=SequenceParallel.MEGATRON, recompute=Recompute.FULL)
    assert replayed == pytest.approx((4 * one_way, 8 * one_way), rel=1e-6)


def test_the_head_sums_its_loss_forward_and_the_embedding_writes_its_whole_gradient():
    model = decoder()
    free = Machine(1e30, 1e30, MACHINE.link, operator_s=0.0)
    whole = Strategy(tp_size=2, dp_size=1)

    def times(type_name, machine):
        found = estimate_layer(model, type_name, whole, 1, MIXED, Attention.SDPA, machine)
        return found.forward_s, found.backward_s

    kernels = KERNEL_START_S * layer_parts(model, "head")[0].kernels
    small = [START_S + 2 * 2e-6 + size / 1e10 for size in (4 * LENGTH, 8 * LENGTH)]
    there, back = times("head", free)
    assert there - kernels == pytest.approx(sum(small), rel=1e-6)
    assert back - 2 * kernels == pytest.approx(START_S + 2 * 2e-6 + 2 * TOKENS / 1e10, rel=1e-6)
    table = VOCABULARY * HIDDEN * 2 / 2
    # Two steps of this link take back what a message starts with: messages are free.
    slow = Machine(1e30, 1e8, Link(1e30, -START_S / 2), operator_s=0.0)
    there, back = times("embedding", slow)
    summed = VOCABULARY * HIDDEN / 2 * (4 + 2 + 4)
    assert back - 2 * there == pytest.approx((table + summed) / 1e8, rel=1e-3)


@pytest.mark.parametrize("kind", ["none", "megatron", "ulysses"])
def test_tensor_parallelism_halves_the_products_and_never_the_time_below_that(kind):
    model, slow = decoder(), MACHINE._replace(flops_per_s=1e6, link=Link(1e30, 0.0))
    times = [estimate(model, tp_size=size, machine=slow, sequence_parallel=SPLIT[kind]).forward_s for size in (1, 2, 4)]
    assert times[1] == pytest.approx(times[0] / 2, rel=1e-2) and times[2] == pytest.approx(times[0] / 4, rel=1e-2)
    assert times[1] > times[0] / 2 and times[2] > times[1] / 2


def test_more_work_is_never_faster_and_a_better_device_never_slower():
    model = decoder()
    for kind in SPLIT.values():
        rows = [estimate(model, samples=n, tp_size=2, sequence_parallel=kind) for n in (1, 2, 5, 9)]
        for less, more in pairwise(rows):
            assert all(a < b for a, b in zip(less, more, strict=True))
    block = model.types["block"]
    heavy = msgspec.structs.replace(block, forward_flops_per_sample=10**9)
    types = model.types | {"block": heavy}
    assert estimate(msgspec.structs.replace(model, types=types)).forward_s > estimate(model).forward_s
    for better in (MACHINE._replace(flops_per_s=9e12), MACHINE._replace(memory_bytes_per_s=9e11)):
        assert estimate(model, machine=better, samples=64).forward_s <= estimate(model, samples=64).forward_s


def test_the_parts_of_a_layer_share_out_all_its_operations_and_matrices():
    for model in (decoder(), decoder(gated=True)):
        parts = layer_parts(model, "block")
        kind = model.types["block"]
        assert [part.name for part in parts] == ["attention", "mlp"]
        assert sum(p.flops + p.attention_flops for p in parts) == pytest.approx(kind.forward_flops_per_sample)
        assert sum(part.weights for part in parts) == kind.parameter_count() - HIDDEN
        assert parts[0].flops == pytest.approx(LENGTH * 8 * HIDDEN**2)
        assert parts[0].attention_flops == pytest.approx(4 * LENGTH**2 * HIDDEN)


def test_an_optimizer_step_reads_and_writes_each_byte_of_its_state():
    kind = decoder().types["block"]
    by_hand = kind.parameter_count() * (6 * 4 + 4 * 4) / 1e11
    assert optimizer_time_s(kind, 1, MIXED, MACHINE) == pytest.approx(by_hand)
    assert optimizer_time_s(kind, 2, MIXED, MACHINE) < by_hand


def test_a_model_that_hands_on_nothing_is_refused(make_model):
    with pytest.raises(BadInput, match="has no output"):
        layer_parts(make_model(), "block")
