"""What a run trains on: blends, random samples, images and data of its own to evaluate on, and what is refused."""

import copy
import json

import pytest
from test_workflow_chain import _of, _options
from test_workflow_configuration import DEFAULT, _load

from configuration import load_workflow
from shardwright.io import BadInput, read_document
from shardwright_train.data.sampling import BlendedData

OTHER = {"text": "/texts/other.jsonl", "vocab_size": 300}
PHOTOS = {"text": "/photos", "source": "images", "image_size": 224}
CAPTIONS = {"text": "/captions", "source": "captions", "image_size": 336, "tokenizer": "/llava"}
PAIRS = {"text": "/pairs.jsonl", "tokenizer": "/llama", "loss_on": "completions"}
BOTH = {"blend": {"stdlib": 3, "other": 1.5}}


def test_a_blend_and_data_to_evaluate_on_are_prepared_before_the_run(finished):
    def change(config):
        config["data"] |= {"other": OTHER, "held": OTHER, "unused": OTHER, "both": BOTH}
        config["runs"]["demo"] |= {"data": "both", "valid_data": "held", "keep_best": True, "export": "best"}

    finished.configure(change)
    done = finished.snakemake("runs")
    assert (done.status, done.jobs) == (
        0, {"write_blend": 1, "write_run_settings": 1, "prepare": 2, "run": 1, "convert": 1},
    ), done.output  # fmt: skip
    run = _options(_of(finished.calls(), "shardwright train run")[-1])
    folders = {name: finished.data(name) for name in ("both", "held", "other", "stdlib")}
    given = run["--data"], run["--valid-data"]
    assert given == (f"results/data/{folders['both']}", f"results/data/{folders['held']}")
    blend = read_document(finished.folder / given[0] / "blend.json", BlendedData)
    parts = [(each.folder, each.weight) for each in blend.datasets]
    assert parts == [(f"../{folders['other']}", 1.5), (f"../{folders['stdlib']}", 3.0)]
    converted = _of(finished.calls(), "shardwright train convert")[-1]
    assert "--best" in converted and _options(converted)["--copy-from"] == f"results/data/{folders['other']}"


def test_random_samples_need_no_data_and_images_and_captions_are_read(finished):
    def change(config):
        config["data"] |= {"photos": PHOTOS, "captions": CAPTIONS, "pairs": PAIRS}
        config["runs"]["demo"] |= {"data": "random", "export": True}
        config["runs"]["demo-tight"]["data"] = "photos"
        config["runs"]["captioned"] = {**config["runs"]["demo-tight"], "data": "captions"}
        config["runs"]["tuned"] = {**config["runs"]["demo-tight"], "data": "pairs", "loss_on": "completions"}

    finished.configure(change)
    done = finished.snakemake("runs", "-n", "--printshellcmds")
    prepared = dict.fromkeys(("prepare_images", "prepare_pairs", "prepare_completions"), 1)
    assert done.jobs == {**prepared, "write_run_settings": 4, "run": 4, "convert": 1}, done.output
    assert "--data random " in done.output and "--copy-from" not in done.output
    options = "--text /photos --source images --image-size 224 --workers 1"
    assert f"prepare {options} --out results/data/{finished.data('photos')}" in done.output
    options = "--text /captions --source captions --image-size 336 --tokenizer /llava --workers 1"
    assert f"prepare {options} --out results/data/{finished.data('captions')}" in done.output
    options = "--text /pairs.jsonl --tokenizer /llama --loss-on completions --workers 1"
    assert f"prepare {options} --out results/data/{finished.data('pairs')}" in done.output
    assert any("--loss-on completions " in command for command in done.output.split("train run")[1:])


def _changed(**entries):
    """The default configuration with more data, and other keys of its first run."""
    config = copy.deepcopy(DEFAULT)
    config["data"] |= {"other": OTHER, "photos": PHOTOS, **entries.pop("data", {})}
    config["runs"]["demo"] |= entries
    return load_workflow(config, "config.yaml")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"data": {"random": OTHER}}, "data.random: the name is reserved for random samples: choose another"),
        ({"data": {"x": {"vocab_size": 300}}}, "data.x needs either text or blend"),
        ({"data": {"x": OTHER | BOTH}}, "data.x needs either text or blend"),
        ({"data": {"x": BOTH | {"vocab_size": 300}}}, "data.x.vocab_size: does not apply to a blend"),
        ({"data": {"x": {"blend": {}}}}, "data.x.blend names no data"),
        (
            {"data": {"x": {"blend": {"othr": 1}}}},
            "data.x.blend: 'othr' is not defined under data: did you mean other?",
        ),
        ({"data": {"x": {"blend": {"other": 0}}}}, r"data.x.blend\[...\]: Expected `float` > 0.0"),
        ({"data": {"x": {"blend": {"photos": 1}}}}, "data.x.blend: photos is not a text"),
        ({"data": {"x": BOTH, "y": {"blend": {"x": 1}}}}, "data.y.blend: x is not a text"),
        ({"valid_data": "othr"}, "runs.demo.valid_data: 'othr' is not defined under data: did you mean other?"),
        ({"valid_data": "random"}, "runs.demo.valid_data: random samples are not for evaluation"),
        ({"export": "best"}, "runs.demo.export: there is no best checkpoint: set keep_best: true, too"),
        ({"export": "last"}, "runs.demo.export: Invalid"),
        ({"loss_on": "completions"}, "runs.demo.loss_on: data.stdlib does not mark completions: set loss_on: compl"),
        (
            {"data": {"x": BOTH}, "valid_data": "x", "loss_on": "completions"},
            "runs.demo.loss_on: data.stdlib does not mark completions",
        ),
    ],
)
def test_data_that_contradicts_itself_is_refused_with_its_place(entries, message):
    with pytest.raises(BadInput, match=message):
        _changed(**entries)


def test_tokens_of_all_that_a_run_reads_must_fit_its_model():
    large = {"large": OTHER | {"vocab_size": 4096}, "x": {"blend": {"other": 1, "large": 1}}}
    for entries in ({"data": large, "valid_data": "large"}, {"data": large, "valid_data": "x"}):
        with pytest.raises(BadInput, match="its data has 4096 tokens, its model's vocabulary 2048"):
            _changed(**entries)
    assert json.loads(_changed(data={"x": BOTH}).blend_json("x"))["version"] == 1
    assert _load().run_options("demo") == _load().options("runs", "demo", ("search", "data"))
