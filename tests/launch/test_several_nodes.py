"""Launchers of two nodes, on loopback and without a shared folder, end with one report of what failed first."""

import re
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from launchers import SEVERAL, STARTED_S, free_port, let_act, met, start_node, started_by, until_in_a_step

from shardwright.io import RunFailed
from shardwright.launch.exchange import exchange
from shardwright.launch.failure_report import NodeReport
from shardwright.launch.meeting import meeting_of
from shardwright.launch.nodes import Nodes


class Ended(NamedTuple):
    status: int
    error: str

    @property
    def last_line(self) -> str:
        return self.error.rstrip("\n").rpartition("\n")[2]


def _both(folder: Path, first: Sequence[str], second: Sequence[str]) -> tuple[Ended, Ended]:
    port = free_port()
    nodes = [start_node(folder, node, actions, 2, port) for node, actions in ((1, second), (0, first))]
    let_act(folder, len(first) + len(second))
    ended = [Ended(node.wait(STARTED_S), node.communicate()[1]) for node in nodes]
    assert started_by(folder) == {}
    return ended[1], ended[0]


def test_ranks_of_two_nodes_that_end_well_are_no_failure(tmp_path: Path) -> None:
    assert _both(tmp_path, ["end"], ["later end"]) == (Ended(0, ""), Ended(0, ""))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (["lose", "lose"], ["later signal SIGKILL", "lose"], "rank 2: was killed by SIGKILL in step 1"),
        (["later fail x"], ["lose"], "rank 0: failed in step 1: ValueError: x"),
        (["wait"], ["fail y"], "rank 1: failed in step 1: ValueError: y"),
    ],
)
def test_both_nodes_name_the_rank_that_failed_first(
    tmp_path: Path, first: list[str], second: list[str], words: str
) -> None:
    for ended in _both(tmp_path, first, second):
        assert (ended.status, ended.last_line.startswith(f"error: {words}")) == (4, True), ended.error


def test_node_0_passes_on_what_one_node_tells_to_the_third(tmp_path: Path) -> None:
    port = free_port()
    actions = (["later lose"], ["fail z"], ["later lose"])
    nodes = [start_node(tmp_path, node, actions[node], 3, port) for node in range(3)]
    let_act(tmp_path, 3)
    for node in nodes:
        _, error = node.communicate(timeout=STARTED_S)
        assert (node.returncode, error.splitlines()[-1]) == (4, "error: rank 1: failed in step 1: ValueError: z")


def test_what_all_ranks_agree_on_is_said_by_the_first_node_alone(tmp_path: Path) -> None:
    line = "error: plan.json: is odd: write another\n"
    assert _both(tmp_path, ["refuse"], ["refuse"]) == (Ended(2, line), Ended(2, ""))


def test_a_hang_shows_the_stacks_of_the_ranks_of_both_nodes(tmp_path: Path) -> None:
    words = "error: ranks 0 to 1, in step 1: no step ended within 2 s: the stacks of all ranks are above"
    for number, ended in enumerate(_both(tmp_path, ["sleep"], ["wait"])):
        assert (ended.status, ended.last_line) == (4, words), ended.error
        assert f"rank {number}, in step 1:\n" in ended.error and "launched_rank.py" in ended.error


@pytest.mark.parametrize(("gone", "other_rank"), [(0, "later lose"), (1, "later lose"), (1, "wait")])
def test_a_node_whose_launcher_is_gone_is_named_and_no_rank_is_left(tmp_path: Path, gone: int, other_rank: str) -> None:
    """Also where the other ranks wait for those of it."""
    port = free_port()
    actions = [[other_rank], [other_rank]]
    actions[gone] = ["wait"]
    nodes = [start_node(tmp_path, node, actions[node], 2, port) for node in (0, 1)]
    until_in_a_step(tmp_path, 2)
    let_act(tmp_path)
    nodes[gone].kill()
    (tmp_path / "acted").touch()
    other = nodes[1 - gone]
    _, error = other.communicate(timeout=STARTED_S)
    assert other.returncode == 4
    assert error.endswith(f"error: node {gone}: its launcher is gone, and its ranks with it\n")
    nodes[gone].communicate()
    assert started_by(tmp_path) == {}


def test_a_signal_to_one_node_stops_both(tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(tmp_path, node, ["wait" if node else "later lose"], 2, port) for node in (0, 1)]
    until_in_a_step(tmp_path, 2)
    let_act(tmp_path)
    nodes[1].send_signal(signal.SIGHUP)
    (tmp_path / "acted").touch()
    for node in nodes:
        _, error = node.communicate(timeout=STARTED_S)
        assert (node.returncode, error.rpartition("error: ")[2]) == (
            75,
            "stopped in step 1: run the same command again\n",
        )


def test_a_launcher_whose_node_0_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.launch.exchange.START_UP_S", 1.0)
    nodes, file = Nodes(2, 1, f"127.0.0.1:{free_port()}"), tmp_path / "run" / "SECRET"
    for environment, words in (({}, "SECRET does not exist"), (SEVERAL, "Connection refused")):
        with meeting_of(nodes, file, environment) as node:
            with pytest.raises(
                RunFailed, match=f"node 0 was not reached within 1 s .*{words}.*SHARDWRIGHT_SECRET to the same"
            ):
                with exchange(node, "4"):
                    pass


def test_a_launcher_that_waits_for_node_0_can_be_stopped(tmp_path: Path) -> None:
    node = start_node(tmp_path, 1, ["wait"], 2, free_port())
    deadline = time.monotonic() + STARTED_S
    while not _caught(node.pid, signal.SIGTERM):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    node.send_signal(signal.SIGTERM)
    _, error = node.communicate(timeout=STARTED_S)
    assert (node.returncode, error) == (75, "error: stopped before node 0 was reached: run the same command again\n")


def _caught(process: int, number: int) -> bool:
    """Whether a process has a handler of a signal."""
    (mask,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_launch_is_not_taken_for_the_one_before_it_at_the_same_rendezvous() -> None:
    """A node may be in its second launch while node 0 has not closed its first."""
    with met(2) as (node_0, node_1), ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        with exchange(node_0, "2") as first:
            second = pool.submit(lambda: stack.enter_context(exchange(node_1, "4")))
            time.sleep(1.0)
            assert (first.heard(), second.done()) == ((), False)
        with exchange(node_0, "4") as first:
            first.tell(NodeReport(node=0, ended=True))
            (of_first, _) = second.result(STARTED_S).gather(NodeReport(node=1, ended=True), 10.0)
            assert of_first.ended and not of_first.gone


@pytest.mark.parametrize("new", [0, 1])
def test_a_launcher_that_came_back_takes_the_number_of_starts_from_the_one_that_stayed(new: int) -> None:
    starts = {new: 0, 1 - new: 2}
    with met(2) as nodes, ExitStack() as stack:
        both = [stack.enter_context(exchange(nodes[node], "4", starts[node])) for node in (0, 1)]
        for node in (0, 1):
            both[node].tell(NodeReport(node=node, ended=node != new))
        until = time.monotonic() + STARTED_S
        while [each.start for each in both] != [2, 2] or not any(told.ended for told in both[new].heard()):
            assert time.monotonic() < until
            time.sleep(0.02)
        (heard,) = both[new].heard()
        assert (heard.node, heard.ended, heard.gone) == (1 - new, True, False)


def test_what_is_no_launcher_at_the_port_is_hung_up_on(tmp_path: Path) -> None:
    port = free_port()
    node = start_node(tmp_path, 0, ["end"], 2, port)
    until_in_a_step(tmp_path)
    for line in (b"GET / HTTP/1.0\r\n\r\n", b'{"node":7,"ranks":[],"hang":"x"}\n', b'{"node":-1}\n', b"\xff" * 10_000):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(line)
    (tmp_path / "met").touch()
    _, error = node.communicate(timeout=STARTED_S)
    assert (node.returncode, error) == (0, "")


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        node = start_node(tmp_path, 0, ["end"], 2, port)
        _, error = node.communicate(timeout=STARTED_S)
    words = f"--rendezvous: 127.0.0.1, port {port} cannot be listened at (Address already in use): choose "
    assert (node.returncode, error) == (2, f"error: {words}an address of node 0 and a free port\n")
