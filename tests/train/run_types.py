"""`make parity`, second half: every causal type of transformers, trained as its stock class on 2 ranks, in float64.

Each type is exact (five plans, and one of tensor parallelism where its blocks can be shared out, against the stock
class in one process, to 1e-10), or refused with a reason, before training starts; anything else is a fault, and then
nothing is recorded. What was seen goes into a file, from which a run that was cut goes on.

python tests/train/run_types.py [--out FILE] [--record] [TYPE ...]
"""

import argparse
import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import transformers

sys.path.append(str(Path(__file__).parents[1]))
import stock_worker
import torch._dynamo
from forked_ranks import run_worker
from tiny_types import TYPES, tiny_config

LIMIT_S = 1200
RECORD = Path(__file__).parents[2] / "docs/models.json"
"""What the documentation says of each type."""


def main(types: list[str], out: Path, *, jobs: int, record: bool) -> int:
    """Try the types of which a file has nothing or a fault, some at a time; return the number of faults among all."""
    transformers.logging.set_verbosity_error()
    gc.freeze()  # children look through none of what is imported
    seen: dict[str, dict[str, object]] = json.loads(out.read_bytes()) if out.exists() else {}
    started, waiting, running = time.monotonic(), [kind for kind in types if _is_left(seen, kind)], list[_Trial]()
    out.parent.mkdir(parents=True, exist_ok=True)
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Trial(waiting.pop(0)))
        wait([trial.process.sentinel for trial in running], 1)
        for trial in [trial for trial in running if trial.is_over()]:
            running.remove(trial)
            seen[trial.kind] = trial.found()
            out.write_text(json.dumps(seen, indent=1) + "\n")
            print(f"{trial.kind}: {_words(seen[trial.kind])}, {time.monotonic() - trial.begun:.0f} s", flush=True)
    told = [_words(seen[kind]).partition(" ")[0].rstrip(":") for kind in types]
    divided = sum("undivided" in seen[kind] and seen[kind]["undivided"] is None for kind in types)
    print(
        f"{len(types)} types: {told.count('exact')} exact ({divided} with tensor parallelism), "
        f"{told.count('refused')} refused, {told.count('fault')} faults, {time.monotonic() - started:.0f} s"
    )
    if record and "fault" not in told:
        measured = {"transformers": transformers.__version__, "measured": date.today().isoformat()}
        said = {kind: _said(seen[kind]) for kind in TYPES}
        RECORD.write_text(json.dumps({**measured, "types": said}, indent=1) + "\n")
    return told.count("fault")


def _is_left(seen: Mapping[str, Mapping[str, Any]], kind: str) -> bool:
    return kind not in seen or _words(seen[kind]).startswith("fault")


def _said(found: Mapping[str, Any]) -> dict[str, object]:
    if "errors" not in found:
        return {"refused": found["refused"]}
    return {"exact": True, **({} if found["undivided"] is None else {"undivided": found["undivided"]})}


def _words(found: Mapping[str, object]) -> str:
    if isinstance(errors := found.get("errors"), dict):
        largest = max(errors.values())
        of_tp = f", tp {errors['tp']:.1e}" if "tp" in errors else f"; {found['undivided']}"
        of_rounding = (
            f", a rounding of the stock class's weights {found['rounding']:.1e}" if "rounding" in found else ""
        )
        return f"{'exact' if largest <= stock_worker.TOLERANCE else 'fault'} ({largest:.1e}{of_tp}{of_rounding})"
    return f"refused: {found['refused']}" if "refused" in found else f"fault: {found['fault']}"


class _Trial:
    """A type that is trained in processes of its own."""

    def __init__(self, kind: str) -> None:
        self.kind, self.begun, self.folder = kind, time.monotonic(), tempfile.TemporaryDirectory()
        self.process = multiprocessing.get_context("fork").Process(target=_train, args=(kind, Path(self.folder.name)))
        self.process.start()

    def is_over(self) -> bool:
        """Whether it has ended, or taken too long."""
        return not self.process.is_alive() or time.monotonic() - self.begun > LIMIT_S

    def found(self) -> dict[str, object]:
        """What it found."""
        with self.folder:
            if self.process.is_alive():
                assert self.process.pid is not None
                os.killpg(self.process.pid, signal.SIGKILL)
                return {"fault": f"took over {LIMIT_S} s"}
            result = Path(self.folder.name, "result.json")
            if not result.exists():
                return {"fault": f"ended with exit status {self.process.exitcode}"}
            found: dict[str, object] = json.loads(result.read_bytes())
            return found


def _train(kind: str, folder: Path) -> None:
    os.setpgid(0, 0)
    result, config = Path(folder, "result.json"), Path(folder, "config.json")
    sys.stderr = Path(os.devnull).open("w")
    try:
        config.write_text(json.dumps(tiny_config(kind)))
    except Exception as error:  # whatever transformers says of its own defaults
        result.write_text(json.dumps({"refused": f"no tiny configuration of its class's defaults: {_line(error)}"}))
        return
    found = stock_worker.prepared(str(config))
    if isinstance(found, str):
        result.write_text(json.dumps({"refused": found}))
        return
    try:
        run_worker("stock_worker", [str(config), str(result)], 2, "fork")
    except AssertionError as error:
        last = [line for line in str(error).splitlines() if re.match(r"[\w.]+(Error|Exception|Interrupt)?: ", line)]
        result.write_text(json.dumps({"fault": (last or ["?"])[-1][:300], "trace": str(error)[-3000:]}))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="types to try; default: all")
    parser.add_argument("--out", type=Path, default=Path("results/parity/types.json"), help="what was seen so far")
    parser.add_argument("--jobs", type=int, default=2, help="types at a time; each has two ranks, which often wait")
    parser.add_argument("--record", action="store_true", help="write docs/models.json")
    asked = parser.parse_args()
    torch._dynamo.config.suppress_errors = False
    sys.exit(min(1, main(asked.types or list(TYPES), asked.out, jobs=asked.jobs, record=asked.record)))
