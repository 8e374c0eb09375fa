"""A system that is entered as docs/architecture.md says is searched for, exported for, and read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from shardwright.io import read_document, write_document
from shardwright.models.description import model_of_config
from shardwright.types import Cluster, DataParallel, Plan
from shardwright_search.options import System, UniformRequest
from shardwright_search.systems.entry import Entry
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan

EXAMPLES = Path(__file__).parents[2] / "core/examples"
CONFIG = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return read_document(EXAMPLES / "plan.json", Plan).cluster


def test_an_entry_is_all_that_a_system_needs(tmp_path: Path, cluster: Cluster) -> None:
    """Its best plan is found and started, its file is read back; what it does not run is refused by name."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = model_of_config(CONFIG, "m", 64, "config.json")
    plans = {}
    asked = {"runs": {}, "parallel": {"tp_size": 2}, "strided": {"tp_size": 2, "tp_consecutive": False}}
    for name, changes in asked.items():
        request = replace(UniformRequest(global_batch_size=16, data_parallel=DataParallel.ZERO2), **changes)
        plans[name] = tmp_path / f"{name}.json"
        write_document(plans[name], uniform_plan(name, request, model, cluster))
    script = Path(__file__).with_name("made_up_system.py")
    words = [sys.executable, script, tmp_path, tmp_path / "config.json", *plans.values()]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    said = {Path(name).stem: ended for name, ended in json.loads(done.stdout).items()}
    assert [said[name][0] for name in ("advise", "against", "runs", "parallel", "strided")] == [0, 0, 0, 2, 2], said
    assert "made_up.py plan.made-up" in said["advise"][1] and "made-up 1.0" in said["advise"][1]
    assert "runtime nanotron: " in said["advise"][1] and "(--for made-up)" in said["advise"][1]
    text = (tmp_path / "launch/plan.made-up").read_text()
    assert text.startswith("made-up zero")
    assert "against" in said["against"][1]
    problem = "Made-up cannot express model parallelism: choose tp 1 and pp 1"
    assert said["parallel"][2] == f"error: {plans['parallel']}: {problem}\n"
    assert "Made-up cannot express" in said["strided"][2] and "strided tensor-parallel groups" in said["strided"][2]


def test_every_system_that_may_be_named_has_an_entry() -> None:
    assert set(SYSTEMS) == set(System)
    assert "runtime" not in Entry._field_defaults, "an entry that names no runtime is none"
    files = [entry.file_name for entry in SYSTEMS.values()]
    assert len(set(files)) == len(files), "their files are told apart by name"
    assert sum(entry.read_words is not None for entry in SYSTEMS.values()) == 1
