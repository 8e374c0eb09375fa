"""Commands on estimated profiles of a processor, whose figures are made up."""

import json
from pathlib import Path

from command_calls import call

from shardwright.command import CommandLine
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import write_document
from shardwright.types import Plan, Recompute, SequenceParallel
from shardwright_profile.cli import APP as PROFILE
from shardwright_search.cli import APP as SEARCH

__all__ = ["DEVICES", "PLAIN", "command", "predicted_bytes"]

DEVICES = """
revised = "2026-11-22"
[devices.processor]
names = ["cpu"]
peaks = { float32 = 5e10 }
peaks_source = "taken for the test"
memory_bytes = 4_294_967_296
memory_bytes_source = "taken for the test"
memory_bytes_per_s = 1e10
memory_bytes_per_s_source = "taken for the test"
link = "pcie"
link_bytes_per_s = 1e9
link_bytes_per_s_source = "taken for the test"
pcie_bytes_per_s = 1e9
pcie_bytes_per_s_source = "taken for the test"
"""
PLAIN = {"recompute": (Recompute.NONE,), "sequence_parallel": (SequenceParallel.NONE,)}


def command(app: CommandLine, work: Path, line: str) -> None:
    """Words that end in a suffix of a file are files of the folder."""
    words = [work / word if Path(word).suffix else word for word in line.split()]
    ended = call(app, *words)
    assert ended.exit_code == 0, ended.stderr


def predicted_bytes(plan: Plan, work: Path) -> list[int]:
    """What each stage of a plan without tensor parallelism holds, the process apart, of an estimated profile."""
    samples = plan.global_batch_size // plan.num_microbatches // plan.embedding.dp_size
    shape = {"tp_sizes": (1,), "micro_batch_sizes": (samples,), "layers": (1, 2)}
    settings = ProfileSettings(precision=plan.precision, **shape, **PLAIN)
    documents = {"plan": plan, "model": plan.model, "cluster": plan.cluster, "settings": settings}
    for name, document in documents.items():
        write_document(work / f"{name}.json", document)
    (work / "devices.toml").write_text(DEVICES)
    (device,) = plan.cluster.node_types
    given = f"--model model.json --cluster cluster.json --node-type {device} --devices devices.toml"
    command(PROFILE, work, f"analytic {given} --settings settings.json --out p.h5 --hardware-out h.h5")
    command(SEARCH, work, "evaluate plan.json --hardware h.h5 --profile p.h5 --out predicted.json")
    stages = json.loads((work / "predicted.json").read_text())["estimate"]["stages"]
    beside = ("process", "communicators")
    return [s["memory_bytes"] - sum(s["memory_terms_bytes"].get(name, 0) for name in beside) for s in stages]
