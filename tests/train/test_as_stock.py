"""Types without facts are trained as their stock class, exactly, or refused with the reason."""

import json

import pytest
import stock_worker
import torch
from forked_ranks import run_worker
from msgspec.structs import replace
from run_resumes import resumed, saved
from run_types import RECORD
from tiny_types import TYPES, tiny_config

from shardwright.io import BadInput
from shardwright.types import Recompute
from shardwright_train.models.as_stock import as_stock
from shardwright_train.models.initial_weights import Constant, Filling, Normal
from shardwright_train.models.masks import Places
from shardwright_train.models.traced import describe_by_trace

EXACT = 1e-10
SOON = {
    "xlm-roberta": ("zero3", "gpipe"),  # a bias of the head has two names, a matrix of it is the embedding's
    "lfm2_moe": ("ddp", "1f1b"),  # convolutions, attention and experts
}
OTHERS = (
    *("bloom", "deepseek_v3", "falcon_h1", "gemma3_text", "gpt_neox", "mamba2", "olmo3", "opt", "qwen3_next"),
    *("starcoder2", "xglm"),
)


@pytest.mark.parametrize("kind", [*SOON, *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)])
def test_plans_train_what_the_stock_class_trains(kind, tmp_path):
    config, result = tmp_path / "config.json", tmp_path / "result.json"
    config.write_text(json.dumps(tiny_config(kind)))
    run_worker("stock_worker", [str(config), str(result), *SOON.get(kind, ())], 2)
    errors = json.loads(result.read_bytes())["errors"]
    assert len(errors) == len(SOON.get(kind, range(5)))
    assert max(errors.values()) <= EXACT, errors


@pytest.mark.long
def test_other_plans_go_on_from_what_a_plan_saved(tmp_path):
    zero3, _, pipeline, *_, interleaved = stock_worker.plans_of(
        describe_by_trace(tiny_config("starcoder2"), "tiny", stock_worker.LENGTH)
    )
    told = saved(tmp_path, run_worker, [zero3, pipeline])
    assert max(one.error for one in resumed(tmp_path, run_worker, [pipeline, interleaved, zero3], told)) < EXACT


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
