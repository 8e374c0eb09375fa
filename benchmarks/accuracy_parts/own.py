"""Random plans and the searched one on this machine: predicted first, measured afterwards.

The model is the demo's, the profile is measured now (or given), every plan of the draw that the cost model prices and
that fits the devices is taken. Plans are drawn before any of them is measured, and the profile is of probes that none
of them is. Profile and plans are measured in turns, some rounds of each: the speed of a shared machine drifts by a
third within the hour, and so both see it all.
"""

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from accuracy_parts.commands import made, run, write_json_document
from accuracy_parts.draws import random_plan
from accuracy_parts.figures import Compared, spearman

from shardwright.io import BadInput, read_document, write_document
from shardwright.models.registry import read_presets
from shardwright.types import Cluster, Estimate, Measurement, Model, Plan, PlanMeasurement, Plans
from shardwright.types.model_profile import read_model_profile
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import Profiles, read_profiles
from shardwright_search.cost_model.time_model import TimeModel
from shardwright_train.models.support import check_supported

__all__ = ["Inputs", "Round", "compared", "prepare", "rounds", "verdict"]

BATCH, LENGTH = 16, 128
KINDS = {
    "sequence_parallel": ["none", "megatron", "ulysses"],
    "recompute": ["none", "full", "selective"],
}
PROBES = {"tp_sizes": [1, 2], "micro_batch_sizes": [1, 2, 4, 8, 16], "layers": [1, 3]}
DEVICES = {"device": "cpu", "devices_per_node": 2, "memory_bytes": 2 * 2**30}
CHOSEN = "chosen"
TIME_MODEL = TimeModel.BATCH
"""Lines through the points of a profile: they even out the noise of a shared machine."""
_MOST_DRAWS_PER_PLAN = 200


class Inputs(NamedTuple):
    """Files of what is planned for."""

    model: Path
    cluster: Path
    hardware: Path


class Round(NamedTuple):
    """A profile, and what the plans took right after it was measured."""

    profile: Path
    measurement: Path


def prepare(work: Path, root: Path, hardware: Path | None) -> Inputs:
    """Describe the demo's model and measure the links, if not given; what lies in `work` already is taken as it is."""
    write_json_document(work / "model" / "config.json", None, **read_presets()["llama-2m"].config)
    nodes = [{"node_type": "cpu", "count": 1}]
    found = Inputs(
        work / "model.json",
        write_json_document(
            work / "cluster.json", "cluster", name="two-cpus", nodes=nodes, node_types={"cpu": DEVICES}
        ),
        hardware or work / "hardware.h5",
    )
    made(found.model, "shardwright", "train", "describe", work / "model", "--name", "demo", "--sequence-length", LENGTH)
    made(found.hardware, "shardwright", "profile", "hardware", "--cluster", found.cluster, "--time-budget", 60)
    return found


def rounds(
    work: Path, inputs: Inputs, profile: Path | None, count: int, seed: int, settings: dict[str, Any], number: int
) -> Iterator[Round]:
    """Measure the model, if it was not, draw plans and search one, measure them; then all but the draw again.

    The searched plan is the first of each measurement. `settings` are the options of `shardwright train measure`.
    """
    plans = work / f"plans-{seed}-{count}.json"
    for i in range(1, number + 1):
        found = Round(profile or _profiled(work, inputs, settings, i), work / f"measured-{seed}-{count}-{i}.json")
        if not plans.exists():
            every = (_searched(work, inputs, found.profile), *_drawn(inputs, found.profile, count, seed))
            write_document(plans, Plans(plans=every))
        _measure(plans, settings, found.measurement)
        yield found


def _profiled(work: Path, inputs: Inputs, settings: dict[str, Any], number: int) -> Path:
    described = write_json_document(work / "settings.json", "profile_settings", **PROBES, **KINDS)
    probes, taken, profile = (
        work / "probes.json",
        work / f"probes-{number}.measured.json",
        work / f"profile-{number}.h5",
    )
    run("shardwright", "profile", "probes", "--model", inputs.model, "--cluster", inputs.cluster,
        "--node-type", "cpu", "--settings", described, "--out", probes)  # fmt: skip
    _measure(probes, settings, taken)
    run("shardwright", "profile", "fit", "--measurements", taken, "--out", profile)
    return profile


def _measure(plans: Path, settings: dict[str, Any], out: Path) -> None:
    made(
        out,
        "shardwright",
        "train",
        "measure",
        plans,
        *(w for name, value in settings.items() for w in (f"--{name}", value)),
    )


def compared(found: Sequence[Round], inputs: Inputs) -> list[Compared]:
    """Step time in s of every plan, and memory in bytes of every rank: over all rounds the medians, and the most."""
    profiles = [read_profiles([inputs.hardware], [one.profile]) for one in found]
    taken = zip(*(read_document(one.measurement, Measurement).plans for one in found), strict=True)
    return [row for plans in taken for row in _rows(plans, profiles)]


def _estimate(plan: Plan, profiles: Profiles) -> Estimate:
    return evaluate(plan, profiles, cost_model_of(plan, profiles, TIME_MODEL)).estimate


def verdict(rows: Sequence[Compared]) -> dict[str, float]:
    """Rank correlation of predicted with measured step times, and how far the searched plan is from the best."""
    times = [row for row in rows if row.set == "own plans, time"]
    best = min(row.measured for row in times)
    chosen = next(row.measured for row in times if row.what == CHOSEN)
    return {
        "spearman": spearman([row.predicted for row in times], [row.measured for row in times]),
        "chosen_over_best_measured": chosen / best,
    }


def _rows(found: Sequence[PlanMeasurement], profiles: Sequence[Profiles]) -> Iterator[Compared]:
    plan = found[0].plan
    estimates = [_estimate(plan, each) for each in profiles]
    shape = "1 pipeline stage" if len(plan.stages) == 1 else f"{len(plan.stages)} pipeline stages"
    raw_s = median(step_s for one in found for step_s in one.step_times_s)
    # Each round's steps at the speed that its profile's probes met.
    slowdowns = [one.slowdown(each.reference_s) for one, each in zip(found, profiles, strict=True)]
    time_s = median(s / slow for one, slow in zip(found, slowdowns, strict=True) for s in one.step_times_s)
    predicted_s = median(estimate.simulated_step_time_s for estimate in estimates)
    yield Compared("own plans, time as the clock showed it", plan.name, raw_s, predicted_s)
    for name in ("own plans, time", f"own plans, time, {shape}"):
        yield Compared(name, plan.name, time_s, predicted_s)
    for ranks in zip(*(one.ranks for one in found), strict=True):
        held = max(rank.memory.peak_bytes + rank.memory.process_bytes for rank in ranks)
        counted = max(estimate.stages[ranks[0].stage].memory_bytes for estimate in estimates)
        yield Compared("own plans, memory of every rank", f"{plan.name} rank {ranks[0].rank}", held, counted)


def _searched(work: Path, inputs: Inputs, profile: Path) -> Plan:
    search = write_json_document(
        work / "search.json",
        "search",
        name=CHOSEN,
        global_batch_size=BATCH,
        schedules=["gpipe", "1f1b", "interleaved_1f1b"],
        time_model=str(TIME_MODEL),
        **_profiled_kinds(profile),
    )
    plan = work / f"{CHOSEN}.json"
    run("shardwright", "plan", "--cluster", inputs.cluster, "--model", inputs.model, "--hardware",
        inputs.hardware, "--profile", profile, "--search", search, "--out", plan)  # fmt: skip
    return read_document(plan, Plan)


def _profiled_kinds(profile: Path) -> dict[str, list[str]]:
    """The kinds of sequence parallelism and recomputation that a profile has points of."""
    layers = read_model_profile(profile).layers
    return {name: [kind for kind in KINDS[name] if kind.encode() in layers[name]] for name in KINDS}


def _drawn(inputs: Inputs, profile: Path, count: int, seed: int) -> list[Plan]:
    """Different plans that are priced and fit; why others were not taken is printed."""
    model, cluster = read_document(inputs.model, Model), read_document(inputs.cluster, Cluster)
    profiles = read_profiles([inputs.hardware], [profile])
    draw, known, refused = random.Random(seed), set[str](), Counter[str]()
    found: list[Plan] = []
    for _ in range(_MOST_DRAWS_PER_PLAN * count):
        if len(found) == count:
            break
        plan = random_plan(model, cluster, BATCH, draw, f"plan {len(found) + 1}")
        if (decision := _decision(plan)) in known:
            continue
        known.add(decision)
        if (problem := _problem(plan, profiles)) is None:
            found.append(plan)
        else:
            refused[problem] += 1
    for problem, times in refused.most_common():
        print(f"not taken, {times} times: {problem}", file=sys.stderr)
    if len(found) < count:
        sys.exit(f"only {len(found)} of {count} plans are priced and fit")
    return found


def _decision(plan: Plan) -> str:
    return str([getattr(plan, field) for field in Plan.__struct_fields__ if field not in ("name", "model", "cluster")])


def _problem(plan: Plan, profiles: Profiles) -> str | None:
    """Why a plan cannot be run, priced or held in memory."""
    try:
        check_supported(plan, Path("plan"))
        estimate = _estimate(plan, profiles)
    except BadInput as error:
        return str(error.args[1])
    least = min(node.memory_bytes for node in plan.cluster.node_types.values())
    return "it takes more memory than a device has" if estimate.memory_bytes > least else None
