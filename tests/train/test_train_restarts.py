"""Ranks and nodes that are lost are started anew; the nodes that are left may go on under a plan for them."""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from command_calls import call
from forked_command import Command, forked_command
from launchers import by_address
from random_plans import random_plan
from test_train_searched_plan import DEVICES, PLAIN
from tiny_models import tiny

from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput, RunFailed, read_document, write_document
from shardwright.launch.nodes import Nodes
from shardwright.types import Cluster, NodeGroup, NodeType, Plan, RunResult
from shardwright_profile.cli import APP as PROFILE
from shardwright_search.cli import APP as SEARCH
from shardwright_search.space.request import SearchRequest
from shardwright_train.checkpoints.folders import folder_of_run, latest_checkpoint
from shardwright_train.cli import APP as TRAIN
from shardwright_train.commands.ranks import replanned, without_nodes
from shardwright_train.data.prepare import prepare
from shardwright_train.options import RunOptions

LIMIT_S = 400.0


def cluster_of(nodes: int) -> Cluster:
    node_type = NodeType(device="cpu", devices_per_node=1, memory_bytes=1 << 32)
    return Cluster(name="here", nodes=(NodeGroup(node_type="cpu", count=nodes),), node_types={"cpu": node_type})


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, profiles of a cluster of three nodes of one rank, a plan for it, and one for two."""
    folder = tmp_path_factory.mktemp("restarts")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(folder / "text"), "*.txt", 260, 1.0, folder / "data")
    (folder / "devices.toml").write_text(DEVICES)
    write_document(folder / "model.json", tiny("llama", vocab_size=260))
    write_document(folder / "cluster.json", cluster_of(3))
    settings = ProfileSettings(tp_sizes=(1,), micro_batch_sizes=(1, 2, 4), layers=(1, 2), **PLAIN)
    write_document(folder / "settings.json", settings)
    request = SearchRequest(name="left", global_batch_size=12, num_microbatches=(3,), tp_sizes=(1,), **PLAIN)
    write_document(folder / "search.json", request)
    for app, line in (
        (
            PROFILE,
            "analytic --model model.json --cluster cluster.json --node-type cpu --devices devices.toml "
            "--settings settings.json --inter-node-gbit-s 10 --out p.h5 --hardware-out h.h5",
        ),
        (
            SEARCH,
            "plan --model model.json --cluster cluster.json --hardware h.h5 --profile p.h5 --search search.json "
            "--out three.json",
        ),
    ):
        ended = call(app, *(folder / word if Path(word).suffix else word for word in line.split()))
        assert ended.exit_code == 0, ended.stderr
    two = random_plan(tiny("llama", vocab_size=260), 1, 2, "float32", stages=2)
    write_document(folder / "two.json", msgspec.structs.replace(two, cluster=cluster_of(2)))
    return folder


class Run:
    """A command that trains, on some nodes of this machine."""

    def __init__(self, work: Path, name: str, plan: str, nodes: int, steps: int, *options: object) -> None:
        self.out, self.places = work / name, by_address(nodes, work)
        self.checkpoints = folder_of_run(self.out / "kept", read_document(work / plan, Plan))
        folders: tuple[object, ...] = ("--data", work / "data", "--checkpoints", self.out / "kept", "--out", self.out)
        folders += ("--steps", steps, "--checkpoint-every", 2, "--learning-rate", 0.01, "--no-trial")
        self.command = list(map(str, ("run", work / plan, *folders, *options)))
        self.nodes = [self.start(node) for node in range(nodes)]

    def start(self, node: int) -> Command:
        """Start the command on a node."""
        options, variables = self.places[node]
        return forked_command([*self.command, *options], variables)

    def ranks(self) -> dict[int, int]:
        """The processes of all living ranks."""
        return {rank: process for node in self.nodes for rank, (process, _) in node.ranks().items()}

    def until_saved(self, folder: Path) -> Path:
        """A checkpoint of a folder, once there is one."""
        until = time.monotonic() + LIMIT_S
        while (found := latest_checkpoint(folder)) is None:
            assert time.monotonic() < until and None in [node.poll() for node in self.nodes], self.ends()
            time.sleep(0.02)
        return found

    def ends(self) -> list[tuple[int, str]]:
        """How the command ends on each node."""
        return [(node.returncode, error) for node in self.nodes for error in [node.communicate(timeout=LIMIT_S)[1]]]

    def losses(self) -> list[float]:
        """Of every step."""
        return [json.loads(line)["loss"] for line in (self.out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(900)
def test_nodes_that_are_left_go_on_under_a_plan_for_them_and_a_lost_rank_is_started_anew(work: Path) -> None:
    """A launcher of three is killed, then a rank of the two that are left; no step is lost, repeated or different."""
    given = {"hardware": "h.h5", "profile": "p.h5", "search": "search.json"}
    replan = [word for name, file in given.items() for word in (f"--replan-{name}", work / file)]
    run = Run(work, "lost", "three.json", 3, 24, "--max-restarts", 2, "--on-node-loss", "replan", *replan)
    run.until_saved(run.checkpoints)
    run.nodes[2].kill()
    until = time.monotonic() + LIMIT_S
    while not (branches := list((run.out / "kept").glob("*-from-*"))):
        assert time.monotonic() < until and None in [node.poll() for node in run.nodes[:2]], run.ends()
        time.sleep(0.02)
    run.until_saved(branches[0])
    os.kill(run.ranks()[1], signal.SIGKILL)
    (first, told), (second, _), _ = run.ends()
    assert (first, second) == (0, 0), told
    assert "node 2: its launcher is gone, and its ranks with it: restarting from the newest checkpoint" in told
    costs = r"planned for the nodes that are left: predicted [\d.e-]+ s a step, [\d.e-]+ s with all of them \([+-]\d+%"
    assert re.search(costs, told), told
    assert "rank 1: was killed by SIGKILL in step" in told and "start 2 of 2 at most" in told
    done = read_document(run.out / "DONE.json", RunResult)
    assert (done.steps, Path(done.checkpoint).parent) == (24, branches[0])
    alone = Run(work, "unbroken", "three.json", 3, 24)
    assert {status for status, _ in alone.ends()} == {0}
    assert run.losses() == pytest.approx(alone.losses(), rel=1e-4)
    assert run.ranks() == {}


@pytest.mark.timeout(900)
def test_a_node_that_comes_back_meets_those_that_waited_for_it(work: Path) -> None:
    run = Run(work, "back", "two.json", 2, 12, "--max-restarts", 1)
    run.until_saved(run.checkpoints)
    before = run.nodes[0].ranks()
    run.nodes[1].kill()
    run.nodes[1].wait(LIMIT_S)
    until = time.monotonic() + LIMIT_S
    while run.nodes[0].ranks() in (before, {}):  # it has not started its rank anew yet, which then waits
        assert time.monotonic() < until and run.nodes[0].poll() is None, run.ends()
        time.sleep(0.02)
    run.nodes[1] = run.start(1)
    assert [status for status, _ in run.ends()] == [0, 0], run.ends()
    assert read_document(run.out / "DONE.json", RunResult).steps == 12


def test_the_cluster_of_the_nodes_that_are_left_keeps_their_order() -> None:
    node = NodeType(device="cpu", devices_per_node=2, memory_bytes=1)
    groups = [NodeGroup(node_type=name, count=count) for name, count in (("a", 2), ("b", 1), ("a", 1))]
    cluster = Cluster(name="c", nodes=tuple(groups), node_types={"a": node, "b": node})

    def left(*gone: int) -> list[tuple[str, int]]:
        return [(group.node_type, group.count) for group in without_nodes(cluster, gone).nodes]

    assert left(0) == [("a", 1), ("b", 1), ("a", 1)]
    assert left(2) == [("a", 3)]
    assert left(1, 3) == [("a", 1), ("b", 1)]


def _refused(work: Path, *options: object) -> str:
    folders = ("--data", work / "data", "--checkpoints", work / "no", "--out", work / "no", "--steps", 1)
    nodes = ("--nnodes", 3, "--node-rank", 0, "--rendezvous", "127.0.0.1:1")
    ended = call(TRAIN, "run", work / "three.json", *folders, *nodes, "--on-node-loss", "replan", *options)
    assert (ended.exit_code, ended.stderr.count("\n"), (work / "no").exists()) == (2, 1, False), ended.stderr
    return ended.stderr


def test_what_a_new_plan_would_be_searched_with_is_asked_for_before_anything_starts(work: Path) -> None:
    def given(hardware: str = "h.h5", search: str = "search.json", restarts: int = 1) -> Sequence[object]:
        files = {"--replan-hardware": hardware, "--replan-profile": "p.h5", "--replan-search": search}
        return ("--max-restarts", restarts, *(word for name, file in files.items() for word in (name, work / file)))

    assert "give --replan-hardware, --replan-profile and --replan-search" in _refused(work, "--max-restarts", 1)
    assert "pass --max-restarts, 1 or more" in _refused(work, *given(restarts=0))
    assert "none.h5: is not a file" in _refused(work, *given(hardware="none.h5"))
    other = SearchRequest(name="left", global_batch_size=24, **PLAIN)
    write_document(work / "other.json", other)
    assert "asks for a global batch of 24, but the plan has 12: search" in _refused(work, *given(search="other.json"))


def test_without_the_first_node_there_is_nowhere_to_meet(work: Path, tmp_path: Path) -> None:
    plan = read_document(work / "three.json", Plan)
    options = RunOptions(plan=tmp_path, data=tmp_path, steps=1, out=tmp_path, checkpoints=tmp_path)
    with pytest.raises(RunFailed, match=r"node 0, where .*is gone: start.*all nodes.*--resume-from") as caught:
        replanned(options, plan, Nodes(3, 1, "host:1"), (0,), tmp_path)
    assert not isinstance(caught.value, BadInput)


def test_a_plan_for_the_nodes_that_are_left_is_priced_with_the_same_load_of_experts(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, called = read_document(work / "three.json", Plan), list[list[str]]()
    options = RunOptions(
        plan=tmp_path, data=tmp_path, steps=1, out=tmp_path, checkpoints=tmp_path, replan_hardware=tmp_path / "h.h5",
        replan_profile=(tmp_path / "p.h5",), replan_search=tmp_path / "s.json", replan_imbalance="1.5",
    )  # fmt: skip
    monkeypatch.setattr("shardwright_train.commands.ranks._run", lambda words: called.append([*map(str, words)]))
    with pytest.raises(BadInput, match=r"lost.prediction.json"):
        replanned(options, plan, Nodes(3, 0, "host:1"), (2,), tmp_path)
    assert [words[0] for words in called] == ["evaluate", "plan"]
    assert all(words[words.index("--imbalance") + 1] == "1.5" for words in called)
