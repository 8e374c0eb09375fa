"""FASOP's fastest plans compared with ours in its own search space, both priced by our cost model.

    snakemake --cores 2 reference                  # once: FASOP's published layer times and links, as profiles
    python benchmarks/fasop.py --reference FOLDER [--write]

The folder has the tables that FASOP's commit 93cb38b writes; it is not part of this repository. From each table, the
fastest plan that fits according to FASOP's own flag is priced. FASOP counts embedding and head, and T5's embedding of
the decoder, as layers of a stage.
"""

import argparse
import ast
import csv
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
from harness import table
from msgspec.structs import replace

from shardwright.display.plan_words import shape_words
from shardwright.io import BadInput, one_line_errors, read_document
from shardwright.types import GIB, Cluster, LayerStrategy, Model, Plan
from shardwright_search.candidates import Candidate
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import Profiles, read_profiles
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.uniform import UniformStrategy, plan_of_uniform

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks/results/fasop-plans.md"
MODELS = {"gpt2XL": ("gpt2XL-1024", 64), "gpt2": ("gpt2XL-1024", 64), "bert": ("bert-512", 256), "T5": ("T5-512", 128)}
"""File and global batch size of each model, by the first word of a table's name."""
TABLES = {"bert": 0.4, "bert_het": 1.5, "gpt2": 1.1, "gpt2_het": 10, "T5": 9, "T5_het": 66, "gpt2XL_pareto_n4": 32}
"""Seconds that FASOP's search took for each table on a machine of two virtual cores."""
MEMORY_GIB = {"A100": 39.59, "A10": 22.2}
"""Memory limit of each device in FASOP."""
SEARCH = {
    "name": "fasop",
    "space": "fasop",
    "precision": {"parameters": "float32", "compute": "float16", "reduce": "float32"},
    "sequence_parallel": ["none"],
    "max_tp_size": 4,
    "span_node_types": True,
}


class Row(NamedTuple):
    """A plan in one of FASOP's tables."""

    micro_batch_size: int
    tp_size: int
    dp_size: int
    nodes: tuple[str, ...]
    """Device of each node, in the order of the pipeline."""
    layers: tuple[int, ...]
    """Number of layers of each stage, as FASOP counts them."""
    stated_s: float


def main() -> None:
    """Print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="folder of FASOP's tables")
    parser.add_argument("--profiles", type=Path, default=ROOT / "results/reference", help="imported profiles")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    with one_line_errors():
        lines = []
        for line in page(asked.reference, asked.profiles):
            print(line, flush=True)
            lines.append(line)
        if asked.write:
            PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def page(reference: Path, profiles: Path) -> Iterator[str]:
    """Yield the lines of the page."""
    day = datetime.now(UTC)
    yield f"<!-- python benchmarks/fasop.py, {day.day} {day:%B %Y}; no step was measured -->"
    yield (
        "Seconds a step: `FASOP's` is the fastest plan of its own table that fits by its own flag, priced by our cost"
        " model from its own layer times and links; `stated` is what FASOP says of it. `ours` is the plan that we find"
        " in the same space. CPU seconds of one thread. Why and how: [docs/fasop.md](../../docs/fasop.md).\n"
    )
    names = "table|FASOP's plan|our plan|stated:|FASOP's:|ours:|FASOP's / ours:|its CPU s:|CPU s:"
    files = {name: reference / f"results/head_rerun_{name}.csv" for name in TABLES}
    yield from table(names, (_cells(name, read_row(file), profiles) for name, file in files.items()))


def read_row(file: Path) -> Row:
    """Return the fastest plan that fits, from a table, which is sorted by time."""
    if not file.is_file():
        raise BadInput(file, "does not exist", "give the folder of FASOP's tables with --reference")
    with file.open(encoding="utf-8") as lines:
        cells = next((cells for cells in csv.DictReader(lines) if cells.get("is_oom") == "False"), None)
    if cells is None:
        raise BadInput(file, "has no plan that fits", "give a table as FASOP writes it")
    nodes = ("A100" if name.startswith("p4d") else "A10" for name in ast.literal_eval(cells["node placement"]))
    sizes = (int(cells[name]) for name in ("mbs", "tp", "dp"))
    layers = tuple(ast.literal_eval(cells["partition"]))
    return Row(*sizes, tuple(nodes), layers, float(cells["estimated time (s/step)"]))


def _cells(of: str, row: Row, folder: Path) -> Iterator[str]:
    name, batch = MODELS[of.partition("_")[0]]
    model = read_document(folder / f"models/fasop-{name}.json", Model)
    cluster, profiles = cluster_of(row, 8 if "pareto" in of else 4), profiles_of(row, folder, name, of)
    began_s = time.process_time()
    ours = _searched(batch, model, cluster, profiles)
    took_s = time.process_time() - began_s
    plan = plan_of(row, ours.plan)
    theirs_s = evaluate(plan, profiles, timeline=False).estimate.simulated_step_time_s
    ours_s = ours.evaluation.estimate.simulated_step_time_s
    yield of
    yield from (f"{shape_words(each)}, tp {each.layers[0].tp_size}" for each in (plan, ours.plan))
    yield from (f"{each:.4f}" for each in (row.stated_s, theirs_s, ours_s))
    yield from (f"{theirs_s / ours_s:.3f}", f"{TABLES[of]:g}", f"{took_s:.1f}")


def _searched(batch: int, model: Model, cluster: Cluster, profiles: Profiles) -> Candidate:
    request = msgspec.convert({**SEARCH, "global_batch_size": batch}, SearchRequest)
    answer = find_best(request, model, cluster, profiles, Path("fasop"), lambda _: None)
    if not isinstance(answer, SearchAnswer):
        raise BadInput("space fasop", "has no plan that fits", "check the imported profiles")
    return answer.chosen


def cluster_of(row: Row, devices_per_node: int) -> Cluster:
    """Return the cluster of a plan's nodes, with node types in alphabetical order."""
    names = sorted(set(row.nodes))
    types = {
        name: {"device": name, "devices_per_node": devices_per_node, "memory_bytes": int(MEMORY_GIB[name] * GIB)}
        for name in names
    }
    groups = [{"node_type": name, "count": row.nodes.count(name)} for name in names]
    return msgspec.convert({"name": "fasop", "nodes": groups, "node_types": types}, Cluster)


def profiles_of(row: Row, folder: Path, model: str, table: str) -> Profiles:
    """Return the imported profiles of a plan's devices."""
    per_node = "8x8" if "pareto" in table else "8x4"
    names = sorted(set(row.nodes))
    hardware = [folder / f"hardware/fasop-{name.lower()}-{per_node}.h5" for name in names]
    return read_profiles(hardware, [folder / f"profiles/fasop-{model.partition('-')[0]}@{name}.h5" for name in names])


def plan_of(row: Row, ours: Plan) -> Plan:
    """Return FASOP's plan, with the model, cluster, batch size and number formats of our plan."""
    micro_batches = ours.global_batch_size // (row.dp_size * row.micro_batch_size)
    ends = [sum(row.layers[:i]) for i in range(len(row.layers) + 1)]
    # T5's decoder has an embedding, which is not a layer of our model.
    outside = (0, len(ours.layers) // 2 + 1) if ours.model.family == "t5" else (0,)
    inner = [min(end - sum(place < end for place in outside), len(ours.layers)) for end in ends]
    layer = LayerStrategy(type=ours.layers[0].type, tp_size=row.tp_size, dp_size=row.dp_size)
    uniform = UniformStrategy(layer, len(row.layers), row.micro_batch_size, ranges=tuple(pairwise(inner)))
    kept = {name: getattr(ours, name) for name in ("global_batch_size", "schedule", "precision", "attention")}
    plan = plan_of_uniform("fasop", uniform, ours.model, ours.cluster, num_microbatches=micro_batches, **kept)
    rank_of = _placed(row.nodes, ours.cluster)
    stages = tuple(replace(stage, ranks=tuple(map(rank_of.__getitem__, stage.ranks))) for stage in plan.stages)
    return replace(plan, stages=stages)


def _placed(nodes: tuple[str, ...], cluster: Cluster) -> Mapping[int, int]:
    """Return the rank in our cluster by rank in a pipeline that uses FASOP's order of nodes."""
    (size,) = {kind.devices_per_node for kind in cluster.node_types.values()}
    order = sorted(range(len(nodes)), key=lambda node: nodes[node])
    return {node * size + i: place * size + i for place, node in enumerate(order) for i in range(size)}


if __name__ == "__main__":
    main()
