"""Checks that need a GPU, in rows that are each tried separately: see docs/gpu.md and run.sh.

    bash benchmarks/gpu_kit/run.sh                          # on a GPU, for 8 minutes
    bash benchmarks/gpu_kit/run.sh --only S3 --limit 150    # one step
    bash benchmarks/gpu_kit/run.sh --rehearse --limit 0     # on the processor at a tiny size: no result

Exit codes: 0 every row succeeded, 2 no NVIDIA GPU (nothing is written), 4 a row failed or was not reached.
"""

import argparse
import gc
import json
import math
import os
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from gpu_kit import compile_ahead
from gpu_kit.prepare import PREDICTIONS
from gpu_kit.rows import Results, Row, page_of, tried
from gpu_kit.setting import ROOT, Setting, setting_of_gpus, setting_of_rehearsal
from gpu_kit.start import settle_allocator
from gpu_kit.steps import STEPS, Step

from shardwright.io import BadInput, RunFailed, one_line_errors, write_bytes

_LIMIT_S = 480.0
_LEFT_FOR_THE_END_S = 8.0
"""Seconds of a limit that are reserved for writing the results at the end."""


def main() -> None:
    """Run the steps, and write the results after each row."""
    asked = _arguments()
    with one_line_errors():
        chosen = [STEPS[name] for name in asked.only] if asked.only else list(STEPS.values())
        if asked.rehearse:
            setting = setting_of_rehearsal(asked.work, asked.carried / "rehearsal")
        else:
            carried = asked.carried / "null" if asked.null else asked.carried
            setting = setting_of_gpus(asked.work, carried, null=asked.null)
        _check_prepared(setting)
        asked.work.mkdir(parents=True, exist_ok=True)
        results = Results(asked.out / "results.json", setting, keep_failed=asked.ends_at is not None)
        limit = asked.limit if asked.limit is not None else 0.0 if setting.tiny else _LIMIT_S
        ends_at = asked.ends_at or (time.monotonic() + limit if limit else math.inf)
        for step in chosen:
            if setting.devices < step.least_devices:
                print(f"{step.name}: left out: it needs {step.least_devices} devices", flush=True)
                continue
            _run(step, setting, results, ends_at)
            write_bytes(asked.out / "report.md", page_of(results, STEPS).encode())
            _keep_traces(setting, asked.out)
        compile_ahead.stop()
        wrong = [*results.failed, *results.not_reached]
        if wrong:
            raise RunFailed(f"{len(results.failed)} rows failed, {len(results.not_reached)} were not reached")


def _check_prepared(setting: Setting) -> None:
    """Raise BadInput if the files that `prepare` makes do not exist, or are for another device."""
    file = setting.carried / PREDICTIONS
    if not file.is_file():
        raise BadInput(file, "is not there", "run make gpu-kit first, or make gpu on the machine itself")
    if (device := json.loads(file.read_bytes())["device"]) != setting.device:
        raise BadInput(file, f"is for {device}, this is {setting.device}", "run make gpu, which prepares it for here")


def _run(step: Step, setting: Setting, results: Results, ends_at: float) -> None:
    """Try the rows of a step that have no result yet, while time is left."""
    began = time.monotonic()
    step_ends_at = ends_at if math.isinf(ends_at) else min(began + step.at_most_s, ends_at - _LEFT_FOR_THE_END_S)
    print(f"{step.name}: {step.title}", flush=True)
    with ExitStack() as stack:
        rows: list[Row] = import_module(f"gpu_kit.{step.module}").rows(setting, stack)
        # Imported objects need not be examined by the garbage collection after each row.
        gc.collect()
        gc.freeze()
        todo = [row for row in rows if not results.has(step.name, row.name)]
        if step_ends_at - began < step.least_s:
            results.leave(step.name, step.title, [row.name for row in todo])
            return
        while todo and (left_s := step_ends_at - time.monotonic()) > 0:
            row = todo.pop(0)
            found = tried(row, setting, left_s)
            results.add(step.name, step.title, row.name, found)
            print(f"  {row.name}: {found.get('error', 'there')} ({found['row_s']:.1f} s)", flush=True)
            if "error" in found and setting.on_cuda and not _device_answers():
                _begin_anew(ends_at)
        results.leave(step.name, step.title, [row.name for row in todo])
    print(f"{step.name}: {time.monotonic() - began:.0f} s", flush=True)


def _device_answers() -> bool:
    """Return whether CUDA still works in this process: after some faults it fails until the process ends."""
    import torch

    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


def _begin_anew(ends_at: float) -> None:
    """Replace this process by one that continues with the next row."""
    print("the device does not answer this process any more: it begins anew", flush=True)
    compile_ahead.stop()
    words = [word for word in sys.argv[1:] if not word.startswith("--ends-at=")]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "gpu_kit.kit", *words, f"--ends-at={ends_at}"])


def _keep_traces(setting: Setting, out: Path) -> None:
    for trace in (setting.work / "out").glob("*"):
        shutil.copy(trace, out / trace.name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json and report.md")
    parser.add_argument("--work", type=Path, required=True, help="folder of everything else that is made")
    parser.add_argument("--carried", type=Path, default=ROOT / ".kit", help="folder of what was prepared")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--limit", type=float, help="seconds, by default 480 on a GPU; 0: as long as it takes")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--rehearse", action="store_true", help="on the processor at a tiny size: no result")
    kind.add_argument("--null", action="store_true", help="on a null device at a tiny size: no result")
    parser.add_argument("--ends-at", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    # So that processes that it has started are ended with it.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    settle_allocator()
    main()
    sys.exit(0)
