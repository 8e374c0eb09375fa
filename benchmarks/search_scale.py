"""The cost of a search: CPU seconds of the whole command with one thread, and its memory.

    snakemake --cores 2 reference                  # once: the imported profiles of three cases
    python benchmarks/search_scale.py [--work DIR] [--cases WORD ...] [--repeats N]

Three cases of benchmarks/search.py on published profiles, left out if these do not exist; large clusters, many batch
sizes and many layers on analytic profiles (no such machine is needed); the analytic hardware profile of 2,048 nodes;
and whole commands of `shardwright advise`, some of them with a time limit, with the step time of the plan that they
find. The results are printed as a table. If all cases ran, it is also written to benchmarks/results/search-scale.md and
.json, with the load of the machine.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from harness import run, table, table_line, write_json
from search import CASES as PUBLISHED
from search import files_of, request_of

from shardwright.models.registry import read_presets

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
    "llama-7b on 64 devices, 32 batch sizes": {
        "preset": "llama-7b",
        "config": {},
        "nodes": 8,
        "search": {"global_batch_size": {"min": 64, "max": 2048, "step": 64}, "memory_gib": 36},
    },
    "llama-7b of 128 layers on 64 devices": {
        "preset": "llama-7b",
        "config": {"num_hidden_layers": 128},
        "nodes": 8,
        "search": {"global_batch_size": 512, "memory_gib": 80},
    },
    "gpt 175b on 1,024 devices, 4 batch sizes": {
        "preset": "gpt-3-6.7b",
        "config": {"n_embd": 12288, "n_head": 96, "n_layer": 96, "n_positions": 2048, "vocab_size": 51200},
        "nodes": 128,
        "search": {"global_batch_size": {"min": 512, "max": 2048, "step": 512}, "memory_gib": 80},
    },
    "llama 405b on 16,384 devices": {
        "preset": "llama-3-8b",
        "config": {
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_attention_heads": 128,
            "num_hidden_layers": 126,
        },
        "sequence_length": 8192,
        "device": "H100-SXM",
        "driver": "NVIDIA H100 80GB HBM3",
        "inter_node_gbit_s": 3200,
        "recompute": ["none", "selective", "full"],
        "nodes": 2048,
        "search": {"global_batch_size": 2048, "memory_gib": 80},
    },
}


IMPORTED = {case.name: case for case in PUBLISHED if case.name in ("llama-7b-1x8", "vit-xhuge-1x8", "t5-3b-1x8")}
NODES = "hardware profile of 2,048 nodes"
TOLD = "told.txt"
COLUMNS = "case|CPU s|goal|MiB|gap|configurations|plan"
ADVISED = {
    "advise llama-3-8b on 64 H100": ("llama-3-8b --gpus 8x8:H100-SXM --batch 512", "1.5"),
    "advise llama-3-70b on 64 H100": ("llama-3-70b --gpus 8x8:H100-SXM --batch 512", "2.5"),
    "advise llama-3-8b for megatron-lm": ("llama-3-8b --gpus 8x8:H100-SXM --batch 512 --for megatron", "4"),
    "advise llama-3-70b for torchtitan": ("llama-3-70b --gpus 8x8:H100-SXM --batch 512 --for torchtitan", "4"),
    "advise mixtral-8x7b, one strategy": ("mixtral-8x7b --gpus 8x8:H100-SXM --batch 512 --seq 4096 --uniform", "4"),
    "advise qwen3-235b-a22b on 256 H100": ("qwen3-235b-a22b --gpus 32x8:H100-SXM --batch 1024 --seq 4096", "12"),
    "advise llama-3.1-70b, 131,072 tokens": ("llama-3.1-70b --gpus 64x8:H100-SXM --batch 64 --seq 131072", "8"),
    "advise deepseek-v3 on 2,048 H100": ("deepseek-v3 --gpus 256x8:H100-SXM --batch 15360 --seq 4096", "6"),
}
"""Arguments of `shardwright advise`, and the goal in CPU seconds."""
_405B = "llama-3.1-405b --gpus 2048x8:H100-SXM --batch 2048 --seq 8192"
_DEEPSEEK = "deepseek-v3 --gpus 256x8:H100-SXM --batch 15360 --seq 4096"
CUT_SHORT = {
    "advise llama-3.1-405b on 16,384 H100": _405B,
    "advise llama-3.1-405b, cut at 3 s": f"{_405B} --time-limit 3",
    "advise deepseek-v3, cut at 1 s": f"{_DEEPSEEK} --time-limit 1",
    "advise deepseek-v3, cut at 3 s": f"{_DEEPSEEK} --time-limit 3",
}
"""Arguments of further searches with and without a time limit; the step time of the plan found is reported."""
GOALS_S = {
    "llama-7b-1x8": "0.5",
    "vit-xhuge-1x8": "1.0",
    "t5-3b-1x8": "0.6",
    "llama-7b of 128 layers on 64 devices": "1.0",
    "gpt 175b on 1,024 devices, 4 batch sizes": "1.5",
    "llama 405b on 16,384 devices": "5",
    **{name: goal for name, (_, goal) in ADVISED.items()},
}


def main() -> None:
    """Make the profiles, run the searches, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=ROOT / "results/benchmark-search-scale", help="folder for the files"
    )
    parser.add_argument("--reference", type=Path, default=ROOT / "results/reference", help="imported profiles")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each command, of which the median counts")
    parser.add_argument("--cases", nargs="+", default=[""], help="those with one of these words in their names")
    asked = parser.parse_args()
    imported = IMPORTED if (asked.reference / "hardware").is_dir() else {}
    rows, loads, lines = {}, [os.getloadavg()[0]], [*table(COLUMNS, ())]
    print("\n".join(lines))
    advised = {name: arguments for name, (arguments, _) in ADVISED.items()} | CUT_SHORT
    for number, name in enumerate((*imported, *CASES, NODES, *advised)):
        if any(word in name for word in asked.cases):
            folder = asked.work / str(number)
            if name == NODES:
                rows[name] = hardware_of_many_nodes(folder, asked.repeats)
            elif name in advised:
                folder.mkdir(parents=True, exist_ok=True)
                rows[name] = measured(folder, ["advise", *advised[name].split()], asked.repeats, name in CUT_SHORT)
            elif name in imported:
                rows[name] = measured(folder, ["plan", *published(folder, name, asked.reference)], asked.repeats)
            else:
                rows[name] = measured(folder, ["plan", *prepared(folder, CASES[name])], asked.repeats)
            loads.append(os.getloadavg()[0])
            lines.append(_row(name, rows[name]))
            print(lines[-1], flush=True)
    if len(rows) == len(IMPORTED) + len(CASES) + 1 + len(advised):
        date, cpus = datetime.now(UTC).strftime("%Y-%m-%d"), os.cpu_count()
        document = {"date": date, "cpus": cpus, "load": [min(loads), max(loads)], "repeats": asked.repeats}
        out = ROOT / "benchmarks/results/search-scale.json"
        out.write_text(json.dumps(document | {"rows": rows}, indent=2) + "\n", encoding="utf-8")
        said = f"Medians of {asked.repeats} runs on {date}, on {cpus} virtual cores whose load (the mean number of"
        said += f" processes that ran in the last minute) was {min(loads):.1f} to {max(loads):.1f}."
        out.with_suffix(".md").write_text("\n".join((*lines, "", said)) + "\n", encoding="utf-8")


def _row(name: str, row: dict) -> str:
    """Return the table's line of a case."""
    told = [name, f"{row['cpu_s']:.2f}", GOALS_S.get(name, ""), str(row["peak_mib"])]
    told += [f"{row['gap']:.2%}", str(row["cases"])] if "gap" in row else ["", ""]
    told.append(row.get("plan", ""))
    return table_line(told)


def measured(folder: Path, asked: list[str], repeats: int, is_cut: bool = False) -> dict:
    """Return the median CPU seconds, the most memory, and the plan found; if `is_cut`, there may be no plan."""
    out = folder / "plan.json"
    out.unlink(missing_ok=True)
    used = median_of(["shardwright", *asked, "--out", str(out)], folder, repeats, may_fail=is_cut)
    if is_cut and not out.exists():
        return used | {"plan": "none"}
    plan = json.loads(out.read_text(encoding="utf-8"))
    words = f"pp {len(plan['stages'])}, {plan['num_microbatches']} microbatches, batch {plan['global_batch_size']}"
    if asked[0] == "advise":  # its output has the step time
        step_s = re.search(r"predicted (\S+ s) a step", (folder / TOLD).read_text(encoding="utf-8"))
        return used | {"plan": words if step_s is None else f"{words}, {step_s[1]} a step"}
    proof = json.loads((folder / "plan.prediction.json").read_text(encoding="utf-8"))["proof"]
    return used | {"gap": proof["gap"], "cases": proof["examined"], "plan": words}


def hardware_of_many_nodes(folder: Path, repeats: int) -> dict:
    """Return the CPU seconds and the memory of making the analytic hardware profile of a large cluster."""
    nodes = [{"node_type": "a", "count": 2048}]
    cluster = write_json(folder / "cluster.json", "cluster", name="large", nodes=nodes, node_types={"a": NODE})
    machines = ["--cluster", str(cluster), "--node-type", "a", "--inter-node-gbit-s", "800"]
    out = ["--hardware-out", str(folder / "hardware.h5")]
    return median_of(["shardwright", "profile", "analytic", *machines, *out], folder, repeats)


def published(folder: Path, name: str, reference: Path) -> list[str]:
    """Return the options of a search on published profiles, within the memory that the peer leaves for tensors."""
    case = IMPORTED[name]
    folder.mkdir(parents=True, exist_ok=True)
    files = files_of(case, reference, folder)
    request = request_of(case, "scale", case.memory_gib * 1024 * 4 // 5 - 1024)
    (folder / "search.json").write_text(json.dumps(request), encoding="utf-8")
    return [*files.machines, *files.profiles, "--search", str(folder / "search.json")]


def median_of(
    command: list[str],
    folder: Path,
    repeats: int,
    clear: Callable[[], None] = lambda: None,
    may_fail: bool = False,
) -> dict:
    """Return the median CPU seconds and the most memory of several runs; `clear` removes what a run has written.

    The output of the last run is in the folder. A run that fails ends this process, unless it `may_fail`.
    """
    environment, used = _with_bytecode(folder / "bytecode"), []
    for _ in range(repeats + 1):
        clear()
        used.append(_used(command, environment, folder / TOLD, may_fail))
    used = sorted(used[1:])  # the first run compiles Python's bytecode, as an installation does elsewhere
    return {"cpu_s": used[len(used) // 2][0], "peak_mib": max(peak for _, peak in used)}


def prepared(folder: Path, case: dict) -> list[str]:
    """Describe the model and estimate the profiles; return the options of the search."""
    config = read_presets()[case["preset"]].config
    write_json(folder / "config/config.json", None, **{**config, **case["config"]})
    node = NODE | {"device": case.get("driver", NODE["device"])}
    cluster = {"name": "large", "nodes": [{"node_type": "a", "count": case["nodes"]}], "node_types": {"a": node}}
    settings = SETTINGS | {"recompute": case.get("recompute", SETTINGS["recompute"])}
    search = {"name": "large", "precision": PRECISION, "max_tp_size": 8} | case["search"]
    for name, of in (("cluster", cluster), ("profile_settings", settings), ("search", search)):
        write_json(folder / f"{name}.json", name, **of)
    files = {name: str(folder / name) for name in ("model.json", "cluster.json", "hardware.h5", "profile.h5")}
    describe = "shardwright", "train", "describe", folder / "config", "--name", "large"
    length = case.get("sequence_length", 2048)
    run(*describe, "--sequence-length", length, "--out", files["model.json"])
    device = "--device", case.get("device", "A100-80")
    analytic = "shardwright", "profile", "analytic", "--model", files["model.json"], *device
    wanted = "--settings", folder / "profile_settings.json", "--out", files["profile.h5"]
    machines = (
        "--cluster",
        files["cluster.json"],
        "--node-type",
        "a",
        "--inter-node-gbit-s",
        case.get("inter_node_gbit_s", 800),
    )
    run(*analytic, *wanted, *machines, "--hardware-out", files["hardware.h5"])
    return [
        *("--cluster", files["cluster.json"], "--model", files["model.json"], "--hardware", files["hardware.h5"]),
        *("--profile", files["profile.h5"], "--search", str(folder / "search.json")),
    ]


def _used(command: list[str], environment: dict[str, str], told: Path, may_fail: bool) -> tuple[float, int]:
    """Return the CPU seconds and the maximum resident MiB of one run, whose output goes to a file."""
    with told.open("wb") as printed:
        process = subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode and not may_fail:
        sys.exit(f"{command[0]} {command[1]} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss // 1024


def _with_bytecode(folder: Path) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(folder)}
    own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | own


if __name__ == "__main__":
    main()
