"""A plan that is searched for two node types, measured beside the even plan, on two kinds of nodes that are made up.

    python benchmarks/mixed_nodes.py [--work DIR] [--rounds 3] [--slower 2] [--steps 9] [--out FILE.json]

A cluster of two nodes of one rank each, both on this machine: of the second one what its rank computes takes `--slower`
times as long (`cpu/2`). Links of the cluster are measured, and the model on each node type, with two ranks of it, since
the ranks of this machine share its memory. A plan for both is searched, and the same plan with as many layers on the
one as on the other is predicted with the same profiles. Then both are measured in turns, in some rounds. Every file is
kept in `--work`, and what lies there is taken as it is.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
from accuracy_parts import commands
from accuracy_parts.commands import made, run, write_json_document

from shardwright.io import read_document, write_document
from shardwright.io.versions import versions_text
from shardwright.models.registry import read_presets
from shardwright.types import Measurement, Plan, Plans
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import read_profiles
from shardwright_search.cost_model.time_model import TimeModel

ROOT = Path(__file__).resolve().parents[1]
LENGTH, BATCH, MICROBATCHES = 128, 32, [4, 8]
TIME_MODEL = TimeModel.BATCH
NAMES = ("searched", "even")
SETTINGS = {"tp_sizes": [1], "sequence_parallel": ["none"], "recompute": ["none"]} | {
    "micro_batch_sizes": [4, 8],
    "layers": [1, 3],
}


class Files(NamedTuple):
    """What is planned with."""

    model: Path
    cluster: Path
    hardware: Path
    profiles: tuple[Path, ...]


def main() -> None:
    """Measure, print, keep."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--work", type=Path, help="folder of what is measured; a temporary one if left out")
    options.add_argument("--rounds", type=int, default=3, help="how often both plans are measured in turns")
    options.add_argument("--slower", type=int, default=2, help="how many times as long the second node computes")
    options.add_argument("--steps", type=int, default=9, help="measured steps of each plan and round")
    options.add_argument("--out", type=Path, help="JSON file of the figures")
    given = options.parse_args()
    with TemporaryDirectory() as scratch:
        found = measured(given.work or Path(scratch), given.slower, given.rounds, given.steps)
    print(said(found))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured(work: Path, slower: int, rounds: int, steps: int) -> dict[str, Any]:
    """Predicted and measured times of a step in s, of the searched and of the even plan."""
    files = _profiled(work, slower)
    plans = dict(zip(NAMES, (searched := _searched(work, files), _even(searched)), strict=True))
    profiles = read_profiles([files.hardware], files.profiles)
    predicted = (
        evaluate(plan, profiles, cost_model_of(plan, profiles, TIME_MODEL)).estimate for plan in plans.values()
    )
    asked = work / "both.json"
    write_document(asked, Plans(plans=tuple(plans.values()), in_turns=((0, 1),)))
    both = [_measured(asked, work / f"both-{i + 1}.measured.json", steps) for i in range(rounds)]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions_text(("torch",), on_gpu=False),
        "slower": slower,
        "layers": {name: [stage.layers[0][1] - stage.layers[0][0] for stage in plans[name].stages] for name in NAMES},
        "num_microbatches": searched.num_microbatches,
        "predicted_s": {name: one.simulated_step_time_s for name, one in zip(NAMES, predicted, strict=True)},
        "measured_s": {name: [one.plans[i].step_times_s for one in both] for i, name in enumerate(NAMES)},
    }


def gains(found: dict[str, Any]) -> dict[str, float]:
    """By what share of the even plan's time the searched one is faster: predicted, and measured in each round."""
    predicted, rounds = found["predicted_s"], list(zip(*(found["measured_s"][name] for name in NAMES), strict=True))
    seen = {f"round {i + 1}": 1 - median(ours) / median(even) for i, (ours, even) in enumerate(rounds)}
    return {"predicted": 1 - predicted["searched"] / predicted["even"], **seen, "measured": median(seen.values())}


def said(found: dict[str, Any]) -> str:
    """The figures in a few lines."""
    lines = [
        f"{name}: {' + '.join(map(str, found['layers'][name]))} layers, {found['predicted_s'][name]:.3f} s predicted, "
        f"{median(s for one in found['measured_s'][name] for s in one):.3f} s measured"
        for name in NAMES
    ]
    gain = gains(found)
    lines.append(", ".join(f"{name} gain {share:.1%}" for name, share in gain.items()))
    return "\n".join([*lines, f"of the predicted gain measured: {gain['measured'] / gain['predicted']:.0%}"])


def _profiled(work: Path, slower: int) -> Files:
    """Measure links and layers on both node types; what lies in `work` already is taken as it is."""
    write_json_document(work / "model" / "config.json", None, **read_presets()["llama-2m"].config)
    types = {
        name: {"device": device, "devices_per_node": 1, "memory_bytes": 2 << 30}
        for name, device in (("fast", "cpu"), ("slow", f"cpu/{slower}"))
    }
    model, hardware = work / "model.json", work / "hardware.h5"
    cluster = _cluster(work, "mixed", types, list(types))
    made(model, "shardwright", "train", "describe", work / "model", "--name", "demo", "--sequence-length", LENGTH)
    made(hardware, "shardwright", "profile", "hardware", "--cluster", cluster, "--all-nodes-here", "--time-budget", 20)
    settings = write_json_document(work / "settings.json", "profile_settings", **SETTINGS)
    for name in types:
        if (work / f"{name}.h5").exists():
            continue
        probes, taken = work / f"{name}.probes.json", work / f"{name}.measured.json"
        pair = {name: types[name] | {"devices_per_node": 2}}
        run("shardwright", "profile", "probes", "--model", model, "--cluster", _cluster(work, name, pair, [name]),
            "--node-type", name, "--settings", settings, "--out", probes)  # fmt: skip
        _measured(probes, taken, steps=5)
        run("shardwright", "profile", "fit", "--measurements", taken, "--out", work / f"{name}.h5")
    return Files(model, cluster, hardware, tuple(work / f"{name}.h5" for name in types))


def _cluster(work: Path, name: str, types: dict[str, Any], nodes: list[str]) -> Path:
    groups = [{"node_type": node_type, "count": 1} for node_type in nodes]
    of = {node_type: types[node_type] for node_type in nodes}
    return write_json_document(work / f"{name}.cluster.json", "cluster", name=name, nodes=groups, node_types=of)


def _measured(plans: Path, out: Path, steps: int) -> Measurement:
    return commands.measured(plans, out, "--all-nodes-here", "--steps", steps, "--warmup-steps", 2)


def _searched(work: Path, files: Files) -> Plan:
    search = write_json_document(
        work / "search.json", "search", name="searched", global_batch_size=BATCH, num_microbatches=MICROBATCHES,
        pp_sizes=[2], recompute=["none"], time_model=str(TIME_MODEL),
    )  # fmt: skip
    plan = work / "searched.json"
    profiles = [word for path in files.profiles for word in ("--profile", path)]
    run("shardwright", "plan", "--cluster", files.cluster, "--model", files.model, "--hardware",
        files.hardware, *profiles, "--search", search, "--out", plan)  # fmt: skip
    return read_document(plan, Plan)


def _even(plan: Plan) -> Plan:
    """The same plan with as many layers on each node; all its layers have one strategy, as each stage has one rank."""
    count = len(plan.model.layers)
    cuts = ((0, count // 2), (count // 2, count))
    stages = tuple(msgspec.structs.replace(s, layers=(cut,)) for s, cut in zip(plan.stages, cuts, strict=True))
    return msgspec.structs.replace(plan, name="even", stages=stages)


if __name__ == "__main__":
    main()
