"""Errors of analytic profiles compared with layer and message times that others measured.

    python benchmarks/analytic.py [--reference ../shared/reference] [--rows] [--out FILE.json]

The measured numbers are not part of this repository; a set is left out if its folder does not exist:

- FASOP (layer_forward_times.csv): forward passes of GPT-2 XL, BERT and T5 layers on A100 and A10, 16 bit, one sample.
- Sailor (profiles_tmp.json): forward and backward passes of OPT-350 and GPT-Neo-2.7 layers at sequence length 2048 on
  V100, A100 and GH200 in float32. Layers on A100 and GH200 are faster than float32 units can be, so TF32 is assumed for
  them. LLAMA-3-8 and OPT-30 are left out, because their sequence length is not stated.
- vTrain (allreduce/): NCCL all_reduce on one node of A100 or V100, 1 MiB to 1 GiB.

FASOP's and Sailor's runs are assumed to keep attention scores, as Megatron did then. Errors are
|estimate / measured - 1|; the default efficiencies are used.
"""

import argparse
import csv
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from shardwright.devices.table import read_devices
from shardwright.estimate.hardware import message_time_s
from shardwright.estimate.layers import Machine, estimate_layer
from shardwright.estimate.machines import Efficiencies, machine_of, rates_of
from shardwright.types import Attention, LayerStrategy, Model, Precision, Strategy, misfit
from shardwright.types.hardware_profile import Collective
from shardwright.types.model_profile import LayerFigures
from shardwright_train.models.base import describe, family_named

FASOP_MODELS = {
    "gpt2XL": ("gpt2", 1024, {"vocab_size": 50257, "n_positions": 1024, "n_embd": 1600, "n_layer": 1, "n_head": 16}),
    "bert": (
        "bert",
        512,
        {
            "vocab_size": 30522,
            "hidden_size": 1024,
            "num_hidden_layers": 1,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "mask_token_id": 103,
        },
    ),
    "T5": (
        "t5",
        512,
        {"vocab_size": 30522, "d_model": 1024, "d_kv": 128, "d_ff": 4096, "num_layers": 1, "num_heads": 32},
    ),
}
FASOP_DEVICES = {"A100": "A100-40", "A10": "A10"}
FASOP_TYPES = {
    "transformer": "block",
    "encoder": "encoder",
    "decoder": "decoder",
    "embedding": "embedding",
    "post_process": "head",
}
SAILOR_MODELS = {
    "OPT-350": {"vocab_size": 50272, "n_positions": 2048, "n_embd": 1024, "n_layer": 1, "n_head": 16},
    "GPT-Neo-2.7": {"vocab_size": 50304, "n_positions": 2048, "n_embd": 2560, "n_layer": 1, "n_head": 32},
}
SAILOR_LENGTH = 2048
SAILOR_DEVICES = {"V100-16": "V100-16", "A100-40": "A100-40", "A100-80": "A100-80", "GH-96": "H100-SXM"}
VTRAIN_DEVICES = {"a100": "A100-40", "v100": "V100-16"}


class Compared(NamedTuple):
    """A measured time and its estimate."""

    set: str
    """Name of the set within which errors are aggregated."""
    what: str
    measured_s: float
    estimated_s: float

    @property
    def error(self) -> float:
        """Return the absolute error of the estimate, relative to the measured time."""
        return abs(self.estimated_s / self.measured_s - 1)


def fasop(folder: Path) -> Iterator[Compared]:
    """Yield FASOP's layers, and its embeddings and heads as a separate set."""
    with (folder / "layer_forward_times.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            family, length, config = FASOP_MODELS[row["model"]]
            if (type_name := FASOP_TYPES.get(row["kind"])) is None:
                continue
            model, tp_size = described(family, length, config), int(row["tp"])
            found = estimate(model, type_name, tp_size, 1, machine(FASOP_DEVICES[row["gpu"]], "float16"), "float16")
            ends = "ends" if type_name in ("embedding", "head") else "layers"
            what = f"{row['model']} {row['kind']} on {row['gpu']}, tp {tp_size}"
            yield Compared(f"FASOP {row['gpu']} {ends}, forward", what, float(row["forward_s"]), found.forward_s)


def sailor(folder: Path) -> Iterator[Compared]:
    """Yield the second block of each profile, forward and backward separately; the first block's time includes more."""
    profiles = json.loads((folder / "profiles_tmp.json").read_text(encoding="utf-8"))
    for name, device in ((m, d) for m in SAILOR_MODELS for d in SAILOR_DEVICES if d in profiles[m]):
        model = described("gpt2", SAILOR_LENGTH, SAILOR_MODELS[name])
        here = machine(SAILOR_DEVICES[device], "float32" if device.startswith("V100") else "tf32")
        for samples, tp_size in ((s, t) for s, sizes in profiles[name][device].items() for t in sizes):
            if misfit(model, "block", Strategy(tp_size=int(tp_size), dp_size=1)) is not None:
                continue
            forward_s, backward_s, _ = list(profiles[name][device][samples][tp_size].values())[2]
            found = estimate(model, "block", int(tp_size), int(samples), here, "float32")
            what = f"{name} on {device}, micro_batch_size {samples}, tp {tp_size}"
            yield Compared(f"Sailor {device} layers, forward", what, forward_s, found.forward_s)
            yield Compared(f"Sailor {device} layers, backward", what, backward_s, found.backward_s)


def vtrain(folder: Path) -> Iterator[Compared]:
    """Yield the sizes that are powers of two, with the second of the two times of a row."""
    for path in sorted((folder / "allreduce").glob("*_LUT.csv")):
        device, group_size = path.name.split("_")[0], int(path.name.split("GPU")[1].split("_")[0])
        link = machine(VTRAIN_DEVICES[device], "float16").link
        with path.open(encoding="utf-8") as file:
            rows = list(csv.reader(file))[1:]
        for row in rows:
            size = int(row[0])
            if size & (size - 1) == 0:
                estimated_s = message_time_s(Collective.ALL_REDUCE, group_size, size, link)
                what = f"{size >> 20} MiB among {group_size} {device.upper()}"
                yield Compared(f"vTrain {device.upper()} all_reduce", what, float(row[5]) * 1e-9, estimated_s)


def described(family: str, length: int, config: dict[str, Any]) -> Model:
    """Return the description of a model of a family, from its configuration."""
    return describe(family_named(family, "benchmark"), {"model_type": family, **config}, "benchmark", length)


def machine(device: str, compute: str) -> Machine:
    """Return the rates that a device of the table reaches with the default efficiencies."""
    return machine_of(rates_of(read_devices(), device), compute, Efficiencies())


def estimate(
    model: Model,
    type_name: str,
    tp_size: int,
    samples: int,
    here: Machine,
    stored: Any,  # noqa: ANN401
) -> LayerFigures[float]:
    """Return the estimate of one layer with only tensor parallelism, if attention scores are kept."""
    strategy = LayerStrategy(type=type_name, tp_size=tp_size, dp_size=1)
    precision = Precision(parameters=stored, compute=stored, reduce=stored)
    return estimate_layer(model, type_name, strategy, samples, precision, Attention.EAGER, here)


def summary(rows: Iterable[Compared]) -> list[dict[str, Any]]:
    """Return for each set its number of points, median and worst error, and the median of estimate over measured."""
    found = []
    for name, group in groupby(sorted(rows), key=lambda row: row.set):
        errors = list(group)
        found.append(
            {
                "set": name,
                "points": len(errors),
                "median_error": median(row.error for row in errors),
                "worst_error": max(row.error for row in errors),
                "median_estimate_over_measured": median(row.estimated_s / row.measured_s for row in errors),
            }
        )
    return found


def main() -> None:
    """Print the errors, and write them if asked to."""
    parser = argparse.ArgumentParser(description="Hold analytic profiles against measured times.")
    reference = Path(__file__).resolve().parents[2] / "shared" / "reference"
    parser.add_argument("--reference", type=Path, default=reference, help="folder of the measured sets")
    parser.add_argument("--rows", action="store_true", help="print every point")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    asked = parser.parse_args()
    rows: list[Compared] = []
    for read, name in ((fasop, "fasop"), (sailor, "sailor"), (vtrain, "vtrain")):
        if (asked.reference / name).is_dir():
            rows += read(asked.reference / name)
        else:
            print(f"left out: {asked.reference / name} is absent")
    sets = summary(rows)
    for title, part in (("layer times", ("layers",)), ("all_reduce", ("all_reduce",))):
        some = [row for row in rows if any(word in row.set for word in part)]
        sets += summary(row._replace(set=f"all {title}") for row in some)
    if asked.rows:
        for row in sorted(rows):
            print(f"{row.set}: {row.what}: {row.measured_s * 1e3:.3f} ms, estimated {row.estimated_s * 1e3:.3f} ms")
    print(f"{'set':42} {'points':>6} {'median':>8} {'worst':>8} {'estimate/measured':>18}")
    for one in sets:
        ratio = one["median_estimate_over_measured"]
        print(f"{one['set']:42} {one['points']:6} {one['median_error']:8.0%} {one['worst_error']:8.0%} {ratio:18.2f}")
    if asked.out is not None:
        asked.out.write_text(json.dumps({"efficiencies": Efficiencies()._asdict(), "sets": sets}, indent=1) + "\n")


if __name__ == "__main__":
    main()
