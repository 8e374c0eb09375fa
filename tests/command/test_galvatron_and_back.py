"""Galvatron's measurements and strategies meet here, and what is searched for it goes back to it at the same price."""

import json
from functools import partial

import pytest
from command_calls import call

from shardwright.io import read_document, write_document
from shardwright.types import Cluster, NodeGroup, NodeType, Plan, Precision, Prediction
from shardwright_profile.cli import APP as PROFILE
from shardwright_search.cli import APP as SEARCH
from shardwright_search.space.request import SearchRequest

SIZES = (1, 2, 4)
TIMES = {f"layernum[{n}]_bsz{b}_seq32": n * (1 + 2 * b) + 3 + b for n in (2, 4) for b in SIZES} | {
    f"layertype_0_bsz{b}_seq32": (1 + 2 * b) / b for b in SIZES
}
"""ms of layers that take 1 + 2b in a model whose rest takes 3 + b."""
RAW = {
    f"layernum[{n}]_bsz8_seq32_rank0_{kind}": size
    for n, ms, act in ((1, 20, 50), (2, 36, 90)) for kind, size in (("ms", ms), ("act", act), ("act_peak", 99))
}  # fmt: skip
OTHER = {"32": {"model_states": {"1": 64.0, "2": 32.0}, "activation": {"1": 20.0, "2": 11.0}}}
MEMORY = {
    "1_1_2_sp": RAW,
    "1_2_1_sp": RAW,
    "layertype_0_sp": {
        "32": {"parameter_size": 8.0, "tp_activation_per_bsz_dict": {"1": 10.0, "2": 5.0, "checkpoint": 1.0}}
    },
    "other_memory_pp_off_sp": OTHER,
}
STRATEGY = {
    "pp_deg": 1, "tp_sizes_enc": "2,2,1,1", "tp_consecutive_flags": "1,1,1,1", "dp_types_enc": "0,0,0,1",
    "use_sp": "0,0,0,0", "checkpoint": "0,1,0,0", "global_bsz": 8, "chunks": 2, "pp_division": "4",
    "pipeline_type": "pipedream_flush", "default_dp_type": "zero2", "vtp": 1, "vsp": 0, "embed_sdp": 0,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Galvatron's files, imported: hardware, model and its profile."""
    monkeypatch.chdir(tmp_path)
    files = {
        "times.json": TIMES, "memory.json": MEMORY, "strategy.json": STRATEGY,
        "allreduce_bandwidth_1nodes_2gpus_per_node.json": {"allreduce_size_2_consec_1": 100.0},
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    node = NodeType(device="A100", devices_per_node=2, memory_bytes=2**34)
    nodes = (NodeGroup(node_type="n", count=1),)
    write_document(tmp_path / "cluster.json", Cluster(name="c", nodes=nodes, node_types={"n": node}))
    hardware = call(
        PROFILE, "import", "galvatron-hardware", "--cluster", "c", "--device", "A100", "--allreduce",
        "allreduce_bandwidth_1nodes_2gpus_per_node.json", "--out", "hw.h5",
    )  # fmt: skip
    profile = call(
        PROFILE, "import", "galvatron", "--computation", "times.json", "--memory", "memory.json", "--type",
        "block,4,32,16,8", "--model-out", "m.json", "--device", "A100", "--backward-ratio", 2, "--tp-sizes", "1,2",
        "--hardware", "hw.h5", "--out", "a.h5",
    )  # fmt: skip
    assert (hardware.exit_code, profile.exit_code) == (0, 0), hardware.output + profile.output
    return tmp_path


search = partial(call, SEARCH)
ON = ("--cluster", "cluster.json", "--model", "m.json")
PRICED = ("--hardware", "hw.h5", "--profile", "a.h5")


def imported(config, out, *more):
    ended = search("import", "galvatron", config, *ON, "--sequence-parallel", "megatron", "--out", out, *more)
    assert ended.exit_code == 0, ended.output


def evaluated(plan):
    return search("evaluate", plan, *PRICED, "--out", f"{plan}.prediction")


@pytest.mark.parametrize("reduce", [(), ("--precision-reduce", "float32")])
def test_an_imported_profile_prices_an_imported_plan_whatever_it_reduces_in(folder, reduce):
    """No file of Galvatron times a reduction; messages are those of the hardware, of the plan's format."""
    imported("strategy.json", "plan.json", *reduce)
    ended = evaluated("plan.json")
    assert ended.exit_code == 0, ended.output
    wanted = Precision(compute="bfloat16", reduce="float32" if reduce else "bfloat16")
    assert read_document(folder / "plan.json", Plan).precision == wanted


def test_what_the_files_lack_is_said_in_words_of_the_import(folder):
    alone = ("--sequence-parallel", "none", "--out", "plan.json")
    assert search("import", "galvatron", "strategy.json", *ON, *alone).exit_code == 0
    ended = evaluated("plan.json")
    assert ended.exit_code == 2 and "no point for block tp_size 2 sequence_parallel none" in ended.stderr
    assert "it is not in the files that were imported: import it with --tp-sizes" in ended.stderr
    (folder / "strategy.json").write_text(
        json.dumps(STRATEGY | {"pp_deg": 2, "tp_sizes_enc": "1,1,1,1", "pp_division": "2,2"})
    )
    imported("strategy.json", "deep.json")
    ended = evaluated("deep.json")
    assert ended.exit_code == 2 and "import a table that has it (--allreduce, --p2p, --sp-time)" in ended.stderr
    assert "measure" not in ended.stderr


def test_what_is_searched_for_galvatron_comes_back_from_it_at_the_same_price(folder):
    """Without --for the best plan has no place in Galvatron's file: the head is sharded otherwise."""
    request = SearchRequest(
        name="s", global_batch_size=8, memory_gib=0.35, precision=Precision(compute="bfloat16"), pp_sizes=(1,),
        sequence_parallel=("none", "megatron"), recompute=("none", "selective", "full"),
    )  # fmt: skip
    write_document(folder / "s.json", request)
    ended = search("plan", "--for", "galvatron", "--search", "s.json", *ON, *PRICED, "--out", "best.json")
    assert ended.exit_code == 0, ended.output
    assert "searched within what hetu-galvatron 2.4.0 runs" in ended.output
    assert search("export", "best.json", "--to", "galvatron", "--out", "back.json").exit_code == 0
    imported("back.json", "again.json", "--precision-reduce", "float32")
    assert evaluated("again.json").exit_code == 0
    best, again = (
        read_document(folder / name, Prediction) for name in ("best.prediction.json", "again.json.prediction")
    )
    assert best.estimate.simulated_step_time_s == again.estimate.simulated_step_time_s
    assert best.estimate.memory_bytes == again.estimate.memory_bytes and best.proof.gap == 0


@pytest.mark.parametrize(
    ("changes", "more", "says"),
    [
        ({"gradient_reduction": "every_microbatch"}, (), "--for galvatron: Galvatron runs no plan of"),
        ({"sequence_parallel": ["ulysses"]}, (), "--for galvatron: Galvatron runs no plan of"),
        ({"head": {"tp_sizes": [1]}}, (), "s.json: embedding and head: their strategies are those that the system has"),
        ({}, ("--certificate", "c.json"), "--certificate: covers one search, but --for makes one each way"),
    ],
)
def test_what_galvatron_has_no_part_of_is_refused(folder, changes, more, says):
    raw = {"format": "shardwright.search", "version": 1, "name": "s", "global_batch_size": 8}
    raw |= {"precision": {"compute": "bfloat16"}} | changes
    (folder / "s.json").write_text(json.dumps(raw))
    ended = search("plan", "--for", "galvatron", "--search", "s.json", *ON, *PRICED, "--out", "best.json", *more)
    assert ended.exit_code == 2 and says in ended.stderr, ended.stderr
    assert not (folder / "best.json").exists()
