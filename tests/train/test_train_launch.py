"""However ranks end, the launcher names the one that failed first, prints one last line, and leaves no process."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwright_formats.io.errors import RunFailed
from shardwright_train import cli
from shardwright_train import launch as launching
from shardwright_train.launch import Nodes, launch
from shardwright_train.verdict import Evidence, verdict
from shardwright_train.watch import NotedError, RankFiles, Step, Watch

RANK = Path(__file__).with_name("launched_rank.py")
STARTED_S = 20.0

Launched = Callable[..., None]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    """Launch one rank per action; no process that was started may be there afterwards."""
    monkeypatch.setenv("STARTED_BY", str(tmp_path))

    def run(*actions: str, nodes: Nodes | None = None, hang_timeout_s: float | None = None) -> None:
        began = time.monotonic()
        nodes = nodes or Nodes()
        try:
            launch([sys.executable, str(RANK), *actions], len(actions), 2 * nodes.rank, 4, nodes, hang_timeout_s)
        finally:
            assert time.monotonic() - began < STARTED_S
            assert started_by(tmp_path) == []

    return run


def started_by(folder: Path) -> list[int]:
    """The processes that live and have a folder's name in their environment, except this one."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            environment = (process / "environ").read_bytes() if process.name.isdigit() else b""
        except OSError:
            continue
        if f"STARTED_BY={folder}".encode() in environment.split(b"\0") and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


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
        (("lose", "later exit 7"), "rank 1: ended with status 7 in step 1: its last words stand above"),
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


def test_where_all_of_a_node_lost_a_connection_the_other_nodes_are_pointed_at(launched: Launched) -> None:
    words = "^rank 3: lost its connection first, in step 1: a rank of another node may have ended: look there$"
    with pytest.raises(RunFailed, match=words):
        launched("later lose", "lose", nodes=Nodes(2, 1, "127.0.0.1:1"))


@pytest.mark.parametrize(
    ("actions", "node", "status", "line"),
    [
        (("refuse", "refuse"), 0, 2, "error: plan.json: is odd: write another\n"),
        (("refuse", "refuse"), 1, 2, ""),
        (("lose", "later refuse"), 1, 2, "error: plan.json: is odd: write another\n"),
        (("stop", "later stop"), 0, 75, "error: stopped after step 1\n"),
    ],
)
def test_an_error_in_order_is_one_line_even_of_a_single_rank(
    launched: Launched, capsys: pytest.CaptureFixture[str], actions: tuple[str, ...], node: int, status: int, line: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        launched(*actions, nodes=Nodes(2, node, "127.0.0.1:1"))
    assert (ended.value.code, capsys.readouterr().err) == (status, line)


def test_a_hang_shows_every_stack_or_says_why_there_is_none(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    words = r"ranks 0 to 2, in step 1: no step ended within 2 s: the stacks of all ranks stand above"
    with pytest.raises(RunFailed, match=f"^{words}$"):
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
    with pytest.raises(RunFailed, match=r"^ranks 0 to 1, in start-up: the ranks did not find one another within 1 s"):
        launched("never join", "never join", hang_timeout_s=1.0)
    assert "rank 1, in start-up:\n" in capsys.readouterr().err


def test_a_step_that_begins_in_time_starts_the_time_anew(tmp_path: Path) -> None:
    files = RankFiles.of_rank(tmp_path, 3)
    assert files.step() is None
    watch = Watch(files)
    watch.begin("in step 100 of\na plan")
    first = files.step()
    watch.begin("in step 2")
    second = files.step()
    assert first is not None and second is not None
    assert (first.where, second.where) == ("in step 100 of a plan", "in step 2")
    assert first.began_s < second.began_s <= time.monotonic()


@pytest.mark.parametrize(("signals", "status"), [(1, 75), (2, 130)])
def test_signals_before_the_ranks_can_stop_in_order_end_them(tmp_path: Path, signals: int, status: int) -> None:
    action = "sleep" if signals == 1 else "signal SIGSTOP"  # a stopped process does not die of SIGTERM
    script = f"from shardwright_train.launch import *; launch({[sys.executable, str(RANK), action]}, 1, 0, 1, Nodes())"
    script = f"from shardwright_formats.io.errors import one_line_errors\nwith one_line_errors():\n    exec({script!r})"
    environment = os.environ | {"STARTED_BY": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + STARTED_S
    while not _in_a_step(started_by(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    _, err = process.communicate(timeout=STARTED_S)
    assert (process.returncode, started_by(tmp_path)) == (status, [])
    assert err == ("error: stopped in step 1: run the same command again\n" if signals == 1 else "")


def _in_a_step(processes: list[int]) -> bool:
    for process in processes:
        environment = Path(f"/proc/{process}/environ").read_bytes()
        if found := re.search(rb"SHARDWRIGHT_RANK_FILES=([^\0]+)", environment):
            return RankFiles(Path(found[1].decode())).step() is not None
    return False


def _evidence(rank: int, status: int | None, seen_s: float, error: NotedError | None = None) -> Evidence:
    return Evidence(rank, status, seen_s, Step(0.0, "in step 5"), error)


def test_an_abort_counts_by_its_time_and_not_before_what_the_rank_noted() -> None:
    """NCCL aborts the ranks whose peer has failed."""
    failed = NotedError(time_s=1.0, text="ValueError: x")
    lost = NotedError(time_s=0.5, text="DistBackendError: remote process exited", lost_connection=True)
    for ranks in (
        [_evidence(0, -6, 2.0), _evidence(1, None, 0.0, failed)],
        [_evidence(0, -6, 0.5, lost), _evidence(1, 1, 2.0, failed)],
    ):
        assert verdict(ranks, several_nodes=False, signalled=False).words == "rank 1: failed in step 5: ValueError: x"
    ranks = [_evidence(0, -6, 0.5), _evidence(1, 1, 2.0, failed)]
    assert verdict(ranks, several_nodes=False, signalled=False).words.startswith("rank 0: was killed by SIGABRT")


def test_a_kill_that_nobody_asked_for_is_no_stop() -> None:
    for status, signalled in ((-9, True), (-15, False)):
        found = verdict([_evidence(0, status, 1.0)], several_nodes=False, signalled=signalled)
        assert found.words.startswith("rank 0: was killed by SIG") and found.exit_code is None


def test_a_killed_rank_goes_before_what_its_peers_noted_before_its_end_was_seen() -> None:
    failed = NotedError(time_s=1.0, text="RuntimeError: something new that gloo says")
    found = verdict([_evidence(0, 1, 2.0, failed), _evidence(1, -9, 1.05)], several_nodes=False, signalled=False)
    assert found.words.startswith("rank 1: was killed by SIGKILL in step 5")


def test_a_measurement_is_watched_as_its_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(cli, "start_measure", lambda *arguments: asked.extend(arguments))
    ended = CliRunner().invoke(cli.app, ["measure", "plan.json", "--out", "out.json", "--hang-timeout-s", "7.5"])
    assert (ended.exit_code, asked.count(7.5)) == (0, 1)
