"""What ranks print is shown as ever and, where that is asked for, kept, however they end and however much it is."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launchers import RANK, STARTED_S, free_port, let_act, start_node, started_by

from shardwright.io import BadInput, RunFailed
from shardwright.launch import ranks
from shardwright.launch.ranks import RankLog, launch

HEADING = r"=== start (\d+) at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00: rank (\d) of 2 ===\n"
Launched = Callable[..., None]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    """Launch one rank per action, its output kept; no process that was started may be there afterwards."""
    monkeypatch.setenv("STARTED_BY", str(tmp_path))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def run(*actions: str, **options: object) -> None:
        given = {"log_folder": tmp_path / "logs", **options}
        try:
            launch([sys.executable, str(RANK), *actions], range(len(actions)), len(actions), **given)
        finally:
            assert started_by(tmp_path) == {}

    return run


def kept(folder: Path, rank: int) -> str:
    """What is kept of a rank, without the headings."""
    return re.sub(rf"(\A|\n){HEADING}", r"\1", (folder / f"logs/rank-{rank}.log").read_text())


def mixed(text: str, lines: str, unended: str) -> bool:
    """Whether a text is these lines in their order and, in front of one or at the end, what had no end of a line."""
    return unended in text and text.replace(unended, "", 1) == lines


def test_what_is_shown_is_what_is_shown_without_files(
    launched: Launched, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    actions = "say one|two", "say three"
    launched(*actions, log_folder=None)
    without = capfd.readouterr()
    launched(*actions)
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == sorted(without.out.splitlines()) == ["one", "three", "two"]
    for said in (without.err, shown.err):
        assert said in ("two in vainthree in vain", "three in vaintwo in vain")
    assert mixed(kept(tmp_path, 0), "one\ntwo\n", "two in vain")
    assert mixed(kept(tmp_path, 1), "three\n", "three in vain")


def test_a_killed_rank_keeps_what_it_has_printed_and_its_last_lines_are_shown_before_the_error(
    launched: Launched, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "|".join(f"line {i}" for i in range(30))
    with pytest.raises(RunFailed, match=r"^rank 1: was killed by SIGKILL in step 1: the other ranks were ended$"):
        launched("say_and_wait hello", f"later say_and_die {words}")
    lines = [f"line {i}" for i in range(30)]
    assert mixed(kept(tmp_path, 1), "".join(f"{line}\n" for line in lines), "line 29 in vain")
    assert mixed(kept(tmp_path, 0), "hello\n", "hello in vain")
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == sorted(["hello", *lines])
    before, _, last = shown.err.partition(f"the last lines of rank 1, of {tmp_path}/logs/rank-1.log:\n")
    assert before in ("line 29 in vainhello in vain", "hello in vainline 29 in vain")
    assert last == "".join(f"    {line}\n" for line in kept(tmp_path, 1).splitlines()[-10:])
    assert last.count("\n") == 10 and "    line 28\n" in last


def test_a_traceback_is_among_the_last_lines_even_of_a_rank_that_could_not_print_it(
    launched: Launched, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for action in ("fail z", "linger z"):
        with pytest.raises(RunFailed, match=r"^rank 1: failed in step 1: ValueError: z$"):
            launched("sleep", action)
        assert kept(tmp_path, 1).endswith("\nValueError: z\n")
        shown = capfd.readouterr().err
        assert shown.endswith("\n    ValueError: z\n") and "\nValueError: z\nthe last lines of rank 1" in shown


def test_every_start_adds_to_the_files_and_the_last_lines_are_of_the_last(
    launched: Launched, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for start, word in enumerate(("before", "after")):
        with pytest.raises(RunFailed):
            launched("sleep", f"say_and_die {word}", start=start)
    text = (tmp_path / "logs/rank-1.log").read_text()
    assert re.findall(HEADING, text) == [("0", "1"), ("1", "1")]
    assert sorted(re.findall("before|after", text)) == ["after"] * 2 + ["before"] * 2
    assert max(text.rindex("before"), text.index("after")) == text.index("after")
    *_, told = capfd.readouterr().err.split("the last lines of rank 1")
    assert sorted(re.findall("after|before|start", told.partition("\n")[2])) == ["after", "after"]


def test_ranks_that_print_a_lot_wait_for_nobody(
    launched: Launched, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launched("flood 20000", "flood 20000")
    shown = capfd.readouterr()
    assert len(shown.out) == len(shown.err) == 2 * 20_000 * 101
    for rank in range(2):
        found = [int(line) for line in kept(tmp_path, rank).splitlines()]
        assert sorted(found) == sorted(2 * list(range(20_000)))


def test_all_is_handed_on_before_a_launch_returns(launched: Launched, tmp_path: Path) -> None:
    taken: list[bytes] = []

    def take(line: bytes) -> None:
        time.sleep(0.02)
        taken.append(line)

    launched(f"say {'|'.join(map(str, range(30)))}", "say other", on_line=take)
    assert taken == [b"%d\n" % i for i in range(30)]
    assert mixed(kept(tmp_path, 0), "".join(f"{i}\n" for i in range(30)), "29 in vain")


def test_a_child_that_holds_a_pipe_holds_up_no_end(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "_JOIN_S", 0.3)
    launched("leave_a_child")
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)  # it is there still
    assert kept(tmp_path, 0) == (tmp_path / "logs/rank-0.log").read_text()


def test_a_hang_ends_with_the_last_lines_of_the_rank_that_is_named(
    launched: Launched, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailed, match=r"^ranks 0 to 1, in step 1: no step ended within 1 s: the stacks of all ranks"):
        launched("say_and_wait one", "say_and_wait two", hang_timeout_s=1.0)
    shown = capfd.readouterr().err
    (rank,) = re.findall("the last lines of rank (.), of ", shown)
    stacks, last = shown.split(f"the last lines of rank {rank}, of {tmp_path}/logs/rank-{rank}.log:\n")
    word = ("one", "two")[int(rank)]
    assert "rank 0, in step 1:\n" in stacks and "rank 1, in step 1:\n" in stacks
    assert mixed(last, f"    {word}\n", f"    {word} in vain\n") or last == f"    {word} in vain{word}\n"


@pytest.mark.parametrize("action", ["refuse", "stop"])
def test_an_error_in_order_stays_one_line(launched: Launched, capfd: pytest.CaptureFixture[str], action: str) -> None:
    with pytest.raises(SystemExit):
        launched(action, action)
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_the_node_that_has_the_rank_shows_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT_IN", str(tmp_path / "logs"))
    port = free_port()
    actions = ("wait",), ("say_and_die mine",)
    nodes = [start_node(tmp_path, node, told, 2, port) for node, told in enumerate(actions)]
    let_act(tmp_path)
    shown = [node.communicate(timeout=STARTED_S)[1] for node in nodes]
    line = "error: rank 1: was killed by SIGKILL in step 1: the other ranks were ended"
    assert shown[0].splitlines() == [line]
    told = f"the last lines of rank 1, of {tmp_path}/logs/rank-1.log:"
    first, *lines, last = shown[1].splitlines()
    assert (first, last) == (f"mine in vain{told}", line)  # what it had said itself had no end of a line
    text = "".join(lines)  # what it said and what it complained of come in either order
    assert text.count("mine in vain") == 1 and text.replace("mine in vain", "").split() == ["mine"]


def test_a_file_that_takes_no_more_is_said_once_and_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = RankLog(tmp_path / "rank-0.log", "start")
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), log._descriptor)
    log.write(b"one")
    log.write(b"two")
    log.close()
    told = f"{tmp_path}/rank-0.log: No space left on device: the rank's further output is not logged\n"
    assert capfd.readouterr().err == told


@pytest.mark.parametrize("place", ["file", "file/below", "taken"])
def test_a_place_that_holds_no_logs_is_refused_before_anything_is_started(
    launched: Launched, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken/rank-1.log").mkdir(parents=True)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(BadInput, match=f"^{tmp_path}/{place}.*: "):
        launched("end", "end", log_folder=tmp_path / place)
