"""Our import of a profile, from the very memory tables that the peer reads.

Some of the peer's memory files hold two measurements of the same layer: one with Megatron's sequence parallelism and
an older one without. At tensor-parallel size 1 there is nothing to split, and yet a layer of Llama-7B holds 430 MiB a
sample in the one and 301 MiB in the other. The peer reads the one that its `--sequence_parallel` names, for every size;
the import of `snakemake reference` fills size 1 from the older one. Where a file has both, the profile is imported once
more here, from a copy that has only what the peer reads.
"""

import json
import re
import sys
from pathlib import Path

import yaml
from peers.cases import Case
from peers.galvatron import run

__all__ = ["imported_profile"]

ROOT = Path(__file__).parents[2]
_PLAIN = re.compile(r"(layertype_\d+|other_memory_pp_(off|on_first|on_last)|\d+_\d+_\d+(_c)?(_vtp)?)")


def imported_profile(case: Case, reference: Path, folder: Path) -> Path:
    """The reference profile of a case, or one made in its folder from the tables with sequence parallelism alone."""
    tables = reference / "hetu-galvatron/galvatron/models" / case.family / "configs"
    whole = json.loads((tables / f"memory_profiling_bf16_{case.files}.json").read_text())
    kept = {key: table for key, table in whole.items() if not _PLAIN.fullmatch(key)}
    if case.sequence_parallel == "none" or kept == whole:
        return reference / "profiles" / f"{case.profile}.h5"
    every = yaml.safe_load((ROOT / "config/reference/reference.yaml").read_text())
    how, out = every["galvatron"], folder / f"{case.profile}.h5"
    memory = folder / f"sequence_parallel_memory_profiling_bf16_{case.files}.json"
    memory.write_text(json.dumps(kept, indent=1))
    options = {
        "--computation": tables / f"computation_profiling_bf16_{case.files}.json",
        "--memory": memory,
        "--model": reference / "models" / f"{case.model}.json",
        "--hardware": reference / "hardware" / f"{how['traffic_of']}.h5",
        "--device": how["device"],
        "--backward-ratio": every["backward_ratio"],
        "--tp-sizes": how["tp_sizes"],
        "--micro-batch-sizes": how["micro_batch_sizes"],
        "--out": out,
    }
    line = [str(part) for option in options.items() for part in option]
    line += ["--mend"] if how["profiles"][case.profile].get("mend") else []
    profiler = str(Path(sys.executable).with_name("shardwright-profile"))
    run([profiler, "import", "galvatron", *line], folder / "import-profile.log")
    return out
