"""python tests/null_gpu [PART ...] [--families NAME ...]: plans on a CUDA device that computes nothing.

What a GPU would refuse shows here without one: shapes, formats, alignment, kernels that are missing, streams and events
in an order that PyTorch refuses. What it would compute does not. See docs/testing.md.
"""

import os
import sys
import time
import traceback
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "train")]
# Memory that is taken anew is 0, and so is what a kernel should have written there: never the rests of other numbers.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch  # noqa: E402
from compared_families import FAMILIES  # noqa: E402
from drawn import DEVICE, PARTS, PRECISIONS, on_null_device  # noqa: E402
from restored import restored  # noqa: E402
from steps import train  # noqa: E402

from shardwright.models.context import plan_obstacle  # noqa: E402
from shardwright.types import Plan  # noqa: E402

CHECKPOINT = "checkpoint"
NAMES = (*PARTS, CHECKPOINT)


def main() -> int:
    """Run the parts, one line each, and return 1 if anything failed."""
    parser = ArgumentParser(prog="python tests/null_gpu")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(NAMES)}; all by default")
    parser.add_argument("--families", nargs="+", default=FAMILIES, metavar="NAME")
    asked = parser.parse_args()
    if unknown := {*asked.parts} - {*NAMES}:
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    if not torch.cuda.is_available() or torch.cuda.get_device_name() != DEVICE:
        parser.error("there is no null device: call `make null-gpu`, or `. tests/null_gpu/environment.sh` first")
    failures = 0
    for part in asked.parts or NAMES:
        began, failed = time.monotonic(), list[str]()
        done = _restored(failed) if part == CHECKPOINT else _trained(list(PARTS[part](asked.families)), failed)
        end = f", {len(failed)} FAILED" if failed else ""
        print(f"{part}: {done}{end}, {time.monotonic() - began:.0f} s", flush=True)
        failures += len(failed)
    return 1 if failures else 0


def _trained(plans: Sequence[Plan], failed: list[str]) -> str:
    """Train the first and the last rank of plans in each precision; return how many."""
    ran, refused = Counter[str](), 0
    for precision, drawn in product(PRECISIONS, plans):
        plan = on_null_device(drawn, precision)
        if plan_obstacle(plan) is not None:
            refused += 1
            continue
        for rank in sorted({0, plan.world_size - 1}):
            name = f"{drawn.name.removesuffix(' float64')}, rank {rank}, {precision.compute}"
            if (attention := _tried(name, partial(train, plan, rank), failed)) is not None:
                ran[attention] += 1
    kernels = ", ".join(f"{count} with {kernel}" for kernel, count in sorted(ran.items()))
    left_out = f", {refused} times refused on GPUs" if refused else ""
    return f"{len(plans)} plans, {ran.total()} ranks trained ({kernels}){left_out}"


def _restored(failed: list[str]) -> str:
    return _tried(CHECKPOINT, restored, failed) or "nothing done"


def _tried(name: str, call: Callable[[], str], failed: list[str]) -> str | None:
    """Return what a call returns; print its error in one line, with the places in this repository and PyTorch."""
    try:
        return call()
    except Exception as error:  # whatever it is, the others are tried
        trace = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in trace if "/src/shardwright" in frame.filename]
        places = " in ".join(f"{Path(f.filename).name}:{f.lineno}" for f in (trace[-1], *own[-1:]))
        failed.append(name)
        print(f"  FAILED {name}: {type(error).__name__} at {places}: {' '.join(str(error).split())[:300]}", flush=True)
        return None


if __name__ == "__main__":
    sys.exit(main())
