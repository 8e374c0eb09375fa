"""How long searches over several node types take: CPU seconds of the whole command, one thread, and its memory.

    snakemake --cores 2 reference                  # once: FASOP's published profiles
    python benchmarks/mixed_scale.py [--work DIR] [--cases WORD ...] [--sailor FOLDER]

The front of GPT-2 XL over 0 to 8 A100 and 0 to 8 A10 nodes of 8 on FASOP's layer times, links and prices, left out
where its profiles are not there; the front of Llama-7B over three types of 8 nodes of 8 each, and a plan of a model of
OPT-350M's shapes for 512 GPUs of two types, both on analytic profiles (no such machine is needed); and a plan of
OPT-350M for 64 A100 and 64 V100 nodes of 4 on Sailor's own layer times, memory and links, left out where --sailor does
not say in which folder its tables are. Printed as a table, and written to benchmarks/results/mixed-scale.json.
"""

import argparse
import json
import os
import re
import shutil
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from accuracy_parts.commands import run, write_json_document
from msgspec.structs import replace
from peers import sailor_inputs
from search_scale import PRECISION, SETTINGS, median_of

from shardwright.io import BadInput, one_line_errors, read_document, write_document
from shardwright.models.registry import read_presets
from shardwright.types import Cluster

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
TYPES = {
    "p4de": {"device": "NVIDIA A100-SXM4-80GB", "memory_bytes": 80 * GIB, "usd_per_hour": 40.97},
    "p4d": {"device": "NVIDIA A100-SXM4-40GB", "memory_bytes": 40 * GIB, "usd_per_hour": 32.77},
    "g5": {"device": "NVIDIA A10", "memory_bytes": 24 * GIB, "usd_per_hour": 9.773},
    "v100": {"device": "Tesla V100-SXM2-16GB", "memory_bytes": 16 * GIB, "usd_per_hour": 24.48},
    "A100": {"device": "A100", "memory_bytes": 40 * GIB, "usd_per_hour": 32.7726},
    "A10": {"device": "A10", "memory_bytes": 24 * GIB, "usd_per_hour": 9.773},
}
GBIT_S = {"p4de": 400, "p4d": 400, "g5": 100, "v100": 100}
OPT_350M = {"model_type": "gpt2", "n_layer": 24, "n_embd": 1024, "n_head": 16, "n_positions": 2048, "vocab_size": 50304}
SPACE = {"sequence_parallel": ["none", "megatron"], "recompute": ["none", "full"]}
FASOP = {"max_tp_size": 4, "sequence_parallel": ["none"], "num_microbatches": [1, 2, 4, 8, 16, 32], "space": "full"}


def main() -> None:
    """Make the profiles, search, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "results/benchmark-mixed-scale", help="folder for the files"
    )
    parser.add_argument("--reference", type=Path, default=ROOT / "results/reference", help="imported profiles")
    parser.add_argument("--sailor", type=Path, help="folder of Sailor's tables, which are no part of this repository")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each command, of which the median counts")
    parser.add_argument("--cases", nargs="+", default=[""], help="those with one of these words in their names")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/mixed-scale.json", help="file of figures"
    )
    asked = parser.parse_args()
    llama = read_presets()["llama-7b"].config
    rows = {}
    print("| case | CPU s | MiB | found |\n| --- | --- | --- | --- |")
    for name, command, prepare in (
        ("front of GPT-2 XL, 8 A100 + 8 A10 nodes", "rent", lambda to: published(to, asked.reference)),
        ("front of Llama-7B, 8 + 8 + 8 nodes", "rent", lambda to: estimated(to, llama, ("p4de", "p4d", "g5"), 8, 256)),
        ("plan of OPT-350M, 32 + 32 nodes", "plan", lambda to: estimated(to, OPT_350M, ("p4d", "v100"), 32, 2048)),
        ("plan of OPT-350M by Sailor, 64 + 64 nodes", "plan", lambda to: sailors(to, asked.sailor)),
    ):
        folder = asked.work / re.sub(r"\W+", "-", name)
        if any(word in name for word in asked.cases) and (inputs := prepare(folder)):
            out = folder / "out"
            inputs += ["--out", str(out if command == "rent" else out / "plan.json")]
            clear = partial(shutil.rmtree, out, ignore_errors=True)
            rows[name] = median_of(["shardwright", command, *inputs], folder, asked.repeats, clear)
            rows[name] |= front_of(out) if command == "rent" else plan_of(out)
            used = f"{rows[name]['cpu_s']:.1f} | {rows[name]['peak_mib']}"
            print(f"| {name} | {used} | {rows[name]['found']} |", flush=True)
    document = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    asked.out.write_text(json.dumps(document | {"rows": rows}, indent=2) + "\n", encoding="utf-8")


def front_of(out: Path) -> dict:
    """How many points, whether they are all."""
    rows = [line.split(",") for line in (out / "front.csv").read_text(encoding="utf-8").splitlines()]
    status = [row[rows[0].index("status")] for row in rows[1:]]
    points, left = status.count("front"), status.count("open")
    return {"found": f"{points} points of {len(status)} sub-clusters, {left} open"}


def plan_of(out: Path) -> dict:
    """What is proven."""
    proof = json.loads((out / "plan.prediction.json").read_text(encoding="utf-8"))["proof"]
    return {"found": f"gap {proof['gap']:.2%}, {proof['examined']} configurations"}


def published(folder: Path, reference: Path) -> list[str]:
    """FASOP's model, layer times and links; nothing where they were not imported."""
    if not (reference / "hardware").is_dir():
        return []
    request = FASOP | {"global_batch_size": 128, "precision": PRECISION | {"compute": "float16"}}
    documents(folder, ("A100", "A10"), 8, request)
    files = [("--hardware", f"hardware/fasop-{name}-8x8.h5") for name in ("a100", "a10")]
    files += [("--profile", f"profiles/fasop-gpt2XL@{name}.h5") for name in ("A100", "A10")]
    files += [("--model", "models/fasop-gpt2XL-1024.json")]
    return [*given(folder), *(word for option, path in files for word in (option, str(reference / path)))]


def sailors(folder: Path, tables: Path | None) -> list[str]:
    """Its layer times, memory and links, its cluster of two types of nodes of 4; nothing where its tables are not."""
    if tables is None:
        return []
    if not (tables / "profiles_tmp.json").is_file():
        raise BadInput(tables, "has no profiles_tmp.json", "give the folder of Sailor's tables")
    both = ROOT / "config/reference/sailor-a100-v100.json"
    model, cluster = described(folder, sailor_inputs.OPT_350M), read_document(both, Cluster)
    request = {"precision": sailor_inputs.PRECISION, "global_batch_size": 2048}
    request |= {"sequence_parallel": ["none"], "recompute": ["none"]}
    write_json_document(folder / "search.json", "search", name="scale", objective="step_time", **request)
    found = ["--cluster", str(both), "--search", str(folder / "search.json"), "--model", str(model)]
    for group in cluster.nodes:
        name, device = group.node_type, cluster.node_types[group.node_type].device
        hardware, profile, alone = (folder / f"{name}{end}" for end in ("-hardware.h5", ".h5", ".json"))
        write_document(alone, replace(cluster, name=name, nodes=(group,)))
        sailor_inputs.write_profile(tables, device, model, profile)
        sailor_inputs.write_hardware(tables, device, alone, hardware)
        found += ["--hardware", str(hardware), "--profile", str(profile)]
    return found


def described(folder: Path, config: dict) -> Path:
    """The model's description, at 2,048 tokens."""
    write_json_document(folder / "config/config.json", None, **config)
    model = folder / "model.json"
    run("shardwright", "train", "describe", folder / "config", "--name", "m", "--sequence-length", 2048, "--out", model)
    return model


def estimated(folder: Path, config: dict, names: tuple[str, ...], nodes: int, batch: int) -> list[str]:
    """Describe the model and estimate the profiles of each node type."""
    tp_sizes = [1, 2, 4, 8] if nodes == 8 else [1, 2, 4]
    own = SPACE | {"precision": PRECISION | {"compute": "float16" if "v100" in names else "bfloat16"}}
    documents(folder, names, nodes, own | {"global_batch_size": batch, "tp_sizes": tp_sizes})
    settings = write_json_document(folder / "settings.json", "profile_settings", **SETTINGS | own)
    model = described(folder, config)
    found = [*given(folder), "--model", str(model)]
    for name in names:
        hardware, profile = folder / f"{name}-hardware.h5", folder / f"{name}.h5"
        cluster = cluster_of(folder / f"{name}.json", (name,), nodes)
        asked = "--model", model, "--settings", settings, "--cluster", cluster
        machines = *asked, "--node-type", name, "--inter-node-gbit-s", GBIT_S[name]
        run("shardwright", "profile", "analytic", *machines, "--out", profile, "--hardware-out", hardware)
        found += ["--hardware", str(hardware), "--profile", str(profile)]
    return found


def documents(folder: Path, names: tuple[str, ...], nodes: int, search: dict) -> None:
    """The cluster and the search."""
    cluster_of(folder / "cluster.json", names, nodes)
    write_json_document(folder / "search.json", "search", name="scale", objective="step_time", **search)


def cluster_of(path: Path, names: tuple[str, ...], nodes: int) -> Path:
    """So many nodes of each type."""
    types = {name: TYPES[name] | {"devices_per_node": 8} for name in names}
    counts = [{"node_type": name, "count": nodes} for name in names]
    return write_json_document(path, "cluster", name="mixed", nodes=counts, node_types=types)


def given(folder: Path) -> list[str]:
    """Their options."""
    return ["--cluster", str(folder / "cluster.json"), "--search", str(folder / "search.json")]


if __name__ == "__main__":
    with one_line_errors():
        main()
