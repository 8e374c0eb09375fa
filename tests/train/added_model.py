"""Run with copies of two packages first on PYTHONPATH: parity of an OLMo 2 that the copies alone know, as JSON."""

import json
import sys
from pathlib import Path

from forked_ranks import run_worker
from random_plans import random_plan
from tiny_models import CONFIGS, LAYERS, tiny

import shardwright_models
import shardwright_train
from shardwright_formats.io import write_document
from shardwright_formats.types import Plans
from shardwright_models.description import model_of_config

PLANS = 8
CONFIGS["olmo2"] = {
    "model_type": "olmo2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def main(folder: Path) -> None:
    model = tiny("olmo2")
    plans = Plans(plans=tuple(random_plan(model, number, 2) for number in range(PLANS)))
    write_document(folder / "plans.json", plans)
    # Ranks that are forked from this very process have the copy, too.
    run_worker("parity_worker", [str(folder / "plans.json"), str(folder / "errors.json")], 2, method="fork")
    by_shapes = model_of_config(CONFIGS["olmo2"], model.name, model.sequence_length, "config.json")
    write_document(folder / "shapes.json", by_shapes)
    write_document(folder / "described.json", model)
    packages = [str(Path(str(package.__file__)).parent) for package in (shardwright_train, shardwright_models)]
    (folder / "packages.json").write_text(json.dumps(packages))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
