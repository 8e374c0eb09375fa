"""However a run or a measurement fails, it ends soon, says which rank and where, and leaves no process."""

import json
import os
import re
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command_calls import call
from faults import hang_in_step_3, kill_in_step_3
from forked_command import Fault, forked_command
from random_plans import random_plan
from tiny_models import tiny
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwright.io import write_document
from shardwright.launch.heartbeat import RankFiles
from shardwright_train import cli
from shardwright_train.commands import ranks
from shardwright_train.data.prepare import prepare
from shardwright_train.parallel.world import joined_world

START_UP_S = 300.0
HANG, KILL = Fault(1, hang_in_step_3), Fault(1, kill_in_step_3)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and a plan that keeps both ranks in every collective."""
    folder = tmp_path_factory.mktemp("failures")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(folder / "text"), "*.txt", 260, 1.0, folder / "data")
    plan = random_plan(tiny("llama", vocab_size=260), 1, 2, "float32", stages=1)
    write_document(folder / "plan.json", plan)
    return folder


class Started:
    """A command that runs, and its ranks."""

    def __init__(self, work: Path, subcommand: str, *options: str, fault: Fault | None = None) -> None:
        command = (subcommand, work / "plan.json", "--steps", 100_000, *options)
        self.process = forked_command(command, {"KILLS": str(work / "kills")}, fault)

    def ranks(self) -> dict[int, tuple[int, RankFiles]]:
        """Process and files of every living rank."""
        return self.process.ranks()

    def until_step(self, number: int) -> dict[int, tuple[int, RankFiles]]:
        """The ranks, once all are in a step of this number or a later one."""
        deadline = time.monotonic() + START_UP_S
        while time.monotonic() < deadline and self.process.poll() is None:
            ranks = self.ranks()
            where = [step.where for _, files in ranks.values() if (step := files.step()) is not None]
            numbers = [int(found[1]) for text in where if (found := re.match(r"in step (\d+)", text))]
            if len(numbers) == 2 and min(numbers) >= number:
                return ranks
            time.sleep(0.05)
        raise AssertionError(f"step {number} was not reached: {self.end().error}")

    def end(self) -> "Ended":
        """Wait for the end."""
        _, error = self.process.communicate(timeout=START_UP_S)
        return Ended(self.process.returncode, error)


@dataclass(frozen=True)
class Ended:
    status: int
    error: str

    @property
    def last_line(self) -> str:
        return self.error.rstrip("\n").rpartition("\n")[2]


def run_options(work: Path, name: str, *more: str) -> tuple[str, ...]:
    folders = ("--data", str(work / "data"), "--checkpoints", str(work / name / "kept"), "--out", str(work / name))
    return (*folders, "--checkpoint-every", "100000", *more)


@pytest.fixture(scope="module")
def killed(work: Path) -> Ended:
    """A run whose rank 1 was killed in mid-run, with a schedule of its own."""
    schedule = ("--learning-rate", "0.01", "--warmup-steps", "1", "--learning-rate-schedule", "inverse_sqrt")
    started = Started(work, "run", *run_options(work, "killed", *schedule))
    process, _ = started.until_step(6)[1]
    os.kill(process, signal.SIGKILL)
    ended = started.end()
    assert started.ranks() == {}
    return ended


def test_a_killed_rank_ends_all_and_the_last_line_names_it(killed: Ended) -> None:
    assert (killed.status, killed.error.count("error: ")) == (4, 1)
    assert re.fullmatch(
        r"error: rank 1: was killed by SIGKILL in step \d+: the other ranks were ended", killed.last_line
    )


def test_a_run_learns_at_the_rates_of_its_schedule(work: Path, killed: Ended) -> None:
    (metrics,) = (work / "killed" / "kept").glob("*/metrics.jsonl")
    rates = [json.loads(line)["learning_rate"] for line in metrics.read_text().splitlines()[:4]]
    assert rates == pytest.approx([0.01, 0.01 / 2**0.5, 0.01 / 3**0.5, 0.005])


def test_a_hang_prints_the_stacks_of_all_ranks_and_ends_them(work: Path) -> None:
    kept = ("--hang-timeout-s", "10", "--log-dir", str(work / "hung-logs"))
    started = Started(work, "run", *run_options(work, "hung", *kept), fault=HANG)
    ended = started.end()
    assert started.ranks() == {}
    words = "error: ranks 0 to 1, in step 3: no step ended within 10 s: the stacks of all ranks are above"
    missing = r"; rank 1 has not entered \w+ \d+ of [a-z ]+ of ranks 0 1, in which rank 0 waits"
    assert ended.status == 4 and re.fullmatch(re.escape(words) + missing, ended.last_line), ended.error
    for rank in range(2):
        trace = json.loads((work / "hung-logs" / f"rank-{rank}-collectives.json").read_bytes())
        assert trace["entries"], "what the flight recorder has seen is kept"
    _, waiting, hanging = re.split(r"^rank \d, in step 3:\n", ended.error, flags=re.MULTILINE)
    assert "sleep_for_ever" in hanging and "sleep_for_ever" not in waiting
    assert "in run_step" in waiting or "in all_reduce" in waiting


def test_a_rank_killed_in_a_send_and_in_a_collective_is_started_anew_and_a_stopped_one_is_named(work: Path) -> None:
    """One command: two kills at one place each, two starts anew, then a rank that SIGSTOP holds for ever."""
    (work / "kills").mkdir()
    plan = random_plan(tiny("llama", vocab_size=260), 1, 2, "float32", stages=2)
    write_document(work / "plan.json", plan)
    kept = ("--checkpoint-every", "1", "--checkpoint-sync", "--log-dir", str(work / "logs"))
    options = run_options(work, "stopped", "--max-restarts", "2", "--hang-timeout-s", "20", *kept)
    started = Started(work, "run", *options, fault=KILL)
    while len(list((work / "kills").iterdir())) < 3:
        assert started.process.poll() is None, started.end().error
        time.sleep(0.05)
    os.kill(started.until_step(6)[1][0], signal.SIGSTOP)
    ended = started.end()
    assert started.ranks() == {}
    for step, start in ((3, 1), (5, 2)):  # the third of each start: steps 2 and 4 are saved
        words = f"rank 1: was killed by SIGKILL in step {step}: the other ranks were ended: restarting from the newest"
        assert f"{words} checkpoint, start {start} of 2 at most\n" in ended.error
    words = r"error: ranks 0 to 1, in step \d+: no step ended within 20 s, rank 1 is stopped \(SIGSTOP\): the stacks of"
    assert ended.status == 4 and re.match(words, ended.last_line), ended.error
    # What was printed is kept, each start behind the one before.
    for rank in range(2):
        log = (work / "logs" / f"rank-{rank}.log").read_text()
        headings = re.findall(r"^=== start (\d) at .*: rank (\d) of 2 ===$", log, re.MULTILINE)
        assert headings == [(start, str(rank)) for start in "012"]
        steps = r"^=== start 0 .*^step 1/100000: .*^=== start 1 "
        assert (re.search(steps, log, re.DOTALL | re.MULTILINE) is not None) == (rank == 0)


def test_a_measurement_is_watched_as_its_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(ranks, "start_measure", lambda options: asked.append(options.hang_timeout_s))
    ended = call(cli.APP, "measure", "plan.json", "--out", "out.json", "--hang-timeout-s", "7.5")
    assert (ended.exit_code, asked) == (0, [7.5])


def test_a_killed_launcher_takes_its_ranks_with_it(work: Path) -> None:
    out = work / "orphaned.json"
    started = Started(work, "measure", "--out", str(out), "--hang-timeout-s", "60")
    started.until_step(4)
    started.process.kill()
    deadline = time.monotonic() + START_UP_S
    while started.ranks() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started.ranks() == {}
    assert (started.end().status, out.exists()) == (-signal.SIGKILL, False)


def test_every_group_waits_longer_than_the_hang_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (place | RankFiles.of_rank(tmp_path, 0).environment).items():
        monkeypatch.setenv(name, value)
    defaults = (distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout)
    with joined_world("cpu", timeout_s=4321.0):
        groups = [
            dist.group.WORLD,
            dist.new_group([0]),
            DeviceMesh("cpu", [[0]], mesh_dim_names=("a", "b")).get_group("b"),
        ]
        assert {group._get_backend(torch.device("cpu")).options._timeout for group in groups} == {
            timedelta(seconds=4321)
        }
    assert defaults == (distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout)
