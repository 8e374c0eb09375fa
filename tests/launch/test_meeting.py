"""The secret that the nodes of a run share, where it comes from and what it keeps out."""

import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from launchers import SEVERAL, free_port, met
from strangers import listeners

from shardwright.io import BadInput
from shardwright.launch.exchange import exchange
from shardwright.launch.heartbeat import RankFiles
from shardwright.launch.meeting import Place, Refused, call, meeting_of, place_of
from shardwright.launch.nodes import Address, Meeting, Nodes, interface_of, means_loopback, name_for_others
from shardwright.launch.store import note_meeting, rank_store


def _node(rank: int) -> Nodes:
    return Nodes(2, rank, f"127.0.0.1:{free_port()}")


def test_node_0_makes_a_random_secret_that_the_user_alone_can_read_and_removes_it(tmp_path: Path) -> None:
    file, seen = tmp_path / "run" / "SECRET", set[bytes]()
    for _ in range(2):
        with meeting_of(_node(0), file, {}) as first, meeting_of(_node(1), file, {}) as second:
            assert (file.stat().st_mode & 0o777, list(file.parent.iterdir())) == (0o600, [file])
            assert place_of(first).secret == place_of(second).secret and len(place_of(first).secret) == 64
            seen.add(place_of(first).secret)
            file.unlink()
            assert place_of(first).secret in seen, "it is known to node 0 for as long as it listens"
        assert list(file.parent.iterdir()) == []
    assert len(seen) == 2


def test_a_secret_that_a_killed_start_left_is_taken_again(tmp_path: Path) -> None:
    """The other nodes may have read it before node 0 is there again."""
    file = tmp_path / "SECRET"
    file.write_text("0123456789abcdef" * 4)
    file.chmod(0o600)
    with meeting_of(_node(0), file, {}) as first:
        assert place_of(first).secret == file.read_bytes()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda file: file.chmod(0o640), "is not a file that only this user can read: remove it, or set SHARDWRIGHT_"),
        (lambda file: file.write_text("short"), "contains no secret: remove it"),
    ],
)
def test_a_secret_that_others_may_know_is_refused(tmp_path: Path, rank: int, make: object, words: str) -> None:
    file = tmp_path / "SECRET"
    file.write_text("0123456789abcdef" * 4)
    file.chmod(0o600)
    make(file)  # type: ignore[operator]
    with pytest.raises(BadInput, match=f"SECRET: {words}"), meeting_of(_node(rank), file, {}) as node:
        place_of(node)


def test_a_link_is_not_followed_to_a_secret(tmp_path: Path) -> None:
    (tmp_path / "SECRET").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="SECRET: cannot be written and read"):
        with meeting_of(_node(0), tmp_path / "SECRET", {}):
            pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_secret_of_the_environment_is_taken_and_must_be_long(tmp_path: Path) -> None:
    with meeting_of(_node(0), tmp_path / "SECRET", SEVERAL) as node:
        assert place_of(node).secret == SEVERAL["SHARDWRIGHT_SECRET"].encode()
    with pytest.raises(BadInput, match="SHARDWRIGHT_SECRET: has 31 characters: use 32 or more random characters"):
        with meeting_of(_node(0), tmp_path / "SECRET", {"SHARDWRIGHT_SECRET": "x" * 31}):
            pass
    assert list(tmp_path.iterdir()) == []


def test_the_port_of_a_step_follows_from_its_secret_and_no_two_steps_of_one_secret_share_it() -> None:
    def port(secret: bytes, step: str) -> int:
        return place_of(Nodes(2, 1, "h", step=step, meeting=Meeting(Path("x"), secret))).address.port

    ports = {port(b"a" * 32, f"{job}.{step}") for job in range(20) for step in range(5)}
    assert len(ports) > 95 and min(ports) >= 20000 and max(ports) < 32000
    assert port(b"a" * 32, "7.0") != port(b"b" * 32, "7.0")


def test_a_caller_without_the_secret_is_hung_up_on_and_node_0_without_it_is_not_taken_for_it() -> None:
    with met(2) as (first, _), exchange(first, "4"):
        place = place_of(first)
        with pytest.raises(Refused, match="connection closed"):
            call(replace(place, secret=b"y" * 32))
        call(place).close()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        threading.Thread(target=_answer_at_random, args=(impostor,)).start()
        there = Place(Address("127.0.0.1", impostor.getsockname()[1]), b"y" * 32)
        with pytest.raises(Refused, match="does not know the secret"):
            call(there)


def _answer_at_random(server: socket.socket) -> None:
    line, _ = server.accept()
    with line:
        line.sendall(bytes(32))
        line.recv(64)
        line.sendall(bytes(32))


def test_node_0_listens_at_the_rendezvous_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with met(2) as (first, _):
        assert ("0100007F", place_of(first).address.port) in listeners(["self"])
        assert {address for address, port in listeners(["self"]) if port == place_of(first).address.port} == {
            "0100007F"
        }
    monkeypatch.setattr("shardwright.launch.meeting.means_loopback", lambda _: True)
    words = (
        "--rendezvous: vm is this machine's loopback interface here, which other nodes cannot reach: give an address"
    )
    with pytest.raises(BadInput, match=words), meeting_of(Nodes(2, 0, "vm:7"), Path("x"), SEVERAL):
        pass


def test_a_name_that_means_loopback_here_is_not_the_one_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes 127.0.1.1 beside a machine's name into /etc/hosts."""
    known = {"debian": ["127.0.1.1"], "cluster": ["127.0.1.1", "10.0.0.3"], "localhost": ["127.0.0.1", "::1"]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (at, 0)) for at in known[host]])
    assert [means_loopback(name) for name in known] == [True, False, False]
    monkeypatch.setattr(socket, "gethostname", lambda: "cluster")
    assert name_for_others() == "cluster"
    monkeypatch.setattr(socket, "gethostname", lambda: "debian")
    assert not name_for_others().startswith("127.")


def test_the_interface_is_that_of_the_address() -> None:
    assert [interface_of(address) for address in ("127.0.0.1", "127.0.1.1", "::1")] == ["lo"] * 3
    assert interface_of("203.0.113.77") is None


class _Base:
    """What stands for torch.distributed.Store."""

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


def _no_file(_file: str, _size: int) -> _Base:
    raise AssertionError("several nodes have no file")


def test_a_rank_of_another_launch_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RankFiles.of_rank(tmp_path, 0)
    monkeypatch.setenv("SHARDWRIGHT_RANK_FILES", str(files.beginning))
    with met(2) as (first, _), exchange(first, "4") as line:
        assert line.place is not None
        note_meeting(files.meeting_file, line.place, "the launch before")
        store = rank_store(_no_file, _Base, 2, timedelta(seconds=20))
        with pytest.raises(ConnectionError):
            store.set("a", b"1")  # type: ignore[attr-defined]


def test_a_value_that_no_rank_sets_is_waited_for_no_longer_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RankFiles.of_rank(tmp_path, 0)
    monkeypatch.setenv("SHARDWRIGHT_RANK_FILES", str(files.beginning))
    with met(2) as (first, _), exchange(first, "4") as line:
        assert line.place is not None
        note_meeting(files.meeting_file, line.place, line.launch)
        store = rank_store(_no_file, _Base, 2, timedelta(seconds=0.3))
        for ask in (lambda: store.get("never"), lambda: store.wait(["never"], timedelta(seconds=0.1))):  # type: ignore[attr-defined]
            with pytest.raises(TimeoutError, match="no rank has set never within 0"):
                ask()
