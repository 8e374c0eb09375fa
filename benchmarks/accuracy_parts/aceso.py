"""Aceso's rows: what its own model predicted, and the one row whose plan was published, priced by this project.

Aceso (EuroSys'24) published measured and predicted time and memory of five GPT and five ResNet sizes on V100s, each
for the plan that its planner chose. The plans are not shipped, so no other cost model can be compared with them, except
for GPT 350M: one GPU, micro-batch size 8, everything recomputed. That row is priced with an analytic profile of a V100,
as no measured profile is shipped either: nothing in it is measured or fitted.
"""

import csv
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accuracy_parts.figures import Compared
from harness import run, write_json

from shardwright.io import read_document
from shardwright.types import Estimate, Prediction

FAMILIES = {"gpt": "GPT", "resnet": "ResNet"}
MIB = 2**20
GPT_350M = {
    "model_type": "gpt2",
    "vocab_size": 51200,
    "n_positions": 2048,
    "n_embd": 1024,
    "n_layer": 24,
    "n_head": 16,
}
PRECISION = {"parameters": "float32", "compute": "float16", "reduce": "float32"}
BATCH, MICRO_BATCH_SIZE, LENGTH = 1024, 8, 2048


def compared(folder: Path) -> Iterator[Compared]:
    """Yield time in s and memory in MiB. The README names ResNet's times, all predicted too short, as remarkable."""
    for family, name in FAMILIES.items():
        for kind in ("time", "mem"):
            rows = _rows(folder / f"perf_model_{kind}_large_{family}.csv")
            for size, measured in rows["actual"].items():
                predicted = sum(row[size] for title, row in rows.items() if title.startswith("predict"))
                what = "time" if kind == "time" else "memory"
                yield Compared(f"Aceso's own, {what}", f"{name} {size}", measured, predicted)
                if family == "gpt":
                    yield Compared(f"Aceso's own, {what}, without ResNet", f"{name} {size}", measured, predicted)
    estimate = estimated_350m()
    for kind, predicted in (("time", estimate.simulated_step_time_s), ("mem", estimate.memory_bytes / MIB)):
        what = "time" if kind == "time" else "memory"
        measured = _rows(folder / f"perf_model_{kind}_large_gpt.csv")["actual"]["350M"]
        yield Compared(f"Aceso's GPT 350M, {what}, ours (analytic)", "GPT 350M", measured, predicted)


def estimated_350m() -> Estimate:
    """Return time and memory of GPT 350M on a V100 of 32 GB, estimated from shapes and the table of devices."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        node = {"device": "Tesla V100-SXM2-32GB", "devices_per_node": 1, "memory_bytes": 32 * 2**30}
        cluster = write_json(
            folder / "cluster.json",
            "cluster",
            name="v100",
            nodes=[{"node_type": "v100", "count": 1}],
            node_types={"v100": node},
        )
        settings = write_json(
            folder / "settings.json",
            "profile_settings",
            tp_sizes=[1],
            sequence_parallel=["none"],
            recompute=["none", "full"],
            micro_batch_sizes=[MICRO_BATCH_SIZE],
            layers=[1, 2],
            precision=PRECISION,
            attention="eager",
        )
        write_json(folder / "model" / "config.json", None, **GPT_350M)
        model, hardware, profile = folder / "model.json", folder / "hardware.h5", folder / "profile.h5"
        plan, prediction = folder / "plan.json", folder / "plan.prediction.json"
        run("shardwright", "train", "describe", folder / "model", "--name", "gpt-350m", "--sequence-length", LENGTH,
            "--out", model)  # fmt: skip
        run("shardwright", "profile", "analytic", "--cluster", cluster, "--hardware-out", hardware)
        run("shardwright", "profile", "analytic", "--model", model, "--cluster", cluster, "--node-type", "v100",
            "--settings", settings, "--out", profile)  # fmt: skip
        precision = (word for kind, dtype in PRECISION.items() for word in (f"--precision-{kind}", dtype))
        run("shardwright", "uniform", "--model", model, "--cluster", cluster, "--global-batch-size", BATCH,
            "--num-microbatches", BATCH // MICRO_BATCH_SIZE, "--recompute", "full", "--attention", "eager",
            *precision, "--out", plan)  # fmt: skip
        run("shardwright", "evaluate", plan, "--hardware", hardware, "--profile", profile, "--out", prediction)
        return read_document(prediction, Prediction).estimate


def _rows(path: Path) -> dict[str, dict[str, float]]:
    """Return the rows by series and size."""
    with path.open(encoding="utf-8") as file:
        (_, *sizes), *rows = csv.reader(file)
    return {title: dict(zip(sizes, map(float, values), strict=True)) for title, *values in rows}
