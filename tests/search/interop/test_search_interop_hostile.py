"""Texts of a plan stay texts in every file that is made of it: the format's own parser finds what was there before."""

import ast
import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from command_calls import call
from hostile_plans import CONFIG, HOSTILE, REQUEST, named
from made_up import make_cluster
from megatron_parser import parser
from msgspec.structs import replace

from shardwright.io import read_document, write_document
from shardwright.models.description import model_of_config
from shardwright.types import Plan
from shardwright_search.cli import APP
from shardwright_search.options import System
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan


@pytest.fixture(scope="module")
def plan():
    """A plan of two nodes under plain names."""
    cluster = make_cluster(8, 2)
    ((name, node),) = cluster.node_types.items()
    cluster = replace(cluster, node_types={name: replace(node, device="H100")})
    return uniform_plan("plain", REQUEST, model_of_config(CONFIG, "plain", 64, "config.json"), cluster)


def exported(folder: Path, plan: Plan, *options: object) -> Path:
    """A folder with the export of a plan that was read from its file, `out`, and what was asked for besides."""
    folder.mkdir()
    write_document(folder / "plan.json", plan)
    ended = call(APP, "export", folder / "plan.json", "--out", folder / "out", *options)
    assert ended.exit_code == 0, ended.output
    return folder


def parsed(system: System, text: str, name: str) -> object:
    """What a system's parser reads in its file, with a plain name in the place of the one that was given."""
    match Path(SYSTEMS[system].file_name).suffix:
        case ".py":
            return ast.dump(ast.parse(text)).replace(repr(name), repr("plain"))
        case ".toml":
            return tomllib.loads(text)
        case ".json":
            return json.loads(text)
        case _:
            return shlex.split(text)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_name_is_a_text_in_the_file_of_each_system(tmp_path, plan, system, kind):
    text = HOSTILE[kind]
    plain = exported(tmp_path / "plain", plan, "--to", system)
    hostile = exported(tmp_path / "hostile", named(plan, text), "--to", system)
    assert read_document(hostile / "plan.json", Plan).name == text
    before, after = ((folder / "out").read_text() for folder in (plain, hostile))
    assert parsed(system, after, text) == parsed(system, before, "plain")
    if system is System.MEGATRON_BRIDGE:
        assert ast.unparse(ast.parse(after)).count(repr(text)) == 2  # the plan's name and the model's


def said_by(script: Path) -> tuple[list[str], list[str]]:
    """The lines of a script that bash runs, and those that sbatch reads."""
    subprocess.run(["bash", "-n", script], check=True)
    lines = script.read_text().splitlines()
    return [line for line in lines if not line.startswith("#")], [line for line in lines if line.startswith("#SBATCH")]


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_name_is_a_text_in_the_scripts_that_start_a_plan(tmp_path, plan, kind):
    text = HOSTILE[kind]
    for folder, each in (("plain", plan), ("hostile", named(plan, text))):
        exported(tmp_path / folder, each, "--to", "megatron", "--launch", tmp_path / folder / "launch")
    plain, hostile = tmp_path / "plain" / "launch", tmp_path / "hostile" / "launch"
    for script in sorted(hostile.glob("*.sh")):
        (runs, asks), (plain_runs, plain_asks) = said_by(script), said_by(plain / script.name)
        assert runs == plain_runs
        job = [ask for ask in asks if ask.startswith("#SBATCH --job-name=")]
        assert [ask for ask in asks if ask not in job] == [ask for ask in plain_asks if "job-name" not in ask]
        assert all(re.fullmatch(r"#SBATCH --job-name=[A-Za-z0-9_.-]+", ask) for ask in job)
    listed = (hostile / "nodes.txt").read_text().splitlines()
    assert len(listed) == len((plain / "nodes.txt").read_text().splitlines())
    hosts = [line.split(" ")[0] for line in listed if not line.startswith("#")]
    assert hosts == ["<host-0>", "<host-1>"]


VALUES = ("1e-5 --load /elsewhere", "$(touch RAN)", "--load=/elsewhere", True, [1], {"a": 1}, "1e-5", None)
KEYS = ("rms_norm_eps", "rope_theta", "attention_dropout", "rope_scaling.factor", "vocab_size")


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_a_configuration_becomes_no_further_argument(tmp_path, plan, key, value):
    """A plan file may hold any configuration, which no family has checked: a value is a number, or the plan refused."""
    outer, _, inner = key.partition(".")
    config = plan.model.config | {outer: plan.model.config[outer] | {inner: value} if inner else value}
    write_document(tmp_path / "plan.json", replace(plan, model=replace(plan.model, config=config)))
    ended = call(APP, "export", tmp_path / "plan.json", "--to", "megatron", "--out", tmp_path / "args")
    if ended.exit_code == 0:
        words = (tmp_path / "args").read_text()
        assert "touch" not in words and "elsewhere" not in words
        parser().parse_args(shlex.split(words))
        return
    assert ended.exit_code == 2 and ended.stderr.startswith(f"error: {tmp_path}/plan.json: ")
    assert inner or key in ended.stderr
    assert not (tmp_path / "args").exists()
