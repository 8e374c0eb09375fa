"""`make kills`: a run that is killed at random moments and started again comes to the same bits as one that is not.

    python tests/train/run_kills.py [--kills 100] [--seed 0]

A moment is drawn anew each time: in start-up, in a step, in a save, in the removal of an old checkpoint. Killed is one
rank, or the launcher and with it all. After each kill every complete checkpoint is whole, and the newest is not older
than the newest before.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from random_plans import random_plan
from safetensors.torch import load
from tiny_models import tiny

from shardwright_formats.io.json import read_document, sha256_of_file, write_document
from shardwright_formats.types.plan import Plan
from shardwright_train.checkpoints.choice import read_record
from shardwright_train.checkpoints.folders import complete_checkpoints, folder_of_run
from shardwright_train.data.prepare import prepare

STEPS = 40
_LONGEST_S = 300.0


@dataclass(frozen=True)
class Run:
    """A command that trains, and what it leaves behind."""

    work: Path
    name: str
    draw: random.Random = field(default_factory=random.Random)

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return folder_of_run(self.out / "kept", read_document(self.work / "plan.json", Plan).sha256)

    @property
    def out(self) -> Path:
        """The folder of what it says."""
        return self.work / self.name

    def start(self) -> "subprocess.Popen[str]":
        """Start it, or go on with it."""
        command = [sys.executable, "-m", "shardwright_train.cli", "run", str(self.work / "plan.json")]
        command += ["--data", str(self.work / "data"), "--steps", str(STEPS), "--checkpoint-every", "1"]
        command += ["--checkpoints", str(self.out / "kept"), "--out", str(self.out), "--learning-rate", "0.01"]
        environment = os.environ | {"STARTED_BY": str(self.out)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def kill(self, running: "subprocess.Popen[str]") -> str:
        """Kill one of its processes, or let it end; says which."""
        found = [process for process in self._processes() if process != running.pid]
        ranks = sorted(found)
        victim = self.draw.choice([running.pid, *ranks])
        os.kill(victim, signal.SIGKILL)
        return "the launcher" if victim == running.pid else f"process {ranks.index(victim)} of {len(ranks)}"

    def _processes(self) -> list[int]:
        found = []
        for process in Path("/proc").iterdir():
            try:
                environment = (process / "environ").read_bytes() if process.name.isdigit() else b""
            except OSError:
                continue
            if f"STARTED_BY={self.out}\0".encode() in environment + b"\0":
                found.append(int(process.name))
        return found

    def gone(self) -> None:
        """Wait until none of its processes is left."""
        until = time.monotonic() + _LONGEST_S
        while self._processes():
            assert time.monotonic() < until, "a process outlived its launcher"
            time.sleep(0.05)

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


def prepared(work: Path) -> Path:
    """A folder with data and a plan for two ranks, in two pipeline stages."""
    (work / "text").mkdir(parents=True)
    (work / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(work / "text"), "*.txt", 260, 1.0, work / "data")
    write_document(work / "plan.json", random_plan(tiny("llama", vocab_size=260), 3, 2, "float32"))
    return work


def survive(work: Path, kills: int, seed: int) -> int:
    """Kill a run that often, each time going on, and hold its end to that of an unbroken one; returns the kills.

    A run that comes to its end before begins anew in another folder.
    """
    unbroken = Run(work, "unbroken")
    process = unbroken.start()
    began = time.monotonic()
    error = process.communicate(timeout=_LONGEST_S)[1]
    assert process.returncode == 0, error
    draw, took_s, done, runs = random.Random(seed), time.monotonic() - began, 0, 0
    while done < kills:
        runs += 1
        done += _survive_once(Run(work, f"killed{runs}", draw), unbroken, took_s, kills - done)
    return done


def _survive_once(run: Run, unbroken: Run, took_s: float, kills: int) -> int:
    done, newest = 0, 0
    while True:
        process = run.start()
        try:
            process.wait(run.draw.uniform(0.1, 0.9) * took_s if done < kills else _LONGEST_S)
        except subprocess.TimeoutExpired:
            victim = run.kill(process)
            process.communicate(timeout=_LONGEST_S)
            run.gone()
            done += 1
            before, newest = newest, run.newest()
            assert newest >= before, f"step {before} was saved, {newest} is the newest"
            print(f"kill {done}: {victim}; step {newest} of {STEPS} is saved", flush=True)
            continue
        error = process.communicate()[1]
        assert process.returncode == 0, error
        assert run.outcome() == unbroken.outcome(), run.name
        return done


def main() -> None:
    """Kill as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how often a run is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = survive(prepared(Path(folder) / "work"), asked.kills, asked.seed)
    print(f"{done} kills: every run came to the bits of the unbroken one, and no complete checkpoint was lost")


if __name__ == "__main__":
    main()
