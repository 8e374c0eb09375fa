"""Sailor's own layer times, memory and links: what is made of them, and a plan for 512 GPUs of two types."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from shardwright.io import read_document
from shardwright.types import Cluster
from shardwright.types.hardware_profile import Collective, CollectiveKey, read_hardware_profile
from shardwright.types.model_profile import read_model_profile

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "../shared/reference/sailor"


@pytest.mark.parametrize(("name", "devices"), [("sailor-a100-v100", 512), ("sailor-rtx", 48)])
def test_its_clusters_are_examples_that_can_be_read(name, devices):
    assert read_document(ROOT / f"config/reference/{name}.json", Cluster).num_devices == devices


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The folder of a plan for 64 nodes of 4 A100 and 64 of 4 V100, and the benchmark's row of it."""
    if not REFERENCE.is_dir():
        pytest.skip("Sailor's tables are not here")
    work = tmp_path_factory.mktemp("sailor")
    given = ["--cases", "Sailor", "--sailor", str(REFERENCE), "--work", str(work), "--out", str(work / "figures.json")]
    command = [sys.executable, str(ROOT / "benchmarks/mixed_scale.py"), *given]
    subprocess.run(command, check=True, timeout=170, capture_output=True)
    ((name, row),) = json.loads((work / "figures.json").read_text())["rows"].items()
    assert "Sailor" in name
    (folder,) = (path for path in work.iterdir() if path.is_dir())
    return folder, row


@pytest.mark.long
def test_profiles_are_its_own_figures(planned):
    folder, _ = planned
    times, sizes = (
        json.loads((REFERENCE / name).read_text())["OPT-350"] for name in ("profiles_tmp.json", "llm_info.json")
    )
    rows = read_model_profile(folder / "v100.h5").layers.rows
    (row,) = (r for r in rows if (r.type, r.tp_size, r.micro_batch_size) == ("block", 2, 4))
    its = times["V100-16"]["4"]["2"]
    assert row.backward_s == pytest.approx(fmean(its[str(layer)][1] for layer in range(1, 25)))
    assert row.activation_bytes == 4 * sizes["2"]["7"]["act_mem_floats"] * 4
    (head,) = (r for r in rows if (r.type, r.tp_size, r.micro_batch_size) == ("head", 4, 1))
    assert head.forward_s == times["V100-16"]["1"]["4"]["25"][0]


@pytest.mark.long
def test_messages_share_what_a_node_sends(planned):
    """At 1 MB its curves are their last coefficient, in GB/s of all GPUs that send at once."""
    folder, _ = planned
    a100 = read_hardware_profile(folder / "a100-hardware.h5").curves
    four = json.loads((REFERENCE / "network/multizone_bandwidths.json").read_text())
    gb_s = four["us-central1-a"]["A100-40"]["4"]["us-central1-a"]["A100-40"]["4"][0][2]
    sizes, times_s = a100[CollectiveKey(Collective.P2P, 2, 1, False)]
    at_1_mib = times_s[list(sizes).index(1024**2)]
    assert at_1_mib == pytest.approx(4 * 1024**2 / (1e9 * gb_s), rel=0.01)
    # A ring of 8, one on a node: 14 messages of an eighth, four rings at once.
    sizes, times_s = a100[CollectiveKey(Collective.ALL_REDUCE, 8, 1, False)]
    assert times_s[list(sizes).index(8 * 1024**2)] == pytest.approx(14 * at_1_mib)


@pytest.mark.long
def test_the_plan_is_proven(planned):
    folder, row = planned
    assert row["found"].startswith("gap 0.00%")
    plan = json.loads((folder / "out/plan.json").read_text())
    assert sum(len(stage["ranks"]) for stage in plan["stages"]) == 512
