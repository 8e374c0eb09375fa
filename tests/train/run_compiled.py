"""`make compiled`: a random plan of every family on 2 ranks, compiled by torch.compile's own backend, in float32.

Each is held against one process that compiles nothing; where the same plan, not compiled, is further off than the
tolerance, by float32's rounding alone, the compiled one may be twice as far off as that. Parameters are printed and not
held: Adam divides by gradients however small they are, so that they say little of float32's rounding. Two are
evaluated, too, in float64, in which the compiler's own arithmetic is off by some 1e-10; its graphs under `aot_eager`
are off by 1e-15.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from random_plans import random_plan
from run_parity import Errors, compare, launched
from tiny_models import CONFIGS, tiny

from shardwright.io import write_document
from shardwright.types import Plan, Plans

TOLERANCE, EVALUATED = 1e-5, 1e-8
HELD = ("loss", "gradient", "norm")


def main() -> int:
    """Compare, say what was seen, and return the number of plans that differ."""
    started = time.monotonic()
    plain = [random_plan(tiny(family), 2000, 2, "float32") for family in CONFIGS]
    plans = [_compiled(plan) for plan in plain]
    with tempfile.TemporaryDirectory() as folder:
        errors = compare([*plain, *plans], Path(folder), launched)
        evaluated = _evaluated(Path(folder))
    for name, found in (errors | evaluated).items():
        print(f"{name}: {', '.join(f'{what} {error:.1e}' for what, error in found.items())}")
    pairs = [(errors[as_is.name], errors[plan.name]) for as_is, plan in zip(plain, plans, strict=True)]
    wrong = [plan.name for plan, pair in zip(plans, pairs, strict=True) if _differs(*pair)]
    wrong += [name for name, found in evaluated.items() if max(found.values()) > EVALUATED]
    told = f"differ by more than {TOLERANCE}, evaluated by more than {EVALUATED}"
    count, took = len(plans) + len(evaluated), time.monotonic() - started
    print(f"{count} compiled plans, {len(wrong)} {told}, {took:.0f} s")
    return len(wrong)


def _differs(plain: dict[str, float], compiled: dict[str, float]) -> bool:
    return any(compiled[name] > max(TOLERANCE, 2 * plain[name]) for name in HELD)


def _compiled(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, name=f"inductor {plan.name}", compile=True)


def _evaluated(folder: Path) -> Errors:
    """Largest errors of an evaluation between steps, and of the training that goes on."""
    plans = [_compiled(random_plan(tiny(family), 40, 2)) for family in ("llama", "t5")]
    write_document(folder / "plans.json", Plans(plans=tuple(plans)))
    launched("evaluation_worker", [str(folder / "plans.json"), str(folder / "evaluated.json")], 2)
    errors: Errors = json.loads((folder / "evaluated.json").read_bytes())
    return errors


if __name__ == "__main__":
    sys.exit(min(1, main()))
