"""Low-rank matrices (LoRA) of a description: where they stand, and what of peft's configurations is refused."""

from typing import Any

import pytest
from msgspec import UNSET
from tiny_models import CONFIGS

from shardwright.io import BadInput
from shardwright.models.adapter_config import adapter_of_config
from shardwright.models.description import model_of_config
from shardwright.models.frozen import FrozenPart, freeze
from shardwright.models.low_rank import adapt, adapter_config
from shardwright.types import EMBEDDING, HEAD, LowRank, Model

LLAMA, T5 = CONFIGS["llama"], CONFIGS["t5"]
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def _plain(config: dict[str, Any]) -> Model:
    return model_of_config(config, "tiny", 16, "config.json")


def _adapted(config: dict[str, Any] = LLAMA, **changes: object) -> Model:
    return adapt(_plain(config), adapter_of_config(ADAPTER | changes, "adapter"), "adapter")


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
    given = {"use_rslora": True, "init_lora_weights": False, "lora_dropout": 0.0, "alpha_pattern": {"q_proj": 6}}
    model = _adapted(**given, rank_pattern={"layers.[01].mlp.down_proj": 2}, layers_to_transform=[0, 1, 2])
    assert model.layers == ("block.lora", "block.lora", "block.lora2", "block.frozen")
    named = {"targets": ("down_proj", "q_proj"), "rank_stabilized": True, "starts_at_zero": False}
    numerators = {f"model.layers.{number}.self_attn.q_proj": 6 for number in range(3)}
    read = model.low_rank
    assert read == LowRank(rank=4, alpha=8, **named, alphas=numerators)  # type: ignore[arg-type]
    scalings = read.scaling_of("model.layers.0.mlp.down_proj", 4), read.scaling_of("model.layers.1.self_attn.q_proj", 4)
    assert scalings == (8 / 2, 6 / 2)
    again = adapt(_plain(LLAMA), adapter_of_config(adapter_config(model), "adapter"), "adapter")
    assert (again.types, again.layers) == (model.types, model.layers)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout 0.1 cannot be trained: nothing is dropped"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"bias": "all"}, "bias 'all' cannot be trained"),
        ({"use_dora": True}, "use_dora True cannot be trained"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save .* cannot be trained"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern 0 is not a whole number"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern '8' is not a number above 0"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform .* is not a list of numbers"),
        ({"layers_to_transform": [7]}, "target_modules match no module that is not excluded"),
        ({"layers_pattern": "layers"}, "layers_pattern needs layers_to_transform"),
        ({"target_modules": "all-linear", "layers_to_transform": [0]}, "need a list of target_modules"),
        ({"exclude_modules": ".*"}, "target_modules match no module that is not excluded"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices .* no table rows are trained"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' cannot be trained: peft would also train the whole head"),
        ({"target_parameters": ["mlp.up_proj.weight"]}, "mlp.up_proj.weight is not a parameter that gets low-rank"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"r": 0}, "r 0 is not a whole number"),
        ({"target_modules": None}, "target_modules names no modules"),
        ({"target_modules": "(q_proj"}, "'\\(q_proj' is not a regular expression"),
        ({"rank_pattern": {"(q_proj": 2}}, "'\\(q_proj' is not a regular expression"),
        ({"target_modules": "(" * 2000 + ")" * 2000}, "is not a regular expression .*recursion"),
        ({"target_modules": "q{9999999999999}"}, "is not a regular expression .*too large"),
        ({"target_modules": r"(\w+\.?)+!"}, "takes over 2 s or 1 GiB to match the names of modules"),
        ({"target_modules": "q_proj"}, "target_modules: q_proj is not a module of the model"),
        ({"target_modules": ["q_proj", "q_a_proj"]}, "target_modules: q_a_proj is not a module of the model"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head gives the logits, and low-rank matrices are not"),
        ({"target_modules": ["embed_tokens"]}, "model.embed_tokens is a part of the embedding"),
        ({"target_modules": ["input_layernorm"]}, "model.layers.0.input_layernorm is not a Linear"),
        ({"target_modules": ["mlp"]}, "model.layers.0.mlp is not a Linear"),
    ],
)
def test_what_is_not_trained_is_refused_by_its_key(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        _adapted(**changes)


@pytest.mark.parametrize(
    ("family", "targets", "problem"),
    [
        ("mixtral", ["w1"], "w1 and w3 are one matrix of all experts, and only w1 is named"),
        ("qwen3_moe", ["up_proj", "q_proj"], "gate_proj and up_proj are one matrix of all experts, and only up_proj"),
        ("gpt_oss", ["router"], "model.layers.0.mlp.router is a router, and not a Linear"),
        ("llama4_text", ["router"], "router returns its scores twice, which peft cannot run"),
        ("glm4", ["gate_proj"], "target_modules: gate_proj is not a module of the model"),
        ("glm4", ["gate_up_proj"], "gate_up_proj is held here as gate_proj and up_proj, which cannot have one pair"),
        ("t5", ["relative_attention_bias"], "relative_attention_bias is not a Linear"),
        ("whisper", ["proj_out"], "proj_out gives the logits"),
    ],
)
def test_what_cannot_have_low_rank_matrices_is_refused_with_the_reason(
    family: str, targets: list[str], problem: str
) -> None:
    with pytest.raises(BadInput, match=problem):
        _adapted(CONFIGS[family], target_modules=targets)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text"])
@pytest.mark.parametrize("name", ["mlp.experts.gate_up_proj", "feed_forward.experts.down_proj", "experts.down_proj"])
def test_experts_that_never_get_low_rank_matrices_are_not_asked_for_once_more(family: str, name: str) -> None:
    with pytest.raises(BadInput, match=f"experts and routers of {family} get no .*: leave it out") as refused:
        _adapted(CONFIGS[family], target_modules=["q_proj"], target_parameters=[name])
    assert f"target_parameters: {name} is refused" in str(refused.value)


def test_low_rank_matrices_of_experts_are_shared_out_as_the_experts_are() -> None:
    model = _adapted(CONFIGS["mixtral"], target_modules="all-linear")
    trained = {p.name: p for p in model.types[model.layers[0]].trained_parameters if ".mlp" in f".{p.name}"}
    cuts = {name: (p.shape, p.tp_dim, p.inside, p.ep_dim) for name, p in trained.items()}
    assert cuts == {
        "mlp.gate.lora_A.weight": ((4, 32), None, True, UNSET),
        "mlp.gate.lora_B.weight": ((5, 4), None, True, UNSET),
        "mlp.experts.base_layer.lora_A.weight": ((5, 8, 32), None, True, 0),
        "mlp.experts.base_layer.lora_B.weight": ((5, 2, 24, 8), 2, False, 0),
        "mlp.experts.lora_A.weight": ((5, 4, 24), 2, False, 0),
        "mlp.experts.lora_B.weight": ((5, 32, 4), None, True, 0),
    }
    more = model.types[model.layers[0]].forward_flops_per_sample
    more -= _plain(CONFIGS["mixtral"]).types["sparse"].forward_flops_per_sample
    used = sum(p.numel(1) if p.ep_dim is UNSET else p.numel(1) // 5 * 2 for p in trained.values())
    attention = sum(p.numel(1) for p in model.types[model.layers[0]].trained_parameters if "attn" in p.name)
    assert more == 2 * 16 * (used + attention)


def test_frozen_parts_and_low_rank_matrices_are_not_asked_for_together() -> None:
    model = freeze(model_of_config(LLAMA, "tiny", 16, "config.json"), [FrozenPart.parse("layers[0]")])
    with pytest.raises(BadInput, match="pass only one of --frozen and --lora"):
        adapt(model, adapter_of_config(ADAPTER, "adapter"), "adapter")
