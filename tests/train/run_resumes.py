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
from forked_ranks import run_worker
from random_plans import random_plan, uneven_plan
from run_parity import Start
from tiny_models import tiny

from shardwright.io import write_document
from shardwright.types import Plan, Plans
from shardwright_train.checkpoints.folders import complete_checkpoints

TOLERANCE = 1e-11
FAMILIES = ("llama", "gpt2")
WORLDS = (2, 4, 8)
_BATCH = 48
"""Which all widths divide."""

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
    drawn += [uneven_plan(model, world // 4, world)] if world > 2 else []
    return [msgspec.structs.replace(plan, name=f"{plan.name} of {world}", global_batch_size=_BATCH) for plan in drawn]


def main(count: int) -> int:
    """Resume, say what was seen, and return how many differ."""
    found: list[Resume] = []
    progress = _Progress(2 * len(FAMILIES) * len(WORLDS))
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            plans = {world: plans_of(family, world, count) for world in WORLDS}
            told: dict[str, list[float]] = {}
            for world, own in plans.items():
                told |= saved(Path(folder), run_worker, own[:1])
                progress.say(f"{family}: saved on {world} ranks")
            for world, own in plans.items():
                ended = list(resumed(Path(folder), run_worker, own, told))
                found += ended
                worst = max(one.error for one in ended)
                progress.say(f"{family}: {len(ended)} resumes on {world} ranks, largest difference {worst:.1e}")
    different = [one for one in found if not one.error < TOLERANCE]
    for one in different:
        print(f"{one.saved_by} -> {one.resumed_by}: {one.error:.1e}")
    others = sum(one.saved_by != one.resumed_by for one in found)
    worst = max(one.error for one in found)
    told_s = f"largest difference {worst:.1e}; {time.monotonic() - progress.began_s:.0f} s"
    print(f"{len(found)} resumes, {others} of them under another plan, {len(different)} differ; {told_s}")
    return len(different)


class _Progress:
    """Says how far the launches have come, and how long the rest takes were it as fast."""

    def __init__(self, launches: int) -> None:
        self.began_s, self._launches, self._done = time.monotonic(), launches, 0

    def say(self, what: str) -> None:
        """One more launch has ended."""
        self._done += 1
        gone_s = time.monotonic() - self.began_s
        left_s = gone_s / self._done * (self._launches - self._done)
        print(f"{self._done} of {self._launches}: {what}; {gone_s:.0f} s gone, about {left_s:.0f} s left", flush=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 2) > 0)
