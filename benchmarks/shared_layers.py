"""Plans whose ranks share out positions, or experts: their steps measured beside prices from measured probes.

    python benchmarks/shared_layers.py [--work DIR] [--case context|experts] [--ranks 2|4] [--clock wall|cpu]
                                       [--hidden 192] [--rounds 3] [--steps 7] [--out FILE.json]

Two or four processes on this machine. Its links and the layers of a small Llama of 512 tokens and of a small Mixtral
are profiled; every plan is priced before any is measured, and nothing is fitted to what is measured. Then all plans of
a model are stepped in turns, in some rounds, so that a slow moment of the machine meets them all. The first plan of
each model shares nothing out: its probes ran as it does, and the others are held against it, too. Every file is kept in
`--work`, and what lies there is taken as it is: an interrupted benchmark goes on.

`--clock cpu` times probes, links and steps by the CPU time of each process. What other programs take of the cores does
not count then, nor does the time in which ranks wait for one another or for a link: it shows how prices add up where
the machine is too busy for times by the clock, not how long a step takes.
"""

import argparse
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from accuracy_parts import commands
from accuracy_parts.commands import made, run, write_json_document
from shared_parts.cases import Case, cases, cluster_of

from shardwright.io import read_document, write_document
from shardwright.io.versions import versions_text
from shardwright.types import Cluster, Measurement, Model, Plans, Prediction


def main() -> None:
    """Measure, print, keep."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--work", type=Path, help="folder of what is measured; a temporary one if left out")
    options.add_argument("--case", choices=("context", "experts"), action="append", help="default: all")
    options.add_argument("--ranks", type=int, choices=(2, 4), default=4, help="processes")
    options.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="time, or CPU time of a process")
    options.add_argument("--hidden", type=int, default=192, help="features of a position, a multiple of 64")
    options.add_argument("--rounds", type=int, default=3, help="how often all plans are measured in turns")
    options.add_argument("--steps", type=int, default=7, help="measured steps of each plan and round")
    options.add_argument("--out", type=Path, help="JSON file of the figures")
    given = options.parse_args()
    if given.clock == "cpu":
        os.environ["PYTHONPATH"] = str(Path(__file__).parent / "shared_parts" / "cpu_clock")
    with TemporaryDirectory() as scratch:
        work = (given.work or Path(scratch)) / f"{given.clock}-{given.ranks}-{given.hidden}"
        hardware = _hardware(work, given.ranks)
        named, sizes = cases(given.ranks), (given.hidden, given.rounds, given.steps)
        rows = {name: measured(work / name, named[name], hardware, *sizes) for name in given.case or named}
    print("\n\n".join(table(name, each) for name, each in rows.items()))
    if given.out:
        date, versions = datetime.now(UTC).date().isoformat(), versions_text(("torch",), on_gpu=False)
        asked = {key: getattr(given, key) for key in ("ranks", "clock", "hidden", "rounds", "steps")}
        found = {"date": date, "versions": versions, **asked, "cases": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured(folder: Path, case: Case, hardware: Path, hidden: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Return of each plan of a case the predicted and measured times of a step in s, and memory in bytes."""
    model, profile = _profiled(folder, case, hidden, steps)
    plans = case.plans(read_document(model, Model), read_document(folder.parent / "cluster.json", Cluster))
    estimates = []
    for plan in plans:
        path = folder / "plans" / f"{plan.name}.json"
        write_document(path, plan)
        run("shardwright", "evaluate", path, "--hardware", hardware, "--profile", profile,
            "--out", path.with_suffix(".prediction.json"))  # fmt: skip
        estimates.append(read_document(path.with_suffix(".prediction.json"), Prediction))
    asked = folder / "all.json"
    write_document(asked, Plans(plans=plans, in_turns=(tuple(range(len(plans))),)))
    taken = [_measured(asked, folder / f"all-{i + 1}.measured.json", steps) for i in range(rounds)]
    return [
        {
            "plan": plan.name,
            "predicted_s": estimate.estimate.simulated_step_time_s,
            "measured_s": [one.plans[i].step_times_s for one in taken],
            "slowdowns": [one.plans[i].slowdown(estimate.reference_s) for one in taken],
            "predicted_bytes": estimate.estimate.memory_bytes,
            "measured_bytes": max(one.plans[i].peak_bytes for one in taken),
        }
        for i, (plan, estimate) in enumerate(zip(plans, estimates, strict=True))
    ]


def beside_first(row: dict[str, Any], first: dict[str, Any]) -> float:
    """Return a plan's time over the first one's: median over the turns, in which both met the same machine."""
    turns = zip(_flat(row["measured_s"]), _flat(first["measured_s"]), strict=True)
    return median(one / other for one, other in turns)


def table(name: str, rows: list[dict[str, Any]]) -> str:
    """Return the Markdown table of a case."""
    head = (
        f"| {name} | predicted, ms | measured, ms | ratio | of the first, predicted | measured | ratio | "
        "memory, MiB | measured | ratio |"
    )
    return "\n".join([head, "| --- |" + " ---: |" * 9, *(_line(row, rows[0]) for row in rows)])


def _line(row: dict[str, Any], first: dict[str, Any]) -> str:
    took_s, priced_s = median(_flat(row["measured_s"])), row["predicted_s"]
    share, seen = priced_s / first["predicted_s"], beside_first(row, first)
    memory, held = (row[key] / 2**20 for key in ("predicted_bytes", "measured_bytes"))
    return (
        f"| {row['plan']} | {priced_s * 1e3:.0f} | {took_s * 1e3:.0f} | {priced_s / took_s:.2f} | {share:.2f} | "
        f"{seen:.2f} | {share / seen:.2f} | {memory:.1f} | {held:.1f} | {memory / held:.2f} |"
    )


def _flat(rounds: list[list[float]]) -> Iterator[float]:
    return (value for one in rounds for value in one)


def _hardware(work: Path, ranks: int) -> Path:
    """Measure the links of this machine among so many processes, unless that was done."""
    cluster, hardware = write_json_document(work / "cluster.json", "cluster", **cluster_of(ranks)), work / "hardware.h5"
    return made(hardware, "shardwright", "profile", "hardware", "--cluster", cluster, "--time-budget", 10)


def _profiled(folder: Path, case: Case, hidden: int, steps: int) -> tuple[Path, Path]:
    """Describe the model at each length and measure its profile, unless that was done; return both files."""
    profile, probes, taken = (folder / name for name in ("profile.h5", "probes.json", "probes.measured.json"))
    write_json_document(folder / "config" / "config.json", None, **case.config_of(hidden))
    lengths = (case.length, *(length for length in case.lengths if length != case.length))
    models = [folder / f"model-{length}.json" for length in lengths]
    for length, model in zip(lengths, models, strict=True):
        described = "--name", case.name, "--sequence-length", length
        made(model, "shardwright", "train", "describe", folder / "config", *described)
    settings = write_json_document(folder / "settings.json", "profile_settings", **case.settings)
    if not taken.exists():
        described = [word for model in models for word in ("--model", model)]
        run("shardwright", "profile", "probes", *described, "--cluster", folder.parent / "cluster.json", "--node-type",
            "cpu", "--settings", settings, "--out", probes)  # fmt: skip
        _measured(probes, taken, steps)
    return models[0], made(profile, "shardwright", "profile", "fit", "--measurements", taken)


def _measured(plans: Path, out: Path, steps: int) -> Measurement:
    return commands.measured(plans, out, "--steps", steps, "--warmup-steps", 2)


if __name__ == "__main__":
    main()
