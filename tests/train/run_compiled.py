"""`make compiled`: a random plan of every family on 2 ranks, compiled by torch.compile's own backend, in float32.

Each is held against one process that compiles nothing. Parameters are printed and not held: Adam divides by gradients
however small they are, so that they say little of float32's rounding.
"""

import sys
import tempfile
import time
from pathlib import Path

import msgspec
from random_plans import random_plan
from run_parity import compare, launched
from tiny_models import CONFIGS, tiny

TOLERANCE = 1e-5
HELD = ("loss", "gradient", "norm")


def main() -> int:
    """Compare, say what was seen, and return the number of plans that differ."""
    started = time.monotonic()
    plans = [random_plan(tiny(family), 2000, 2, "float32") for family in CONFIGS]
    plans = [msgspec.structs.replace(plan, name=f"inductor {plan.name}", compile=True) for plan in plans]
    with tempfile.TemporaryDirectory() as folder:
        errors = compare(plans, Path(folder), launched)
    for name, found in errors.items():
        print(f"{name}: {', '.join(f'{what} {error:.1e}' for what, error in found.items())}")
    wrong = [name for name, found in errors.items() if max(found[what] for what in HELD) > TOLERANCE]
    took = time.monotonic() - started
    print(f"{len(errors)} compiled plans, {len(wrong)} differ by more than {TOLERANCE}, {took:.0f} s")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(min(1, main()))
