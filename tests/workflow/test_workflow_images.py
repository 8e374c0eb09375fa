"""Swin from its profile to a checkpoint on a folder of images, with the stages' own commands: no stubs."""

import json
from itertools import pairwise

import numpy as np
import pytest
import yaml
from PIL import Image

from shardwright_formats.io import read_document
from shardwright_formats.types import Plan
from shardwright_formats.types.model_profile import read_model_profile

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
CLASSES = ("red", "green", "blue")
CONFIG = {
    "node_types": {"cpu": {"device": "cpu", "devices_per_node": 2, "memory_gib": 2.0}},
    "clusters": {"laptop": {"nodes": [{"node_type": "cpu", "count": 1}], "hardware_time_budget_s": 5}},
    "models": {
        "little": {
            **{"preset": "swin-tiny", "profile": "cpu", "sequence_length": 256, "image_size": 64, "window_size": 4},
            **{"embed_dim": 32, "depths": [2, 2, 1], "num_heads": [2, 4, 8], "num_labels": len(CLASSES)},
        }
    },
    "profiles": {
        "cpu": {
            **{"source": "measured", "tp_sizes": [1], "sequence_parallel": ["none"], "recompute": ["none"]},
            # Differences that show on a busy machine, too.
            **{"micro_batch_sizes": [8], "layers": [1, 6], "steps": 4, "warmup_steps": 1, "min_time_s": 0.5},
            "precision": {"parameters": "float32", "compute": "float32", "reduce": "float32"},
        }
    },
    "data": {"photos": {"text": "photos", "source": "images", "image_size": 64}},
    "searches": {
        "cut": {"model": "little", "cluster": "laptop", "global_batch_size": 16, "num_microbatches": [2]}
        | {"pp_sizes": [2], "sequence_parallel": ["none"], "recompute": ["none"]}
    },
    "runs": {"cut": {"search": "cut", "data": "photos", "steps": 12, "checkpoint_every": 6, "learning_rate": 0.001}},
    "validate": {"searches": [], "steps": 1, "warmup_steps": 1},
}


def test_swin_is_profiled_planned_and_trained_on_a_folder_of_images(bare):
    drawn = np.random.default_rng(0)
    for channel, name in enumerate(CLASSES):
        (bare.folder / "photos" / name).mkdir(parents=True)
        for number in range(8):
            pixels = drawn.integers(0, 120, (64, 64, 3), dtype=np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(bare.folder / "photos" / name / f"{number}.png")
    done = _run(bare, CONFIG)
    if "on a quieter machine" in done.output:
        # As the error says to do.
        CONFIG["profiles"]["cpu"]["steps"] = 24
        done = _run(bare, CONFIG)
    assert done.status == 0, done.output[-2000:]
    results = bare.folder / "results"
    types = {name.decode() for name in read_model_profile(results / "profiles" / "little@cpu.h5").layers["type"]}
    stages = {"stage1", "merge1", "stage2", "merge2", "stage3"}
    assert types == {"embedding", *stages, "head"}
    plan = read_document(results / "plans" / "cut.json", Plan)
    assert len(plan.stages) == 2 and set(plan.model.layers) == stages
    run = json.loads((results / "runs" / "cut" / "DONE.json").read_text())
    assert run["steps"] == 12 and run["final_loss"] < run["first_loss"] / 2
    lines = map(json.loads, (results / "runs" / "cut" / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in lines if "loss" in line]
    assert all(one < other for one, other in pairwise(steps))
    assert len(list((results / "checkpoints" / "cut").glob("*/step-00000012"))) == 1


def _run(workspace, config):
    (workspace.folder / "config.yaml").write_text(yaml.safe_dump(config))
    return workspace.snakemake("results/runs/cut/DONE.json")
