"""`recompute: parts` in a search file and in a profile's settings: the sets of parts that a model has."""

import json

import msgspec
import pytest
from command_calls import call

from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput, read_document, write_document
from shardwright.models.context import recompute_kinds
from shardwright.models.description import model_of_config
from shardwright.models.registry import read_presets
from shardwright.types import RECOMPUTE_PARTS, Cluster, NodeGroup, NodeType, Plan, Precision, Recompute
from shardwright.types.model_profile import read_model_profile
from shardwright_profile.cli import APP as PROFILE
from shardwright_search.cli import APP as SEARCH
from shardwright_search.space.request import SearchRequest

MIXED = Precision(parameters="float32", compute="bfloat16", reduce="float32")
OF_LLAMA = ("none", "full", "selective", "norms", "activations", "norms+activations")


def described(folder, preset, **changes):
    model = model_of_config(read_presets()[preset].config | changes, "some", 1024, preset)
    write_document(folder / "m.json", model)
    return model


def profiled(folder, **settings):
    """Return the finished command that estimates a profile, with `recompute: parts` unless settings say another."""
    node = NodeType(device="NVIDIA A100-SXM4-80GB", devices_per_node=4, memory_bytes=80 << 30)
    cluster = Cluster(name="some", nodes=(NodeGroup(node_type="a", count=1),), node_types={"a": node})
    write_document(folder / "c.json", cluster)
    given = {
        "tp_sizes": (1, 2),
        "sequence_parallel": ("none", "megatron"),
        "recompute": "parts",
        "micro_batch_sizes": (1, 2),
    }
    given |= {"precision": MIXED} | settings
    write_document(folder / "settings.json", msgspec.convert(msgspec.to_builtins(given), ProfileSettings))
    return call(
        PROFILE, "analytic", "--model", folder / "m.json", "--settings", folder / "settings.json", "--cluster",
        folder / "c.json", "--out", folder / "m.h5", "--hardware-out", folder / "h.h5",
    )  # fmt: skip


def planned(folder, name, recompute, **asked):
    """Return the plan of a search with these kinds of recomputation, and what its prediction says is proven."""
    given = {"name": "s", "global_batch_size": 8, "memory_gib": 30, "recompute": recompute, "precision": MIXED} | asked
    write_document(folder / f"{name}.search.json", msgspec.convert(msgspec.to_builtins(given), SearchRequest))
    files = {"cluster": "c.json", "model": "m.json", "hardware": "h.h5", "profile": "m.h5"}
    options = [part for role, file in files.items() for part in (f"--{role}", folder / file)]
    search, out = folder / f"{name}.search.json", folder / f"{name}.json"
    finished = call(SEARCH, "plan", *options, "--search", search, "--out", out, "--certificate", folder / "proof")
    assert finished.exit_code == 0, finished.stderr
    plan = read_document(out, Plan)
    verified = call(SEARCH, "verify", out, folder / "proof", *options, "--search", search)
    assert verified.exit_code == 0, verified.stderr
    return msgspec.structs.replace(plan, name=""), json.loads((folder / f"{name}.prediction.json").read_text())


def test_the_word_stands_for_the_sets_of_parts_that_a_model_has(tmp_path):
    assert set(recompute_kinds("parts", described(tmp_path, "llama-7b"))) == set(OF_LLAMA)
    latent = described(tmp_path, "deepseek-v3")
    assert recompute_kinds("parts", latent) == RECOMPUTE_PARTS
    assert {"latents", "norms+activations+latents"} < set(RECOMPUTE_PARTS)
    unknown = msgspec.structs.replace(latent, family="unknown")
    with pytest.raises(BadInput, match=r"recompute parts: parts of unknown blocks are not known: list kinds"):
        recompute_kinds("parts", unknown)
    assert recompute_kinds((Recompute.FULL,), unknown) == (Recompute.FULL,)


def test_a_search_with_the_word_is_one_with_its_list(tmp_path):
    described(tmp_path, "llama-7b", num_hidden_layers=4)
    finished = profiled(tmp_path)
    assert finished.exit_code == 0, finished.stderr
    rows = read_model_profile(tmp_path / "m.h5").layers.rows
    assert {row.recompute for row in rows} == set(OF_LLAMA)
    word, listed = (planned(tmp_path, name, kinds) for name, kinds in (("word", "parts"), ("listed", OF_LLAMA)))
    assert word[0].layers == listed[0].layers and word[0].stages == listed[0].stages
    # What is proven is told kind by kind.
    scopes = [prediction["proof"]["scope"] for _, prediction in (word, listed)]
    assert all("norms+activations" in scope and "latents" not in scope for scope in scopes)
    none, _ = planned(tmp_path, "none", "parts", disable=["recompute"], memory_gib=60)
    assert {layer.recompute for layer in none.layers} == {Recompute.NONE}


def test_compiled_blocks_have_no_parts(tmp_path):
    with pytest.raises(msgspec.ValidationError, match="compile: recompute norms frees results"):
        msgspec.convert({"name": "s", "global_batch_size": 8, "recompute": "parts", "compile": True}, SearchRequest)
