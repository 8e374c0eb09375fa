"""A stranger on the machine of a run, with a client of its own, changes nothing of it."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import forged_rank
import pytest
from forked_command import Command, forked_command
from forked_ranks import forking
from launchers import Place, by_address
from msgspec.structs import replace
from random_plans import random_plan
from rest_long import rest_long
from strangers import LOOPBACK, listeners, molest
from tiny_models import tiny

from shardwright.io import write_document
from shardwright.types import Cluster, NodeGroup
from shardwright_train.data.prepare import prepare

IN_STEPS_S = 300.0


def _one_node(_nodes: int, _folder: Path) -> list[Place]:
    return [((), {})]


@pytest.mark.parametrize("place", rest_long(1, (by_address, _one_node)))
def test_a_stranger_changes_nothing_of_a_run(tmp_path: Path, place: Callable[[int, Path], list[Place]]) -> None:
    """Of two ranks on one node, or of two launchers, by what they say and by what the launchers are said to hear."""
    places = place(2, tmp_path)
    arguments = ("run", _plan(tmp_path, len(places)), "--data", _data(tmp_path), "--steps", 100_000)
    folders = ("--checkpoints", tmp_path / "kept", "--out", tmp_path / "out")
    started = [forked_command((*arguments, *folders, *options), variables) for options, variables in places]
    before = _until_in_steps(started)
    where = listeners([*(command.pid for command in started), *before])
    assert {address for address, _ in where} <= LOOPBACK
    launchers = {port for _, port in listeners(command.pid for command in started)}
    assert len(launchers) == len(started) - 1
    answers = molest(tmp_path, {port for _, port in where})
    assert all(len(answers[f"{port}, nothing"]) == 64 for port in launchers), answers
    assert {len(answer) for answer in answers.values()} <= {0, 64}, answers
    assert not (tmp_path / "ran").exists()
    assert _until_in_steps(started) == before
    for command in started:
        command.send_signal(signal.SIGTERM)
    shown = [command.communicate(timeout=300) for command in started]
    assert [command.returncode for command in started] == [75] * len(started), shown
    assert "Traceback" not in str(shown) and "restarting" not in str(shown), shown


def test_a_forged_rank_does_not_join_a_run_that_waits_for_it(tmp_path: Path) -> None:
    """By PyTorch's own protocol, at the rendezvous, before the true rank is there: it would run code in rank 0."""
    places = by_address(2, tmp_path)
    command = ("run", _plan(tmp_path, 2), "--data", _data(tmp_path), "--steps", 2, "--checkpoints", tmp_path / "kept")
    first = forked_command((*command, "--out", tmp_path / "out", *places[0][0]), places[0][1])
    port = _until_listening(first)
    joined, unpickled = tmp_path / "joined", tmp_path / "unpickled"
    forged = forking().Process(target=forged_rank.forge, args=(port, joined, unpickled), daemon=True)
    forged.start()
    forged.join(IN_STEPS_S)
    assert forged.exitcode == 1 and not joined.exists() and not unpickled.exists()
    second = forked_command((*command, "--out", tmp_path / "out", *places[1][0]), places[1][1])
    shown = [launcher.communicate(timeout=IN_STEPS_S) for launcher in (first, second)]
    assert [launcher.returncode for launcher in (first, second)] == [0, 0], shown
    assert not unpickled.exists() and "Traceback" not in str(shown)


def _until_listening(launcher: Command) -> int:
    """Wait until node 0's launcher listens, and return its port."""
    until_s = time.monotonic() + IN_STEPS_S
    while not (where := listeners([launcher.pid])):
        assert time.monotonic() < until_s, launcher.communicate(timeout=1)
        time.sleep(0.01)
    ((_, port),) = where
    return port


def _until_in_steps(started: list[Command]) -> list[int]:
    """Wait until both ranks are in a step that they were not in before, and return their processes."""
    seen, until_s = dict[int, set[str]](), time.monotonic() + IN_STEPS_S
    while len(seen) < 2 or any(len(steps) < 3 for steps in seen.values()):
        assert time.monotonic() < until_s, [command.communicate(timeout=1) for command in started]
        for command in started:
            for pid, files in command.ranks().values():
                if (step := files.step()) is not None:
                    seen.setdefault(pid, set()).add(step.where)
        time.sleep(0.01)
    return sorted(seen)


def _data(folder: Path) -> Path:
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(folder / "text"), "*.txt", 260, 1.0, folder / "data")
    return folder / "data"


def _plan(folder: Path, nodes: int) -> Path:
    plan = random_plan(tiny("llama", vocab_size=260), 1, 2, "float32", stages=2)
    (node_type,) = plan.cluster.node_types.values()
    node_type = replace(node_type, device="cpu", devices_per_node=2 // nodes)
    cluster = Cluster(name="two", nodes=(NodeGroup(node_type="one", count=nodes),), node_types={"one": node_type})
    write_document(folder / "plan.json", replace(plan, cluster=cluster))
    return folder / "plan.json"
