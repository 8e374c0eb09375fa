"""A type without facts goes the whole way: advice, description, profile, plan, training, a folder for transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_up import make_cluster, make_hardware
from tiny_types import tiny_config
from transformers import AutoModelForCausalLM

from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput, read_document, write_document
from shardwright.types import Plan, Recompute, RunResult, SequenceParallel
from shardwright.types.hardware_profile import write_hardware_profile
from shardwright_search.space.request import Dimension, SearchRequest
from shardwright_train.commands.documents import describe_folder

UNMEASURED = Dimension.RECOMPUTE, Dimension.TENSOR_PARALLEL
KIND, TOKENS, LENGTH = "starcoder2", 260, 16


def run(*arguments: object) -> str:
    """What a command of `shardwright` says, as users start it."""
    command = [sys.executable, "-c", "from shardwright.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {**tiny_config(KIND), "vocab_size": TOKENS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_type_without_facts_goes_the_whole_way(folder: Path) -> None:
    advice = run("advise", folder / "config.json", "--gpus", "1x2:H100-SXM", "--batch", 8, "--seq", LENGTH)
    assert f"{KIND!r} is described by a trace of its stock class" in advice
    model = "--name", "tiny", "--sequence-length", LENGTH
    run("train", "describe", folder, *model, "--out", folder / "model.json")
    cluster = make_cluster()
    write_document(folder / "cluster.json", cluster)
    write_hardware_profile(folder / "hardware.h5", make_hardware(cluster))
    sizes = {"micro_batch_sizes": (2, 8), "layers": (1, 3), "tp_sizes": (1,)}
    settings = ProfileSettings(sequence_parallel=(SequenceParallel.NONE,), recompute=(Recompute.NONE,), **sizes)
    write_document(folder / "settings.json", settings)
    where = "--cluster", folder / "cluster.json", "--node-type", "n", "--settings", folder / "settings.json"
    run("profile", "model", folder, *model, *where, "--min-time-s", 0.5, "--out", folder / "profile.h5")
    write_document(folder / "search.json", SearchRequest(name="tiny", global_batch_size=4, disable=UNMEASURED))
    given = {"hardware": "hardware.h5", "profile": "profile.h5", "cluster": "cluster.json", "model": "model.json"}
    files = [part for name, file in given.items() for part in (f"--{name}", folder / file)]
    run("plan", *files, "--search", folder / "search.json", "--out", folder / "plan.json")
    assert read_document(folder / "plan.json", Plan).model.family == KIND
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


def test_low_rank_matrices_of_a_type_without_facts_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(BadInput, match=f"--lora: '{KIND}' is known by a trace, .* train the whole model"):
        describe_folder(folder, "tiny", LENGTH, adapter=folder / "adapter_config.json")
