"""The configuration: what is refused, in which words, and what the stages are given to read."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import yaml
from snakemake_executor_plugin_slurm.validation import validate_slurm_extra

from configuration import load_workflow
from configuration_checks import read_yaml
from shardwright.io import BadInput, Document
from shardwright.types import Cluster
from slurm_jobs import job_resources

ROOT = Path(__file__).parents[2]
DEFAULT = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())


def _without(*keys, **more):
    """The default profile with some keys left out."""
    return {key: value for key, value in DEFAULT["profiles"]["cpu"].items() if key not in keys} | more


def _load(**changes):
    """The default configuration with values replaced: `section__name__key=value`."""
    config = copy.deepcopy(DEFAULT)
    for where, value in changes.items():
        *path, key = where.split("__")
        place = config
        for part in path:
            place = place[part]
        place[key] = value
    return load_workflow(config, "config/config.yaml")


def _read(text: str, kind: type[Document]):
    raw = json.loads(text)
    assert (raw.pop("format"), raw.pop("version")) == (kind.FORMAT, kind.VERSION)
    return msgspec.convert(raw, kind)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"searchs": {}}, "searchs is not a known key: did you mean searches?"),
        ({"searches__tight__memory_gb": 1}, "searches.tight.memory_gb is not a known key: did you mean memory_gib?"),
        ({"node_types__cpu__slurm": {"gpus": 8}}, "node_types.cpu.slurm.gpus is not a known key"),
        ({"searches__tight__global_batch_size": "16"}, "tight.global_batch_size: Expected `int | object`, got `str`: "),
        ({"searches__tight__memory_gib": 0}, "searches.tight.memory_gib: Expected `float` > 0.0"),
        ({"searches__tight__recompute": ["ful"]}, "tight.recompute.0: Invalid enum value 'ful': did you mean full?"),
        ({"searches__tight__pp_sizes": [0]}, "searches.tight.pp_sizes"),
        ({"searches__tight__objective": "best"}, "objective: Invalid enum value 'best': config/config.yaml shows"),
        ({"searches__tight__select": "measured"}, "searches.tight.select was removed: leave it out, and narrow"),
        ({"searches__tight__robust": {"spreads": 2}}, "searches.tight.robust was removed: leave it out"),
        ({"runs__demo__log_to": ["mlflow"]}, "runs.demo.log_to.0: mlflow was removed: take wandb or tensorboard"),
        ({"searches__tight__correction": "romy"}, "searches.tight.correction: 'romy' is not defined under searches"),
        (
            {"searches__tight__correction": "tight"},
            "searches.tight.correction: tight needs tight: learn from a search without a correction",
        ),
        (
            {"searches__tight__correction": "roomy", "searches__roomy__correction": "tight"},
            "searches.roomy.correction: roomy needs tight needs roomy: learn from",
        ),
        (
            {
                "searches__tight__correction": "roomy",
                "models__other": DEFAULT["models"]["demo"],
                "searches__tight__model": "other",
            },
            "searches.tight.correction: roomy uses another model, so its profiles differ: take a search of other",
        ),
        (
            {"searches__tight__imbalance": "load.jsn"},
            "searches.tight.imbalance: 'load.jsn' is neither a file nor a run: name a run, the load.json",
        ),
        ({"searches__tight__imbalance": 0.5}, "searches.tight.imbalance: Expected `float` >= 1.0"),
        ({"searches__tight__imbalance": {"ep2": 1.5}}, "searches.tight.imbalance: Expected `"),
        (
            {"searches__roomy__imbalance": "demo"},
            "searches.roomy.imbalance: roomy needs roomy: learn from a search without an imbalance",
        ),
        (
            {"searches__roomy__imbalance": "demo-tight", "searches__tight__correction": "roomy"},
            "searches.roomy.imbalance: roomy needs tight needs roomy: learn from a search without",
        ),
        ({"searches__a/b": DEFAULT["searches"]["tight"]}, "searches.a/b: Expected `str` matching regex"),
        ({"searches__tight__model": "dema"}, "searches.tight.model: 'dema' is not defined under models: did you"),
        ({"runs__demo__search": "romy"}, "runs.demo.search: 'romy' is not defined under searches: did you mean roomy?"),
        ({"validate__searches": ["none"]}, "validate.searches: 'none' is not defined under searches"),
        ({"clusters__laptop__nodes": [{"node_type": "gpu", "count": 1}]}, "'gpu' is not defined under node_types"),
        ({"models__demo__preset": "lama-2m"}, "models.demo.preset: 'lama-2m' is not a preset: did you mean llama-2m?"),
        ({"models__demo__num_hidden_layer": 4}, "num_hidden_layer is not a known key: did you mean num_hidden_layers?"),
        ({"clusters__laptop": {"nodes": DEFAULT["clusters"]["laptop"]["nodes"]}}, "hardware_time_budget_s is missing"),
        ({"profiles__cpu": _without("steps")}, "profiles.cpu: steps and warmup_steps are missing"),
        ({"profiles__cpu__estimate": {"context_mib": 1}}, "profiles.cpu: estimate does not apply to measured profiles"),
        ({"profiles__cpu__estimate": {"context_gib": 1}}, "profiles.cpu.estimate.context_gib is not a known key"),
        ({"profiles__cpu__source": "guessed"}, "profiles.cpu.source: Invalid enum value 'guessed'"),
        (
            {"clusters__laptop": {"nodes": [{"node_type": "cpu", "count": 2}], "hardware": "analytic"}},
            "clusters.laptop: inter_node_gbit_s is missing: what one of its several nodes sends",
        ),
        (
            {"clusters__h100x64__inter_node_gbit_s": "3200; touch FILE #"},
            "clusters.h100x64.inter_node_gbit_s: Expected `str` matching",
        ),
        (
            {"clusters__h100x64__overlap_slowdowns": "1.25:1.1 $(touch FILE)"},
            "clusters.h100x64.overlap_slowdowns: Expected `str` matching",
        ),
        ({"container": "docker://image; touch FILE"}, "container: Expected `str` matching"),
        ({"pictures": ["results/grids/laptop.svg"]}, "grids have no picture any more: leave it out"),
        ({"pictures": ["results/{grid}.svg"]}, "pictures.0: Expected `str` matching"),
        ({"clusters__laptop__overlap_slowdowns": "1.2:1"}, "overlap_slowdowns does not apply to measured hardware"),
        ({"clusters__laptop__network_step_us": 30}, "network_step_us does not apply to measured hardware"),
        ({"searches__tight__memory_gib": float("inf")}, "searches.tight.memory_gib: Expected `float` <="),
        ({"runs__demo__learning_rate": 1e300}, "runs.demo.learning_rate: Expected `float` <="),
        ({"clusters__laptop__nodes": [{"node_type": "cpu", "count": 10**9}]}, "laptop.nodes.0.count: Expected"),
        ({"data__stdlib__vocab_size": 10**12}, "data.stdlib.vocab_size: Expected `int` <="),
        ({"searches__tight__name": "loose"}, "searches.tight.name cannot be set: leave it out: the key of the search"),
        ({"models__demo__num_hidden_layers": -5}, "models.demo.num_hidden_layers is '-5', but the preset has"),
        ({"models__demo__vocab_size": 10**12}, "models.demo.vocab_size is '1000000000000', but the preset has"),
        ({"models__demo__hidden_act": float("nan")}, "models.demo contains a value that JSON does not have"),
        ({"node_types__cpu__devices_per_node": 2**20 + 1}, "node_types.cpu.devices_per_node: Expected `int` <="),
        (
            {"clusters__laptop__nodes": [{"node_type": "cpu", "count": 2**20}]},
            "clusters.laptop: 2097152 devices are more than 1048576",
        ),
        ({"profiles__cpu__micro_batch_sizes": {"min": 1, "max": 10**9, "step": 1}}, "more than 10000 values"),
        ({"node_types__cpu__slurm": {"account": "me; true"}}, "node_types.cpu.slurm.account: Expected `str` matching"),
        ({f"searches__{'n' * 101}": DEFAULT["searches"]["tight"]}, "of length <= 100"),
        ({"models__demo__preset": "../secret"}, "models.demo.preset: Expected `str` matching"),
        ({"validate": {"search": []}}, "validate.search is not a known key: did you mean searches?"),
        ({"runs__demo__plan": "other.json"}, "runs.demo.plan cannot be set: leave it out: the workflow names"),
        ({"runs__demo__nnodes": 2}, "runs.demo.nnodes cannot be set: leave it out: the cluster sets it"),
        ({"runs__demo__hang_timeout_s": 0.1}, "runs.demo.hang_timeout_s: Expected `float` >= 1.0"),
        ({"runs__demo__grace_s": 43201}, "runs.demo.grace_s: 43201 s are over half of a job of 1440 min: set less, or"),
        ({"searches": None}, "searches: Expected `object`, got `null`"),
        ({"searches__tight": "roomy"}, "searches.tight: Expected `object`, got `str`"),
        ({"data__stdlib__vocab_size": 4096}, "runs.demo: its data has 4096 tokens, its model's vocabulary 2048"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_place_and_the_remedy(changes, message):
    with pytest.raises(BadInput) as error:
        _load(**changes)
    assert str(error.value).startswith("config/config.yaml: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_of_another_family_is_translated():
    with pytest.raises(BadInput, match="num_hidden_layers is called n_layer in a gpt2 configuration"):
        _load(models__demo={"preset": "gpt2-xl", "profile": "cpu", "num_hidden_layers": 2})


def test_what_the_preset_leaves_out_can_be_set_when_the_family_knows_it():
    assert json.loads(_load(models__demo__attention_bias=True).model_config_json("demo"))["attention_bias"] is True


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xff", "not valid YAML"),
        (b"a: " + b"[" * 5000, "not valid YAML"),
        (b"- a", "contains no keys"),
        (b"", "contains no keys"),
        (b"#" * (2**20 + 1), "larger than 1 MiB"),
    ],
)
def test_a_hostile_preset_is_one_line(tmp_path, content, message):
    (tmp_path / "preset.yaml").write_bytes(content)
    with pytest.raises(BadInput, match=message) as error:
        read_yaml(tmp_path / "preset.yaml")
    assert "\n" not in str(error.value)


def test_keys_of_published_files_can_be_set_where_the_family_reads_them():
    assert json.loads(_load(models__demo__rope_theta=5e5).model_config_json("demo"))["rope_theta"] == 5e5
    with pytest.raises(BadInput, match="rope_theta is not a known key"):
        _load(models__demo={"preset": "gpt2-xl", "profile": "cpu", "rope_theta": 5e5})


def test_broken_yaml_is_refused_with_its_line(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("a: 1\nb: [\n")
    with pytest.raises(BadInput, match="not valid YAML in line 3"):
        read_yaml(path)


def test_a_model_may_be_a_config_json_beside_the_configuration(tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "max_position_embeddings": 8192}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    changed = copy.deepcopy(DEFAULT)
    changed["models"]["demo"] = {"config": "mine", "profile": "cpu", "hidden_size": 32}
    workflow = load_workflow(changed, str(tmp_path / "config.yaml"))
    assert json.loads(workflow.model_config_json("demo")) == config | {"hidden_size": 32}
    assert workflow.sequence_length("demo") == 4096
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(BadInput, match=r"models\.demo\.sequence_length: .*config\.json does not state the sample"):
        load_workflow(changed, str(tmp_path / "config.yaml"))
    changed["models"]["demo"]["preset"] = "llama-2m"
    with pytest.raises(BadInput, match="a model needs either preset or config"):
        load_workflow(changed, "config.yaml")


def test_the_demo_model_has_about_two_million_parameters():
    config = json.loads(_load().model_config_json("demo"))
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    assert config["num_key_value_heads"] == config["num_attention_heads"]
    layer = 4 * width * width + 3 * width * inner + 2 * width
    assert 2 * config["vocab_size"] * width + layers * layer + width == 2_132_096


def test_overrides_replace_the_presets_values_and_nothing_else():
    workflow = _load(models__demo__num_hidden_layers=3, models__demo__sequence_length=64)
    changed, usual = (json.loads(each.model_config_json("demo")) for each in (workflow, _load()))
    assert changed == usual | {"num_hidden_layers": 3}
    assert workflow.sequence_length("demo") == 64


def test_what_is_trained_of_a_model_goes_to_its_description_and_not_into_its_configuration():
    plain = _load()
    frozen = _load(models__demo__frozen=["embedding", "layers[0:2]"])
    assert plain.describe_options("demo") == ["--name", "demo", "--sequence-length", "128"]
    assert frozen.describe_options("demo@64")[3:] == ["64", "--frozen", "embedding", "--frozen", "layers[0:2]"]
    assert _load(models__demo__lora="adapter").describe_options("demo")[4:] == ["--lora", "adapter"]
    assert frozen.model_config_json("demo") == plain.model_config_json("demo")


def test_a_cluster_is_a_document_of_the_contract():
    cluster = _read(_load(node_types__cpu__usd_per_hour=1.5).cluster_json("laptop"), Cluster)
    assert (cluster.num_devices, cluster.node_types["cpu"].memory_bytes) == (2, 2 * 1024**3)
    assert cluster.node_types["cpu"].usd_per_hour == 1.5


def test_a_model_is_profiled_on_one_node_whatever_the_cluster_and_its_price():
    usual, dearer = _load(), _load(node_types__cpu__usd_per_hour=9, clusters__laptop__nodes=[
        {"node_type": "cpu", "count": 4}])  # fmt: skip
    assert usual.cluster_json("1xcpu") == dearer.cluster_json("1xcpu")


def test_searches_and_profiles_are_documents_that_the_stages_read():
    from shardwright.estimate.settings import ProfileSettings
    from shardwright_search.space.request import SearchRequest

    workflow = _load()
    request = _read(workflow.search_json("tight"), SearchRequest)
    settings = _read(workflow.profile_json("cpu"), ProfileSettings)
    assert (request.name, request.memory_gib) == ("tight", DEFAULT["searches"]["tight"]["memory_gib"])
    assert request.precision == settings.precision
    assert set(request.recompute) <= set(settings.recompute)


def test_what_is_analytic_needs_no_time_to_measure_and_is_told_by_name():
    assert re.fullmatch(_load().analytic_models(), "demo") is None
    assert re.fullmatch(_load().analytic_clusters(), "laptop") is None
    config = _load(
        profiles__cpu=_without("layers", "steps", "warmup_steps", source="analytic"),
        clusters__laptop={"nodes": [{"node_type": "cpu", "count": 1}], "hardware": "analytic"},
    )
    assert re.fullmatch(config.analytic_models(), "demo") and re.fullmatch(config.analytic_clusters(), "laptop")
    assert json.loads(config.profile_json("cpu")).keys().isdisjoint({"source", "steps", "layers"})


def test_how_plans_are_corrected_is_no_part_of_a_search_document():
    changed = _load(searches__tight__correction="roomy")
    assert [changed.search_json(name) for name in ("roomy", "tight")] == [
        _load().search_json(name) for name in ("roomy", "tight")
    ]


def test_what_others_rest_on_is_measured_without_being_asked_for():
    def measured(**changes):
        return _load(validate__searches=[], **changes).measured_searches()

    assert measured() == ()
    assert measured(searches__tight__correction="roomy") == ("roomy",)


def test_a_search_is_not_touched_by_another_ones_budget():
    assert _load(searches__tight__memory_gib=9).search_json("roomy") == _load().search_json("roomy")


def test_a_job_asks_slurm_for_what_its_node_type_says():
    slurm = {"partition": "gpu", "gpus_per_node": "a100:8", "cpus_per_node": 16, "mem_mb": 64000, "runtime_min": 90}
    slurm |= {"socket_interface": "ib0"}
    workflow = _load(node_types__cpu__slurm=slurm, clusters__laptop__nodes=[{"node_type": "cpu", "count": 2}])
    asked = {
        "nodes": 2, "tasks": 2, "mpi": "srun", "node_groups": "2x16@ib0", "cpus_per_task": 16, "mem_mb": 64000,
        "runtime": 90, "slurm_extra": "--exclusive --gpus-per-node=a100:8", "slurm_partition": "gpu",
    }  # fmt: skip
    assert job_resources(workflow.components("laptop"), 60) == asked
    alone = {"nodes": 1, "tasks": 1, "mpi": "", "node_groups": "1x16"}
    assert job_resources(workflow.one_node("cpu"), 60) == asked | alone


def test_nodes_of_several_types_are_asked_for_as_one_heterogeneous_job():
    """In rank order, neighbours together, and all for the shortest time that one of them may be had for."""
    small = {"device": "A10", "devices_per_node": 1, "memory_gib": 24, "slurm": {"runtime_min": 30}}
    large = small | {"slurm": {"partition": "big", "constraint": "[a|b]", "gpus_per_node": "8", "cpus_per_node": 16}}
    nodes = [{"node_type": name, "count": count} for name, count in [("a", 1), ("b", 1), ("b", 2), ("a", 1)]]
    workflow = _load(node_types__a=small, node_types__b=large, clusters__laptop__nodes=nodes)
    profile = {"slurm_account": "me", "slurm_partition": "small", "disk": "1000"}
    asked = job_resources(workflow.components("laptop"), 60, profile, "--signal=TERM@9")
    others = (
        "--exclusive --gpus-per-node=8 --requeue --signal=TERM@9 -pbig'' -Ame'' -C'[a|b]''' -N3 -n3 -c16",
        "--exclusive --requeue --signal=TERM@9 -psmall'' -Ame'' -N1 -n1 -c1",
    )
    slurm_extra = " : ".join(["--exclusive --requeue --signal=TERM@9", *(f"{of} -t30 --mem\\=4000" for of in others)])
    assert asked == {
        "nodes": 1, "tasks": 1, "mpi": "", "node_groups": "1x1 3x16 1x1", "cpus_per_task": 1, "mem_mb": 4000,
        "runtime": 30, "slurm_extra": slurm_extra, "slurm_partition": "small", "slurm_account": "me",
    }  # fmt: skip
    validate_slurm_extra(SimpleNamespace(resources=SimpleNamespace(**asked)))


def test_what_no_node_type_asks_for_is_left_to_the_clusters_profile():
    assert "slurm_partition" not in _load().resource_names()
    assert "slurm_partition" in _load(node_types__cpu__slurm={"partition": "gpu"}).resource_names()


def test_the_five_lines_of_fine_tuning_in_the_documentation_are_a_configuration_beside_the_default_one():
    (lines,) = re.findall(
        r"As `fine-tune.yaml`:\n\n```yaml\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.S
    )
    assert lines.count("\n") == 5
    config = copy.deepcopy(DEFAULT)
    for section, entries in yaml.safe_load(lines).items():
        config[section] |= entries
    workflow = load_workflow(config, "fine-tune.yaml")
    assert workflow.settings.runs["tuned"].export and workflow.copied_from("tuned") == "/models/bert"
    said = workflow.options("runs", "tuned", without=("search", "data", "export"))
    assert said[:4] == ["--steps", "500", "--weights", "/models/bert"] and said[-3:] == [
        "--eval-every",
        "100",
        "--keep-best",
    ]
