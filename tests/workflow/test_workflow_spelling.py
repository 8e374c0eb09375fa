"""A default that is written out and a list in another order change nothing; another value begins a run of its own."""

import copy
import json
from pathlib import Path

import msgspec
import pytest
import yaml
from msgspec import NODEFAULT

from configuration import load_workflow
from configuration_normal import BESIDE, UNORDERED, folder_of_data, folder_of_run
from configuration_types import DECIDED, Data, ModelChoice, Profile, Run, Search
from grids import Even, GridFile, GridModel, GridSettings
from shardwright_search.space.request import OuterSpace, SearchRequest
from shardwright_train.checkpoints.folders import Identity, Settings

ROOT = Path(__file__).parents[2]
DEFAULT = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
KINDS = {"profiles": Profile, "data": Data, "searches": Search, "runs": Run, "models": ModelChoice}
ORDERED = {"layers", "learning_rate_factor", "nodes", "pictures", "searches", "spaces", "clusters", "published"}
ORDERED |= {"published_times"}
"""Keys of lists whose order counts: that of ranks, of matches, of a page or a table."""


def _load(config):
    return load_workflow(copy.deepcopy(config), "config.yaml")


def _written_out(config):
    """The configuration with every default of its entries written out."""
    written = copy.deepcopy(config)
    for section, kind in KINDS.items():
        for entry in written[section].values():
            for field in msgspec.structs.fields(kind):
                default = field.default if field.default_factory is NODEFAULT else field.default_factory()
                if default is not NODEFAULT and field.name not in DECIDED.get(section, ()) and "blend" not in entry:
                    entry.setdefault(field.name, msgspec.to_builtins(default, enc_hook=str))
    written["models"]["demo"]["hidden_size"] = 128
    return written


def _turned(value, key=""):
    """The same with every list of an unordered key, and every mapping, the other way round."""
    if isinstance(value, dict):
        return {name: _turned(inside, name) for name, inside in reversed(value.items())}
    if isinstance(value, list):
        return value[::-1] if key in UNORDERED else [_turned(each) for each in value]
    return value


def _in_order(config):
    """A configuration with the other way round what has no order; entries stay, as a page shows them in theirs."""
    turned = _turned(config)
    entries = {section: {name: turned[section][name] for name in config[section]} for section in KINDS}
    return {name: entries.get(name, turned[name]) for name in config}


@pytest.mark.parametrize("change", [_written_out, _in_order, lambda config: _in_order(_written_out(config))])
def test_what_means_the_same_is_spelled_the_same(change):
    config = copy.deepcopy(DEFAULT)
    config["data"] |= {"other": {"text": "/other", "vocab_size": 300}, "both": {"blend": {"stdlib": 3, "other": 1}}}
    config["runs"]["demo"]["data"] = "both"
    config["models"]["demo"]["frozen"] = ["embedding", "layers[0:2]"]
    changed = change(config)
    assert changed != config or str(changed) != str(config)
    before, after = _load(config), _load(changed)
    for name in config["searches"]:
        assert before.search_json(name) == after.search_json(name)
    for name in config["profiles"]:
        assert before.profile_json(name) == after.profile_json(name)
    for name in config["models"]:
        assert before.model_config_json(name) == after.model_config_json(name)
        assert (before.describe_options(name), before.described(name)) == (
            after.describe_options(name), after.described(name),
        )  # fmt: skip
    for name in config["runs"]:
        assert before.run_options(name) == after.run_options(name)
        assert folder_of_run(before.settings, name) == folder_of_run(after.settings, name)
    for name in config["data"]:
        assert before.options("data", name) == after.options("data", name)
        assert folder_of_data(before.settings, name) == folder_of_data(after.settings, name)
    assert before.blend_json("both") == after.blend_json("both")


def test_a_grid_in_another_order_asks_for_the_same(tmp_path):
    workflow, content = _load(DEFAULT), yaml.safe_load((ROOT / "config/grids/laptop.yaml").read_text())
    content["search"]["space"] = "full"
    content["models"]["demo"]["search"] = {"recompute": ["none", "full"]}
    content["models"]["demo"]["global_batch_size"] = [16, 32]
    turned = _turned(content)
    turned["models"] = {name: turned["models"][name] for name in content["models"]}
    turned["models"]["demo"]["search"]["recompute"] = ["full", "none"]
    grids = []
    for number, each in enumerate((content, turned)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "laptop.yaml").write_text(yaml.safe_dump(each, sort_keys=False))
        grids.append(GridFile(folder / "laptop.yaml", workflow))
    before, after = grids
    assert before.pairs == after.pairs
    for pair in before.pairs:
        assert before.cells_json(*pair) == after.cells_json(*pair)
        assert before.commands(*pair) == after.commands(*pair)


def test_of_every_list_it_is_decided_whether_its_order_counts():
    kinds = (*KINDS.values(), SearchRequest, OuterSpace, GridSettings, GridModel, Even)
    lists = {
        field.name
        for kind in kinds
        for field in msgspec.inspect.type_info(kind).fields
        if _holds_list(field.type) and field.name not in DECIDED["runs"]
    }
    assert lists - ORDERED <= UNORDERED and not ORDERED & UNORDERED


def _holds_list(kind):
    return isinstance(kind, msgspec.inspect.VarTupleType) or any(map(_holds_list, getattr(kind, "types", ())))


def test_all_that_a_run_is_compared_by_when_it_goes_on_is_in_its_folder():
    """Its plan, model, batch and initial weights are in the folder below, of its plan, or follow from keys that are."""
    compared = {*Settings.__struct_fields__, "seed", "weights", "resume_from", "steps", "valid_fraction"}
    compared |= {"test_fraction", "objective", "reset_attention_mask", "reset_position_ids"}
    keys = set(Run.__struct_fields__) - DECIDED["runs"].keys()
    assert compared <= keys - BESIDE and BESIDE <= keys
    beside = {"plan_sha256", "model_sha256", "tensors_sha256", "global_batch_size", "sequence_length"}
    kept = {"settings", "seed", "data_sha256", "weights_sha256", "schedule_steps"}
    assert set(Identity.__struct_fields__) - beside == kept


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 0.002), ("seed", 2), ("steps", 300), ("clip_norm", 0.5), ("weight_decay", 0),
        ("learning_rate_schedule", "wsd"), ("learning_rate_factor", ["*=0.5"]), ("valid_fraction", 0.1),
        ("weights", "/models/demo"), ("resume_from", "step-00000001"), ("data", "random"), ("data", "other"),
        ("router_bias_update_rate", 0.01), ("reset_position_ids", True),
    ],
)  # fmt: skip
def test_another_setting_is_another_folder_and_what_leaves_the_steps_alone_is_not(key, value):
    config = copy.deepcopy(DEFAULT)
    config["data"]["other"] = DEFAULT["data"]["stdlib"] | {"max_mib": 2}
    before = folder_of_run(_load(config).settings, "demo")
    config["runs"]["demo"] |= {"checkpoint_every": 7, "max_restarts": 3, "grace_s": 9, "search": "tight"}
    config["data"]["stdlib"]["workers"] = 3
    assert folder_of_run(_load(config).settings, "demo") == before
    config["runs"]["demo"][key] = value
    assert folder_of_run(_load(config).settings, "demo") != before


def test_a_dry_run_after_such_edits_shows_nothing_to_do(finished):
    finished.configure(lambda config: config.update(_in_order(_written_out(config))))
    assert "Nothing to be done" in finished.snakemake("all", "grid", "-n").output
    assert json.loads((finished.folder / "results/runs" / finished.run("demo") / "settings.json").read_text())
