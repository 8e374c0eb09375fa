"""Everything that only a GPU can show, in one command: `make gpu`. See docs/gpu.md.

    python benchmarks/gpu.py                            # all parts; what was done before is not done again
    python benchmarks/gpu.py parity throughput          # these parts
    python benchmarks/gpu.py --rehearse /tmp/rehearsal  # every part at a tiny size on the processor: no result

Each part's result is kept in --work as it ends, so that a second start goes on: it counts for the same device, versions
and sources. When all parts are there, one JSON and one page are written to --out. Exit codes: 0 all parts ended well,
2 no NVIDIA GPU (nothing is written), 4 a part failed.
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from gpu_parts import record
from gpu_parts.page import page_of
from gpu_parts.parts import PARTS, part_named, run_part, run_rank
from gpu_parts.setting import Setting, setting_of_gpus, setting_of_rehearsal

from shardwright_formats.io import BadInput, RunFailed, one_line_errors, write_bytes

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the parts that are not yet there, and write them down."""
    asked = _arguments()
    if asked.rank:
        run_rank(asked.rank)
        return
    with one_line_errors():
        chosen = asked.parts or list(PARTS)
        if odd := [name for name in chosen if name not in PARTS]:
            raise BadInput("parts", f"there is no {odd[0]!r}", f"choose from {', '.join(PARTS)}")
        if asked.rehearse is None:
            setting = setting_of_gpus(asked.work, ROOT / "config" / "reference")
            out = asked.out
        else:
            setting, out = setting_of_rehearsal(asked.rehearse), asked.rehearse
        failed = [name for name in chosen if not _done(name, setting)]
        _write(setting, out)
        if failed:
            raise RunFailed(f"{', '.join(failed)} failed: see {setting.work}; the same command tries again")


def _done(name: str, setting: Setting) -> bool:
    """Run a part, unless its result is there; whether there is one in the end."""
    part = part_named(name, setting)
    if record.kept(setting, name) is not None:
        print(f"{name}: done before", flush=True)
        return True
    if setting.devices < part.least_devices:
        print(f"{name}: left out: it needs {part.least_devices} devices, {setting.devices} here", flush=True)
        return True
    print(f"{name}: {part.purpose}", flush=True)
    started = time.monotonic()
    try:
        result = run_part(part, setting)
    except RunFailed as error:
        print(f"{name}: failed after {time.monotonic() - started:.0f} s: {error}", flush=True)
        return False
    record.keep(setting, name, result, time.monotonic() - started)
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    return True


def _write(setting: Setting, out: Path) -> None:
    """One JSON and one page of all results that are there."""
    whole = record.together(setting, PARTS)
    if not whole["parts"]:
        return
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"gpu-{setting.slug}-{whole['date']}"
    write_bytes(stem.with_suffix(".json"), (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())
    write_bytes(stem.with_suffix(".md"), page_of(whole, PARTS).encode())
    print(f"written: {stem}.json and .md")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--work", type=Path, default=ROOT / "results" / "gpu", help="folder of what is done so far")
    parser.add_argument("--rehearse", type=Path, metavar="FOLDER", help="on the processor; writes into FOLDER alone")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    # So that what is running is ended with it.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    main()
    sys.exit(0)
