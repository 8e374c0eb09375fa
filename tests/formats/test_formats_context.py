"""What ranks that share out the positions of a sample send to each other, by hand."""

from collections import Counter

import msgspec
import pytest

from shardwright.models.description import model_of_config
from shardwright.plan.communication import Message, context_messages, loss_messages, region_messages
from shardwright.plan.schedules.passes import Pass
from shardwright.types import LayerStrategy, LayerType, Strategy
from shardwright.types.hardware_profile import Collective

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
MODEL = model_of_config(CONFIG, "m", 16, "config.json")
NUMEL = 2 * 3 * 16 * 4 * 4
"""Keys and values of 3 samples, 16 positions and 4 heads of 4 features."""
FORWARD, BACKWARD, MICROBATCHES = Pass.FORWARD, Pass.BACKWARD, 5
GATHER, SCATTER, SEND = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.P2P


def of_layer(kind: LayerType = MODEL.types["block"], dp_size: int = 1, **fields: object) -> Counter[tuple[object, ...]]:
    """Numbers of messages of a microbatch by pass, collective, ranks and bytes: 2 to compute with, 4 to reduce."""
    strategy = msgspec.convert({"type": "block", "tp_size": 1, "dp_size": dp_size} | fields, LayerStrategy)
    tensors = {tensor.name: tensor for tensor in kind.outputs}
    counts: Counter[tuple[object, ...]] = Counter()
    for m in context_messages(kind, strategy, 3 * dp_size, tensors, 2, 4, MICROBATCHES):
        counts[m.during, m.collective, m.group_size, m.bytes] += m.times
    assert all(count % MICROBATCHES == 0 for count in counts.values())
    return Counter({key: count // MICROBATCHES for key, count in counts.items()})


@pytest.mark.parametrize("recompute", ["none", "full", "attention", "selective"])
def test_keys_and_values_are_gathered_in_each_pass_and_gradients_scattered(recompute: str) -> None:
    both = {(FORWARD, GATHER, 4, 2 * NUMEL): 1, (BACKWARD, GATHER, 4, 2 * NUMEL): 1}
    assert of_layer(cp_size=4, recompute=recompute) == both | {(BACKWARD, SCATTER, 4, 4 * NUMEL): 1}


@pytest.mark.parametrize(("recompute", "rounds"), [("none", 1), ("full", 2), ("attention", 2), ("selective", 1)])
def test_gradients_go_a_step_further_round_a_ring_than_keys_and_values(recompute: str, rounds: int) -> None:
    share = NUMEL // 4
    assert of_layer(cp_size=4, context="ring", recompute=recompute) == {
        (FORWARD, SEND, 2, 2 * share): 3,
        (BACKWARD, SEND, 2, 2 * share): 3 * rounds,
        (BACKWARD, SEND, 2, 4 * share): 4,
    }


@pytest.mark.parametrize(
    ("fields", "numel"),
    [
        ({"tp_size": 2}, NUMEL // 2),
        ({"tp_size": 2, "sequence_parallel": "megatron"}, NUMEL // 2),
        ({"tp_size": 2, "sequence_parallel": "ulysses"}, NUMEL // 2),
        ({"tp_size": 8, "sequence_parallel": "ulysses"}, NUMEL // 4),  # each has a head of its own
        ({"dp_size": 2}, NUMEL),
    ],
)
def test_each_rank_sends_keys_of_its_heads_and_samples(fields: dict[str, object], numel: int) -> None:
    assert {bytes_ for *_, bytes_ in of_layer(cp_size=2, **fields)} == {2 * numel, 4 * numel}


def test_without_shared_positions_nothing_is_sent_and_without_a_backward_pass_nothing_back() -> None:
    assert of_layer(tp_size=2) == {}
    assert {during for during, *_ in of_layer(MODEL.types["block"], cp_size=2)} == {FORWARD, BACKWARD}
    assert of_layer(MODEL.types["embedding"], cp_size=2) == {}


def sizes(messages: list[Message]) -> list[tuple[int, int]]:
    return [(m.group_size, m.bytes) for m in messages]


@pytest.mark.parametrize("split", ["none", "megatron", "ulysses"])
def test_ranks_of_a_region_send_what_they_have_of_the_positions(split: str) -> None:
    def of(**degrees: int) -> list[tuple[int, int]]:
        fields = {"type": "block", "tp_size": 2, "dp_size": 1, "sequence_parallel": split} | degrees
        strategy = msgspec.convert(fields, LayerStrategy)
        return sizes(list(region_messages(MODEL, "block", strategy, 3, 2, 1)))

    assert of(cp_size=4) == [(ranks, size // 4) for ranks, size in of()] != []


def test_a_loss_is_of_a_ranks_positions() -> None:
    head, strategies = MODEL.types["head"], [Strategy(tp_size=2, cp_size=n, dp_size=1) for n in (1, 4)]
    whole, shared = (sizes(list(loss_messages(head, strategy, 3, 2, 1))) for strategy in strategies)
    assert shared == [(ranks, size // 4) for ranks, size in whole] != []
