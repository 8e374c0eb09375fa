"""A type without facts goes the whole way: advice, description, profile, plan, training, transformers' folder, LoRA."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import make_cluster, make_hardware
from msgspec.structs import replace
from peft import PeftModel
from tiny_types import tiny_config
from transformers import AutoModelForCausalLM

from shardwright.estimate.settings import ProfileSettings
from shardwright.io import read_document, write_document
from shardwright.types import Model, Plan, Recompute, RunResult, SequenceParallel
from shardwright.types.hardware_profile import write_hardware_profile
from shardwright_search.space.request import Dimension, SearchRequest
from shardwright_train.commands.documents import describe_folder

KIND, TOKENS, LENGTH = "starcoder2", 260, 16
KINDS = KIND, "qwen3_next"  # attention of two kinds, and experts


def run(*arguments: object) -> str:
    """What a command of `shardwright` says, as users start it."""
    command = [sys.executable, "-c", "from shardwright.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    config = {**tiny_config(kind), "vocab_size": TOKENS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_a_type_without_facts_goes_the_whole_way(folder: Path, kind: str) -> None:
    advice = run("advise", folder / "config.json", "--gpus", "1x2:H100-SXM", "--batch", 8, "--seq", LENGTH)
    assert f"{kind!r} is described by a trace of its stock class" in advice
    model = "--name", "tiny", "--sequence-length", LENGTH
    run("train", "describe", folder, *model, "--out", folder / "model.json")
    cluster = make_cluster()
    write_document(folder / "cluster.json", cluster)
    write_hardware_profile(folder / "hardware.h5", make_hardware(cluster))
    sizes = {"micro_batch_sizes": (2, 8), "layers": (1, 3), "tp_sizes": (1,)}
    recompute = Recompute.NONE, Recompute.FULL
    settings = ProfileSettings(sequence_parallel=(SequenceParallel.NONE,), recompute=recompute, **sizes)
    write_document(folder / "settings.json", settings)
    where = "--cluster", folder / "cluster.json", "--node-type", "n", "--settings", folder / "settings.json"
    run("profile", "model", folder, *model, *where, "--min-time-s", 0.5, "--out", folder / "profile.h5")
    request = SearchRequest(name="tiny", global_batch_size=4, recompute=recompute, disable=(Dimension.TENSOR_PARALLEL,))
    write_document(folder / "search.json", request)
    given = {"hardware": "hardware.h5", "profile": "profile.h5", "cluster": "cluster.json", "model": "model.json"}
    files = [part for name, file in given.items() for part in (f"--{name}", folder / file)]
    run("plan", *files, "--search", folder / "search.json", "--out", folder / "plan.json")
    plan = read_document(folder / "plan.json", Plan)
    assert plan.model.family == kind
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    text = "--text", folder / "text", "--glob", "*.txt", "--vocab-size", TOKENS
    run("train", "prepare", *text, "--out", folder / "data")
    trained = "--data", folder / "data", "--checkpoints", folder / "checkpoints", "--out", folder / "run"
    run("train", "run", folder / "plan.json", *trained, "--steps", 3)
    done = folder / "run" / "DONE.json"
    assert read_document(done, RunResult).steps == 3
    run("train", "convert", done, "--plan", folder / "plan.json", "--out", folder / "out")
    stock, read = AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    assert not any(read.values())
    with torch.no_grad():
        logits = stock(torch.arange(LENGTH)[None]).logits
    assert logits.shape == (1, LENGTH, TOKENS) and bool(logits.isfinite().all())
    run("train", "describe", folder / "out", *model, "--out", folder / "again.json")
    assert read_document(folder / "again.json", Model).layers == plan.model.layers
    trained = "--data", folder / "data", "--checkpoints", folder / "checkpoints2", "--out", folder / "run2"
    run("train", "run", folder / "plan.json", *trained, "--weights", folder / "out", "--steps", 1)
    _trains_low_rank_matrices(folder, plan, stock)


def _trains_low_rank_matrices(folder: Path, plan: Plan, stock: Any) -> None:
    """Of the converted folder, whose adapter then goes out as peft opens it."""
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    asked = "--name", "tiny", "--sequence-length", LENGTH, "--lora", folder / "adapter_config.json"
    run("train", "describe", folder / "out", *asked, "--out", folder / "adapted.json")
    adapted = read_document(folder / "adapted.json", Model)
    layers = tuple(replace(layer, type=kind) for layer, kind in zip(plan.layers, adapted.layers, strict=True))
    write_document(folder / "lora.json", replace(plan, model=adapted, layers=layers))
    trained = "--data", folder / "data", "--checkpoints", folder / "checkpoints3", "--out", folder / "run3"
    run("train", "run", folder / "lora.json", *trained, "--weights", folder / "out", "--steps", 2)
    done = folder / "run3" / "DONE.json"
    run("train", "convert", done, "--plan", folder / "lora.json", "--out", folder / "adapter")
    opened = PeftModel.from_pretrained(stock, folder / "adapter")
    learned = [p for name, p in opened.named_parameters() if "lora_B" in name]
    assert len(learned) == sum(2 * ("q_proj" in str(block)) for block in stock.model.layers)
    assert all(bool(p.abs().max() > 0) for p in learned)


@pytest.mark.parametrize("kind", [KIND])
def test_low_rank_products_are_counted_beside_what_a_trace_saw(folder: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["c_fc"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    whole = describe_folder(folder, "tiny", LENGTH).types["block"]
    adapted = describe_folder(folder, "tiny", LENGTH, adapter=folder / "adapter_config.json").types["block.lora"]
    outputs, inputs = next(p.shape for p in whole.parameters if p.name == "mlp.c_fc.weight")
    assert whole.traced and adapted.traced
    assert adapted.trained_count() == 4 * (outputs + inputs)
    added = 2 * LENGTH * 4 * (outputs + inputs)
    assert adapted.forward_flops_per_sample - whole.forward_flops_per_sample == added
    assert adapted.traced.product_flops - whole.traced.product_flops == added
    assert adapted.traced.kept - whole.traced.kept == 4 * LENGTH
