"""A file that is no configuration is one line, whether Snakemake would read it or this workflow."""

import shutil
from pathlib import Path

import pytest
import yaml

from configuration import load_workflow
from configuration_checks import read_yaml
from configuration_normal import load_options, load_sha256
from shardwright.io import BadInput, sha256_of_file

ROOT = Path(__file__).parents[2]


def _tenfold(first, each):
    """Aliases of aliases of aliases: ten times as many values with each line."""
    rows = [f"a0: &a0 {first}", *(f"a{i}: &a{i} {each.format(', '.join([f'*a{i - 1}'] * 10))}" for i in range(1, 12))]
    return "\n".join(rows).encode()


HOSTILE = [
    (b"", "contains no keys"),
    (b"- a", "contains no keys"),
    (b"\x7fELF\x02\x01\x01\x00\xff", "not valid YAML"),
    (_tenfold("[x, x]", "[{}]"), "its aliases expand to more than 2 MiB"),
    (_tenfold("{k: v}", "{{<<: [{}]}}"), "its aliases expand to more than 2 MiB"),
    (b"a: &a [*a]", "its aliases expand to more than 2 MiB"),
    (b"__use_yte__: true\nx: ?open('RAN', 'w')", "__use_yte__: a configuration is not a template"),
    (b"a: 2026-99-99", "not valid YAML (month must be in 1..12)"),
    (b"a: {1: 2}", "a.1: the key 1 is not a text: quote it: '1'"),
]


@pytest.mark.parametrize(("content", "message"), HOSTILE, ids=lambda value: str(value)[:20])
def test_what_is_no_configuration_is_one_line_before_anything_runs(bare, content, message):
    (bare.folder / "config.yaml").write_bytes(content)
    called = bare.snakemake("all", "-n")
    assert called.status == 2, called.output
    using, error = called.output.splitlines()
    assert "profiles/default" in using and error.startswith("error: config.yaml: ") and message in error
    assert {path.name for path in bare.folder.iterdir()} <= {"config.yaml", "output.txt"}


def test_a_configuration_that_is_not_there_is_one_line(bare):
    called = bare.snakemake("all", "-n")
    assert called.status == 2
    assert called.output.splitlines()[-1].startswith("error: config.yaml: there is no such configuration file: ")


def test_a_target_that_was_taken_for_a_configuration_is_named(bare):
    bare.configure()
    called = bare.snakemake(cores=("results/plans/roomy.json", "--cores", "1", "-n"))
    assert called.status == 2
    error = called.output.splitlines()[-1]
    assert error.startswith("error: results/plans/roomy.json: there is no such") and "write targets before" in error


@pytest.mark.parametrize("content", [None, b"", b"- a", b"\xff"])
def test_the_default_configuration_is_checked_as_others_are(bare, content):
    if content is not None:
        (bare.folder / "config").mkdir()
        (bare.folder / "config" / "config.yaml").write_bytes(content)
    called = bare.snakemake("all", "-n", configfile=None)
    assert called.status == 2
    assert called.output.splitlines()[-1].startswith("error: config/config.yaml: ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "key 'a' appears twice, again in line 3: remove one of the two"),
        ("a:\n- b: {c: 1, 'c': 2}\n", "key 'c' appears twice, again in line 2"),
        ("a: &a {b: 1}\nc: {<<: *a, <<: *a}\n", "key '<<' appears twice, again in line 2"),
        ("a: " + "[" * 100_000 + "]" * 100_000, "not valid YAML (maximum recursion depth exceeded"),
        ("{a: " * 100_000 + "1" + "}" * 100_000, "not valid YAML (maximum recursion depth exceeded"),
    ],
    ids=lambda value: value[:10],
)
def test_a_key_that_stands_twice_or_depth_without_end_is_refused(tmp_path, content, said):
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(BadInput) as refused:
        read_yaml(tmp_path / "a.yaml")
    assert f"a.yaml: {said}" in str(refused.value)


def test_a_key_beside_one_of_a_merged_mapping_is_its_own(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {b: 1}\nc: {<<: *a, b: 2}\n")
    assert read_yaml(tmp_path / "a.yaml") == {"a": {"b": 1}, "c": {"b": 2}}


def test_a_file_that_repeats_itself_a_little_is_read(tmp_path):
    (tmp_path / "some.yaml").write_text("a: &a {k: v}\nb: {<<: *a, l: w}\nc: [*a, *a]\n")
    assert read_yaml(tmp_path / "some.yaml")["b"] == {"k": "v", "l": "w"}
    (tmp_path / "large.yaml").write_text(f"a: &a {'x' * 2**19}\nb: [*a, *a, *a, *a]\n")
    with pytest.raises(BadInput, match="aliases"):
        read_yaml(tmp_path / "large.yaml")


def test_a_load_is_no_part_of_a_search_document_and_a_file_may_stand_beside_the_configuration(tmp_path, monkeypatch):
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    without = load_workflow(config, "config/config.yaml").search_json("tight")
    config["searches"]["tight"]["imbalance"] = "load.json"
    (tmp_path / "there").mkdir()
    shutil.copy(ROOT / "core/examples/expert_load.json", tmp_path / "there/load.json")
    monkeypatch.chdir(tmp_path)
    workflow = load_workflow(config, "there/config.yaml")
    given = workflow.settings, workflow.folder, "load.json"
    assert load_options(*given) == ["--imbalance", "there/load.json"]
    assert load_sha256(*given) == sha256_of_file(tmp_path / "there/load.json")
    assert workflow.search_json("tight") == without
    (tmp_path / "there/load.json").write_text("{}")
    with pytest.raises(BadInput, match=r"^there/load.json: [^\n]+$"):
        load_workflow(config, "there/config.yaml")
