"""A trace of the stock class agrees with a family's facts, and describes types that have none."""

import json
import sys
from fractions import Fraction
from subprocess import run

import msgspec
import pytest
import torch
from tiny_types import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.estimate.layers import estimate_memory
from shardwright.estimate.parts import layer_parts
from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.models.registry import read_presets
from shardwright.plan.communication import region_messages
from shardwright.types import EMBEDDING, HEAD, Attention, LayerStrategy, Precision, Recompute
from shardwright.types.model import Traced
from shardwright_search.advise import question as asking
from shardwright_search.advise.question import config_notes, model_of
from shardwright_search.options import AdviseOptions
from shardwright_train.commands.documents import describe_folder
from shardwright_train.models import operators, traced
from shardwright_train.models.traced import describe_by_trace

PRESETS = read_presets()
BFLOAT16 = Precision(compute="bfloat16", parameters="bfloat16", reduce="bfloat16")
FLOPS, KEPT = 0.01, 0.005
SOON = ("qwen3-0.6b", "gemma-2-2b", "gpt2-xl", "deepseek-v2-lite", "gpt-oss-20b")
OTHERS = (
    *("llama-2-7b", "llama-3-8b", "llama-4-scout", "mistral-7b", "phi-3-mini-4k", "ministral-3-8b", "ministral-8b"),
    *("qwen2.5-0.5b", "mixtral-8x7b", "qwen3-30b-a3b", "olmo-2-7b", "command-r", "command-r7b", "gemma-3-1b"),
    *("glm-4-9b", "granite-3.0-2b", "smollm3-3b", "deepseek-v3", "bert-large", "roberta-base"),
)
STOCK_EXPERTS = "the stock model's grouped products keep other rows of experts than the runtime's"
CAUSES = {
    ("gpt-oss-20b", "kept"): STOCK_EXPERTS,
    ("deepseek-v2-lite", "kept"): STOCK_EXPERTS,
    ("deepseek-v3", "kept"): STOCK_EXPERTS,
    ("mixtral-8x7b", "kept"): STOCK_EXPERTS,
    ("qwen3-30b-a3b", "kept"): STOCK_EXPERTS,
    ("llama-4-scout", "kept"): STOCK_EXPERTS,
    ("llama-4-scout", "flops"): "the stock model computes every expert for every position",
    ("bert-large", "head"): "facts count no norm and activation between blocks and the matrix of the head",
    ("roberta-base", "head"): "facts count no norm and activation between blocks and the matrix of the head",
}
"""Why a figure of a preset is not that of its facts; each of them differs."""


def kept(model, type_name):
    """The bytes kept of a layer for one sample in a format of 16 bits, with norms of single operators."""
    parts = layer_parts(model, type_name)
    return sum(2 * (p.inside + p.outside + p.whole) + p.inside_bytes + p.outside_bytes + p.whole_bytes for p in parts)


@pytest.mark.parametrize("name", [*SOON, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_a_trace_agrees_with_the_facts(name):
    preset = PRESETS[name]
    length = min(preset.sequence_length, 2048)
    facts = model_of_config(preset.config, name, length, name)
    seen = describe_by_trace(preset.config, name, length)
    assert (seen.parameter_count, len(seen.layers), seen.tied) == (facts.parameter_count, len(facts.layers), facts.tied)
    pairs = dict.fromkeys([(EMBEDDING, EMBEDDING), *zip(facts.layers, seen.layers, strict=True), (HEAD, HEAD)])
    differing = set()
    for told, found in pairs:
        known, traced = facts.types[told], seen.types[found]
        assert traced.parameter_count() == known.parameter_count()
        assert traced.outputs == known.outputs
        flops = Fraction(traced.forward_flops_per_sample, known.forward_flops_per_sample or 1) - 1
        if told != EMBEDDING and abs(flops) > FLOPS:
            differing.add((name, "flops"))
        if abs(kept(seen, found) / kept(facts, told) - 1) > KEPT:
            differing.add((name, "head" if told == HEAD else "kept"))
    assert differing == {each for each in CAUSES if each[0] == name}


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_ranks_share_out_what_the_facts_say(recompute):
    preset = PRESETS["qwen3-0.6b"]
    facts = model_of_config(preset.config, "facts", 512, "facts")
    seen = describe_by_trace(preset.config, "trace", 512)
    (told,), (found,) = set(facts.layers), set(seen.layers)
    for ranks in (2, 4):
        assert seen.types[found].parameter_count(ranks) == facts.types[told].parameter_count(ranks)
        sent, held = [], []
        for model, kind in ((facts, told), (seen, found)):
            strategy = LayerStrategy(type=kind, tp_size=ranks, dp_size=1, recompute=recompute)
            sent.append(list(region_messages(model, kind, strategy, 2, 2, 1)))
            held.append(sum(estimate_memory(model, kind, strategy, 2, BFLOAT16, Attention.SDPA)))
        assert sent[0] == sent[1]
        # Norms of single operators keep their results, too; what is as wide as the states counts as whole.
        assert held[0] <= held[1] <= 1.35 * held[0]


STARCODER = {
    "model_type": "starcoder2",
    **{"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 64, "sliding_window": 16},
    **{"bos_token_id": 0, "eos_token_id": 0},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(STARCODER))
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "length"),
    [
        ({}, 64),
        ({"max_position_embeddings": 8192}, 4096),
        ({"model_type": "llama", "max_position_embeddings": 300}, 300),
        ({"model_type": "llama", "max_position_embeddings": 8192}, 4096),
        ({"model_type": "vit", "hidden_size": 64, "num_attention_heads": 4}, 197),
    ],
)
def test_samples_are_as_long_as_advise_takes_them_unless_the_length_is_given(folder, capsys, changed, length):
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    kept = {"model_type", "vocab_size"} if "model_type" in changed else STARCODER.keys()
    config = {**{key: STARCODER[key] for key in kept}, **shape, **changed}
    config = {key: value for key, value in config.items() if config["model_type"] != "vit" or key != "vocab_size"}
    (folder / "config.json").write_text(json.dumps(config))
    assert describe_folder(folder, "m", None).sequence_length == length
    assert f"config.json: tokens of a sample: {length}, at most 4096 and the model's" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["starcoder2", "t5"])
def test_a_configuration_without_a_limit_needs_the_length(folder, kind):
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 131}))
    with pytest.raises(BadInput, match=r"--sequence-length: .*config\.json does not state the sample length: give it"):
        describe_folder(folder, "m", None)


def test_a_type_without_facts_is_described_by_its_class(folder):
    model = describe_folder(folder, "starcoder", 32)
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(**STARCODER))
    assert model.parameter_count == sum(p.numel() for p in stock.parameters())
    assert model.layers == ("block",) * 3
    assert model.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    kind = model.types["block"]
    products = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 * 256)
    pairs = 32**2 - 16**2
    assert kind.forward_flops_per_sample == 32 * products + 4 * pairs * 64
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert kind.window == 16
    assert kind.tp_must_divide.items() >= heads.items()
    assert {*kind.tp_must_divide.values()} == {2, 4, 32, 64, 256}
    assert model.types[HEAD].tp_must_divide == {"undivided_blocks": 1}
    # What is recomputed keeps the stream alone.
    full = LayerStrategy(type="block", tp_size=1, dp_size=1, recompute=Recompute.FULL)
    held, _ = estimate_memory(model, "block", full, 1, BFLOAT16, Attention.SDPA)
    assert held == 2 * 32 * 64


@pytest.mark.parametrize("infinity", ["Infinity", '{"__float__": "Infinity"}'])
def test_infinite_limits_are_read_as_transformers_has_written_them(folder, infinity):
    """Older versions wrote a word that JSON does not have."""
    written = json.dumps({**tiny_config("mamba2"), "time_step_limit": [0.0, "infinity"]})
    (folder / "config.json").write_text(written.replace('"infinity"', infinity))
    config = describe_folder(folder, "m", 32).config
    assert config["state_size"] == 16 and "time_step_limit" not in config


def test_numbers_of_families_are_finite(folder):
    (folder / "config.json").write_text('{"model_type": "llama", "rope_theta": Infinity}')
    with pytest.raises(BadInput, match=r"not a finite number at `\$.rope_theta`"):
        describe_folder(folder, "m", 32)


def test_blocks_of_more_elements_than_other_counts_have_are_described():
    """A block of GLM-4.5 multiplies by over 2**31."""
    assert msgspec.convert({**dict.fromkeys(Traced.__struct_fields__[:8], 2**30), "multiplied": 2**33}, Traced)


def test_the_planner_asks_the_stage_that_trains(folder):
    asked = AdviseOptions(model=str(folder), gpus="1x2:H100-SXM", seq=32)
    assert model_of(asked)[0].types["block"].traced.kernels > 10
    (note,) = config_notes(asked)
    assert note.endswith("'starcoder2' is described by a trace of its stock class")
    config = json.loads((folder / "config.json").read_text())
    assert asking.is_traced(config)
    found = asking.traced_model(folder / "config.json", config, "starcoder", 32)
    assert found == describe_folder(folder, "starcoder", 32)
    assert asking.traced_model(folder / "config.json", config, "starcoder", None).sequence_length == 64
    with pytest.raises(BadInput, match=r"--seq: .* does not state the sample length"):
        asking.traced_model(folder / "config.json", {"model_type": "starcoder2"}, "starcoder", None)


def test_without_torch_the_planner_says_how_to_have_it(folder, monkeypatch):
    monkeypatch.setattr(asking, "find_spec", lambda name: None)
    assert not asking.is_traced(STARCODER)
    with pytest.raises(
        BadInput, match=r"'starcoder2' is none of the families known here: .* pip install '\.\[train\]'"
    ):
        model_of_config(STARCODER, "starcoder", 32, folder / "config.json")


@pytest.mark.parametrize(
    ("change", "length", "problem"),
    [
        ({"num_atention_heads": 4}, 32, "did you mean 'num_attention_heads'"),
        ({"num_attention_heads": 0}, 32, "transformers cannot build it"),
        ({"num_hidden_layers": 10**9}, 32, "num_hidden_layers 1000000000 is not from 1 to 4096"),
        ({"num_hidden_layers": 0}, 32, "num_hidden_layers 0 is not from 1 to 4096"),
        ({}, 65, r"sequence length 65 is over 64 positions \(max_position_embeddings\)"),
    ],
)
def test_what_cannot_be_traced_is_named(folder, change, length, problem):
    (folder / "config.json").write_text(json.dumps(STARCODER | change))
    with pytest.raises(BadInput, match=problem):
        describe_folder(folder, "starcoder", length)


def test_a_class_of_more_modules_than_any_model_has_is_refused(monkeypatch):
    monkeypatch.setattr(traced, "_MOST_MODULES", 20)
    with pytest.raises(ValueError, match="its class has over 20 modules"):
        describe_by_trace(STARCODER, "starcoder", 32)


def test_nothing_but_what_is_wrong_is_said_of_a_folder(folder, tmp_path):
    """A process of its own: what transformers says while it is imported depends on when that is."""
    asked = ("describe", folder, "--name", "x", "--sequence-length", 32, "--out", tmp_path / "model.json")
    words = [sys.executable, "-c", "from shardwright_train.cli import main; main()", *map(str, asked)]
    done = run(words, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_layer_that_scans_positions_is_refused(monkeypatch):
    monkeypatch.setattr(operators, "_MOST_OPERATORS", 20)
    with pytest.raises(ValueError, match="over 20 operators: it scans positions one by one"):
        describe_by_trace(STARCODER, "starcoder", 32)
