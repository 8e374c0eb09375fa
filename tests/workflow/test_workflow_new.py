"""`shardwright new` writes configurations that pass the workflow's checks, and asks for what no option says."""

import io
from pathlib import Path

import pytest
import yaml
from command_calls import call

from configuration import load_workflow
from shardwright.cli import APP

ROOT = Path(__file__).parents[2]


def _new(folder, *options):
    out = folder / "mine.yaml"
    done = call(APP, "new", *options, "--out", out)
    assert done.exit_code == 0, done.stderr
    config = yaml.safe_load(out.read_text())
    return config, load_workflow(config, str(out))


@pytest.mark.parametrize(
    ("model", "gpus", "options"),
    [
        ("llama-3.1-8b", "8x8:H100", ["--steps", 7, "--batch", 128]),
        ("qwen3-4b", "2x8:A100-80+1x8:H100-SXM", []),
        ("gpt2-xl", "4:V100-32", []),
        ("vit-huge", "8:A100-40", []),
        ("swin-tiny", "1x8:A100-40", []),
        ("t5-3b", "2x8:A10", ["--inter-node-gbit-s", 100]),
        ("siglip-base", "4:A100-40", []),
        ("llava-1.5-7b", "8:A100-80", []),
        ("whisper-small", "4:A100-40", []),
    ],
)
def test_a_new_configuration_passes_the_checks_of_the_workflow(tmp_path, model, gpus, options):
    (tmp_path / "corpus").mkdir()
    config, workflow = _new(tmp_path, "--model", model, "--gpus", gpus, "--data", tmp_path / "corpus", *options)
    groups = [text.rpartition(":")[0].rpartition("x") for text in gpus.split("+")]
    nodes = [(group.count, workflow.settings.node_types[group.node_type]) for group in _nodes(workflow)]
    assert [(count, node.devices_per_node) for count, node in nodes] == [(int(n or 1), int(g)) for n, _, g in groups]
    assert config["data"]["corpus"]["text"] == str(tmp_path / "corpus")
    sources = {**dict.fromkeys(("vit-huge", "swin-tiny", "siglip-base"), "images"), "llava-1.5-7b": "captions"}
    assert config["data"]["corpus"].get("source") == (sources | {"whisper-small": "speech"}).get(model)
    assert config["profiles"]["estimated"]["precision"]["compute"] == ("float16" if "V100" in gpus else "bfloat16")
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert workflow.settings.runs[model].steps == given.get("--steps", 1000)
    batch = workflow.settings.searches[model].global_batch_size
    assert (
        batch == given.get("--batch", batch)
        and batch % sum(count * node.devices_per_node for count, node in nodes) == 0
    )


def _nodes(workflow):
    return workflow.settings.clusters["cluster"].nodes


def test_a_dry_run_of_a_new_configuration_plans_and_trains(bare):
    _new(bare.folder, "--model", "llama-3.1-8b", "--gpus", "8x8:H100", "--data", "random")
    assert {"search": 1, "run": 1}.items() <= bare.snakemake("-n", configfile="mine.yaml").jobs.items()


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_no_option_says_is_asked_for_on_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", _Terminal("llama-2-7b\n2x8:H100\nrandom\n"))
    done = call(APP, "new", "--out", tmp_path / "mine.yaml")
    assert done.exit_code == 0 and [line[:5] for line in done.stdout.splitlines()] == [
        "Model",
        "Nodes",
        "Data,",
        "wrote",
    ]
    config = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert config["models"] == {"llama-2-7b": {"preset": "llama-2-7b", "profile": "estimated"}}
    assert config["clusters"]["cluster"]["nodes"] == [{"node_type": "H100-SXM", "count": 2}] and config["data"] == {}


GIVEN = {"--model": "llama-2-7b", "--gpus": "2x8:H100", "--data": "random"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"--model": "lama-2-7b"}, "--model: 'lama-2-7b' is not a preset: did you mean llama-2-7b?"),
        ({"--gpus": "2x8:H10"}, "'H10' is not in the table of devices"),
        ({"--gpus": "many"}, "--gpus: 'many' is not NODESxGPUS:DEVICE"),
        ({"--data": "nowhere.txt"}, "--data: 'nowhere.txt' does not exist: name a file or a folder, or random"),
        ({"--data": None}, "--data: is not given: give it, or answer on a terminal"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_writes_nothing(tmp_path, monkeypatch, changed, said):
    monkeypatch.setattr("sys.stdin", io.StringIO("random\n"))
    options = [word for pair in (GIVEN | changed).items() if pair[1] is not None for word in pair]
    done = call(APP, "new", *options, "--out", tmp_path / "mine.yaml")
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1 and not [*tmp_path.iterdir()]


def test_a_configuration_that_is_there_is_kept(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    done = call(APP, "new", *[word for pair in GIVEN.items() for word in pair], "--out", tmp_path / "mine.yaml")
    assert done.exit_code == 2 and "already exists" in done.stderr
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_a_path_is_a_text_in_the_configuration_whatever_it_holds(tmp_path):
    folder = tmp_path / """a: "b" 'c' \\n #{x} {{y}} $(z) &d *e !f 😀"""
    folder.mkdir()
    out = tmp_path / "mine.yaml"
    done = call(APP, "new", "--model", "gpt2-xl", "--gpus", "4:A100-40", "--data", folder, "--out", out)
    assert done.exit_code == 0, done.stderr
    assert yaml.safe_load(out.read_text())["data"]["corpus"]["text"] == str(folder)
