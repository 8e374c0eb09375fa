"""What a configuration, a grid or the name of a folder says never runs as a command, whatever it is."""

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from configuration import load_workflow
from configuration_types import DECIDED, Configuration, components
from shardwright.io import BadInput
from slurm_jobs import job_resources

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "workflow" / "rules").glob("*.smk"))
HOSTILE = "3.1'\";touch CANARY;$(touch CANARY)`touch CANARY` #\\"
WITHOUT_SPACES = "x>CANARY&(touch|tee<CANARY)*?[a]"
"""The worst that may be told to Slurm."""
CONFIG = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
CONFIG["clusters"]["laptop"]["nodes"] = [{"node_type": "cpu", "count": 2}]
CONFIG["searches"]["tight"]["correction"] = "roomy"
CONFIG["runs"]["demo"] |= {"export": True, "max_restarts": 1, "on_node_loss": "replan"}
CONFIG["data"]["photos"] = {"text": "photos", "source": "images", "image_size": 8}
CONFIG["runs"]["demo-tight"]["data"] = "photos"
CONFIG["data"]["captions"] = {"text": "captions", "source": "captions", "image_size": 8}
CONFIG["runs"]["demo-captions"] = CONFIG["runs"]["demo-tight"] | {"data": "captions"}
CONFIG["data"]["pairs"] = {"text": "pairs.jsonl", "tokenizer": "model", "loss_on": "completions"}
CONFIG["runs"]["demo-pairs"] = CONFIG["runs"]["demo-tight"] | {"data": "pairs"}


def _shells(text):
    """The texts of all `shell:` of a file of rules, by the rule's first word."""
    return re.findall(r"^ +shell:\n((?: +['\"].*\n)+)", text, re.M)


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_every_value_in_a_shell_command_is_quoted(path):
    shells = _shells(path.read_text())
    assert len(shells) == path.read_text().count("shell:\n")
    for shell in shells:
        assert [found for found in re.findall(r"{[^{}]*}", shell) if not found.endswith(":q}")] == []


def _text_places(schema, defs, place=()):
    """The places of a schema where any text may stand: keys, `*` for each entry of a mapping, `[]` of a list."""
    if "$ref" in schema:
        yield from _text_places(defs[schema["$ref"].rpartition("/")[2]], defs, place)
    for inner in schema.get("anyOf", ()):
        yield from _text_places(inner, defs, place)
    if schema.get("type") == "string":
        yield place
    for key, inner in schema.get("properties", {}).items():
        if key not in DECIDED.get(place[0] if place else "", ()):
            yield from _text_places(inner, defs, (*place, key))
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _text_places(schema["additionalProperties"], defs, (*place, "*"))
    if "items" in schema and isinstance(schema["items"], dict):
        yield from _text_places(schema["items"], defs, (*place, "[]"))


def _with(config, place, text):
    """A configuration that holds a text at a place: of a mapping in its first entry, of a list as the only value."""
    changed = copy.deepcopy(config)
    inside = changed
    *way, last = place
    for i, step in enumerate(way):
        key = next(iter(inside), "entry") if step == "*" else step
        if step == "[]":
            inside[:] = inside[:1] or [{}]
            inside = inside[0]
            continue
        if not isinstance(inside.get(key), dict | list):
            inside[key] = [] if (*way, last)[i + 1] == "[]" else {}
        inside = inside[key]
    if last == "[]":
        inside[:] = [text]
    else:
        inside[next(iter(inside), "entry") if last == "*" else last] = text
    return changed


PLACES = [
    *_text_places({"$ref": "Configuration"}, components(Configuration)),
    ("models", "*", "hidden_act"),
    ("models", "*", "layer_types", "[]"),
]


def _refusal(config):
    try:
        load_workflow(config, "config.yaml")
    except BadInput as error:
        return str(error)
    return None


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_a_line_break_in_any_text_of_a_configuration_is_refused_in_one_line(place):
    for text in ("name\n", "0\n", "a\nb", "\x1b[31m", "a\x00b", "\u2028"):
        refusal = _refusal(_with(CONFIG, place, text))
        assert refusal is not None and refusal.startswith("config.yaml: ") and "\n" not in refusal


@pytest.mark.parametrize(
    "section", [name for name, of in CONFIG.items() if isinstance(of, dict) and name != "validate"]
)
@pytest.mark.parametrize("name", [HOSTILE, "name\n", "-rf", "../name", "a b", 8])
def test_a_name_is_a_word(section, name):
    entries = CONFIG[section]
    refusal = _refusal(CONFIG | {section: entries | {name: next(iter(entries.values()))}})
    assert refusal is not None and "\n" not in refusal


def _hostile():
    """The configuration with a hostile text at every place that takes one, and these places."""
    config, taken = CONFIG, []
    for place in PLACES:
        for text in (HOSTILE, WITHOUT_SPACES):
            changed = _with(config, place, text)
            if _refusal(changed) is None:
                config, _ = changed, taken.append(".".join(place))
                break
    return config, taken


def _commands(output):
    return [said for said in re.findall(r"^Shell command: (.*)$", output, re.M) if said != "None"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, workspace_in):
    """A clone in a folder with a hostile name, of a hostile configuration and a hostile grid, and what it would run."""
    folder = tmp_path_factory.mktemp("hostile")
    clone = folder / HOSTILE.replace("{", "")
    for part in ("workflow", "config", "profiles"):
        shutil.copytree(ROOT / part, clone / part)
    shutil.copy(ROOT / "Snakefile", clone)
    grid = yaml.safe_load((clone / "config/grids/galvatron.yaml").read_text())
    for model in grid["models"].values():
        for published in model.get("published", ()):
            published["file"] = HOSTILE
    (clone / "config/grids/galvatron.yaml").write_text(yaml.safe_dump(grid))
    grid = yaml.safe_load((clone / "config/grids/fasop.yaml").read_text())
    grid["source_of_times"] = HOSTILE
    for each in (each for model in grid["models"].values() for each in model["published_times"]):
        each["plan"] = HOSTILE
    (clone / "config/grids/fasop.yaml").write_text(yaml.safe_dump(grid))
    workspace = workspace_in(folder / "workspace")
    workspace.folder.mkdir()
    config, taken = _hostile()
    (workspace.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for picture in config["pictures"]:
        (workspace.folder / picture).write_text("<svg/>")
    called = workspace.snakemake("all", "grid", "grids", "reference", "-n", "-p", root=clone)
    assert called.status == 0, called.output
    return workspace, called, taken


def test_every_rule_is_asked_for_of_a_hostile_configuration(hostile):
    _, called, _ = hostile
    rules = {name for path in RULES for name in re.findall(r"^rule (\w+):", path.read_text(), re.M)}
    rules |= set(re.findall(r"^use rule \w+ as (\w+) with:", "".join(path.read_text() for path in RULES), re.M))
    assert rules - called.jobs.keys() == {
        "plans",
        "profiles",
        "runs",
        "train",
        "write_blend",
        "write_grid_part",
        "grid_part",
    }


def test_no_text_of_a_configuration_runs_as_a_command(hostile):
    workspace, called, taken = hostile
    assert {"data.*.text", "runs.*.weights", "node_types.*.slurm.socket_interface", "pictures.[]"} <= set(taken)
    assert not {"clusters.*.inter_node_gbit_s", "clusters.*.overlap_slowdowns", "container"} & set(taken)
    programs = workspace.folder / "programs"
    programs.mkdir()
    commands = _commands(called.output)
    words = {word for command in commands for word in re.findall(r"[\w.-]+", command)}
    for name in {word for word in words if re.fullmatch(r"shardwright|\w+\.sh|python|mkdir|rm|tar", word)}:
        (programs / name).write_text('#!/bin/bash\nprintf "%s\\0" "$@" >> "$ARGUMENTS"\n')
        (programs / name).chmod(0o755)
    shutil.copy(shutil.which("touch"), programs)
    arguments = workspace.folder / "arguments"
    for command in commands:
        for path in re.findall(r"(?:>>?|2>) (\S+)", command):
            if path.startswith("results/"):
                (workspace.folder / path).parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["/bin/bash", "-c", command], cwd=workspace.folder, timeout=300, stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, env={"PATH": str(programs), "ARGUMENTS": str(arguments)},
        )  # fmt: skip
        assert "syntax error" not in done.stderr
    assert list(workspace.folder.parent.rglob("CANARY")) == []
    given = arguments.read_bytes().decode().split("\0")
    assert given.count(HOSTILE) >= 5 and f"--picture={HOSTILE}" in given
    assert f"2x1@{WITHOUT_SPACES}" in given


def test_nothing_that_slurm_is_asked_for_runs_as_a_command(tmp_path):
    slurm = dict.fromkeys(("partition", "account", "constraint", "socket_interface"), WITHOUT_SPACES)
    config = copy.deepcopy(CONFIG)
    for name in ("fast", "slow"):
        config["node_types"][name]["slurm"] = slurm
    config["clusters"]["laptop-mixed"]["all_nodes_here"] = False
    asked = job_resources(load_workflow(config, "config.yaml").components("laptop-mixed"), 60)
    printed = subprocess.run(
        ["/bin/bash", "-c", f"printf '%s\\n' {asked['slurm_extra']}"], cwd=tmp_path, capture_output=True, text=True
    ).stdout.splitlines()
    assert list(tmp_path.iterdir()) == []
    assert {f"-p{WITHOUT_SPACES}", f"-A{WITHOUT_SPACES}", f"-C{WITHOUT_SPACES}"} <= set(printed)


def test_rules_find_their_program_though_no_environment_is_active(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "results/hardware/h100x32.h5", "--cores", "1",
         "--snakefile", ROOT / "Snakefile", "--configfile", ROOT / "config/first-plan.yaml"],
        cwd=tmp_path, env=os.environ | {"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
