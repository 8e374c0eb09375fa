"""Random plans and the searched one on this machine: predicted first, measured afterwards.

The model is the demo's model. The profile is measured now, or given. Every drawn plan that the cost model prices and
that fits the devices is taken. Plans are drawn before any of them is measured, and none of them is a probe of the
profile. Profile and plans are measured alternately, in several rounds: the speed of a shared machine drifts by a third
within an hour, and this way it affects both.
"""

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from accuracy_parts.figures import Compared, spearman
from harness import made, run, write_json

from shardwright.io import BadInput, read_document, write_document
from shardwright.models.registry import read_presets
from shardwright.types import (
    EMBEDDING,
    HEAD,
    Cluster,
    DataParallel,
    Estimate,
    GradientReduction,
    LayerStrategy,
    Measurement,
    Model,
    PipelineStage,
    Plan,
    PlanMeasurement,
    Plans,
    Schedule,
    SequenceParallel,
    Strategy,
    misfit,
)
from shardwright.types.model_profile import read_model_profile
from shardwright.types.strategy import RECOMPUTE_WHOLE
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import Profiles, read_profiles
from shardwright_search.cost_model.time_model import TimeModel
from shardwright_train.models.support import check_supported

BATCH, LENGTH = 16, 128
KINDS = {
    "sequence_parallel": ["none", "megatron", "ulysses"],
    "recompute": ["none", "full", "selective"],
}
PROBES = {"tp_sizes": [1, 2], "micro_batch_sizes": [1, 2, 4, 8, 16], "layers": [1, 3]}
DEVICES = {"device": "cpu", "devices_per_node": 2, "memory_bytes": 2 * 2**30}
CHOSEN = "chosen"
TIME_MODEL = TimeModel.BATCH
"""Fitted lines instead of the points of a profile: they average out the noise of a shared machine."""
_MOST_DRAWS_PER_PLAN = 200


class Inputs(NamedTuple):
    """Files of the model, the cluster and its hardware."""

    model: Path
    cluster: Path
    hardware: Path


class Round(NamedTuple):
    """A profile, and the measurement of the plans right after it."""

    profile: Path
    measurement: Path


def prepare(work: Path, root: Path, hardware: Path | None) -> Inputs:
    """Describe the demo's model and measure the links if they are not given; files already in `work` are kept."""
    write_json(work / "model" / "config.json", None, **read_presets()["llama-2m"].config)
    nodes = [{"node_type": "cpu", "count": 1}]
    found = Inputs(
        work / "model.json",
        write_json(work / "cluster.json", "cluster", name="two-cpus", nodes=nodes, node_types={"cpu": DEVICES}),
        hardware or work / "hardware.h5",
    )
    made(found.model, "shardwright", "train", "describe", work / "model", "--name", "demo", "--sequence-length", LENGTH)
    made(found.hardware, "shardwright", "profile", "hardware", "--cluster", found.cluster, "--time-budget", 60)
    return found


def rounds(
    work: Path, inputs: Inputs, profile: Path | None, count: int, seed: int, settings: dict[str, Any], number: int
) -> Iterator[Round]:
    """Yield `number` rounds: measure the model's profile, unless `profile` is given, then the plans.

    The first round also draws `count` plans and searches one, which is the first of each measurement. `settings`: the
    options of `shardwright train measure`.
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
    described = write_json(work / "settings.json", "profile_settings", **PROBES, **KINDS)
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
    """Return the step time in s of every plan and the bytes of every rank: medians and maxima over all rounds."""
    profiles = [read_profiles([inputs.hardware], [one.profile]) for one in found]
    taken = zip(*(read_document(one.measurement, Measurement).plans for one in found), strict=True)
    return [row for plans in taken for row in _rows(plans, profiles)]


def _estimate(plan: Plan, profiles: Profiles) -> Estimate:
    return evaluate(plan, profiles, cost_model_of(plan, profiles, TIME_MODEL)).estimate


def verdict(rows: Sequence[Compared]) -> dict[str, float]:
    """Return the rank correlation of step times, and the searched plan's measured time over the best plan's."""
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
    # Times of each round are converted to the machine's speed during its profile's probes.
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
    search = write_json(
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
    """Return the kinds of sequence parallelism and recomputation for which a profile has points."""
    layers = read_model_profile(profile).layers
    return {name: [kind for kind in KINDS[name] if kind.encode() in layers[name]] for name in KINDS}


def _drawn(inputs: Inputs, profile: Path, count: int, seed: int) -> list[Plan]:
    """Return `count` different plans that are priced and fit; print why others were not taken."""
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
    """Return why a plan cannot be run, priced or held in memory, or None."""
    try:
        check_supported(plan, Path("plan"))
        estimate = _estimate(plan, profiles)
    except BadInput as error:
        return str(error.args[1])
    least = min(node.memory_bytes for node in plan.cluster.node_types.values())
    return "it takes more memory than a device has" if estimate.memory_bytes > least else None


# Random plans on a few ranks, drawn by seed from everything that a plan can express.


_MOST_RUNS = 4
"""Maximum number of runs of neighbouring layers with the same strategy in a plan."""


def random_plan(model: Model, cluster: Cluster, global_batch_size: int, draw: random.Random, name: str) -> Plan:
    """Return a random plan that can be run, but not always priced.

    All degrees and kinds are equally likely, and all schedules whose backward passes are not split.
    """
    devices, layers = cluster.num_devices, len(model.layers)
    pp_size = draw.choice([d for d in _divisors(devices) if d <= layers])
    width = devices // pp_size
    # No schedules that split backward passes: they are newer than the results, which name plans by their seeds.
    joint = [s for s in Schedule if not s.splits]
    schedule = draw.choice([s for s in joint if pp_size > 1 or s is Schedule.ONE_F_ONE_B])
    chunks = 2 if schedule is Schedule.INTERLEAVED_1F1B and layers >= 2 * pp_size else 1
    counts = [m for m in _divisors(global_batch_size) if (global_batch_size // m) % width == 0]
    if schedule is Schedule.INTERLEAVED_1F1B:
        counts = [m for m in counts if m % pp_size == 0]
    edges = [0, *sorted(draw.sample(range(1, layers), pp_size * chunks - 1)), layers]
    ranges = list(pairwise(edges))
    return Plan(
        name=name,
        model=model,
        cluster=cluster,
        global_batch_size=global_batch_size,
        num_microbatches=draw.choice(counts),
        schedule=schedule if chunks > 1 or schedule is not Schedule.INTERLEAVED_1F1B else Schedule.ONE_F_ONE_B,
        gradient_reduction=draw.choice(list(GradientReduction)),
        stages=tuple(
            PipelineStage(
                ranks=tuple(range(i * width, (i + 1) * width)),
                layers=tuple(ranges[chunk * pp_size + i] for chunk in range(chunks)),
            )
            for i in range(pp_size)
        ),
        embedding=_shardings(model, EMBEDDING, width, draw),
        head=_shardings(model, HEAD, width, draw),
        layers=_layers(model, width, draw),
    )


def _layers(model: Model, width: int, draw: random.Random) -> tuple[LayerStrategy, ...]:
    """Return the layers' strategies: consecutive layers of one type have the same strategy until a run ends."""
    count = len(model.layers)
    ends = sorted(draw.sample(range(1, count), draw.randint(0, min(_MOST_RUNS, count) - 1)))
    found: list[LayerStrategy] = []
    for number, kind in enumerate(model.layers):
        if found and number not in ends and found[-1].type == kind:
            found.append(found[-1])
            continue
        spread = _shardings(model, kind, width, draw)
        fields = {name: getattr(spread, name) for name in Strategy.__struct_fields__}
        found.append(LayerStrategy(**fields, type=kind, recompute=draw.choice(list(RECOMPUTE_WHOLE))))
    return tuple(found)


def _shardings(model: Model, kind: str, width: int, draw: random.Random) -> Strategy:
    tp_sizes = [
        tp_size for tp_size in _divisors(width) if misfit(model, kind, Strategy(tp_size=tp_size, dp_size=1)) is None
    ]
    tp_size = draw.choice(tp_sizes)
    dp_size = width // tp_size
    ways = [
        Strategy(tp_size=tp_size, dp_size=dp_size, data_parallel=sharded, sequence_parallel=split)
        for split in (SequenceParallel if tp_size > 1 else (SequenceParallel.NONE,))
        # Under Ulysses all ranks of the stage have the same parameters, which can be sharded over them.
        for sharded in (DataParallel if dp_size > 1 or split is SequenceParallel.ULYSSES else (DataParallel.DDP,))
    ]
    return draw.choice([way for way in ways if misfit(model, kind, way) is None])


def _divisors(number: int) -> Sequence[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
