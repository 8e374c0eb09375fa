"""How long a search takes on large clusters: CPU seconds of the whole command, one thread, and its memory.

python benchmarks/search_scale.py [--work DIR]

Llama-7B on 64 devices with 7 batch sizes, and a GPT of 175 billion parameters on 1,024 devices with 4, on analytic
profiles (no such machine is needed). Written to benchmarks/results/search-scale.json.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import yaml
from accuracy_parts.commands import run

ROOT = Path(__file__).resolve().parents[1]
NODE = {"device": "NVIDIA A100-SXM4-80GB", "devices_per_node": 8, "memory_bytes": 80 * 2**30, "usd_per_hour": 32.77}
PRECISION = {"parameters": "float32", "compute": "bfloat16", "reduce": "float32"}
SETTINGS = {
    "tp_sizes": [1, 2, 4, 8],
    "sequence_parallel": ["none", "megatron", "ulysses"],
    "recompute": ["none", "full"],
    "micro_batch_sizes": [1, 2, 4, 8, 16, 32, 64],
    "layers": [1, 3],
    "precision": PRECISION,
    "attention": "auto",
    "grid": "full",
}
CASES = {
    "llama-7b on 64 devices, 7 batch sizes": {
        "preset": "llama-7b",
        "config": {},
        "nodes": 8,
        "search": {"global_batch_size": {"min": 64, "max": 448, "step": 64}, "memory_gib": 36},
    },
    "gpt 175b on 1,024 devices, 4 batch sizes": {
        "preset": "gpt2-6.7b",
        "config": {"n_embd": 12288, "n_head": 96, "n_layer": 96, "n_positions": 2048, "vocab_size": 51200},
        "nodes": 128,
        "search": {"global_batch_size": {"min": 512, "max": 2048, "step": 512}},
    },
}


def main() -> None:
    """Make the profiles, search, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "results/benchmark-search-scale", help="folder for the files"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each search, of which the median counts")
    asked = parser.parse_args()
    rows = {
        name: measured(asked.work / str(number), case, asked.repeats)
        for number, (name, case) in enumerate(CASES.items())
    }
    for name, row in rows.items():
        cost = f"{row['cpu_s']:.2f} CPU s, {row['peak_mib']} MiB"
        print(f"{name}: {cost}, gap {row['gap']:.2%}, {row['cases']} cases: {row['plan']}")
    document = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "cpus": os.cpu_count(), "rows": rows}
    (ROOT / "benchmarks/results/search-scale.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def measured(folder: Path, case: dict, repeats: int) -> dict:
    """The median run's CPU seconds, the most memory, and what was found."""
    inputs = prepared(folder, case)
    command = ["shardwright-search", "plan", *inputs, "--out", str(folder / "plan.json")]
    environment = _with_bytecode(folder / "bytecode")
    _used(command, environment)  # compiles Python's bytecode, which installing does elsewhere
    used = sorted(_used(command, environment) for _ in range(repeats))
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    proof = json.loads((folder / "plan.prediction.json").read_text(encoding="utf-8"))["proof"]
    words = f"pp {len(plan['stages'])}, {plan['num_microbatches']} microbatches, batch {plan['global_batch_size']}"
    return {
        "cpu_s": used[len(used) // 2][0],
        "peak_mib": max(peak for _, peak in used),
        "gap": proof["gap"],
        "cases": proof["examined"],
        "plan": words,
    }


def prepared(folder: Path, case: dict) -> list[str]:
    """Describe the model and estimate the profiles; the options of the search."""
    preset = yaml.safe_load((ROOT / f"config/models/{case['preset']}.yaml").read_text(encoding="utf-8"))
    (folder / "config").mkdir(parents=True, exist_ok=True)
    (folder / "config/config.json").write_text(json.dumps(preset["config"] | case["config"]), encoding="utf-8")
    cluster = {"name": "large", "nodes": [{"node_type": "a", "count": case["nodes"]}], "node_types": {"a": NODE}}
    search = {"name": "large", "precision": PRECISION, "max_tp_size": 8} | case["search"]
    for name, of in (("cluster", cluster), ("profile_settings", SETTINGS), ("search", search)):
        document = {"format": f"shardwright.{name}", "version": 1} | of
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    files = {name: str(folder / name) for name in ("model.json", "cluster.json", "hardware.h5", "profile.h5")}
    describe = "shardwright-train", "describe", folder / "config", "--name", "large", "--sequence-length", 2048
    run(*describe, "--out", files["model.json"])
    analytic = "shardwright-profile", "analytic", "--model", files["model.json"], "--device", "A100-80"
    wanted = "--settings", folder / "profile_settings.json", "--out", files["profile.h5"]
    machines = "--cluster", files["cluster.json"], "--node-type", "a", "--inter-node-gbit-s", 800
    run(*analytic, *wanted, *machines, "--hardware-out", files["hardware.h5"])
    return [
        *("--cluster", files["cluster.json"], "--model", files["model.json"], "--hardware", files["hardware.h5"]),
        *("--profile", files["profile.h5"], "--search", str(folder / "search.json")),
    ]


def _used(command: list[str], environment: dict[str, str]) -> tuple[float, int]:
    """CPU seconds and the most resident MiB of one run."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command[0]} {command[1]} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss // 1024


def _with_bytecode(folder: Path) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(folder)}
    own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | own


if __name__ == "__main__":
    main()
