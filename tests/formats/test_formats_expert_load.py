"""The load of experts: what it says of groups of them, and which models it can be of."""

from functools import partial
from typing import Any

import pytest

from shardwright.models.description import model_of_config
from shardwright.plan.expert_placement import imbalances, load_misfit
from shardwright.types import ExpertLoad, GroupLoad, LayerLoad, Model

SHARES = (0.4, 0.2, 0.1, 0.3)
LOAD = ExpertLoad(model="m", first_step=3, last_step=4, layers=(LayerLoad(layer=0, shares=SHARES),))


@pytest.fixture
def model() -> Model:
    """Two layers of four experts."""
    config = {"model_type": "mixtral", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 24}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4}
    return model_of_config(config, "m", 16, "config.json")


@pytest.mark.parametrize(("ep_size", "imbalance"), [(1, 1.0), (2, 1.2), (4, 1.6)])
def test_shares_say_how_much_more_the_fullest_group_has_than_the_mean_one(ep_size: int, imbalance: float) -> None:
    assert LOAD.layers[0].imbalance(ep_size) == pytest.approx(imbalance)


def test_figures_of_single_steps_show_peaks_that_shares_hide() -> None:
    layer = LayerLoad(layer=0, shares=(0.25,) * 4, groups=(GroupLoad(ep_size=2, imbalance=1.5),))
    assert (layer.imbalance(2), layer.imbalance(4)) == (1.5, 1.0)
    with pytest.raises(ValueError, match="ep_size 3 does not divide 4 experts"):
        layer.imbalance(3)


def test_a_type_of_layer_has_the_mean_imbalance_of_its_layers(model: Model) -> None:
    both = (*LOAD.layers, LayerLoad(layer=1, shares=(0.25,) * 4))
    assert imbalances(LOAD, model, 2) == pytest.approx({"sparse": 1.2})
    assert imbalances(_load(layers=both), model, 2) == pytest.approx({"sparse": 1.1})


@pytest.mark.parametrize(
    ("layers", "misfit"),
    [
        ((LayerLoad(layer=2, shares=SHARES),), "layer 2 of m has no experts"),
        ((LayerLoad(layer=1, shares=(0.5, 0.5)),), "layer 1 of m has 4 experts, not 2"),
        (LOAD.layers, None),
    ],
)
def test_a_load_of_other_layers_or_experts_is_not_that_of_a_model(
    model: Model, layers: tuple[LayerLoad, ...], misfit: str | None
) -> None:
    assert load_misfit(_load(layers=layers), model) == misfit


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (partial(LayerLoad, layer=0, shares=(0.5, 0.4)), "the shares of layer 0 add up to 0.9, not to 1"),
        (partial(GroupLoad, ep_size=2, imbalance=2.5), "imbalance 2.5 of 2 groups is not from 1 to 2"),
        (partial(GroupLoad, ep_size=2, imbalance=0.5), "imbalance 0.5 of 2 groups is not from 1 to 2"),
        (lambda: _load(layers=2 * LOAD.layers), "its layers are not in ascending order"),
        (lambda: _load(last_step=2), "last_step 2 is before first_step 3"),
    ],
)
def test_a_load_that_contradicts_itself_is_refused(made: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        made()


def _load(**changes: Any) -> ExpertLoad:
    fields: dict[str, Any] = {"model": "m", "first_step": 3, "last_step": 4, "layers": LOAD.layers}
    return ExpertLoad(**fields | changes)
