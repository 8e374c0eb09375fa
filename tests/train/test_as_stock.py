"""Types without facts are trained as their stock class, exactly, or refused with the reason."""

import json
import re

import pytest
import stock_worker
import torch
from forked_ranks import run_worker
from msgspec.structs import replace
from run_resumes import resumed, saved
from run_types import RECORD
from tiny_models import stock_model
from tiny_types import TYPES, tiny_config

from shardwright.io import BadInput
from shardwright.models.adapter_config import adapter_of_config
from shardwright.models.low_rank import adapt, adapter_config
from shardwright.types import Recompute
from shardwright_train.models.as_stock import as_stock
from shardwright_train.models.initial_weights import Constant, Filling, Normal
from shardwright_train.models.masks import Places
from shardwright_train.models.traced import describe_by_trace
from shardwright_train.weights.reading import open_weights

EXACT = 1e-10
SOON = {
    "xlm-roberta": ("zero3", "gpipe"),  # a bias of the head has two names, a matrix of it is the embedding's
    "lfm2_moe": ("ddp", "1f1b", "zero_bubble", "tp"),  # convolutions, attention and experts
}
OTHERS = (
    *("bloom", "deepseek_v3", "falcon_h1", "gemma3_text", "gpt_neox", "mamba2", "olmo3", "opt", "qwen3_next"),
    *("starcoder2", "xglm"),
)


EVERYWHERE = "zero3", "ddp", "1f1b", "gpipe", "interleaved", "zero_bubble"
DIVIDED = "deepseek_v3", "gemma3_text", "gpt_neox", "olmo3", "qwen3_next", "starcoder2"
"""Those whose blocks ranks share out, as the plan of their class says."""


@pytest.mark.parametrize("kind", [*SOON, *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)])
def test_plans_train_what_the_stock_class_trains(kind, tmp_path):
    config, result = tmp_path / "config.json", tmp_path / "result.json"
    config.write_text(json.dumps(tiny_config(kind)))
    run_worker("stock_worker", [str(config), str(result), *SOON.get(kind, ())], 2)
    errors = json.loads(result.read_bytes())["errors"]
    assert set(errors) == set(SOON.get(kind, (*EVERYWHERE, *(["tp"] if kind in DIVIDED else []))))
    assert max(errors.values()) <= EXACT, errors


@pytest.mark.parametrize(
    ("kind", "targets", "names"),
    [
        ("starcoder2", "all-linear", ("1f1b", "tp")),
        pytest.param("glm", "all-linear", (), marks=pytest.mark.long),  # two matrices in one are cut side by side
        pytest.param("minicpm3", "all-linear", (), marks=pytest.mark.long),  # latents, which each rank has whole
        pytest.param("glm4_moe", ["q_proj", "o_proj"], (), marks=pytest.mark.long),  # beside experts
    ],
)
def test_low_rank_matrices_train_what_peft_trains(kind, targets, names, tmp_path):
    config, result = tmp_path / "config.json", tmp_path / "result.json"
    config.write_text(json.dumps(tiny_config(kind)))
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    run_worker("stock_worker", [str(config), str(result), *names], 2)
    errors = json.loads(result.read_bytes())["errors"]
    assert set(errors) == set(names or (*EVERYWHERE, "tp"))
    assert max(errors.values()) <= EXACT, errors


def lora_of(kind, targets):
    """The modules of the first block of a tiny model that an adapter's targets give low-rank matrices."""
    adapter = adapter_of_config({"peft_type": "LORA", "target_modules": targets}, "adapter")
    model = adapt(describe_by_trace(tiny_config(kind), "tiny", stock_worker.LENGTH), adapter, "adapter")
    return [name.rpartition(".")[2] for name in adapter_config(model)["target_modules"] if ".0." in name]


def test_low_rank_matrices_of_types_without_facts_stand_where_peft_has_them():
    assert lora_of("opt", "all-linear") == ["k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2"]
    assert lora_of("glm4_moe", ["v_proj"]) == ["v_proj"]


@pytest.mark.parametrize(
    ("kind", "targets", "reason"),
    [
        ("glm4_moe", "all-linear", "peft takes gate, gate_proj, up_proj, down_proj for experts' parameters"),
        ("glm4_moe", ["q_proj", "up_proj"], "peft takes gate, gate_proj, up_proj, down_proj for experts' parameters"),
        ("falcon", ["query_key_value"], "query_key_value is a Linear of a class of its own"),
        ("opt", ["lm_head"], "lm_head gives the logits"),
        ("opt", ["self_attn_layer_norm"], "self_attn_layer_norm is not a Linear"),
        ("opt", ["embed_tokens"], "embed_tokens is not a Linear"),
        ("opt", ["nothing"], "nothing is not a module of the model"),
    ],
)
def test_targets_that_get_no_low_rank_matrices_are_refused_by_name(kind, targets, reason):
    with pytest.raises(BadInput, match=reason):
        lora_of(kind, targets)


@pytest.mark.long
def test_other_plans_go_on_from_what_a_plan_saved(tmp_path):
    model = describe_by_trace(tiny_config("qwen2_moe"), "tiny", stock_worker.LENGTH)
    zero3, _, pipeline, _, interleaved, split, divided = stock_worker.plans_of(model)
    told = saved(tmp_path, run_worker, [zero3, pipeline, divided])
    others = [pipeline, interleaved, split, divided, zero3]
    assert max(one.error for one in resumed(tmp_path, run_worker, others, told)) < EXACT


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("starcoder2", None),
        ("gemma3", None),  # the text's
        ("bloom", "transformers has no plan of tensor parallelism for it"),
        ("doge", "its plan of tensor parallelism asks for embedding_rowwise of mlp.down_embed"),
        ("longcat_flash", r"its plan of tensor parallelism asks for colwise of self_attn\.\*\.q_b_proj"),
    ],
)
def test_what_a_plan_of_transformers_asks_is_done_or_refused_by_name(kind, reason):
    problem = as_stock(kind).plan_problem
    assert problem is None if reason is None else re.match(reason, problem)
    assert bool(as_stock(kind).rules) == (reason is None)


def test_experts_are_read_from_the_files_that_transformers_writes(tmp_path):
    """These hold each matrix of each expert by itself."""
    model = describe_by_trace(tiny_config("qwen2_moe"), "tiny", stock_worker.LENGTH)
    stock = stock_model(model)
    stock.save_pretrained(tmp_path)
    weights = open_weights(tmp_path, model, as_stock(model.family), allow_new=False)
    named = {p.name: p for p in model.types["block"].parameters}
    for path, box in {
        "mlp.experts.gate_up_proj": ((1, 3), (0, 2), (48, 96), (0, 64)),
        "mlp.experts.down_proj": ((1, 3), (0, 64), (48, 96)),
    }.items():
        whole = stock.get_parameter(f"model.layers.0.{path}").detach().view(named[path].shape)
        wanted = whole[tuple(slice(*bounds) for bounds in box)]
        found = torch.empty_like(wanted)
        assert weights.read(found, f"model.layers.0.{path}", named[path].shape, box)
        assert torch.equal(found, wanted)


def test_what_a_constructor_alone_fills_is_drawn_as_it_draws_it():
    """Transformers initializes no matrix of openai-gpt's Conv1D once it is made."""
    model = describe_by_trace(tiny_config("openai-gpt"), "tiny", stock_worker.LENGTH)
    fillings = as_stock("openai-gpt").fillings(model, "layers[0]")
    assert fillings["attn.c_attn.weight"] == (Filling(Normal(0.0, 0.02)),)
    assert fillings["attn.c_attn.bias"] == (Filling(Constant(0.0)),)


def problem(kind, **keys):
    """Why a tiny model of a type is refused."""
    model = describe_by_trace({**tiny_config(kind), **keys}, kind, stock_worker.LENGTH)
    return as_stock(kind).problem(model)


@pytest.mark.parametrize(
    ("kind", "keys", "reason"),
    [
        ("starcoder2", {}, None),
        ("mixtral", {"output_router_logits": True}, "output_router_logits adds a loss"),
        ("roberta", {"is_decoder": False}, "is_decoder is false"),
        ("zamba2", {}, "its blocks share the parameter"),
        ("gemma4_text", {}, "its blocks receive more from the embedding than hidden states"),
        ("glm_moe_dsa", {}, r"its blocks receive more from other blocks than hidden states \(prev_topk_indices\)"),
    ],
)
def test_what_cannot_run_block_by_block_is_refused_by_name(kind, keys, reason):
    found = problem(kind, **keys)
    assert found is None if reason is None else found is not None
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)


def test_what_blocks_are_given_draws_nothing():
    """A block that is recomputed, for which it is there already, would draw other numbers."""
    model = describe_by_trace({**tiny_config("starcoder2"), "embedding_dropout": 0.1}, "tiny", stock_worker.LENGTH)
    family = as_stock("starcoder2")
    assert family.dropout(family.configuration(model)) == 0.1
    places = Places(stock_worker.LENGTH, slice(stock_worker.LENGTH), slice(stock_worker.LENGTH), None)
    arguments = family.constants(model, "block", places, torch.zeros(1), "sdpa")["arguments"]
    before = torch.get_rng_state()
    _, given = arguments.of(0, torch.zeros((2, stock_worker.LENGTH), dtype=torch.long))
    assert "position_embeddings" in given
    assert torch.equal(torch.get_rng_state(), before)


def test_parts_of_blocks_are_not_recomputed():
    model = describe_by_trace(tiny_config("starcoder2"), "tiny", stock_worker.LENGTH)
    plan = stock_worker.plans_of(model)[0]
    family = as_stock("starcoder2")
    family.check(plan, "plan")
    parts = tuple(replace(strategy, recompute=Recompute.MLP) for strategy in plan.layers)
    with pytest.raises(BadInput, match="the parts of a traced block are not known"):
        family.check(replace(plan, layers=parts), "plan")


def test_each_type_has_a_word_of_the_record():
    recorded = json.loads(RECORD.read_bytes())["types"]
    assert set(recorded) == set(TYPES)
    assert all(("exact" in found) != ("refused" in found) for found in recorded.values())
