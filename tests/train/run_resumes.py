"""`make resumes`: what a plan saves, plans on other numbers of ranks go on from; two families, in float64.

python tests/train/run_resumes.py [PLANS_OF_EACH_FAMILY_AND_NUMBER_OF_RANKS]
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from random_plans import random_plan, uneven_plan
from run_parity import Start, launched
from tiny_models import tiny

from shardwright_formats.io.json import write_document
from shardwright_formats.types.plan import Plan, Plans
from shardwright_train.checkpoints.folders import complete_checkpoints

TOLERANCE = 1e-11
FAMILIES = ("llama", "gpt2")
WORLDS = (2, 4, 8)
_BATCH = 16

Told = Mapping[str, list[float]]
"""Loss and gradient norm of two steps, by plan."""


class Resume(NamedTuple):
    """A plan that went on from what another saved."""

    saved_by: str
    resumed_by: str
    error: float
    """The largest relative difference of what both tell of the same steps."""


def saved(folder: Path, start: Start, plans: Sequence[Plan]) -> Told:
    """What plans tell of the two steps after the one that each saved, in the folder of its name."""
    return _launched(folder, start, plans)


def resumed(folder: Path, start: Start, plans: Sequence[Plan], told: Told) -> Iterator[Resume]:
    """Each of the plans going on from each that has saved; one launch for all."""
    checkpoints = [str(complete_checkpoints(folder / name)[0]) for name in told]
    for names, outcome in _launched(folder, start, plans, *checkpoints).items():
        before, after = names.split("\n")
        pairs = zip(outcome, told[before], strict=True)
        yield Resume(before, after, max(abs(one - other) / abs(other) for one, other in pairs))


def _launched(folder: Path, start: Start, plans: Sequence[Plan], *checkpoints: str) -> Told:
    plans_file, result = folder / "plans.json", folder / "told.json"
    write_document(plans_file, Plans(plans=tuple(plans)))
    start("checkpoint_worker", [str(plans_file), str(folder), str(result), *checkpoints], plans[0].world_size)
    told: Told = json.loads(result.read_bytes())
    return told


def plans_of(family: str, world: int, count: int) -> list[Plan]:
    """Plans for one model and batch, one more with stages of unequal width; tp 4 and 8 do not divide the vocabulary."""
    model = tiny(family, vocab_size=66)
    drawn = [random_plan(model, 2000 + number, world) for number in range(count)]
    uneven = [uneven_plan(model, number, world) for number in range(8)] if world > 2 else []
    drawn += [plan for plan in uneven if plan.global_batch_size == _BATCH][:1]
    return [msgspec.structs.replace(plan, name=f"{plan.name} of {world}") for plan in drawn]


def main(count: int) -> int:
    """Resume, say what was seen, and return how many differ."""
    found: list[Resume] = []
    began = time.monotonic()
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            plans = {world: plans_of(family, world, count) for world in WORLDS}
            told: dict[str, list[float]] = {}
            for own in plans.values():
                told |= saved(Path(folder), launched, own[:1])
            for own in plans.values():
                found += resumed(Path(folder), launched, own, told)
    different = [one for one in found if not one.error < TOLERANCE]
    for one in different:
        print(f"{one.saved_by} -> {one.resumed_by}: {one.error:.1e}")
    worst = max(one.error for one in found)
    told_s = f"largest difference {worst:.1e}; {time.monotonic() - began:.0f} s"
    print(f"{len(found)} resumes under another plan, {len(different)} differ; {told_s}")
    return len(different)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 3) > 0)
