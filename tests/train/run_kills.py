"""`make kills`: a run that is killed at random moments and started again comes to the same bits as one that is not.

    PYTHONPATH=tests python tests/train/run_kills.py [--kills 100] [--seed 0] [--schedule NAME] [--work FOLDER]

A moment is drawn anew each time: in start-up, or so many saves later in a step, in a save beside it, in the removal of
an old checkpoint. Killed is one rank, or the launcher and with it all. After each kill every complete checkpoint is
whole, and the newest is not older than the newest before; at the end of a run nothing is left of what was half done,
in its folders and in that of temporary files. Cut off, the same command goes on in the same folder, which
is removed at its end.
"""

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from forked_command import Command, forked_command
from forked_ranks import forking
from msgspec.structs import replace as replaced
from random_plans import random_plan
from safetensors.torch import load
from several_chunks import SCHEDULES, in_chunks
from split_plans import split
from tiny_models import tiny

from shardwright.io import read_document, sha256_of_file, write_bytes, write_document
from shardwright.types import Plan, Schedule
from shardwright_train.checkpoints.choice import read_record
from shardwright_train.checkpoints.folders import complete_checkpoints, folder_of_run
from shardwright_train.data.prepare import prepare

STEPS = 40
_SAVES_AHEAD = 6
_POLL_S = 0.01
_LONGEST_S = 300.0
_PR_SET_CHILD_SUBREAPER = 36
_PARENT = 1
"""Place of the parent's number in /proc/*/stat, after the name."""


@dataclass(frozen=True)
class Run:
    """A command that trains, and what it leaves behind."""

    work: Path
    name: str

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return folder_of_run(self.out / "kept", read_document(self.work / "plan.json", Plan))

    @property
    def out(self) -> Path:
        """The folder of what it says."""
        return self.work / self.name

    def start(self) -> Command:
        """Start it, or go on with it."""
        arguments = ["run", str(self.work / "plan.json"), "--data", str(self.work / "data"), "--steps", str(STEPS)]
        arguments += ["--checkpoint-every", "1", "--checkpoints", str(self.out / "kept"), "--out", str(self.out)]
        return forked_command([*arguments, "--learning-rate", "0.01"], {"TMPDIR": str(self.temporary)})

    @property
    def temporary(self) -> Path:
        """The folder of its temporary files."""
        return self.work / "temporary"

    def leftovers(self) -> list[Path]:
        """What it has left of temporary files, and of saves and removals that were cut off."""
        odd = (path for path in self.out.rglob("*") if path.suffix in (".tmp", ".unfinished", ".removed", ".damaged"))
        return [*odd, *self.temporary.glob("shardwright-*")]

    def newest(self) -> int:
        """The step of the newest checkpoint, once all were found whole; 0 where there is none."""
        complete = complete_checkpoints(self.checkpoints)
        for checkpoint in complete:
            for saved in read_record(checkpoint).files:
                assert sha256_of_file(checkpoint / saved.name) == saved.sha256, checkpoint
        return read_record(complete[0]).progress.step if complete else 0

    def outcome(self) -> tuple[object, list[float]]:
        """The bits of the last checkpoint and the loss of every step."""
        lines = (self.out / "metrics.jsonl").read_text().splitlines()
        last = complete_checkpoints(self.checkpoints)[0]
        tensors = [load((last / saved.name).read_bytes()) for saved in read_record(last).files]
        bits = [{name: x.numpy().tobytes() for name, x in of_rank.items()} for of_rank in tensors]
        return bits, [json.loads(line)["loss"] for line in lines]


@dataclass(frozen=True)
class State:
    """How far the kills have come, kept so that they can go on."""

    seed: int
    kills: int
    """Asked for."""
    start_s: float
    """Until the run that is not killed saved its first step."""
    step_s: float
    """What each further step and its save took it."""
    done: int = 0
    runs: int = 1
    """Begun; one that comes to its end is followed by another, in a folder of its own."""
    newest: int = 0
    """Step of the present run's newest checkpoint."""
    spent_s: float = 0.0

    def left(self) -> str:
        """The time that the rest will take, were it as long as that so far."""
        return f"{self.spent_s:.0f} s gone, about {self.spent_s / self.done * (self.kills - self.done):.0f} s left"


def prepared(work: Path, schedule: Schedule | None = None) -> Path:
    """A folder with data and a plan for two ranks, in two pipeline stages, of its own schedule or one that splits."""
    (work / "text").mkdir(parents=True)
    (work / "temporary").mkdir()
    (work / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(work / "text"), "*.txt", 260, 1.0, work / "data")
    plan = random_plan(tiny("llama", vocab_size=260), 3, 2, "float32", stages=2)
    if schedule is not None:
        plan = in_chunks(plan, schedule) if schedule in SCHEDULES else replaced(split(plan), schedule=schedule)
    write_document(work / "plan.json", plan)
    return work


def survive(work: Path, kills: int, seed: int) -> int:
    """Kill a run that often, each time going on, and hold its end to that of an unbroken one; returns the kills.

    A run that comes to its end before is followed by another.
    """
    _adopt_orphans()
    forking()
    own = [pid for pid, parent in _parents() if parent == os.getpid()]
    unbroken = Run(work, "unbroken")
    state = _state(work, kills, seed) or _begun(unbroken, kills, seed)
    while True:
        _keep(work, state)
        run, began = Run(work, f"killed{state.runs}"), time.monotonic()
        draw = random.Random(f"{seed}/{state.done}/{state.runs}")
        process = run.start()
        if state.done < kills and _runs_until(run, process, state, draw) and (victim := _kill(process, draw)):
            process.communicate(timeout=_LONGEST_S)
            _until_all_are_gone(own)
            newest = run.newest()
            assert newest >= state.newest, f"step {state.newest} was saved, {newest} is the newest"
            spent_s = state.spent_s + time.monotonic() - began
            state = replace(state, done=state.done + 1, newest=newest, spent_s=spent_s)
            told = f"{victim}; step {newest} of {STEPS} is saved; {state.left()}"
            print(f"kill {state.done} of {kills}: {told}", flush=True)
            continue
        error = process.communicate(timeout=_LONGEST_S)[1]
        assert process.returncode == 0, error
        assert run.outcome() == unbroken.outcome(), run.name
        assert not run.leftovers(), run.leftovers()
        print(f"run {state.runs} came to its end, and to the bits of the unbroken one", flush=True)
        if state.done == kills:
            return kills
        spent_s = state.spent_s + time.monotonic() - began
        state = replace(state, runs=state.runs + 1, newest=0, spent_s=spent_s)


def _begun(unbroken: Run, kills: int, seed: int) -> State:
    began, process = time.monotonic(), unbroken.start()
    assert _saves(unbroken, process, 1)
    start_s = time.monotonic() - began
    error = process.communicate(timeout=_LONGEST_S)[1]
    assert process.returncode == 0, error
    took_s = time.monotonic() - began
    print(f"the run that is not killed took {took_s:.1f} s, {start_s:.1f} s of them until its first save", flush=True)
    return State(seed, kills, start_s, (took_s - start_s) / (STEPS - 1))


def _runs_until(run: Run, process: Command, state: State, draw: random.Random) -> bool:
    """Wait until a random moment of the present start or of one of the next saves; False where the run has ended."""
    ahead = draw.randrange(_SAVES_AHEAD)
    if not _saves(run, process, state.newest + ahead if ahead else 0):
        return False
    try:
        process.wait(draw.uniform(0.0, 2 * state.step_s if ahead else state.start_s))
    except subprocess.TimeoutExpired:
        return True
    return False


def _saves(run: Run, process: Command, step: int) -> bool:
    """Wait until a run has saved a step; False where it has ended first."""
    while step > max((int(path.name[5:]) for path in complete_checkpoints(run.checkpoints)), default=0):
        if process.poll() is not None:
            return False
        time.sleep(_POLL_S)
    return True


def _state(work: Path, kills: int, seed: int) -> State | None:
    file = work / "kills.json"
    found = msgspec.json.decode(file.read_bytes(), type=State) if file.exists() else None
    return found if found is not None and (found.kills, found.seed) == (kills, seed) else None


def _keep(work: Path, state: State) -> None:
    write_bytes(work / "kills.json", msgspec.json.encode(state))


def _kill(running: Command, draw: random.Random) -> str | None:
    """Kill the launcher or one of its ranks; says which, None where it has just ended by itself."""
    found = sorted(pid for pid, parent in _parents() if parent == running.pid)
    victim = draw.choice([running.pid, *found])
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return "the launcher" if victim == running.pid else f"rank {found.index(victim)} of {len(found)}"


def _adopt_orphans() -> None:
    """Become the parent of ranks whose launcher is gone, so that none can be overlooked."""
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _until_all_are_gone(own: Collection[int]) -> None:
    until = time.monotonic() + _LONGEST_S
    while [pid for pid, parent in _parents() if parent == os.getpid() and pid not in own]:
        os.waitpid(-1, os.WNOHANG)
        assert time.monotonic() < until, "a rank outlived its launcher"
        time.sleep(0.01)


def _parents() -> Iterator[tuple[int, int]]:
    """The processes there are, each with its parent's number."""
    for process in Path("/proc").iterdir():
        try:
            stat = (process / "stat").read_text() if process.name.isdigit() else ""
        except OSError:
            continue
        if stat:
            yield int(process.name), int(stat.rpartition(")")[2].split()[_PARENT])


def main() -> None:
    """Kill as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how often a run is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    splitting = [schedule for schedule in Schedule if schedule.splits]
    parser.add_argument("--schedule", type=Schedule, choices=splitting, help="a schedule of split passes")
    parser.add_argument("--work", type=Path, default=Path("results/kills"), help="folder to work and to go on in")
    asked = parser.parse_args()
    if _state(asked.work, asked.kills, asked.seed) is None:
        shutil.rmtree(asked.work, ignore_errors=True)
        prepared(asked.work, asked.schedule)
    done = survive(asked.work, asked.kills, asked.seed)
    shutil.rmtree(asked.work)
    print(f"{done} kills: every run came to the bits of the unbroken one, and no complete checkpoint was lost")


if __name__ == "__main__":
    main()
