"""A message belongs to the pass that sends it, and what recomputation repeats belongs to the backward pass."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from shardwright.io import read_document
from shardwright.plan.communication import Cause, Message, parameter_messages, region_messages, step_messages
from shardwright.plan.schedules.passes import Pass
from shardwright.types.hardware_profile import Collective
from shardwright.types.model import BoundaryTensor, Heads, Model, Region
from shardwright.types.plan import ITEMSIZE, PipelineStage, Plan
from shardwright.types.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy

EXAMPLES = Path(__file__).parents[2] / "core" / "examples"
STREAM = "hidden_states"
AT_THE_END = (Cause.PARTIAL_GRADIENTS, Cause.TIED_PARAMETERS, Cause.NORM)
REDUCE, GATHER, SCATTER = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER


@pytest.fixture
def model() -> Model:
    """The example's model, whose block has an attention and a feed-forward region of 16 positions and 8 features."""
    example = read_document(EXAMPLES / "model.json", Model)
    heads = Heads(queries=STREAM, keys=STREAM, heads=2, kv_heads=2, head_features=4)
    regions = (
        Region(name="attention", enters=(STREAM,), leaves=STREAM, attention=heads),
        Region(name="mlp", enters=(STREAM,), leaves=STREAM),
    )
    stream = (BoundaryTensor(name=STREAM, sequence_length=16, features=8),)
    block = msgspec.structs.replace(example.types["block"], regions=regions, outputs=stream)
    return msgspec.structs.replace(example, types=example.types | {"block": block})


def counted(messages: list[Message], during: Pass) -> Counter[Collective]:
    found: Counter[Collective] = Counter()
    for message in messages:
        if message.during is during:
            found[message.collective] += message.times
    return found


def messages_of(model: Model, split: str, recompute: str) -> list[Message]:
    strategy = LayerStrategy(
        type="block", tp_size=2, dp_size=1, sequence_parallel=SequenceParallel(split), recompute=Recompute(recompute)
    )
    return list(region_messages(model, "block", strategy, 3, 4, 5))


@pytest.mark.parametrize(
    ("split", "forward", "backward", "replayed"),
    [
        # Of two regions; the last sum of what is recomputed is left out.
        ("none", {REDUCE: 10}, {REDUCE: 10}, {REDUCE: 5}),
        # Megatron's gathers again what enters, recomputed or not.
        ("megatron", {GATHER: 10, SCATTER: 10}, {GATHER: 20, SCATTER: 10}, {SCATTER: 5}),
        ("ulysses", {Collective.ALL_TO_ALL: 20}, {Collective.ALL_TO_ALL: 20}, {Collective.ALL_TO_ALL: 20}),
    ],
)
def test_recomputation_repeats_what_is_sent_forward_in_the_backward_pass(
    model: Model,
    split: str,
    forward: dict[Collective, int],
    backward: dict[Collective, int],
    replayed: dict[Collective, int],
) -> None:
    kept, recomputed = (messages_of(model, split, recompute) for recompute in ("none", "full"))
    assert counted(kept, Pass.FORWARD) == counted(recomputed, Pass.FORWARD) == Counter(forward)
    assert counted(kept, Pass.BACKWARD) == Counter(backward)
    assert counted(recomputed, Pass.BACKWARD) == Counter(backward) + Counter(replayed)


@pytest.mark.parametrize(
    ("split", "further"), [("none", {}), ("megatron", {}), ("ulysses", {Collective.ALL_TO_ALL: 20})]
)
def test_selective_recomputation_repeats_exchanges_alone(
    model: Model, split: str, further: dict[Collective, int]
) -> None:
    kept, selective = (messages_of(model, split, recompute) for recompute in ("none", "selective"))
    assert counted(selective, Pass.FORWARD) == counted(kept, Pass.FORWARD)
    assert counted(selective, Pass.BACKWARD) == counted(kept, Pass.BACKWARD) + Counter(further)


@pytest.mark.parametrize(
    ("split", "entering", "leaving"),
    [
        ("none", [(REDUCE, Pass.BACKWARD)], [(REDUCE, Pass.FORWARD)]),
        (
            "megatron",
            [(GATHER, Pass.FORWARD), (SCATTER, Pass.BACKWARD), (GATHER, Pass.BACKWARD)],
            [(SCATTER, Pass.FORWARD), (GATHER, Pass.BACKWARD)],
        ),
    ],
)
def test_entering_and_leaving_a_region_send_in_the_pass_that_needs_it(
    model: Model, split: str, entering: list[tuple[Collective, Pass]], leaving: list[tuple[Collective, Pass]]
) -> None:
    for region, wanted in (
        (Region(name="mlp", enters=(STREAM,)), entering),
        (Region(name="mlp", leaves=STREAM), leaving),
    ):
        block = msgspec.structs.replace(model.types["block"], regions=(region,))
        alone = msgspec.structs.replace(model, types=model.types | {"block": block})
        assert [(message.collective, message.during) for message in messages_of(alone, split, "none")] == wanted


def test_a_message_has_the_size_of_the_layers_own_outputs(model: Model) -> None:
    """Levels of a pyramid hand on other sizes than the embedding does."""
    assert {message.bytes for message in messages_of(model, "none", "none")} == {3 * 4 * 16 * 8}
    wide = (BoundaryTensor(name=STREAM, sequence_length=4, features=64),)
    block = msgspec.structs.replace(model.types["block"], outputs=wide)
    pyramid = msgspec.structs.replace(model, types=model.types | {"block": block})
    assert {message.bytes for message in messages_of(pyramid, "none", "none")} == {3 * 4 * 4 * 64}


def test_over_a_cut_goes_what_the_layer_before_it_hands_on() -> None:
    """Of another size than the embedding hands on, as between levels of a pyramid; where the layout changes, too."""
    example = read_document(EXAMPLES / "plan.json", Plan)
    narrow = (BoundaryTensor(name=STREAM, sequence_length=4, features=24),)
    types = example.model.types
    types |= {"merge": msgspec.structs.replace(types["block"], outputs=narrow)}
    alone, shared = ({"tp_size": 1, "dp_size": 2}, {"tp_size": 2, "dp_size": 1})
    plan = msgspec.structs.replace(
        example,
        model=msgspec.structs.replace(example.model, layers=("block", "merge", "merge"), types=types),
        global_batch_size=16,
        num_microbatches=4,
        stages=(PipelineStage(ranks=(0, 1), layers=((0, 2),)), PipelineStage(ranks=(2, 3), layers=((2, 3),))),
        embedding=Strategy(**shared),
        layers=tuple(LayerStrategy(type=t, **d) for t, d in (("block", shared), ("merge", alone), ("merge", shared))),
        head=Strategy(**shared),
    )
    itemsize = ITEMSIZE[plan.precision.compute]
    first, later = ([m for m in step_messages(plan, rank)] for rank in (0, 2))
    (sent,) = (m.bytes for m in first if m.cause is Cause.PIPELINE)
    assert sent == 2 * 4 * 24 * itemsize
    (wide,) = plan.model.boundary
    # Four samples: whole on both ranks, then two on each, then whole again.
    before, behind = ([m.bytes for m in part if m.cause is Cause.REDISTRIBUTION] for part in (first, later))
    assert before == [0, 2 * wide.sequence_length * wide.features * itemsize] and behind == [sent, 0]
    assert plan.model.received_by("head") == narrow and plan.model.received_by("embedding") == ()


def test_zero3_gathers_in_both_passes_and_zero2_in_the_first_forward_pass(model: Model) -> None:
    for kind, forward, backward in ((DataParallel.ZERO3, 5, 5), (DataParallel.ZERO2, 1, 0)):
        strategy = LayerStrategy(type="block", tp_size=1, dp_size=2, data_parallel=kind)
        messages = list(parameter_messages(model.types["block"], strategy, 2, 4, 5, False))
        assert counted(messages, Pass.FORWARD) == Counter({GATHER: forward})
        assert counted(messages, Pass.BACKWARD) == Counter({GATHER: backward, SCATTER: 1}) + Counter()


@pytest.mark.parametrize(
    ("kind", "reduces"), [(DataParallel.DDP, REDUCE), (DataParallel.ZERO2, SCATTER), (DataParallel.ZERO3, SCATTER)]
)
def test_gradients_are_reduced_once_a_step_or_after_every_microbatch(
    model: Model, kind: DataParallel, reduces: Collective
) -> None:
    strategy = LayerStrategy(type="block", tp_size=1, dp_size=2, data_parallel=kind)
    for every, times in ((False, 1), (True, 5)):
        messages = list(parameter_messages(model.types["block"], strategy, 2, 4, 5, every))
        assert counted(messages, Pass.BACKWARD)[reduces] == times


def test_only_what_ends_a_step_belongs_to_no_pass() -> None:
    plan = read_document(EXAMPLES / "plan.json", Plan)
    messages = [message for rank in range(plan.world_size) for message in step_messages(plan, rank)]
    assert {message.cause for message in messages} >= {Cause.PIPELINE, Cause.NORM}
    for message in messages:
        assert (message.during is None) == (message.cause in AT_THE_END)


def test_a_stage_sends_activations_forward_and_gradients_backward() -> None:
    plan = read_document(EXAMPLES / "plan.json", Plan)
    for rank in range(plan.world_size):
        sends = {message.during for message in step_messages(plan, rank) if message.cause is Cause.PIPELINE}
        stage = plan.stage_of_rank(rank)
        wanted = {Pass.FORWARD} if stage == 0 else {Pass.BACKWARD} if stage == len(plan.stages) - 1 else set(Pass)
        assert sends == wanted


def test_ranks_of_a_narrow_stage_send_to_each_rank_of_a_wide_one_what_it_wants() -> None:
    """One rank, then three that share the samples: the whole batch forward in three pieces, and back."""
    example = read_document(EXAMPLES / "plan.json", Plan)
    alone, shared = ({"tp_size": 1, "dp_size": ranks} for ranks in (1, 3))
    plan = msgspec.structs.replace(
        example,
        global_batch_size=24,
        num_microbatches=4,
        stages=(PipelineStage(ranks=(0,), layers=((0, 1),)), PipelineStage(ranks=(1, 2, 3), layers=((1, 3),))),
        embedding=Strategy(**alone),
        layers=(LayerStrategy(type="block", **alone), *(LayerStrategy(type="block", **shared) for _ in range(2))),
        head=Strategy(**shared),
    )
    piece = 2 * sum(tensor.sequence_length * tensor.features for tensor in plan.model.boundary)
    piece *= ITEMSIZE[plan.precision.compute]
    sends = [[m for m in step_messages(plan, rank) if m.cause is Cause.PIPELINE] for rank in range(4)]
    forward = Message(Cause.PIPELINE, Collective.P2P, 2, piece, Pass.FORWARD, 4)
    assert sends == [[forward] * 3, *[[forward._replace(during=Pass.BACKWARD)]] * 3]
    assert not any(m.cause is Cause.REDISTRIBUTION for rank in range(4) for m in step_messages(plan, rank))
