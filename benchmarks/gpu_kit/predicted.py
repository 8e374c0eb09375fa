"""S4: step time and memory of 14 plans of one device: from shapes, from a measured profile, and measured.

Predictions from shapes were written beforehand. The profile has Llama-3-8B's layers, in other numbers than the plans;
GPT-2 XL, LoRA and packed documents are priced only from shapes.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from gpu_kit.plans import LLAMA, PACKED, config_of, length_of
from gpu_kit.prepare import PREDICTIONS, TOKENS
from gpu_kit.rows import Row, Values, ratio, scaled
from gpu_kit.setting import Setting
from harness import run, table, write_json

from shardwright.io import read_document, write_document
from shardwright.types import Measurement, Plan
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import Profiles, read_profiles

HARDWARE, PROFILE = "hardware", "llama-3-8b"
PRECISION = {"parameters": "float32", "compute": "bfloat16", "reduce": "float32"}
_RUN_STEPS = 6
_AT_ONCE_S = {HARDWARE: 90.0, PROFILE: 150.0, "measured": 200.0}
"""Maximum seconds of a command if there is no other limit; longer in a rehearsal, whose processor is shared."""
_PATIENCE = 5


def profile_file(setting: Setting, what: str) -> Path:
    """Return the path of a profile: `what` is the device's or the layers'."""
    return setting.work / "profiles" / f"{what}.h5"


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """Return the rows of the two profiles, of the measurements of all plans, and of each plan."""
    predicted = {name: one for name, one in predictions(setting).items() if one["devices"] == "one"}
    profiles, halves = cache(partial(_profiles, setting)), _halves(predicted)
    return [
        Row("profile of the device", partial(_sweep, setting)),
        Row("profile of Llama-3-8B's layers", partial(_profile, setting)),
        *(Row(f"plans measured, {half}", partial(_measure, setting, half, halves[half])) for half in halves),
        *(Row(name, partial(_row, setting, name, one, profiles, halves)) for name, one in predicted.items()),
    ]


def predictions(setting: Setting) -> dict[str, Any]:
    """Return the predictions of each plan that were written beforehand."""
    found: dict[str, Any] = json.loads((setting.carried / PREDICTIONS).read_bytes())["plans"]
    return found


def _command(setting: Setting, limit: str, *words: object) -> None:
    run(*words, threads=None, timeout_s=_AT_ONCE_S[limit] * (_PATIENCE if setting.tiny else 1))


def _cluster(setting: Setting) -> Path:
    path = setting.work / "cluster.json"
    write_document(path, setting.cluster(1))
    return path


def _sweep(setting: Setting) -> Values:
    out = profile_file(setting, HARDWARE)
    out.parent.mkdir(parents=True, exist_ok=True)
    _command(setting, HARDWARE, "shardwright", "profile", "hardware", "--cluster", _cluster(setting), "--time-budget",
             setting.size(8, 2), "--out", out)  # fmt: skip
    return {"file": out.name, "bytes": out.stat().st_size}


def _profile(setting: Setting) -> Values:
    folder, out = setting.work / "llama", profile_file(setting, PROFILE)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", None, **config_of(setting, LLAMA, setting.size(4, 7)))
    settings = write_json(
        setting.work / "settings.json",
        "profile_settings",
        tp_sizes=[1],
        sequence_parallel=["none"],
        recompute=["none", "full", "selective"],
        micro_batch_sizes=[1, 2],
        layers=setting.size([1, 3], [1, 6]),
        precision=PRECISION,
        attention="sdpa",
    )
    steps, seconds = setting.size((5, 0.3), (3, 0.0))
    _command(setting, PROFILE, "shardwright", "profile", "model", folder, "--name", LLAMA, "--sequence-length",
             length_of(setting, LLAMA), "--cluster", _cluster(setting), "--node-type", setting.slug, "--settings",
             settings, "--steps", steps, "--min-time-s", seconds, "--out", out)  # fmt: skip
    shutil.rmtree(folder)
    return {"file": out.name, "bytes": out.stat().st_size}


def _profiles(setting: Setting) -> Profiles:
    return read_profiles((profile_file(setting, HARDWARE),), (profile_file(setting, PROFILE),))


def _halves(predicted: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return plans by the launch that measures them: if one fails, the other remains. Packed documents are in none."""
    plans = [(name, one) for name, one in predicted.items() if name != PACKED]
    return {"first half": dict(plans[: len(plans) // 2]), "second half": dict(plans[len(plans) // 2 :])}


def _measure(setting: Setting, half: str, predicted: Mapping[str, Any]) -> Values:
    """Measure some plans in one launch."""
    plans = [plan_file(setting, one) for one in predicted.values()]
    steps, seconds = setting.size((5, 0.3), (1, 0.0))
    _command(setting, "measured", "shardwright", "train", "measure", *plans, "--steps", steps, "--min-time-s", seconds,
             "--out", _measured_file(setting, half))  # fmt: skip
    found = read_document(_measured_file(setting, half), Measurement)
    return {"plans": len(found.plans), "attention": found.attention, "allocator": found.allocator}


def _measured_file(setting: Setting, half: str) -> Path:
    return setting.work / f"measured-{half.replace(' ', '-')}.json"


def plan_file(setting: Setting, predicted: Mapping[str, Any]) -> Path:
    """Return the file of a plan that was predicted beforehand."""
    return setting.carried / "plans" / str(predicted["file"])


def _row(
    setting: Setting,
    name: str,
    predicted: Mapping[str, Any],
    profiles: Callable[[], Profiles],
    halves: Mapping[str, Mapping[str, Any]],
) -> Values:
    found: Values = {"analytic_s": predicted["analytic_s"], "analytic_bytes": max(predicted["analytic_bytes"])}
    found |= {"check_bytes": predicted["check_bytes"]["0"]}
    if name == PACKED:
        return found | _trained(setting, predicted)
    half = next(half for half, plans in halves.items() if name in plans)
    measured = read_document(_measured_file(setting, half), Measurement).plans
    one = measured[list(halves[half]).index(name)]
    found |= {"measured_s": median(one.step_times_s), "measured_bytes": one.peak_bytes}
    if predicted["is_profiled"]:
        plan = read_document(plan_file(setting, predicted), Plan)
        estimate = evaluate(plan, profiles(), cost_model_of(plan, profiles()), timeline=False).estimate
        found |= {"profiled_s": estimate.simulated_step_time_s, "profiled_bytes": estimate.memory_bytes}
    return found


def _trained(setting: Setting, predicted: Mapping[str, Any]) -> Values:
    """Train steps by `run` on documents that do not attend to one another; return their times and memory."""
    out = setting.work / "run"
    _command(setting, "measured", "shardwright", "train", "run", plan_file(setting, predicted), "--data",
             setting.carried / TOKENS, "--steps", _RUN_STEPS, "--reset-attention-mask", "--reset-position-ids",
             "--checkpoints", out / "kept", "--out", out)  # fmt: skip
    (metrics,) = (out / "kept").glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(out / "kept")  # its checkpoint has tens of gigabytes
    return {
        "measured_s": median(step["step_time_s"] for step in steps[2:]),
        "measured_bytes": max(size for step in steps for size in step["peak_memory_bytes"]),
        "losses": [step["loss"] for step in steps],
    }


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the table of this step's report, and the median errors."""
    plans = {name: row for name, row in rows.items() if "measured_s" in row}
    told = [
        [
            name,
            scaled(row["measured_s"], 1e-3, ".1f"),
            ratio(row["analytic_s"], row["measured_s"]),
            ratio(row.get("profiled_s"), row["measured_s"]),
            scaled(row["measured_bytes"], 2**30),
            ratio(row["analytic_bytes"], row["measured_bytes"]),
            ratio(row.get("profiled_bytes"), row["measured_bytes"]),
            ratio(row["check_bytes"], row["measured_bytes"]),
        ]
        for name, row in plans.items()
    ]
    said = []
    for what, by in (("time", "s"), ("memory", "bytes")):
        for kind in ("analytic", "profiled"):
            errors = [
                abs(row[f"{kind}_{by}"] / row[f"measured_{by}"] - 1) for row in plans.values() if f"{kind}_{by}" in row
            ]
            if errors:
                said.append(f"{what}, {kind}: median error {median(errors):.1%}, worst {max(errors):.1%}.")
    columns = "plan|step, ms|shapes over it|profile over it|peak, GiB|shapes over it|profile over it|check over it"
    return ["No number is fitted to what was measured.", "", *table(columns, told), "", "\n".join(said)]
