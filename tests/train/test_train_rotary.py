"""Every kind of rotary embedding turns as the stock model's, also where ranks have parts of a sequence."""

from typing import Any

import pytest
import torch
from tiny_models import SEQUENCE_LENGTH, stock_model, tiny
from torch import Tensor

from shardwright.types import Model
from shardwright_train.models.base import family_named
from shardwright_train.models.masks import Places

# Below and over the length of pretraining, where a kind tells them apart.
LONG = {"original_max_position_embeddings": SEQUENCE_LENGTH // 2}
SHORT = {"original_max_position_embeddings": 2 * SEQUENCE_LENGTH}
PER_FEATURE = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0], "factor": 4.0}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
KINDS: dict[str, dict[str, Any]] = {
    "theta alone": {"rope_theta": 500.0},
    "linear, as once spelled": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0} | LONG},
    "llama3": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3"} | BANDS | LONG},
    "longrope, short": {"rope_scaling": {"rope_type": "longrope"} | PER_FEATURE | SHORT},
    "longrope, long": {"rope_scaling": {"rope_type": "longrope"} | PER_FEATURE | LONG},
}
STATES = torch.randn(2, SEQUENCE_LENGTH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def rotated(model: Model, positions: slice, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    family = family_named(model.family, "test")
    places = Places(SEQUENCE_LENGTH, positions, positions, order)
    constants = family.constants(model, model.layers[0], places, STATES, "sdpa")
    angles: tuple[Tensor, Tensor] = constants["arguments"]["position_embeddings"]
    return angles


@pytest.mark.parametrize("family_name", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rotary_embedding_gives_the_hidden_states_of_the_stock_model(kind: str, family_name: str) -> None:
    model, family = tiny(family_name, head_dim=4, **KINDS[kind]), family_named(family_name, "test")
    torch.manual_seed(0)
    stock: Any = stock_model(model).double()
    states: tuple[Tensor, ...] = (STATES,)
    for number in range(len(model.layers)):
        block = family.build(model, f"layers[{number}]", "sdpa").double()
        block.load_state_dict(stock.model.layers[number].state_dict())
        constants = family.constants(model, model.layers[number], Places.whole(SEQUENCE_LENGTH), STATES, "sdpa")
        states = family.call(block, states, {"tokens": torch.zeros(2, SEQUENCE_LENGTH)}, constants)
    torch.testing.assert_close(stock.model.norm(states[0]), stock.model(inputs_embeds=STATES)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_out_positions_turn_them_as_one_does(kind: str) -> None:
    model, half = tiny("llama", **KINDS[kind]), SEQUENCE_LENGTH // 2
    parts = zip(rotated(model, slice(0, half)), rotated(model, slice(half, SEQUENCE_LENGTH)), strict=True)
    for whole, part in zip(rotated(model, slice(0, SEQUENCE_LENGTH)), parts, strict=True):
        assert torch.equal(torch.cat(part, 1), whole)
    order = torch.randperm(SEQUENCE_LENGTH, generator=torch.Generator().manual_seed(0))
    permuted = rotated(model, slice(0, half), order)
    for whole, part in zip(rotated(model, slice(0, SEQUENCE_LENGTH)), permuted, strict=True):
        assert torch.equal(part, whole[:, order[:half]])


def test_each_kind_turns_by_other_angles() -> None:
    # Two spellings are of one kind; dynamic grows with sequences that are longer than the model says, and short
    # longrope has factors of its own.
    angles = {kind: rotated(tiny("llama", **keys), slice(0, SEQUENCE_LENGTH))[0] for kind, keys in KINDS.items()}
    same = [(a, b) for a in angles for b in angles if a < b and torch.equal(angles[a], angles[b])]
    assert same == [("linear", "linear, as once spelled")]
