"""Biases of routers: what a step makes of counts, and who has them."""

import msgspec
import torch
from tiny_models import tiny

from shardwright.models.families.deepseek import CORRECTION
from shardwright.models.frozen import FrozenPart, freeze
from shardwright.plan.expert_placement import expert_slices
from shardwright.plan.layout import parameter_box
from shardwright.types import DataParallel, Strategy
from shardwright_train.parallel.experts import RouterBias, RouterBiases, corrected_bias

COUNTS = torch.tensor([4, 2, 3, 3, 0, 1, 0, 3], dtype=torch.float64)
"""Of two layers of four experts: means of 3 and of 1."""


def biases() -> RouterBiases:
    """Those of a rank that holds both layers."""
    held = {f"layers[{i}]": RouterBias(torch.zeros(4), slice(4 * i, 4 * i + 4)) for i in range(2)}
    return RouterBiases(held)


def test_a_bias_rises_where_an_expert_lacks_positions_and_falls_where_it_has_too_many() -> None:
    held = biases()
    held.correct(COUNTS, torch.tensor(0.5))
    assert held.of_layer["layers[0]"].bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert held.of_layer["layers[1]"].bias.tolist() == [0.5, 0.0, 0.5, -0.5]


def test_replicas_of_positions_change_no_bias() -> None:
    once, thrice = biases(), biases()
    once.correct(COUNTS, torch.tensor(0.1))
    thrice.correct(3 * COUNTS, torch.tensor(0.1))
    assert torch.equal(once.of_layer["layers[1]"].bias, thrice.of_layer["layers[1]"].bias)


def test_a_step_that_is_not_done_corrects_nothing() -> None:
    held = biases()
    held.correct(COUNTS, 0.5 * torch.tensor([1.0, torch.inf]).isfinite().all())
    assert not held.of_layer["layers[0]"].bias.any()


def test_every_rank_has_biases_whole_and_nothing_of_them_is_frozen_unless_asked() -> None:
    model = tiny("deepseek_v3")
    (bias,) = (p for p in model.types["sparse"].parameters if p.name == CORRECTION)
    assert corrected_bias(model.types["sparse"]) == bias and corrected_bias(model.types["dense"]) is None
    assert not model.is_frozen and not bias.trained
    for kind in DataParallel:
        strategy = Strategy(tp_size=2, dp_size=4, data_parallel=kind)
        assert {parameter_box(bias, strategy, rank) for rank in range(8)} == {((0, 8),)}
    frozen = freeze(model, [FrozenPart.parse("layers")])
    assert all(corrected_bias(frozen.types[name]) is None for name in frozen.layers)
    assert [part.stop - part.start for part in expert_slices(model).values()] == [8, 8, 8]


def test_a_description_counts_no_buffers_as_parameters() -> None:
    model = tiny("deepseek_v3")
    without = msgspec.structs.replace(
        model.types["sparse"], parameters=tuple(p for p in model.types["sparse"].parameters if not p.is_buffer)
    )
    assert (
        model.parameter_count
        == msgspec.structs.replace(model, types={**model.types, "sparse": without}).parameter_count
    )
