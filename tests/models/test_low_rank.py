"""Low-rank matrices (LoRA) of a description: where they stand, and what of peft's configurations is refused."""

from typing import Any

import pytest
from tiny_models import CONFIGS

from shardwright_formats.io import BadInput
from shardwright_formats.types import EMBEDDING, HEAD, LowRank, Model
from shardwright_models.description import model_of_config
from shardwright_models.frozen import FrozenPart, freeze
from shardwright_models.low_rank import adapt, adapter_config, adapter_of_config

LLAMA, T5 = CONFIGS["llama"], CONFIGS["t5"]
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def _adapted(config: dict[str, Any] = LLAMA, **changes: object) -> Model:
    model = model_of_config(config, "tiny", 16, "config.json")
    return adapt(model, adapter_of_config(ADAPTER | changes, "adapter"), "adapter")


def test_low_rank_matrices_are_cut_as_the_matrix_that_they_stand_beside() -> None:
    model = _adapted()
    assert model.layers == ("block.lora",) * 4
    trained = {p.name: (p.shape, p.tp_dim, p.inside) for p in model.types["block.lora"].trained_parameters}
    assert trained == {
        "self_attn.q_proj.lora_A.weight": ((4, 32), None, True),
        "self_attn.q_proj.lora_B.weight": ((32, 4), 0, False),
        "mlp.down_proj.lora_A.weight": ((4, 48), 1, False),
        "mlp.down_proj.lora_B.weight": ((32, 4), None, True),
    }
    assert not model.types[EMBEDDING].has_backward and not model.types[HEAD].trained_parameters


def test_low_rank_matrices_count_their_operations() -> None:
    plain = model_of_config(LLAMA, "tiny", 16, "config.json").types["block"]
    adapted = _adapted().types["block.lora"]
    more = adapted.forward_flops_per_sample - plain.forward_flops_per_sample
    assert more == 2 * 16 * adapted.trained_count() == 2 * 16 * 4 * (32 + 32 + 48 + 32)


def test_all_linear_is_each_matrix_of_the_blocks() -> None:
    names = [p.name for p in _adapted(target_modules="all-linear").types["block.lora"].trained_parameters]
    assert len(names) == 2 * 7
    shared = _adapted(T5, target_modules="all-linear")
    assert not any("relative" in p.name for kind in shared.types.values() for p in kind.trained_parameters)


def test_a_configuration_of_peft_is_read_and_written_back() -> None:
    read = adapter_of_config(ADAPTER | {"use_rslora": True, "init_lora_weights": False, "lora_dropout": 0.0}, "adapter")
    assert read == LowRank(rank=4, alpha=8, targets=("down_proj", "q_proj"), rank_stabilized=True, starts_at_zero=False)
    assert read.scaling == 8 / 2 and adapter_of_config(ADAPTER, "adapter").scaling == 2
    assert adapter_of_config(adapter_config(read), "adapter") == read


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout 0.1 cannot be trained: nothing is dropped"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not trained here"),
        ({"bias": "all"}, "bias 'all' cannot be trained"),
        ({"use_dora": True}, "use_dora True cannot be trained"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save .* cannot be trained"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern .* cannot be trained"),
        ({"layers_to_transform": [0]}, "layers_to_transform .* cannot be trained"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not drawn here"),
        ({"r": 0}, "r 0 is no whole number"),
        ({"target_modules": ".*q_proj"}, "target_modules '.*q_proj' is no list of names"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head is no matrix of a block"),
        ({"target_modules": ["input_layernorm"]}, "input_layernorm is no matrix of a block"),
    ],
)
def test_what_is_not_trained_is_refused_by_its_key(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        _adapted(**changes)


def test_frozen_parts_and_low_rank_matrices_are_not_asked_for_together() -> None:
    model = freeze(model_of_config(LLAMA, "tiny", 16, "config.json"), [FrozenPart.parse("layers[0]")])
    with pytest.raises(BadInput, match="take one of --frozen and --lora"):
        adapt(model, adapter_of_config(ADAPTER, "adapter"), "adapter")
