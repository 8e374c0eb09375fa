"""The JSON Schema of search files, and the configuration that they are written from."""

import json
import shutil
from pathlib import Path

import jsonschema
import msgspec
import pytest
from made_up import make_request

from shardwright.io import BadInput, read_document
from shardwright.types import Prediction
from shardwright_search.space import schema
from shardwright_search.space.request import Offers, SearchRequest

ROOT = Path(__file__).parents[2]
SCHEMA = "stages/search/schemas/search.schema.json"
FULL = {
    "objective": "usd_per_sample",
    "global_batch_size": {"min": 8, "max": 32, "step": 8},
    "memory_gib": {"n": 40.0},
    "reserve_gib": 1.5,
    "num_microbatches": [1, 2],
    "space": "dp+tp",
    "disable": ["recompute", "sequence_parallel", "context_parallel", "expert_parallel"],
    "fine_grained": False,
    "offload": ["none", "optimizer"],
    "tolerance": 0.02,
    "pp_sizes": [1, 2],
    "max_pp_size": 2,
    "stage_widths": [[4, 4], [6, 2]],
    "span_node_types": True,
    "tp_sizes": None,
    "max_tp_size": 4,
    "cp_sizes": [1, 2],
    "context": ["ring"],
    "ep_sizes": [1, 2],
    "etp_sizes": [1, 2],
    "expert_data_parallel": ["zero2"],
    "max_dp_size": None,
    "tp_consecutive": [True, False],
    "data_parallel": ["zero3"],
    "shard_sizes": [2],
    "sequence_parallel": ["ulysses"],
    "recompute": ["mlp"],
    "embedding": {"tp_sizes": [2], "data_parallel": ["zero3"], "sequence_parallel": None},
    "head": {"tp_sizes": None, "cp_sizes": [2]},
    "schedules": ["interleaved_1f1b"],
    "optimizer": ["adamw", "lion"],
    "loss_chunks": 4,
    "chunks_per_stage": [2, 4],
    "gradient_reduction": "every_microbatch",
    "time_model": "sequence",
    "megatron_gather_buffer": True,
}
"""Every key of a search that a configuration may have, beside those of the workflow itself."""


def configured() -> dict[str, object]:
    """The schema of a search in the configuration."""
    whole = json.loads((ROOT / "workflow" / "schemas" / "config.schema.json").read_text())
    return {"$defs": whole["$defs"], **whole["$defs"]["Search"]}


def test_the_schema_is_up_to_date(capsys):
    assert schema.main(["--check", "--root", str(ROOT)]) == 0, capsys.readouterr().err


def test_check_names_a_stale_schema_and_writing_mends_it(tmp_path, capsys):
    (tmp_path / "core").mkdir()
    shutil.copy(ROOT / "core" / "pyproject.toml", tmp_path / "core")
    assert schema.main(["--root", str(tmp_path)]) == 0
    written = tmp_path / SCHEMA
    written.write_text(written.read_text().replace("shardwright.search", "shardwright.seek"))
    assert schema.main(["--check", "--root", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(written) in line and "python -m shardwright_search.space.schema" in line
    assert schema.main(["--root", str(tmp_path)]) == 0
    assert schema.main(["--check", "--root", str(tmp_path)]) == 0


def test_the_schema_is_not_written_outside_the_repository(tmp_path):
    with pytest.raises(SystemExit) as stop:
        schema.main(["--root", str(tmp_path)])
    assert stop.value.code == 2 and not list(tmp_path.iterdir())


def test_the_schema_takes_what_the_type_takes_and_refuses_unknown_keys():
    validator = jsonschema.Draft202012Validator(json.loads((ROOT / SCHEMA).read_text()))
    head = {"format": "shardwright.search", "version": 1, "name": "s"}
    for fields in (FULL, {"global_batch_size": 8}):
        make_request(**fields)
        assert validator.is_valid(head | fields)
    for odd in ({"memory_gb": 1}, {"space": "4d"}, {"embedding": {"tp": [1]}}, {"global_batch_size": 0}):
        assert not validator.is_valid(head | {"global_batch_size": 8} | odd)


def test_every_key_says_what_it_means():
    found = json.loads((ROOT / SCHEMA).read_text())
    for described in (found, *found["$defs"].values()):
        for name, of in described.get("properties", {}).items():
            assert name in ("format", "version") or of["description"], name


def test_a_configuration_can_say_all_that_a_search_can():
    """But number formats and kernels, which it takes from the profile."""
    of_the_workflow = {"model", "cluster", "correction", "imbalance"}
    fields = set(SearchRequest.__struct_fields__) - {"name", "precision", "attention", "compile"}
    assert set(configured()["properties"]) - of_the_workflow == fields == set(FULL)


def test_what_a_configuration_may_say_a_search_understands():
    validator = jsonschema.Draft202012Validator(configured())
    own = {"model": "m", "cluster": "c"}
    for key, value in FULL.items():
        search = {"global_batch_size": 8, key: value}
        assert validator.is_valid(own | search), key
        if key != "global_batch_size":
            make_request(**search)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory_gib", {}),
        ("memory_gib", 0),
        ("reserve_gib", -1),
        ("space", "all"),
        ("disable", ["tp"]),
        ("max_tp_size", 0),
        ("tp_consecutive", []),
        ("embedding", {"recompute": ["none"]}),
        ("chunks_per_stage", []),
        ("time_model", "linear"),
        ("global_batch_size", {"min": 1, "max": 2}),
        ("objective", "fast"),
    ],
)
def test_what_a_search_refuses_its_configuration_refuses(key, value):
    search = {"global_batch_size": 8, key: value}
    assert not jsonschema.Draft202012Validator(configured()).is_valid({"model": "m", "cluster": "c"} | search)
    with pytest.raises(msgspec.ValidationError):
        make_request(**search)


@pytest.mark.parametrize(
    ("kind", "old", "message"),
    [
        (SearchRequest, {"robust": None}, None),
        (SearchRequest, {"robust": {"spreads": 2}}, "robust was removed: leave it out"),
        (Offers, {"checkpoint_s": 30, "restart_s": 300}, None),
        (Offers, {"node_types": {"a": {"interruptions_per_hour": 0.05}}}, "interruptions_per_hour was removed: leave"),
        (Prediction, {"robust": [{"scenario": "slow", "regret": 0.1, "nominal_regret": 0.2}]}, None),
    ],
)
def test_a_removed_key_is_ignored_if_it_changes_nothing_and_refused_by_name_otherwise(tmp_path, kind, old, message):
    examples = {
        SearchRequest: {"name": "s", "global_batch_size": 8},
        Offers: {},
        Prediction: json.loads((ROOT / "core" / "examples" / "prediction.json").read_text()),
    }
    usual = {"format": kind.FORMAT, "version": 1, **examples[kind]}
    paths = tmp_path / "usual.json", tmp_path / "old.json"
    for path, content in zip(paths, (usual, usual | old), strict=True):
        path.write_text(json.dumps(content))
    if message is None:
        assert read_document(paths[1], kind) == read_document(paths[0], kind)
    else:
        with pytest.raises(BadInput, match=message):
            read_document(paths[1], kind)
