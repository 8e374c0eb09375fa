"""What a stranger on the same machine can do to a run of two launchers: nothing."""

import itertools
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from launchers import STARTED_S, free_port, let_act, met, start_node, started_by, until_in_a_step
from strangers import LOOPBACK, listeners, molest

from shardwright.launch.exchange import exchange
from shardwright.launch.failure_report import NodeReport
from shardwright.launch.meeting import call, framed, place_of, receive, receive_frame
from shardwright.launch.store import RankCall, Request


def test_a_stranger_is_answered_by_a_random_number_alone_and_changes_nothing(tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(tmp_path, node, [action], 2, port) for node, action in enumerate(("end", "end"))]
    until_in_a_step(tmp_path, 2)
    where = listeners([*(node.pid for node in nodes), *started_by(tmp_path)])
    assert {address for address, _ in where} == {"0100007F"} <= LOOPBACK
    answers = molest(tmp_path, [listening for _, listening in where])
    assert {len(answer) for answer in answers.values()} <= {0, 64}, answers
    assert answers[f"{port}, nothing"] != answers[f"{port}, http"]
    assert len(started_by(tmp_path)) == 2 and not (tmp_path / "ran").exists()
    let_act(tmp_path)
    assert [(node.communicate(timeout=STARTED_S)[1], node.returncode) for node in nodes] == [("", 0)] * 2


def test_a_report_of_a_rank_is_heard_while_strangers_call(tmp_path: Path) -> None:
    port = free_port()
    nodes = [start_node(tmp_path, node, [action], 2, port) for node, action in enumerate(("wait", "fail y"))]
    until_in_a_step(tmp_path, 2)
    molest(tmp_path, [port])
    let_act(tmp_path)
    for node in nodes:
        _, error = node.communicate(timeout=STARTED_S)
        assert (node.returncode, error.splitlines()[-1]) == (4, "error: rank 1: failed in step 1: ValueError: y")


def test_a_peer_that_never_reads_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the secret: a launcher that is stopped (SIGSTOP) while node 0 has much to tell."""
    monkeypatch.setattr("shardwright.launch.exchange.ANSWER_S", 2.0)
    with ExitStack() as stack:
        nodes = stack.enter_context(met(3))
        first, second = (stack.enter_context(exchange(node, "4")) for node in nodes[:2])
        deaf = stack.enter_context(call(place_of(nodes[2])))
        deaf.sendall(framed(NodeReport(node=2, run="4")))
        began_s = time.monotonic()
        for number in itertools.count():  # until it is more than the kernel holds for who does not read
            first.tell(NodeReport(node=0, hang=f"{number} {'x' * 2_000_000}"))
            if any(report.gone for report in first.heard()):
                break
            assert time.monotonic() - began_s < 60
            time.sleep(0.05)
        while not (heard := second.heard()) or (heard[0].hang or "").split()[0] != str(number):
            assert time.monotonic() - began_s < 60
            time.sleep(0.02)
        stack.pop_all().close()
        assert time.monotonic() - began_s < 70


_NESTED = b'{"type":"report","node":1,"unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "message",
    [
        *(len(body).to_bytes(4, "big") + body for body in (_NESTED, b"", b"\xff", b"[]", b'{"type":"count"}', b"{}")),
        *(len(body).to_bytes(4, "big") + body for body in (b'{"type":"report","node":"x"}', b'{"type":"rank"}')),
        (1 << 31).to_bytes(4, "big") + b"x",
    ],
    ids=lambda message: repr(message[4:30]),
)
def test_what_makes_no_sense_is_hung_up_on_without_a_traceback(
    message: bytes, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of a peer that knows the secret, which may be of another version."""
    with met(2) as (first, second), exchange(first, "4") as one:
        with call(place_of(first)) as line:
            line.sendall(message)
            assert line.recv(1) == b""
        with exchange(second, "4"):
            one.tell(NodeReport(node=0, ended=True))
    assert (*capfd.readouterr(), caplog.text) == ("", "", "")


def test_an_exchange_that_ends_while_peers_wait_says_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of a rank that waits for a value of the store, and of a stranger that says nothing."""
    with met(2) as (first, _), ExitStack() as stack:
        with exchange(first, "4") as one:
            stranger = stack.enter_context(socket.create_connection(place_of(first).address))
            assert len(receive(stranger, 32)) == 32
            rank = stack.enter_context(call(place_of(first)))
            rank.sendall(framed(RankCall(launch=one.launch)) + framed(Request("count")))
            receive_frame(rank)
            rank.sendall(framed(Request("read", ("late",), wait_s=60.0)))
        assert (stranger.recv(1), rank.recv(1)) == (b"", b"")
    assert (*capfd.readouterr(), caplog.text) == ("", "", "")


def test_nothing_listens_where_ranks_are_of_one_node(tmp_path: Path) -> None:
    node = start_node(tmp_path, 0, ["wait", "wait"])
    until_in_a_step(tmp_path, 2)
    assert listeners([node.pid, *started_by(tmp_path)]) == set()
    node.send_signal(signal.SIGTERM)
    node.communicate(timeout=STARTED_S)
