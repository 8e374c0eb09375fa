"""hetu-galvatron 2.4.0 as a peer: its own environment, its profiles under the keys that it reads, its processes.

Most of the profiles that it ships do not load in the same version. The copies made here change names and structure, but
no measured number:

- times: `layertype_0_bszB` and `layertype_other_0_bszB` (llama, gpt) get the sequence length that the reader looks for,
  `layertype_other_bszB_seq[512,512]` (T5) the one length; the stale plain `layertype_0` is left out.
- memory: tables without a level for the sequence length (llama, gpt) get it; T5's "[512,512]" becomes "512".
- embedding and head tables without the largest tensor-parallel degrees (ViT, Swin with pipelines) get them as half of
  the one before, as its own profiler fills such gaps.
- hardware: 2x8 has no table of whole collectives; the reader needs one, the search does not use it: 1x8's is copied.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

REQUIREMENT = "hetu-galvatron==2.4.0 --hash=sha256:452a1964f9c2e1649886c427537f61e7e8b1c6e82163813a25b275c42ec8a662\n"
NEEDED = ("numpy==2.4.6", "scipy==1.17.1", "tqdm==4.70.1", "pybind11==3.1.0", "setuptools==80.9.0", "wheel==0.48.0")
HERE = Path(__file__).parent


class Ran(NamedTuple):
    """The time that a process took."""

    cpu_s: float
    """User and system seconds, including all its child processes."""
    wall_s: float


def one_thread() -> dict[str, str]:
    """Return the environment variables for both sides: one thread."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return os.environ | dict.fromkeys(names, "1")


def run(command: list[str], log: Path, expected: tuple[int, ...] = (0,)) -> tuple[int, Ran]:
    """Run a process to its end, with its output in a file; raise SystemExit with the end of the output if it fails."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with log.open("w") as text:
        code = subprocess.run(command, stdout=text, stderr=subprocess.STDOUT, env=one_thread(), check=False).returncode
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    if code not in expected:
        last = "\n".join(log.read_text().splitlines()[-5:])
        raise SystemExit(f"error: {Path(command[0]).name} {command[1]} ended with {code}, see {log}:\n{last}")
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return code, Ran(round(cpu_s, 2), round(wall_s, 2))


def environment(work: Path) -> Path:
    """Return the peer's Python; its environment is made once in the work folder, its C++ core built from the sdist."""
    python, ready = work / "venv/bin/python", work / "venv/ready"
    if not ready.exists():
        work.mkdir(parents=True, exist_ok=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        hashed = work / "requirements.txt"
        hashed.write_text(REQUIREMENT)
        built = ["--no-deps", "--no-build-isolation", "--no-binary", "hetu-galvatron", "--require-hashes"]
        run([sys.executable, "-m", "venv", "--clear", str(work / "venv")], work / "venv.log")
        run([*pip, *NEEDED], work / "needed.log")
        run([*pip, *built, "--requirement", str(hashed)], work / "peer.log")
        ready.touch()
    return python


def rekeyed_times(times: dict[str, Any], lengths: list[int]) -> dict[str, float]:
    """Return a computation profile with the keys that the reader expects; milliseconds per layer and sample."""
    found = {}
    for key, value in times.items():
        if not key.startswith("layertype_") or key == "layertype_0":
            continue
        name = key.replace("layertype_other_0_", "layertype_other_")
        name = name.replace("seq" + _listed(lengths), f"seq{lengths[0]}") if len(set(lengths)) == 1 else name
        found[name if "_seq" in name else f"{name}_seq{lengths[0]}"] = value
    return found


def rekeyed_memory(memory: dict[str, Any], lengths: list[int], max_tp: int) -> dict[str, Any]:
    """Return a memory profile in MiB, with a level for the sequence length and all tensor-parallel degrees."""
    found = {}
    for key, table in memory.items():
        if not key.startswith(("layertype_", "other_memory_")):
            continue
        if "parameter_size" in table or "model_states" in table:
            table = {str(lengths[0]): table}
        if len(set(lengths)) == 1:
            table = {str(lengths[0]) if length == _listed(lengths) else length: t for length, t in table.items()}
        other = key.startswith("other_memory_")
        found[key] = {length: _halved(t, max_tp) if other else t for length, t in table.items()}
    return found


def _halved(table: dict[str, Any], max_tp: int) -> dict[str, Any]:
    found = {name: dict(values) if isinstance(values, dict) else values for name, values in table.items()}
    for values in found.values():
        tp_size = 2
        while isinstance(values, dict) and tp_size <= max_tp:
            values.setdefault(str(tp_size), values[str(tp_size // 2)] / 2)
            tp_size *= 2
    return found


def _listed(lengths: list[int]) -> str:
    return "[" + ",".join(map(str, lengths)) + "]"


def write_case(case: dict[str, Any], tables: Path, folder: Path) -> Path:
    """Write the case and its profiles into a folder, as the peer reads them; return the case's file."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [layer["seq_len"] for layer in case["layers"]]
    source = tables / "galvatron/models" / case["family"] / "configs"
    for kind in ("computation", "memory"):
        read = json.loads((source / f"{kind}_profiling_bf16_{case['files']}.json").read_text())
        kept = (
            rekeyed_times(read, lengths)
            if kind == "computation"
            else rekeyed_memory(read, lengths, case["max_tp_size"])
        )
        (folder / f"{kind}_profiling_bf16_{case['name']}.json").write_text(json.dumps(kept, indent=1))
    hardware = tables / "galvatron/profile_hardware/hardware_configs"
    for kind in ("allreduce_bandwidth", "p2p_bandwidth", "sp_time"):
        name = f"{kind}_{case['nodes']}nodes_{case['devices_per_node']}gpus_per_node.json"
        kept = hardware / (name if kind != "sp_time" else "sp_time_1nodes_8gpus_per_node.json")
        (folder / name).write_bytes(kept.read_bytes())
    (folder / "overlap_coefficient.json").write_bytes((hardware / "overlap_coefficient.json").read_bytes())
    path = folder / "case.json"
    path.write_text(json.dumps(case | {"folder": str(folder.resolve())}, indent=1) + "\n")
    return path


def search(python: Path, case: Path) -> dict[str, Any]:
    """Return what the peer finds, and the time that it took; both are kept in the case's folder for the next run."""
    kept, found = case.with_name("found.json"), case.with_name("search.out.json")
    if not kept.exists() or json.loads(kept.read_text())["case"] != json.loads(case.read_text()):
        command = [str(python), str(HERE / "galvatron_search.py"), "search", str(case), str(found)]
        _, ran = run(command, case.with_name("search.log"))
        whole = {"case": json.loads(case.read_text()), "ran": ran._asdict(), **json.loads(found.read_text())}
        kept.write_text(json.dumps(whole, indent=1) + "\n")
    return dict(json.loads(kept.read_text()))


def price(python: Path, case: Path, plans: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the peer's step seconds and MiB for plans in the form of its own configs, by name."""
    given, priced = case.with_name("plans.json"), case.with_name("priced.json")
    given.write_text(json.dumps(plans, indent=1))
    command = [str(python), str(HERE / "galvatron_search.py"), "price", str(case), str(given), str(priced)]
    run(command, case.with_name("price.log"))
    return dict(json.loads(priced.read_text()))
