"""The command `devices`, and profiles in FP8."""

import json

from command_calls import call

from shardwright.io import write_document
from shardwright.models.description import model_of_config
from shardwright.models.registry import read_presets
from shardwright.types.model_profile import read_model_profile
from shardwright_profile.cli import APP


def test_the_devices_that_can_be_estimated_are_listed_with_their_sources(tmp_path):
    listed = call(APP, "devices")
    assert listed.exit_code == 0 and "H100-SXM (" in listed.stdout and "datasheet" in listed.stdout
    refused = call(APP, "devices", "--devices", tmp_path / "none.toml")
    assert (refused.exit_code, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)


def test_a_profile_in_fp8_says_so_and_has_no_eager_attention(tmp_path):
    settings = {
        "format": "shardwright.profile_settings", "version": 1, "tp_sizes": [1], "sequence_parallel": ["none"],
        "recompute": ["none"], "micro_batch_sizes": [1, 2],
        "precision": {"parameters": "float32", "compute": "fp8", "reduce": "float32"},
    }  # fmt: skip
    write_document(tmp_path / "model.json", model_of_config(read_presets()["gpt2-xl"].config, "m", 512, "gpt2-xl"))
    (tmp_path / "fp8.json").write_text(json.dumps(settings))
    (tmp_path / "eager.json").write_text(json.dumps(settings | {"attention": "eager"}))
    asked = ("analytic", "--model", tmp_path / "model.json", "--device", "H100-SXM", "--out", tmp_path / "m.h5")
    refused = call(APP, *asked, "--settings", tmp_path / "eager.json")
    assert refused.stderr == "error: --settings: attention eager: is not estimated with fp8: take auto or sdpa\n"
    assert refused.exit_code == 2 and not (tmp_path / "m.h5").exists()
    assert call(APP, *asked, "--settings", tmp_path / "fp8.json").exit_code == 0
    profile = read_model_profile(tmp_path / "m.h5")
    assert profile.origin.precision == "float32/fp8/float32"
    assert "FLOP/s x 0.60265 reached fp8;" in profile.provenance.notes
    assert "Products with the weights of blocks are in FP8; attention, embedding and head" in profile.provenance.notes
