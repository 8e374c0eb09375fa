"""Every strategy file that hetu-galvatron 2.4.0 ships, where it is at hand: after `snakemake reference`, or wherever
SHARDWRIGHT_GALVATRON says that the unpacked sdist is."""

import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from shardwright.io import BadInput
from shardwright_search.options import GalvatronRun
from shardwright_search.systems.galvatron import galvatron_file, plan_of_galvatron, read_galvatron

ROOT = Path(__file__).parents[3]
FOLDER = Path(os.environ.get("SHARDWRIGHT_GALVATRON", ROOT / "results" / "reference" / "hetu-galvatron")) / "galvatron"
FILES = sorted((FOLDER / "models").glob("*/configs/galvatron_config_*.json"))

pytestmark = pytest.mark.skipif(not FILES, reason=f"no strategy files in {FOLDER}: run snakemake reference")

RUN = GalvatronRun(sequence_parallel="megatron")
TYPES = {"T5": (24, 24), "swin": (2, 2, 42, 2)}
UNEQUAL = {
    "gpt_fa gpt-2.7b_2nodes 3D": ("chunks 16 cuts a rank's 40 samples into microbatches of 3 and one of 1", 20),
    "gpt_hf gpt-2.7b_2nodes 3D": ("chunks 16 cuts a rank's 40 samples into microbatches of 3 and one of 1", 20),
    "bert_hf hidden1024_head16": ("chunks 3 cuts a rank's 32 samples into microbatches of 11 and one of 10", 4),
    "swin swin-huge": ("chunks 41 cuts a rank's 1024 samples into microbatches of 25 and one of 24", 64),
}
"""Files whose last microbatch is smaller, what is said of them, and a number that divides the batch."""


def imported(make, path: Path, num_microbatches: int | None = None):
    """The plan of a file, for a made-up model of its layers and a cluster of as many GPUs as its name says."""
    raw = json.loads(path.read_text())
    count = len(raw["tp_sizes_enc"].split(","))
    model = make.model(count)
    if (sizes := TYPES.get(path.parents[1].name)) is not None:
        names = tuple(f"block{i}" for i, size in enumerate(sizes) for _ in range(size))
        block = model.types["block"]
        types = {"embedding": model.types["embedding"], "head": model.types["head"], **dict.fromkeys(names, block)}
        model = msgspec.structs.replace(model, layers=names, types=types)
    nodes, devices = re.search(r"_(\d+)nodes_(\d+)gpus_per_node", path.name).groups()
    cluster = make.cluster(int(nodes) * int(devices), int(nodes))
    run = msgspec.structs.replace(RUN, num_microbatches=num_microbatches)
    return plan_of_galvatron("imported", read_galvatron(path), model, cluster, run, path)


def meaning(path: Path) -> dict[str, object]:
    """The file with what it leaves out at the values that `config2strategy` and the run take."""
    raw = json.loads(path.read_text())
    zeros = ",".join("0" for _ in raw["tp_sizes_enc"].split(","))
    absent = {"use_sp": zeros, "checkpoint": zeros, "vtp": 1, "vsp": 0, "embed_sdp": 0}
    newer = {"cp_sizes_enc": zeros.replace("0", "1"), "vcp": 1, "vocab_sdp": 0}
    return absent | newer | raw


def test_there_are_24_files():
    assert len(FILES) == 24


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_a_shipped_file_comes_back_from_its_plan(make, path):
    key = next((key for key in UNEQUAL if all(part in str(path) for part in key.split())), None)
    if key is None:
        assert json.loads(galvatron_file(imported(make, path), path).text) == meaning(path)
        return
    words, equal = UNEQUAL[key]
    with pytest.raises(BadInput, match=re.escape(words)):
        imported(make, path)
    plan = imported(make, path, equal)
    assert json.loads(galvatron_file(plan, path).text) == meaning(path) | {"chunks": equal}
