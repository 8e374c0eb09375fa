"""However ranks end, the launcher names the one that failed first, prints one last line, and leaves no process."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launchers import RANK, STARTED_S, start_node, started_by, until_in_a_step, until_there

from shardwright.io import RunFailed
from shardwright.launch import ranks as launching
from shardwright.launch.heartbeat import Heartbeat, RankFiles
from shardwright.launch.ranks import launch

Launched = Callable[..., None]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    """Launch one rank per action; no process that was started may be there afterwards."""
    monkeypatch.setenv("STARTED_BY", str(tmp_path))

    def run(*actions: str, hang_timeout_s: float | None = None) -> None:
        began = time.monotonic()
        try:
            ranks = range(len(actions))
            launch([sys.executable, str(RANK), *actions], ranks, len(actions), hang_timeout_s=hang_timeout_s)
        finally:
            assert time.monotonic() - began < STARTED_S
            assert started_by(tmp_path) == {}

    return run


def test_ranks_that_end_well_are_no_failure(launched: Launched) -> None:
    launched("end", "later end", hang_timeout_s=60.0)


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (("sleep", "signal SIGKILL"), "rank 1: was killed by SIGKILL in step 1: the other ranks were ended"),
        (("lose", "later signal SIGSEGV"), "rank 1: was killed by SIGSEGV in step 1: the other ranks were ended"),
        (("sleep", "fail two\nlines"), "rank 1: failed in step 1: ValueError: two lines"),
        (("lose", "later fail x"), "rank 1: failed in step 1: ValueError: x"),
        (("fail y", "later fail x"), "rank 0: failed in step 1: ValueError: y"),
        (("lose", "later exit 7"), "rank 1: ended with status 7 in step 1: its last output is above"),
        (("later lose", "lose"), r"rank 1: lost its connection first, in step 1: RuntimeError: .* closed by peer .*"),
    ],
)
def test_the_rank_that_failed_first_is_named(launched: Launched, actions: tuple[str, ...], words: str) -> None:
    with pytest.raises(RunFailed, match=f"^{words}$") as failed:
        launched(*actions)
    assert failed.value.exit_code == 4


def test_a_rank_that_lingers_over_its_failure_is_ended_and_its_traceback_shown(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailed, match=r"^rank 1: failed in step 1: ValueError: z$"):
        launched("sleep", "linger z")
    shown = capsys.readouterr().err
    assert "launched_rank.py" in shown and shown.endswith("\nValueError: z\n")


@pytest.mark.parametrize(
    ("actions", "status", "line"),
    [
        (("refuse", "refuse"), 2, "error: plan.json: is odd: write another\n"),
        (("lose", "later refuse"), 2, "error: plan.json: is odd: write another\n"),
        (("stop", "later stop"), 75, "error: stopped after step 1\n"),
    ],
)
def test_an_error_in_order_is_one_line_even_of_a_single_rank(
    launched: Launched, capsys: pytest.CaptureFixture[str], actions: tuple[str, ...], status: int, line: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        launched(*actions)
    assert (ended.value.code, capsys.readouterr().err) == (status, line)


def test_a_hang_shows_every_stack_or_says_why_there_is_none(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "ranks 0 to 2, in step 1: no step ended within 2 s, rank 1 is stopped (SIGSTOP): the stacks of all ranks"
    with pytest.raises(RunFailed, match=f"^{re.escape(words)} are above$"):
        launched("sleep", "signal SIGSTOP", "end", hang_timeout_s=2.0)
    shown = re.split(r"^rank (\d), in step 1:\n", capsys.readouterr().err, flags=re.MULTILINE)
    assert shown[1::2] == ["0", "1", "2"]
    assert "launched_rank.py" in shown[2] and " in act" in shown[2]
    assert "it showed no stack within 2 s; its process is in state T" in shown[4]
    assert "it had ended with status 0" in shown[6]


def test_ranks_that_never_find_one_another_are_a_hang(
    launched: Launched, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "START_UP_S", 1.0)
    with pytest.raises(
        RunFailed, match=r"^ranks 0 to 1, in start-up: the ranks did not connect to one another within \d+ s"
    ):
        launched("never join", "never join", hang_timeout_s=1.0)
    assert "rank 1, in start-up:\n" in capsys.readouterr().err


def test_a_rank_that_cannot_show_its_stack_yet_is_not_ended_by_being_asked(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    """It imports for long, say: what hangs is the step of the other."""
    with pytest.raises(RunFailed, match=r"^ranks 0 to 1, in start-up: no step ended within 1 s"):
        launched("sleep", "never start", hang_timeout_s=1.0)
    shown = capsys.readouterr().err
    assert "rank 1, in start-up:\nit showed no stack within 2 s; its process is in state S" in shown


def test_a_step_that_begins_in_time_starts_the_time_anew(tmp_path: Path) -> None:
    files = RankFiles.of_rank(tmp_path, 3)
    assert files.step() is None
    heartbeat = Heartbeat(files)
    heartbeat.begin("in step 100 of\na plan")
    first = files.step()
    heartbeat.begin("in step 2")
    second = files.step()
    assert first is not None and second is not None
    assert (first.where, second.where) == ("in step 100 of a plan", "in step 2")
    assert first.began_s < second.began_s <= time.monotonic()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_before_the_ranks_can_stop_in_order_ends_them(tmp_path: Path, number: signal.Signals) -> None:
    ended = _signalled(tmp_path, "sleep", number)
    assert ended == (75, "error: stopped in step 1: run the same command again\n")


def test_a_second_signal_ends_ranks_that_do_not_answer_at_once(tmp_path: Path) -> None:
    # A stopped process does not die of SIGTERM.
    assert _signalled(tmp_path, "signal SIGSTOP", signal.SIGTERM, signal.SIGHUP, state="T") == (130, "")


def _signalled(folder: Path, action: str, *signals: signal.Signals, state: str = "S") -> tuple[int, str]:
    """Signal a launcher once its rank's process is in a state of proc(5)."""
    process = start_node(folder, 0, (action,))
    (rank,) = until_in_a_step(folder)
    deadline = time.monotonic() + STARTED_S
    while Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.2)
    _, err = process.communicate(timeout=STARTED_S)
    assert started_by(folder) == {}
    return process.returncode, err


def test_a_rank_outlives_the_terminal_that_it_prints_to(tmp_path: Path) -> None:
    """A closed terminal sends SIGHUP to the launcher and takes no more output from anybody."""
    terminal, ours = os.openpty()
    process = start_node(tmp_path, 0, ("print until stopped",), stdout=ours, stderr=ours, terminal=True)
    os.close(ours)
    until_in_a_step(tmp_path)
    until_there(tmp_path / "ready")  # before it takes signals, SIGTERM ends it unsaved, as it should
    os.close(terminal)
    assert process.wait(timeout=STARTED_S) == 75
    assert (tmp_path / "saved").exists()
    assert started_by(tmp_path) == {}


def test_a_killed_launcher_takes_its_ranks_with_it(tmp_path: Path) -> None:
    process = start_node(tmp_path, 0, ("sleep", "sleep"))
    until_in_a_step(tmp_path)
    process.kill()
    process.communicate(timeout=STARTED_S)
    deadline = time.monotonic() + STARTED_S
    while started_by(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert started_by(tmp_path) == {}
