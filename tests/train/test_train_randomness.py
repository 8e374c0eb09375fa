"""Dropout: the same whenever a pass is run again, the same on ranks that hold copies, and apart everywhere else."""

import json
from typing import Any

import pytest
from forked_ranks import run_worker
from randomness_worker import MICROBATCHES, MODEL, RATE


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = tmp_path_factory.mktemp("randomness") / "found.json"
    run_worker("randomness_worker", [str(result)], 2)
    read: dict[str, Any] = json.loads(result.read_bytes())
    return read


def test_a_step_run_twice_gives_the_same_gradients_to_the_bit(found: dict[str, Any]) -> None:
    assert found["repeated"]


@pytest.mark.parametrize("recompute", ["full", "attention", "mlp", "selective"])
def test_recomputing_gives_the_same_loss_and_gradients_to_the_bit(found: dict[str, Any], recompute: str) -> None:
    assert found["recomputed"][recompute]


@pytest.mark.parametrize("recompute", ["full", "attention", "mlp", "selective"])
def test_a_replay_from_another_seed_is_seen(found: dict[str, Any], recompute: str) -> None:
    assert not found["stale"][recompute]


def test_ranks_that_hold_copies_drop_the_same_hidden_states(found: dict[str, Any]) -> None:
    assert found["copies_equal"]


def test_ranks_that_hold_different_heads_drop_different_attention_weights(found: dict[str, Any]) -> None:
    assert not found["copies_attend_alike"]


@pytest.mark.parametrize("apart", ["samples", "positions", "heads"])
def test_ranks_that_hold_different_states_drop_different_ones(found: dict[str, Any], apart: str) -> None:
    assert not found["ranks_alike"][apart]


@pytest.mark.parametrize("what", ["microbatches", "layers", "samples", "steps"])
def test_what_is_drawn_for_one_is_not_drawn_for_the_next(found: dict[str, Any], what: str) -> None:
    assert not found[f"{what}_alike"]


def test_a_share_of_what_embedding_attention_and_feed_forward_give_is_dropped(found: dict[str, Any]) -> None:
    assert found["drops"] == MICROBATCHES * (1 + 2 * len(MODEL.layers))
    assert found["kept"] == pytest.approx(1 - RATE, abs=0.01)


def test_whole_parts_of_blocks_are_left_out_alike_by_copies_and_replays(found: dict[str, Any]) -> None:
    paths = found["paths"]
    assert len(paths["recomputed"]) == 4 and all(paths["recomputed"].values()) and paths["copies_equal"]
    assert not paths["stale"] and not paths["samples_alike"] and not paths["steps_alike"]
