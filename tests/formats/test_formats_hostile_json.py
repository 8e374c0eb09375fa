"""A corpus of JSON files that must not be believed: each is answered by exactly one clear line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.io import Document, one_line_errors, read_any_document, read_document
from shardwright.types import Cluster, Measurement, Model, Plan, Plans

EXAMPLES = Path(__file__).parents[2] / "core" / "examples"
Change = Callable[[dict[str, Any]], object]


def _plan_text() -> str:
    return (EXAMPLES / "plan.json").read_text()


def _refusal(path: Path, capsys: pytest.CaptureFixture[str], *kinds: type[Document]) -> str:
    """The one line that a command would print."""
    with pytest.raises(SystemExit) as stop, one_line_errors():
        read_any_document(path, *kinds)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {path}: ")
    assert line.count(": ") >= 3, "file, fault and remedy"
    return line


BYTES = {
    "empty": (b"", "not valid JSON"),
    "truncated": (_plan_text().encode()[:1000], "not valid JSON"),
    "not JSON": (b"plan: {}", "not valid JSON"),
    "two values": (b"{} {}", "not valid JSON"),
    "a list": (b"[1, 2]", "not an object"),
    "a number": (b"3", "not an object"),
    "null": (b"null", "not an object"),
    "not UTF-8": (b'{"format": "\xff\xfe\xfa"}', "utf-8"),
    "NUL bytes": (b"\x00" * 64, "not valid JSON"),
    "deep lists": (b'{"format": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "deep objects": (b'{"a":' * 900 + b"1" + b"}" * 900, "nested too deeply"),
    "repeated key": (_plan_text().replace('"name"', '"name": "first", "name"', 1).encode(), "'name' appears twice"),
    "NaN": (_plan_text().replace('"usd_per_hour": 0.5', '"usd_per_hour": NaN').encode(), "usd_per_hour"),
    "infinity": (_plan_text().replace('"usd_per_hour": 0.5', '"usd_per_hour": Infinity').encode(), "usd_per_hour"),
    "minus infinity": (
        _plan_text().replace('"usd_per_hour": 0.5', '"usd_per_hour": -Infinity').encode(),
        "usd_per_hour",
    ),
    "1e999": (_plan_text().replace('"usd_per_hour": 0.5', '"usd_per_hour": 1e999').encode(), "usd_per_hour"),
    "a float of 400 digits": (_plan_text().replace("0.5", "1" + "0" * 400).encode(), "usd_per_hour"),
    "a float of 250 digits and an exponent": (_plan_text().replace("0.5", "1" * 250 + "e99").encode(), "usd_per_hour"),
    "an exponent after zeros": (_plan_text().replace("0.5", "1E+0000999").encode(), "usd_per_hour"),
    "an integer of 5000 digits": (_plan_text().replace("0.5", "1" * 5000).encode(), "not valid JSON"),
    "a control character": (
        _plan_text().replace('"example"', r'"exam\u001b[31mple"', 1).encode(),
        "control character in",
    ),
    "a control character in a key": (
        _plan_text().replace('"usd_per_hour"', r'"usd\u0007"').encode(),
        "a control character in a key at `$.cluster",
    ),
    "another writing direction": (
        _plan_text().replace('"example"', '"\u202eexample"', 1).encode(),
        "control character",
    ),
    "half of a surrogate pair": (_plan_text().replace('"example"', r'"\ud800"', 1).encode(), "control character"),
    "NaN where anything may stand": (_plan_text().replace('"hidden_size": 8', '"x": [1, NaN]').encode(), "config.x[1]"),
}


@pytest.mark.parametrize("case", BYTES)
def test_bytes_that_are_no_document_are_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, fault = BYTES[case]
    assert content != _plan_text().encode()
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert fault in _refusal(path, capsys, Plan)


def _block(plan: dict[str, Any], **changes: object) -> None:
    plan["layers"][1] |= changes


def _three_heads_for_ulysses(plan: dict[str, Any]) -> None:
    _block(plan, sequence_parallel="ulysses")
    plan["model"]["types"]["block"]["ulysses_must_divide"] = {"heads": 3}


def _sequence_of_one_part(plan: dict[str, Any]) -> None:
    _block(plan, sequence_parallel="megatron")
    plan["model"]["types"]["block"]["sequence_must_divide"] = {"windows": 1}


def _empty_middle_stage(plan: dict[str, Any]) -> None:
    ranges = ([0, 2], [2, 2], [2, 2], [2, 3])
    plan["stages"] = [{"ranks": [i], "layers": [layers]} for i, layers in enumerate(ranges)]


PLANS: dict[str, tuple[Change, str]] = {
    "unknown key": (lambda p: p.update(colour=1), "colour"),
    "unknown key inside": (lambda p: p["layers"][2].update(colour=1), "colour` - at `$.layers[2]"),
    "missing key": (lambda p: p.pop("schedule"), "schedule"),
    "missing key inside": (lambda p: p["layers"][0].pop("tp_size"), "tp_size` - at `$.layers[0]"),
    "no format": (lambda p: p.pop("format"), "format is None"),
    "another format": (lambda p: p.update(format="shardwright.cluster"), "'shardwright.cluster', not shardwright.plan"),
    "format of another type": (lambda p: p.update(format=["shardwright.plan"]), "not shardwright.plan"),
    "no version": (lambda p: p.pop("version"), "version None"),
    "future version": (lambda p: p.update(version=2), "version 2 of shardwright.plan"),
    "version as text": (lambda p: p.update(version="1"), "version '1'"),
    "version as a truth value": (lambda p: p.update(version=True), "version True"),
    "version as a fraction": (lambda p: p.update(version=1.0), "version 1.0"),
    "text for a number": (lambda p: p.update(global_batch_size="8"), "`$.global_batch_size`"),
    "fraction for an integer": (lambda p: p.update(global_batch_size=8.0), "`$.global_batch_size`"),
    "truth value for an integer": (lambda p: p.update(num_microbatches=True), "`$.num_microbatches`"),
    "null for an object": (lambda p: p.update(model=None), "`$.model`"),
    "zero batch": (lambda p: p.update(global_batch_size=0), "`$.global_batch_size`"),
    "negative rank": (lambda p: p["stages"][0].update(ranks=[-1, 1]), "`$.stages[0].ranks[0]`"),
    "empty name": (lambda p: p.update(name=""), "`$.name`"),
    "no stages": (lambda p: p.update(stages=[]), "`$.stages`"),
    "unknown schedule": (lambda p: p.update(schedule="2f2b"), "'2f2b'"),
    "unknown data parallelism": (lambda p: _block(p, data_parallel="zero1"), "'zero1'"),
    "unknown number format": (lambda p: p["precision"].update(compute="float8"), "'float8'"),
    "negative price": (lambda p: p["cluster"]["node_types"]["example-2"].update(usd_per_hour=-1), "usd_per_hour"),
    "a CPU slowed by nothing": (
        lambda p: p["cluster"]["node_types"]["example-2"].update(device="cpu/1"),
        "a slowed CPU is cpu/2 to cpu/99",
    ),
    "too few ranks": (lambda p: p["stages"].pop(), "2 ranks, the cluster has 4 devices"),
    "a rank used twice": (lambda p: p["stages"][1].update(ranks=[1, 2]), "exactly once"),
    "a rank that is not there": (lambda p: p["stages"][1].update(ranks=[3, 4]), "exactly once"),
    "cluster of another size": (lambda p: p["cluster"]["nodes"][0].update(count=3), "4 ranks, the cluster has 6"),
    "a batch beyond all": (lambda p: p.update(global_batch_size=10**18), "<= 4194304 - at `$.global_batch_size`"),
    "microbatches beyond all": (lambda p: p.update(num_microbatches=10**9), "`$.num_microbatches`"),
    "a vocabulary beyond all": (
        lambda p: p["model"]["types"]["embedding"]["parameters"][0].update(shape=[10**12, 8]),
        "`$.model.types[...].parameters[0].shape[0]`",
    ),
    "a tensor of too many dims": (
        lambda p: p["model"]["types"]["embedding"]["parameters"][0].update(shape=[1] * 9),
        "length <= 8 - at `$.model.types[...].parameters[0].shape`",
    ),
    "a sequence beyond all": (lambda p: p["model"].update(sequence_length=10**15), "`$.model.sequence_length`"),
    "a price beyond all": (
        lambda p: next(iter(p["cluster"]["node_types"].values())).update(usd_per_hour=1e300),
        "<= 1000000000000000.0 - at `$.cluster.node_types[...].usd_per_hour`",
    ),
    "an endless cluster": (lambda p: p["cluster"]["nodes"][0].update(count=10**15), "`$.cluster.nodes[0].count`"),
    "a hole between layer ranges": (
        lambda p: p["stages"][0].update(layers=[[0, 1]]),
        "[2, 3] does not continue at layer 1",
    ),
    "overlapping layer ranges": (
        lambda p: p["stages"][1].update(layers=[[1, 3]]),
        "[1, 3] does not continue at layer 2",
    ),
    "layer ranges that end too early": (
        lambda p: p["stages"][1].update(layers=[[2, 2]]),
        "hold 2 of 3 layers",
    ),
    "layer ranges that end too late": (lambda p: p["stages"][1].update(layers=[[2, 4]]), "hold 4 of 3 layers"),
    "layer ranges that run backwards": (
        lambda p: p["stages"][1].update(layers=[[2, 1]]),
        "[2, 1] does not continue",
    ),
    "a stage in the middle without layers": (_empty_middle_stage, "stages[1]: layer range [2, 2] is empty"),
    "several ranges without interleaving": (
        lambda p: p["stages"][0].update(layers=[[0, 1], [1, 2]]),
        "need an interleaved schedule",
    ),
    "a range of three numbers": (lambda p: p["stages"][0].update(layers=[[0, 1, 2]]), "`$.stages[0].layers[0]`"),
    "a strategy too few": (lambda p: p["layers"].pop(), "2 layer strategies for a model of 3"),
    "a layer of another type": (lambda p: _block(p, type="decoder"), "layers[1]: type 'decoder'"),
    "tp x dp of another stage size": (lambda p: _block(p, tp_size=2, dp_size=2), "layers[1]: tp_size 2 x dp_size 2"),
    "head too wide": (lambda p: p["head"].update(tp_size=4), "head: tp_size 4 x dp_size 1"),
    "batch that microbatches do not divide": (lambda p: p.update(num_microbatches=3), "num_microbatches 3"),
    "microbatch that dp does not divide": (lambda p: p.update(global_batch_size=6), "dp_size 2 does not divide the 3"),
    "sequence that tp does not divide": (lambda p: p["model"].update(sequence_length=15), "the sequence length 15"),
    "heads that Ulysses does not divide": (
        _three_heads_for_ulysses,
        "layers[1]: tp_size 2 does not divide heads 3",
    ),
    "sequence that no ranks share out": (_sequence_of_one_part, "layers[1]: tp_size 2 does not divide windows 1"),
    "width that tp does not divide": (
        lambda p: p["model"]["types"]["block"].update(tp_must_divide={"intermediate_size": 33}),
        "layers[1]: tp_size 2 does not divide intermediate_size 33",
    ),
    "a layer type that is not described": (lambda p: p["model"]["layers"].append("decoder"), "'decoder'"),
    "no head": (lambda p: p["model"]["types"].pop("head"), "'head'"),
    "embedding among the layers": (lambda p: p["model"]["layers"].append("embedding"), "among the layers"),
    "tied to nothing": (lambda p: p["model"].update(tied=[["embed.weight", "nothing"]]), "'nothing'"),
    "tp_dim outside its tensor": (
        lambda p: p["model"]["types"]["head"]["parameters"][0].update(tp_dim=2),
        "tp_dim 2 of head.weight",
    ),
    "unknown node type": (lambda p: p["cluster"]["nodes"][0].update(node_type="a100"), "node type 'a100'"),
    "a key that draws on the terminal": (lambda p: p.update({"\x1b[2J\n": 1}), "a control character in a key at `$`"),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_cannot_be_is_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, fault = PLANS[case]
    plan = json.loads(_plan_text())
    change(plan)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    line = _refusal(path, capsys, Plan)
    assert fault in line
    assert line.isprintable()


MEASUREMENTS: dict[str, tuple[Change, str]] = {
    "a rank left out": (lambda m: m["plans"][0]["ranks"].pop(), "ranks [0, 1, 2] were measured"),
    "ranks out of order": (lambda m: m["plans"][0]["ranks"].reverse(), "[3, 2, 1, 0]"),
    "different repeats": (lambda m: m["plans"][0]["ranks"][0]["step_s"].append(1.0), "repeats"),
    "negative time": (lambda m: m["plans"][0]["ranks"][0].update(step_s=[-1.0]), "step_s[0]"),
    "negative memory": (lambda m: m["plans"][0]["ranks"][0]["memory"].update(peak_bytes=-1), "peak_bytes"),
    "a rank of another stage": (
        lambda m: m["plans"][0]["ranks"][0].update(stage=1),
        "rank 0 belongs to stage 0, not 1",
    ),
    "a pass left out": (lambda m: m["plans"][0]["ranks"][0]["passes"].pop(), "instead of each of the plan's"),
    "a pass twice": (
        lambda m: m["plans"][0]["ranks"][0].update(passes=[m["plans"][0]["ranks"][0]["passes"][0]] * 4),
        "instead of each of the plan's",
    ),
    "a plan that cannot be": (lambda m: m["plans"][0]["plan"].update(num_microbatches=3), "num_microbatches 3"),
    "no plans": (lambda m: m.update(plans=[], failed=[]), "no plan was measured, and none failed"),
}


@pytest.mark.parametrize("case", MEASUREMENTS)
def test_a_measurement_that_cannot_be_is_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, fault = MEASUREMENTS[case]
    measurement = json.loads((EXAMPLES / "measurement.json").read_text())
    change(measurement)
    path = tmp_path / "measurement.json"
    path.write_text(json.dumps(measurement))
    assert fault in _refusal(path, capsys, Measurement)


def test_a_missing_file_and_a_folder_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No such file" in _refusal(tmp_path / "plan.json", capsys, Plan)
    assert "is a folder" in _refusal(tmp_path, capsys, Plan)
    (tmp_path / "file").touch()
    assert "Not a directory" in _refusal(tmp_path / "file" / "plan.json", capsys, Plan)


def test_a_giant_file_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "256 MiB" in _refusal(path, capsys, Plan)


def test_a_file_of_none_of_several_kinds_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    line = _refusal(EXAMPLES / "model.json", capsys, Plan, Plans)
    assert "'shardwright.model', not shardwright.plan or shardwright.plans" in line


def test_a_document_of_several_kinds_is_told_apart_by_its_format() -> None:
    kinds: tuple[type[Document], ...] = (Model, Cluster)
    assert isinstance(read_any_document(EXAMPLES / "cluster.json", *kinds), Cluster)
    assert isinstance(read_any_document(EXAMPLES / "model.json", *kinds), Model)
    assert read_document(EXAMPLES / "model.json", Model).name == "example"
