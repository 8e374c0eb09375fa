"""Run with a copy of the package first on PYTHONPATH: parity of an OLMo 2 that the copy alone knows, as JSON."""

import json
import sys
from pathlib import Path

from forked_ranks import run_worker
from random_plans import random_plan
from tiny_models import CONFIGS, LAYERS, tiny

import shardwright_train
from shardwright_formats.io.json import write_document
from shardwright_formats.types.plan import Plans

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
    package = Path(shardwright_train.__file__).parent
    (folder / "package.json").write_text(json.dumps(str(package)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
