"""A type without facts goes the whole way: advice, description, profile, plan, training, a folder for transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_calls import call
from forked_command import forked_command
from made_up import make_cluster, make_hardware
from msgspec.structs import replace
from peft import PeftModel
from random_plans import precision_of
from safetensors.torch import load_file
from stock_worker import plans_of
from tiny_types import tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwright.estimate.settings import ProfileSettings
from shardwright.io import read_document, write_document
from shardwright.models.registry import FAMILIES, TRACED_TOWERS
from shardwright.types import Plan, Recompute, RunResult, SequenceParallel
from shardwright.types.hardware_profile import write_hardware_profile
from shardwright_search.space.request import Dimension, OuterSpace, SearchRequest
from shardwright_train.cli import APP
from shardwright_train.commands.documents import describe_folder

KIND, TOKENS, LENGTH = "starcoder2", 260, 16
PRECISION = precision_of("float64")


def run(*arguments: object) -> str:
    """What a command of `shardwright` says, as users start it."""
    command = [sys.executable, "-c", "from shardwright.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def kind() -> str:
    return KIND


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    config = {**tiny_config(kind), "vocab_size": TOKENS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_type_without_facts_goes_the_whole_way(folder: Path) -> None:
    """Under tensor parallelism as measured, to the same weights as under data parallelism."""
    advice = run("advise", folder / "config.json", "--gpus", "1x2:H100-SXM", "--batch", 8, "--seq", LENGTH)
    assert f"{KIND!r} is described by a trace of its stock class" in advice
    model = "--name", "tiny", "--sequence-length", LENGTH
    run("train", "describe", folder, *model, "--out", folder / "model.json")
    cluster = make_cluster()
    write_document(folder / "cluster.json", cluster)
    write_hardware_profile(folder / "hardware.h5", make_hardware(cluster))
    measured = {"micro_batch_sizes": (2, 8), "layers": (1, 3), "tp_sizes": (1, 2), "precision": PRECISION}
    settings = ProfileSettings(sequence_parallel=(SequenceParallel.NONE,), recompute=(Recompute.NONE,), **measured)
    write_document(folder / "settings.json", settings)
    where = "--cluster", folder / "cluster.json", "--node-type", "n", "--settings", folder / "settings.json"
    run("profile", "model", folder, *model, *where, "--min-time-s", 0.5, "--out", folder / "profile.h5")
    whole = OuterSpace(tp_sizes=(1,))
    asked = {"global_batch_size": 4, "pp_sizes": (1,), "embedding": whole, "head": whole, "precision": PRECISION}
    given = {"hardware": "hardware.h5", "profile": "profile.h5", "cluster": "cluster.json", "model": "model.json"}
    files = [part for name, file in given.items() for part in (f"--{name}", folder / file)]
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    text = "--text", folder / "text", "--glob", "*.txt", "--vocab-size", TOKENS
    run("train", "prepare", *text, "--out", folder / "data")
    plans = list[Plan]()
    for name, tp_size in (("divided", 2), ("plain", 1)):
        request = SearchRequest(name=name, disable=(Dimension.RECOMPUTE,), tp_sizes=(tp_size,), **asked)
        write_document(folder / "search.json", request)
        run("plan", *files, "--search", folder / "search.json", "--out", folder / f"{name}.json")
        plans.append(read_document(folder / f"{name}.json", Plan))
        assert plans[-1].model.family == KIND and {layer.tp_size for layer in plans[-1].layers} == {tp_size}
        _trained(folder, plans[-1], name, data=folder / "data")
    divided, plain = (load_file(folder / name / "model.safetensors") for name in ("divided", "plain"))
    assert divided.keys() == plain.keys()
    assert max((divided[name] - plain[name]).abs().max().item() for name in divided) < 1e-10
    stock, read = AutoModelForCausalLM.from_pretrained(folder / "divided", output_loading_info=True)
    assert not any(read.values())
    with torch.no_grad():
        logits = stock(torch.arange(LENGTH)[None]).logits
    assert logits.shape == (1, LENGTH, TOKENS) and bool(logits.isfinite().all())
    _check_adapter(folder, plans[0], stock, "divided")


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [KIND])
def test_two_ranks_train_a_model_and_then_low_rank_matrices_of_what_was_converted(folder: Path, kind: str) -> None:
    """With recomputed layers in a pipeline; the folder is opened by transformers, and the adapter by peft."""
    whole = describe_folder(folder, "tiny", LENGTH)
    plan = replace(plans_of(whole)[2], precision=precision_of("float32"))
    assert {layer.recompute for layer in plan.layers} == {Recompute.NONE, Recompute.FULL}
    _trained(folder, plan, "whole")
    stock, read = AutoModelForCausalLM.from_pretrained(folder / "whole", output_loading_info=True)
    assert not any(read.values())
    assert describe_folder(folder / "whole", "tiny", LENGTH).types == whole.types
    _check_adapter(folder, plan, stock, "whole")


def _check_adapter(folder: Path, plan: Plan, stock: PreTrainedModel, weights: str) -> None:
    """Train low-rank matrices beside converted weights; peft opens what is converted, and all of them have learned."""
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    adapted = describe_folder(folder / weights, "tiny", LENGTH, folder / "adapter_config.json")
    layers = tuple(replace(layer, type=name) for layer, name in zip(plan.layers, adapted.layers, strict=True))
    _trained(folder, replace(plan, model=adapted, layers=layers), "adapter", "--weights", folder / weights)
    opened = PeftModel.from_pretrained(stock, str(folder / "adapter"))
    learned = [p for name, p in opened.named_parameters() if "lora_B" in name]
    assert len(learned) == sum(
        p.name.endswith("lora_B.weight") for at in adapted.layers for p in adapted.types[at].parameters
    )
    assert learned and all(bool(p.abs().max() > 0) for p in learned)


def _trained(folder: Path, plan: Plan, name: str, *options: object, data: object = "random") -> None:
    """Train for two steps, and convert what was trained to a folder of this name."""
    write_document(folder / f"{name}.json", plan)
    given = "--data", data, "--out", folder / f"run-{name}", "--checkpoints", folder / f"kept-{name}", *options
    run = forked_command(("run", folder / f"{name}.json", *given, "--steps", 2, "--log-to", "none"))
    _, said = run.communicate(timeout=800)
    assert run.returncode == 0, said
    done = folder / f"run-{name}" / "DONE.json"
    assert read_document(done, RunResult).steps == 2
    ended = call(APP, "convert", done, "--plan", folder / f"{name}.json", "--out", folder / name)
    assert ended.exit_code == 0, ended.stderr


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


def test_no_type_that_is_only_planned_is_recorded_as_trained():
    record = json.loads((Path(__file__).parents[2] / "docs" / "models.json").read_text())["types"]
    planned = {kind for kind in record if kind in TRACED_TOWERS or (kind in FAMILIES and FAMILIES[kind].untrained)}
    assert "llama4" in planned and not [kind for kind in planned if record[kind].get("exact")]
