"""A plan of stages of unequal width, from estimated profiles to a run by the commands, trains like one rank."""

import json
from pathlib import Path

import pytest
from estimated import DEVICES, PLAIN, command
from forked_command import forked_command
from tiny_models import tiny

from shardwright.estimate.settings import ProfileSettings
from shardwright.io import read_document, write_document
from shardwright.types import Cluster, NodeGroup, NodeType, Plan
from shardwright_profile.cli import APP as PROFILE
from shardwright_search.cli import APP as SEARCH
from shardwright_search.space.request import SearchRequest
from shardwright_train.data.prepare import prepare


def cluster_of(devices: int) -> Cluster:
    node_type = NodeType(device="cpu", devices_per_node=devices, memory_bytes=1 << 32)
    return Cluster(name="here", nodes=(NodeGroup(node_type="cpu", count=1),), node_types={"cpu": node_type})


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(tmp_path / "text"), "*.txt", 260, 1.0, tmp_path / "data")
    (tmp_path / "devices.toml").write_text(DEVICES)
    write_document(tmp_path / "model.json", tiny("llama", vocab_size=260))
    for devices in (1, 4):
        write_document(tmp_path / f"cluster-{devices}.json", cluster_of(devices))
    settings = ProfileSettings(tp_sizes=(1, 2), micro_batch_sizes=(1, 2, 4), layers=(1, 2), **PLAIN)
    write_document(tmp_path / "settings.json", settings)
    request = SearchRequest(
        name="unequal", global_batch_size=12, num_microbatches=(3,), pp_sizes=(3,), tp_sizes=(1, 2), **PLAIN,
        stage_widths="any",
    )  # fmt: skip
    write_document(tmp_path / "search.json", request)
    return tmp_path


def losses(work: Path, plan: str) -> list[float]:
    options = {"data": work / "data", "steps": 3, "checkpoints": work / "kept", "out": work / plan}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    run = forked_command(["run", work / f"{plan}.json", *words])
    said = run.communicate(200)[1]
    assert run.wait(0) == 0, said
    return [json.loads(line)["loss"] for line in (work / plan / "metrics.jsonl").read_text().splitlines()]


def test_a_searched_plan_of_unequal_stages_trains_like_one_rank(work: Path) -> None:
    given = "--model model.json --cluster cluster-4.json"
    estimated = (
        f"{given} --node-type cpu --devices devices.toml --settings settings.json --out p.h5 --hardware-out h.h5"
    )
    command(PROFILE, work, f"analytic {estimated}")
    command(SEARCH, work, f"plan {given} --hardware h.h5 --profile p.h5 --search search.json --out unequal.json")
    widths = [len(stage.ranks) for stage in read_document(work / "unequal.json", Plan).stages]
    assert (sorted(widths), sum(widths)) == ([1, 1, 2], 4)
    alone = "--model model.json --cluster cluster-1.json --global-batch-size 12 --out alone.json"
    command(SEARCH, work, f"uniform {alone}")
    assert losses(work, "unequal") == pytest.approx(losses(work, "alone"), rel=1e-5)
