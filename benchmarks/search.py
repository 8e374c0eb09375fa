"""Our search and hetu-galvatron 2.4.0 on its own measured profiles: CPU seconds, and both plans priced by both.

    snakemake --cores 2 reference                  # once: the imported profiles
    python benchmarks/search.py [--work results/benchmark-search] [--reference results/reference]
                                [--cases NAME ...] [--out benchmarks/results/search.json]

Each searches one batch size in its own process with one thread, over the same space: powers of two, consecutive
tensor-parallel groups, ZeRO-2 and ZeRO-3, full recomputation or none, every divisor of the batch, 1F1B. The peer's own
environment is made in the work folder, where its answers are also kept (17 to 108 CPU seconds each).
`benchmarks/peers/galvatron.py` says which of its profiles needed other keys to load at all.

Memory: above 20 GB the peer sets 20 % aside, and counts 1 GiB for the process, which the imported profiles do not have.
Our search gets what remains (`usable`), and in a second search the whole budget (`whole`). Only the first is compared.

Prices: the peer's plan is imported and evaluated by our cost model and simulator; our plan is exported and priced by
the peer's cost-model classes. If its model prefers its own plan, each of its known defects is mended in turn, and the
one whose repair reverses the preference is named (`benchmarks/peers/galvatron_repairs.py`).
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from harness import table, write_json
from peers import galvatron
from peers.galvatron_repairs import DEFECTS, DIFFERENCES

from shardwright.io import read_document, write_document
from shardwright.types import Cluster, NodeGroup, NodeType, Plan, Prediction, Strategy

MIB = 1 << 20
CONTEXT_MIB = 1024
"""MiB that the peer counts for the process on every device (`pytorch_context_mem`)."""
COLUMNS = (
    "case|CPU s: theirs|ours|s a step, simulated: theirs|ours|MiB: theirs|ours|budget|so|"
    "s a step, its model: theirs|ours|its verdict"
)
SHARDWRIGHT = str(Path(sys.executable).with_name("shardwright"))


# The cases that both search: profiles that the peer ships, each with a cluster, a batch size and a budget.


class Layers(NamedTuple):
    """The layers of one type, in the form of the peer's arguments."""

    hidden_size: int
    seq_len: int
    layer_num: int


class Case(NamedTuple):
    """One of the peer's profiles, with a cluster, a batch size and a budget."""

    name: str
    family: str
    """The peer's folder of the model; `files` is in the names of the two files in it."""
    files: str
    profile: str
    model: str
    layers: tuple[Layers, ...]
    global_batch_size: int
    memory_gib: int
    nodes: int = 1
    sequence_parallel: str = "megatron"
    time_model: str = "batch"
    max_tp_size: int = 8
    max_pp_size: int = 8
    devices_per_node: int = 8

    @property
    def hardware(self) -> str:
        """Return the name of the imported hardware profile."""
        return f"a100-{self.nodes}x{self.devices_per_node}"


LLAMA = ("llama_hf", "hidden4096_head32_seqlen2048", "llama-7b-hf", "llama-7b-hf-2048", (Layers(4096, 2048, 32),))
GPT = ("gpt_hf", "hidden4096_head32_seqlen2048", "gpt-6.7b-hf", "gpt-6.7b-hf-2048", (Layers(4096, 2048, 32),))
BERT = ("bert_hf", "hidden1024_head16", "bert-large", "bert-large-512", (Layers(1024, 512, 24),))
VIT = ("vit_hf", "hidden2560_head32", "vit-xhuge", "vit-xhuge-197", (Layers(2560, 197, 128),))
T5 = ("T5", "t5-3B", "t5-3b", "t5-3b-512", (Layers(1024, 512, 24), Layers(1024, 512, 24)))
SWIN_LAYERS = (Layers(320, 3136, 2), Layers(640, 784, 2), Layers(1280, 196, 42), Layers(2560, 49, 2))
SWIN = ("swin", "swin-huge", "swin-huge", "swin-huge", SWIN_LAYERS)
# Times: at every batch size if the files have them, at every length for BERT, at one point for ViT and Swin.
CASES = (
    Case("llama-7b-1x8", *LLAMA, 16, 36),
    Case("llama-7b-2x8", *LLAMA, 32, 36, nodes=2),
    Case("gpt-6.7b-2x8", *GPT, 32, 36, nodes=2),
    Case("bert-large-1x8", *BERT, 128, 16, time_model="sequence"),
    Case("bert-large-1x8-3gib", *BERT, 128, 3, time_model="sequence"),
    # None of ViT's tables has memory at tp_size 8.
    Case("vit-xhuge-1x8", *VIT, 64, 36, sequence_parallel="none", time_model="static", max_tp_size=4),
    Case("t5-3b-1x8", *T5, 64, 34),
    Case("swin-huge-1x8", *SWIN, 64, 5, sequence_parallel="none", time_model="static"),
)


# Our searches, and the prices of both plans.


class Files(NamedTuple):
    """The files that our search reads."""

    cluster: Path
    model: Path
    hardware: Path
    profile: Path

    @property
    def profiles(self) -> list[str]:
        """Return the options with the profiles, which `evaluate` needs as well."""
        return ["--hardware", str(self.hardware), "--profile", str(self.profile)]

    @property
    def machines(self) -> list[str]:
        """Return the options with cluster and model, which an import needs as well."""
        return ["--cluster", str(self.cluster), "--model", str(self.model)]


def files_of(case: Case, reference: Path, folder: Path) -> Files:
    """Write the cluster of a case next to its answers; return its path and the paths of the imported profiles."""
    node = NodeType(device="A100", devices_per_node=case.devices_per_node, memory_bytes=80 << 30)
    nodes = (NodeGroup(node_type="a100", count=case.nodes),)
    cluster = folder / "cluster.json"
    write_document(cluster, Cluster(name=case.hardware, nodes=nodes, node_types={"a100": node}))
    model, hardware = reference / "models" / f"{case.model}.json", reference / "hardware" / f"{case.hardware}.h5"
    return Files(cluster, model, hardware, reference / "profiles" / f"{case.profile}.h5")


def powers_of_two(greatest: int) -> list[int]:
    """Return 1, 2, 4, ... up to `greatest`."""
    return [1 << i for i in range(greatest.bit_length())]


def request_of(case: Case, name: str, budget_mib: int) -> dict[str, Any]:
    """Return the content of the search file of a case within a budget."""
    return {
        "format": "shardwright.search",
        "version": 1,
        "name": f"{case.name}-{name}",
        "global_batch_size": case.global_batch_size,
        "memory_gib": budget_mib / 1024,
        "pp_sizes": powers_of_two(case.max_pp_size),
        "tp_sizes": powers_of_two(case.max_tp_size),
        "data_parallel": ["zero2", "zero3"],
        "sequence_parallel": [case.sequence_parallel],
        "precision": {"parameters": "float32", "compute": "bfloat16", "reduce": "float32"},
    }


def search_ours(
    case: Case, files: Files, folder: Path, name: str, budget_mib: int, outer: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return our best plan within a budget, None if no plan fits; `outer`: the constraint on embedding and head."""
    narrowed = {} if outer is None else {"embedding": outer, "head": outer}
    request = request_of(case, name, budget_mib) | narrowed
    asked, plan = folder / f"{name}.search.json", folder / f"{name}.json"
    asked.write_text(json.dumps(request, indent=1))
    command = [SHARDWRIGHT, "plan", *files.machines, *files.profiles, "--search", str(asked), "--out", str(plan)]
    code, ran = galvatron.run(command, folder / f"{name}.log", expected=(0, 3))
    found = {"name": name, "budget_mib": budget_mib, "ran": ran._asdict()}
    if code == 3:
        return found | {"plan": None, "why": (folder / f"{name}.log").read_text().splitlines()[-1]}
    prediction = read_document(folder / f"{name}.prediction.json", Prediction)
    proof = prediction.proof
    assert proof is not None
    kept = {"gap": proof.gap, "examined": proof.examined, "solved": proof.solved}
    return found | {"plan": summary(read_document(plan, Plan)), "priced": priced(prediction), "proof": kept}


def priced(prediction: Prediction) -> dict[str, Any]:
    """Return the seconds and MiB of a plan under our cost model."""
    estimate = prediction.estimate
    return {
        "simulated_s": estimate.simulated_step_time_s,
        "closed_form_s": estimate.objective_s,
        "memory_mib": [round(stage.memory_bytes / MIB) for stage in estimate.stages],
        "warnings": list(prediction.warnings),
    }


def evaluate_theirs(config: dict[str, Any], case: Case, files: Files, folder: Path) -> dict[str, Any]:
    """Return the peer's plan, priced by our cost model and simulator."""
    written, plan, out = (folder / f"theirs.{end}" for end in ("config.json", "json", "prediction.json"))
    written.write_text(json.dumps(config, indent=1))
    said = ["--sequence-parallel", case.sequence_parallel, "--precision-reduce", "float32"]
    galvatron.run(
        [SHARDWRIGHT, "import", "galvatron", str(written), *files.machines, *said, "--out", str(plan)],
        folder / "import.log",
    )
    galvatron.run([SHARDWRIGHT, "evaluate", str(plan), *files.profiles, "--out", str(out)], folder / "evaluate.log")
    return {"plan": summary(read_document(plan, Plan)), "priced": priced(read_document(out, Prediction))}


def exported(folder: Path, name: str) -> dict[str, Any] | str:
    """Return our plan as the peer's config, or why that format cannot express it."""
    out, log = folder / f"{name}.config.json", folder / "export.log"
    command = [SHARDWRIGHT, "export", str(folder / f"{name}.json"), "--to", "galvatron", "--out", str(out)]
    code, _ = galvatron.run(command, log, expected=(0, 2))
    return dict(json.loads(out.read_text())) if code == 0 else log.read_text().splitlines()[-1].partition(".json: ")[2]


def sayable(case: Case, files: Files, folder: Path, usable: dict[str, Any]) -> dict[str, Any]:
    """Return our plan with its config for the peer or, if that format cannot express it, our best plan that it can.

    The format has only one strategy for embedding and head: we search with each possible one and take the fastest plan.
    """
    config = exported(folder, usable["name"])
    if isinstance(config, dict):
        return usable | {"config": config}
    kinds = [(tp_size, kind) for tp_size in powers_of_two(case.max_tp_size) for kind in ("zero2", "zero3")]
    tried = [
        search_ours(
            case, files, folder, f"alike-tp{tp_size}-{kind}", usable["budget_mib"],
            {"tp_sizes": [tp_size], "data_parallel": [kind]},
        )
        for tp_size, kind in kinds
    ]  # fmt: skip
    best = min((found for found in tried if found["plan"]), key=lambda found: found["priced"]["simulated_s"])
    alike = exported(folder, best["name"])
    return best | {"refused": config} | ({"config": alike} if isinstance(alike, dict) else {"refused_too": alike})


def summary(plan: Plan) -> str:
    """Return a plan in one line: pipeline stages, microbatches, runs of equal layers, embedding and head."""

    def said(strategy: Strategy) -> str:
        recompute = getattr(strategy, "recompute", "none")
        kind = f"tp{strategy.tp_size} dp{strategy.dp_size} {strategy.data_parallel}"
        return kind + (" recomputed" if recompute != "none" else "")

    runs = [f"{len(list(run))} x {text}" for text, run in groupby(map(said, plan.layers))]
    cut = ",".join(str(sum(b - a for a, b in stage.layers)) for stage in plan.stages)
    ends = f"embedding {said(plan.embedding)}; head {said(plan.head)}"
    return f"pp{len(plan.stages)} ({cut}), {plan.num_microbatches} microbatches: {', '.join(runs)}; {ends}"


def compare(case: Case, python: Path, work: Path, reference: Path) -> dict[str, Any]:
    """Return both searches of a case and all prices."""
    folder = work / case.name
    told = case._asdict() | {"layers": [layers._asdict() for layers in case.layers]}
    peer_case = galvatron.write_case(told, reference / "hetu-galvatron", folder)
    found = galvatron.search(python, peer_case)
    if found["config"] is None:
        raise SystemExit(f"{case.name}: the peer finds no plan")
    files = files_of(case, reference, folder)
    own = galvatron.price(python, peer_case, {"theirs": found["config"]})["theirs"]
    reserve_mib = case.memory_gib * 1024 - own["usable_mib"]
    printed, again = found["believed"], [mib + reserve_mib for mib in own["memory_mib"]]
    if abs(own["step_s"] - printed["step_s"]) > 1e-9 or again != printed["memory_mib"]:
        raise SystemExit(f"{case.name}: the peer's answer, priced again, is not what its search printed")
    usable = search_ours(case, files, folder, "usable", own["usable_mib"] - CONTEXT_MIB)
    whole = search_ours(case, files, folder, "whole", case.memory_gib * 1024)
    theirs = evaluate_theirs(found["config"], case, files, folder)
    said = sayable(case, files, folder, usable) if usable["plan"] else {}
    plans = {"theirs": found["config"]} | ({"ours": said["config"]} if "config" in said else {})
    peer = galvatron.price(python, peer_case, plans)
    return {
        "case": told,
        "peer": {"ran": found["ran"], "plan": theirs["plan"], "reserve_mib": reserve_mib},
        "usable": usable,
        "whole": whole,
        "sayable": said,
        "our_price_of_theirs": theirs["priced"],
        "their_prices": peer,
        "our_verdict": our_verdict(usable, theirs["priced"]),
        "their_verdict": their_verdict(peer, said),
    }


def cells(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    """Yield the cells of each case, in the order of `COLUMNS`."""
    for row in rows:
        ours, theirs, peer = row["usable"], row["our_price_of_theirs"], row["their_prices"]
        mine = ours.get("priced", {"simulated_s": float("nan"), "memory_mib": [0]})
        yield (
            row["case"]["name"], f"{row['peer']['ran']['cpu_s']:.1f}", f"{ours['ran']['cpu_s']:.2f}",
            f"{theirs['simulated_s']:.4f}", f"{mine['simulated_s']:.4f}",
            str(max(theirs["memory_mib"])), str(max(mine["memory_mib"])), str(ours["budget_mib"]), row["our_verdict"],
            f"{peer['theirs']['step_s']:.4f}", f"{peer['ours']['step_s']:.4f}" if "ours" in peer else "-",
            row["their_verdict"],
        )  # fmt: skip


# The verdict of each cost model on the two plans, in words.


ALIKE = 5e-4
"""Relative difference below which times are called alike; the figures are in the JSON."""


def our_verdict(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return how our simulator compares the peer's plan with ours, and whether the peer's exceeds our budget."""
    if ours["plan"] is None:
        return ours["why"]
    ratio = theirs["simulated_s"] / ours["priced"]["simulated_s"]
    over_mib = max(theirs["memory_mib"]) - ours["budget_mib"]
    said = f"ours is {ratio - 1:.1%} faster" if ratio >= 1 else f"ours is {1 / ratio - 1:.1%} slower"
    said = "both alike" if abs(ratio - 1) < ALIKE else said
    return said + (f"; theirs is {over_mib} MiB over the budget" if over_mib > 0 else "")


def their_verdict(peer: dict[str, Any], said: dict[str, Any]) -> str:
    """Return how the peer's model compares our plan with its own, and the defect that makes it prefer its own."""
    if "ours" not in peer:
        return f"its format cannot say our plan: {said.get('refused_too', 'nothing fits')}"
    ours, theirs, usable = peer["ours"], peer["theirs"], peer["theirs"]["usable_mib"]
    memory = f"memory {max(ours['memory_mib'])} MiB, "
    over_mib, late_mib = (max(ours[name]) - usable for name in ("memory_mib", "memory_mib_late_gradients"))
    memory += "fits" if over_mib <= 0 else f"{over_mib} MiB over"
    if over_mib > 0 and late_mib < over_mib:
        memory += f", {max(0, late_mib)} if gradients are not counted beside the activations that they replace"
    ratio = ours["step_s"] / theirs["step_s"]
    if abs(ratio - 1) < ALIKE:
        return f"prices both alike; {memory}"
    if ratio < 1:
        return f"prefers our plan by {1 / ratio - 1:.1%}; {memory}"
    turned = [names for names, s in ours["step_s_mended"].items() if s <= theirs["step_s_mended"][names]]
    return f"prefers its own by {ratio - 1:.1%}, {cause(turned)}; {memory}"


def cause(turned: list[str]) -> str:
    """Return what makes the peer's model prefer its own plan.

    `turned`: the names, joined by spaces, of all repairs that reverse the preference. A single defect is named rather
    than several together, and defects rather than differences.
    """
    for kind, names in (("defect", DEFECTS), ("difference", DIFFERENCES)):
        alone = [name for name in names if name in turned]
        if alone:
            return f"for the {kind} {' or '.join(alone)}"
        if " ".join(names) in turned:
            return f"for its {kind}s together ({', '.join(names)})"
    together = " ".join((*DEFECTS, *DIFFERENCES)) in turned
    return "for its defects and differences together" if together else "why is not determined"


# All cases, and what is written.


def machine() -> dict[str, str | float]:
    """Return the machine, the date, and the load before the run: other work makes CPU seconds longer."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.machine()
    return {"cpu": name, "python": platform.python_version(), "load": os.getloadavg()[0]} | {
        "date": datetime.now(UTC).date().isoformat()
    }


def main() -> None:
    """Run the cases one after another and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("results/benchmark-search"), help="environment and answers")
    parser.add_argument("--reference", type=Path, default=Path("results/reference"), help="imported profiles")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], help="by default all")
    parser.add_argument("--out", type=Path, help="JSON of everything that was found")
    options = parser.parse_args()
    if not (options.reference / "hardware").is_dir():
        raise SystemExit(f"error: {options.reference}: no imported profiles: run snakemake --cores 2 reference")
    where, python, rows = machine(), galvatron.environment(options.work), []
    for case in CASES:
        if options.cases is None or case.name in options.cases:
            rows.append(compare(case, python, options.work, options.reference))
            print(f"{case.name}: {rows[-1]['their_verdict']}", file=sys.stderr, flush=True)
    print("\n".join(table(COLUMNS, cells(rows))))
    if options.out:
        write_json(options.out, None, machine=where, cases=rows)


if __name__ == "__main__":
    main()
