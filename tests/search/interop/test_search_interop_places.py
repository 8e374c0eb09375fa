"""Files that start a plan elsewhere: each is what its system's schema takes, and starts each node in its place."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from command_calls import call
from hostile_plans import CONFIG, HOSTILE, REQUEST, named
from hypothesis import given
from hypothesis import strategies as st
from launch_stand_ins import mixed_plan, said, stand_ins
from made_up import make_cluster
from msgspec.structs import replace
from place_schemas import SCHEMAS

from shardwright.io import write_document
from shardwright.models.description import model_of_config
from shardwright.types import Plan
from shardwright_search.cli import APP
from shardwright_search.systems.places import label_of, yaml_text
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan

DEVICE = "NVIDIA A100-SXM4-80GB"
OWN = "NODES NODE_RANK MASTER_ADDR MASTER_PORT"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """What all systems run, on two nodes."""
    cluster = make_cluster(8, 2)
    ((name, node),) = cluster.node_types.items()
    cluster = replace(cluster, node_types={name: replace(node, device=DEVICE)})
    return uniform_plan("plain", REQUEST, model_of_config(CONFIG, "plain", 64, "config.json"), cluster)


def launched(folder: Path, plan: Plan, system: str) -> Path:
    folder.mkdir(exist_ok=True)
    write_document(folder / "plan.json", plan)
    ended = call(
        APP, "export", folder / "plan.json", "--to", system, "--out", folder / "out", "--launch", folder / "launch"
    )
    assert ended.exit_code == 0, ended.output
    return folder / "launch"


def checked(folder: Path) -> dict[str, Any]:
    """The files of the folder that a schema is known of, read, and found to be such."""
    read = {path.name: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    for name, content in read.items():
        jsonschema.validate(content, SCHEMAS[name])
    return read


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_started_in_every_place(tmp_path, plan, system):
    folder = launched(tmp_path / system, plan, system)
    read = checked(folder)
    assert set(read) == set(SCHEMAS)
    assert read["skypilot.yaml"]["resources"]["accelerators"] == "A100-80GB:4"
    assert read["skypilot.yaml"]["num_nodes"] == read["trainjob.yaml"]["spec"]["trainer"]["numNodes"] == 2
    for script in folder.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
    programs = stand_ins(tmp_path) | {"TRAIN": "/mine/train it.py", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.7"}
    subprocess.run(["bash", folder / "node.sh", "--more", "a b"], env=programs, check=True)
    ((_, _, *words),) = said(programs).values()
    assert words[:10] == [
        "--nnodes", "2", "--node_rank", "1", "--nproc_per_node", "4", "--master_addr", "10.0.0.7",
        "--master_port", "29500",
    ]  # fmt: skip
    assert words[-2:] == ["--more", "a b"] and len(words) > 12
    files = [word for word in words[10:] if word.startswith(str(folder))]
    assert all(Path(file).is_file() for file in files)
    assert files or "TRAIN" in (folder / "node.sh").read_text() or system == "megatron"


def pods(content: dict[str, Any]) -> list[dict[str, Any]]:
    if content["kind"] == "TrainJob":
        trainer = content["spec"]["trainer"]
        return [trainer | {"index": i} for i in range(trainer["numNodes"])]
    jobs = [job["template"]["spec"] for job in content["spec"]["replicatedJobs"]]
    return [{**job["template"]["spec"]["containers"][0], "index": i} for job in jobs for i in range(job["completions"])]


def run_pods(content: dict[str, Any], programs: dict[str, str], **more: str) -> dict[int, list[str]]:
    """Run the container of each pod as Kubernetes does, which reads $$ as $, and say what torchrun was told."""
    path = os.pathsep.join((programs["PATH"], os.defpath))
    for pod in pods(content):
        own = {each["name"]: each["value"] for each in pod["env"]} | more | {"JOB_COMPLETION_INDEX": str(pod["index"])}
        words = [word.replace("$$", "$") for word in (*pod["command"], *pod["args"])]
        subprocess.run(words, env=programs | own | {"PATH": path}, check=True)
    return said(programs)


def test_pods_of_two_types_are_the_nodes_of_the_plan(tmp_path):
    read = checked(launched(tmp_path, mixed_plan(), "megatron"))
    assert set(read) == {"jobset.yaml"}
    first, second = read["jobset.yaml"]["spec"]["replicatedJobs"]
    assert [each["template"]["spec"]["template"]["spec"]["nodeSelector"] for each in (first, second)] == [
        {"nvidia.com/gpu.product": "A10"}, {"nvidia.com/gpu.product": "A100"},
    ]  # fmt: skip
    told = run_pods(read["jobset.yaml"], stand_ins(tmp_path), PRETRAIN="/opt/pretrain gpt.py", ARGUMENTS="--lr 1e-4")
    assert list(told) == [0, 1, 2, 3]
    for node, (_, _, *words) in told.items():
        assert words[:8] == [
            "--nnodes", "4", "--node_rank", str(node), "--nproc_per_node", "4" if node < 2 else "8", "--master_addr",
            "two-types-nodes-0-0-0.two-types",
        ]  # fmt: skip
        assert words[10] == "/opt/pretrain gpt.py" and words[-2:] == ["--lr", "1e-4"]


@pytest.mark.parametrize("place", ["trainjob.yaml", "skypilot.yaml"])
def test_kubeflow_and_skypilot_tell_nodes_their_place(tmp_path, plan, place):
    folder, programs = launched(tmp_path, plan, "torchtitan"), stand_ins(tmp_path)
    content = checked(folder)[place]
    if place == "trainjob.yaml":
        told = run_pods(content, programs, PET_MASTER_ADDR="job-node-0-0.job", PET_NODE_RANK="0")
        master = "job-node-0-0.job"
    else:
        for rank in "01":
            own = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": rank}
            subprocess.run(["bash", "-c", content["run"]], env=programs | own, cwd=folder, check=True)
        told, master = said(programs), "10.0.0.1"
    assert [" ".join(words[2:10]) for words in told.values()] == [
        f"--nnodes 2 --node_rank {node} --nproc_per_node 4 --master_addr {master}" for node in (0, 1)
    ]
    assert all("torchtitan.train" in words for words in told.values())


def lines_run(word: str) -> list[str]:
    return [line for line in word.splitlines() if not line.startswith("#")]


def told(content: Any, label: str) -> Any:
    """The content of a file without comments of its scripts, and with a plain label in the place of the plan's."""
    if isinstance(content, dict):
        return {key: told(each, label) for key, each in content.items() if key != "nodeSelector"}
    if isinstance(content, list):
        return [told(each, label) for each in content]
    if not isinstance(content, str):
        return content
    name = re.compile(rf"^{label}(?=$|-nodes-0-0-0\.{label}$)|(?<=-nodes-0-0-0\.){label}$")
    return [line.split(" ")[0] if "<host-" in line else name.sub("plain", line) for line in lines_run(content)]


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_name_is_a_text_in_the_files_of_other_places(tmp_path, plan, kind):
    plain = checked(launched(tmp_path / "plain", plan, "megatron"))
    hostile = checked(launched(tmp_path / "hostile", named(plan, HOSTILE[kind]), "megatron"))
    for name, content in hostile.items():
        assert told(content, label_of(HOSTILE[kind])) == told(plain[name], "plain")
    # A device of such a name is none that SkyPilot is known to have.
    assert set(hostile) == set(SCHEMAS) - {"skypilot.yaml"}


TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["a\n b\n", "|\n-\n", "on", "- a: b", "#"])
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS, VALUES), TEXTS)
def test_any_value_is_read_back_from_its_yaml(value, comment):
    assert yaml.safe_load(yaml_text(value, comment)) == (value or None)
