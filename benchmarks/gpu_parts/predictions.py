"""Step time and memory of 12 plans of one device: first what `search evaluate` says, then what `train measure` finds.

The plans are made before any is measured, of layers that were probed in other numbers: Llama-7B's, GPT-2 XL's and
BERT-large's, with and without recomputation, in one and in several microbatches.
"""

import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from accuracy_parts.commands import run
from accuracy_parts.figures import Compared, figures
from gpu_parts.parts import Part
from gpu_parts.profiles import HARDWARE, MODELS, PRECISION, cluster_file, profile_file, write_preset
from gpu_parts.setting import Setting

from shardwright_formats.io import RunFailed, read_document
from shardwright_formats.types import Measurement, Prediction

LAYERS = {"llama-7b": (8, 6, 4, 2), "gpt2-xl": (24, 12, 6), "bert-large": (24, 12, 6)}
"""The first that fits the device under every plan is taken."""
KINDS = tuple(product(("none", "full"), (1, 4)))
"""Recomputation and microbatches; the micro-batch size is between those that were probed, or one of them."""
MICRO_BATCH_SIZES = {1: 3, 4: 2}


def of_commands(setting: Setting, part: Part) -> dict[str, Any]:
    """Predict every plan, then measure all in one launch."""
    deadline_s = time.monotonic() + part.limit_s
    if missing := [of for of in (HARDWARE, *MODELS) if not profile_file(setting, of).is_file()]:
        raise RunFailed(f"there is no profile of {', '.join(missing)}: the part of that name comes first")
    folder = setting.work / setting.slug / "predictions"
    plans = [plan for model in MODELS for plan in _plans(setting, model, folder, deadline_s)]
    measured, steps = folder / "measured.json", setting.size((10, 1.0), (1, 0.0))
    run("shardwright-train", "measure", *plans, "--steps", steps[0], "--min-time-s", steps[1], "--out", measured,
        threads=None, timeout_s=deadline_s - time.monotonic())  # fmt: skip
    found = read_document(measured, Measurement)
    rows = [row for path, one in zip(plans, found.plans, strict=True) for row in _rows(path, one)]
    return {"rows": [row._asdict() for row in rows], "sets": figures(rows), "attention": found.attention}


def _plans(setting: Setting, model: str, folder: Path, deadline_s: float) -> list[Path]:
    """The plans of a model with the most layers that fit the device, each with its prediction beside it."""
    for layers in setting.size(LAYERS[model], (2,)):
        plans = [_predicted(setting, model, layers, kind, folder, deadline_s) for kind in KINDS]
        if max(_prediction(plan).estimate.memory_bytes for plan in plans) <= setting.usable_bytes:
            return plans
    raise RunFailed(f"no plan of {model} fits {setting.device}")


def _predicted(
    setting: Setting, model: str, layers: int, kind: tuple[str, int], folder: Path, deadline_s: float
) -> Path:
    recompute, microbatches = kind
    name = f"{model}-{layers}-{recompute}-{microbatches}"
    plan, described = folder / f"{name}.json", folder / f"{model}-{layers}.model.json"

    def command(*words: object) -> None:
        run(*words, threads=None, timeout_s=deadline_s - time.monotonic())

    if not described.exists():
        config = folder / f"{model}-{layers}"
        counted_by = "n_layer" if model == "gpt2-xl" else "num_hidden_layers"
        length = write_preset(setting, model, config, **{counted_by: layers})
        command("shardwright-train", "describe", config, "--name", model, "--sequence-length", length,
                "--out", described)  # fmt: skip
    size = setting.size(MICRO_BATCH_SIZES[microbatches], 2)
    precision = [word for what, dtype in PRECISION.items() for word in (f"--precision-{what}", dtype)]
    command("shardwright-search", "uniform", "--model", described, "--cluster", cluster_file(setting, 1),
            "--global-batch-size", size * microbatches, "--num-microbatches", microbatches, "--recompute", recompute,
            "--attention", "sdpa", *precision, "--out", plan)  # fmt: skip
    command("shardwright-search", "evaluate", plan, "--hardware", profile_file(setting, HARDWARE), "--profile",
            profile_file(setting, model), "--out", plan.with_suffix(".prediction.json"))  # fmt: skip
    return plan


def _prediction(plan: Path) -> Prediction:
    return read_document(plan.with_suffix(".prediction.json"), Prediction)


def _rows(path: Path, measured: Any) -> list[Compared]:  # noqa: ANN401
    """Step time in s, and memory in bytes."""
    estimate = _prediction(path).estimate
    return [
        Compared("step time", path.stem, median(measured.step_times_s), estimate.simulated_step_time_s),
        Compared("memory", path.stem, measured.peak_bytes, estimate.memory_bytes),
    ]


def lines(result: dict[str, Any]) -> list[str]:
    """The tables of the page."""
    by_plan: dict[str, list[float]] = {}
    for row in result["rows"]:
        by_plan.setdefault(row["what"], []).extend((row["predicted"], row["measured"]))
    head = [
        "No number is fitted to what was measured.",
        "",
        "| layers of, number, recomputed, microbatches | predicted | measured | ratio | memory | measured | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = [
        f"| {name} | {time_s * 1000:.1f} ms | {took_s * 1000:.1f} ms | {time_s / took_s:.2f} | "
        f"{memory / 2**30:.2f} GiB | {held / 2**30:.2f} GiB | {memory / held:.2f} |"
        for name, (time_s, took_s, memory, held) in by_plan.items()
    ]
    sums = [
        f"{one['set']}: median error {one['median_error']:.1%}, worst {one['worst_error']:.1%} ({one['worst']}), "
        f"median of predicted over measured {one['median_predicted_over_measured']:.2f}."
        for one in result["sets"]
    ]
    return [*head, *rows, "", "\n".join(sums)]
