"""`make parity`: many random plans of every family on 2, 4 and 8 ranks against one process, in float64.

One launch trains a plan of each family. On 4 and 8 ranks the first of four launches has plans of each family with
pipeline stages of unequal width, too. Each plan of a family with experts is trained with those shared out as well; a
third of the plans with another optimizer, a quarter with a chunked loss, as many with offloaded layers, half with split
backward passes, and those of two stages with split passes of several chunks. Two models predict further tokens.

python tests/train/run_parity.py [PLANS_PER_FAMILY_ON_2 ON_4 ON_8]
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace
from offloaded import with_moved_activations, with_offload
from random_plans import UNEVEN, random_plan, uneven_plan
from several_chunks import SCHEDULES, in_chunks
from shared_experts import with_shared_experts
from split_plans import split
from stock_optimizers import with_optimizers
from tiny_models import CONFIGS, tiny

from shardwright.io import RanksLost, write_document
from shardwright.launch.ranks import launch
from shardwright.models.mtp import with_mtp
from shardwright.types import Model, Plan, Plans, Schedule
from shardwright_train.models.base import family_named

__all__ = ["TOLERANCE", "Start", "compare", "launched"]

TOLERANCE = 1e-10
PLANS = (4, 4, 1)
WORLDS = (2, 4, 8)

Errors = dict[str, dict[str, float]]
Start = Callable[[str, Sequence[str], int], None]
"""Runs a worker, by its module's name, with arguments on a number of ranks."""


def launched(worker: str, arguments: Sequence[str], world_size: int) -> None:
    """Start as users' runs are."""
    script = Path(__file__).with_name(f"{worker}.py")
    launch([sys.executable, str(script), *arguments], range(world_size), world_size)


def compare(plans: Sequence[Plan], folder: Path, start: Start, mutations: Sequence[str] = ()) -> Errors:
    """Largest error of loss, gradients, norm and parameters after three steps, by plan; one launch for all.

    The last plan is compared once more under each mutation, under the mutation's name.
    """
    plans_file, result = folder / "plans.json", folder / "errors.json"
    write_document(plans_file, Plans(plans=tuple(plans)))
    start("parity_worker", [str(plans_file), str(result), *mutations], plans[0].world_size)
    errors: Errors = json.loads(result.read_bytes())
    return errors


def main(counts: Sequence[int]) -> int:
    """Compare, say what was seen after each launch, and return the number of plans that differ."""
    models = [*(tiny(family) for family in CONFIGS), with_mtp(tiny("deepseek_v3"), 1), with_mtp(tiny("llama"), 2)]
    trained, different, worst = 0, 0, 0.0
    for size, count in zip(WORLDS, counts, strict=True):
        for number in range(count):
            started = time.monotonic()
            plans = _plans(models, number, size)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    errors = compare(plans, Path(folder), launched)
            except RanksLost as error:  # the other launches are tried all the same
                print(
                    f"{size} ranks, {number + 1} of {count}: none of {len(plans)} plans is compared: {error}",
                    flush=True,
                )
                trained, different = trained + len(plans), different + len(plans)
                continue
            wrong = {name: found for name, found in errors.items() if not max(found.values()) <= TOLERANCE}
            largest = max(max(found.values()) for found in errors.values())
            seen = f"{len(errors)} plans, {len(wrong)} differ, largest error {largest:.1e}"
            print(f"{size} ranks, {number + 1} of {count}: {seen}, {time.monotonic() - started:.0f} s", flush=True)
            for name, found in wrong.items():
                print(f"  {name}: {found}")
            trained, different, worst = trained + len(errors), different + len(wrong), max(worst, largest)
    print(f"{trained} plans of {len(models)} models, {different} differ, largest error {worst:.1e}")
    return different


def _plans(models: Sequence[Model], number: int, size: int) -> list[Plan]:
    # Other numbers than those of the tests.
    plans = [random_plan(model, 1000 + number, size) for model in models]
    if size in UNEVEN and number % 4 == 0:
        plans += [uneven_plan(model, 1000 + number, size) for model in models]
    experts = [plan for plan in plans if family_named(plan.model.family, "test").facts.experts is not None]
    chunked = [replace(plan, name=f"chunks {plan.name}", loss_chunks=2 + number % 3) for plan in plans[number % 4 :: 4]]
    optimizers = with_optimizers(plans[number % 3 :: 3], first=number)
    shared = [with_shared_experts(plan, number) for plan in experts]
    halves = [plan for plan in map(split, plans[number % 2 :: 2]) if plan.schedule.splits]
    halves += [replace(plan, name=f"H2 {plan.name}", schedule=Schedule.ZERO_BUBBLE_H2) for plan in halves[::4]]
    chunks = [in_chunks(plan, SCHEDULES[(i + number) % len(SCHEDULES)]) for i, plan in enumerate(_halved(plans))]
    offloaded = with_offload(
        [*plans[number % 4 :: 4], *optimizers[::2], *shared[::2], *halves[::4], *chunks[::4]], number
    )
    moved = with_moved_activations([*plans[(number + 2) % 4 :: 4], *shared[1::2], *optimizers[1::4]], number)
    drawn = [*plans, *halves, *chunks, *shared, *chunked, *optimizers, *offloaded, *moved]
    return [replace(plan, name=f"{i} {plan.name}") for i, plan in enumerate(drawn)]


def _halved(plans: Sequence[Plan]) -> list[Plan]:
    """Those of two stages of equal width."""
    return [plan for plan in plans if [len(each.ranks) for each in plan.stages] == [plan.world_size // 2] * 2]


if __name__ == "__main__":
    sys.exit(min(1, main([int(argument) for argument in sys.argv[1:]] or PLANS)))
