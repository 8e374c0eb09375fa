"""Our search beside hetu-galvatron 2.4.0 on its own measured profiles: CPU seconds, and both plans priced by both.

    snakemake --cores 2 reference                  # once: the imported profiles
    python benchmarks/search.py [--work results/benchmark-search] [--reference results/reference]
                                [--cases NAME ...] [--out benchmarks/results/search.json]

Both search, in a process of their own with one thread, one batch size over the same space: powers of two, consecutive
tensor-parallel groups, ZeRO-2 and ZeRO-3, full recomputation or none, every divisor of the batch, 1F1B. The peer's own
environment is made in the work folder, where its answers are kept too (17 to 108 CPU seconds each);
`benchmarks/peers/galvatron.py` says what of its profiles had to be given other keys to load at all.

Bytes: above 20 GB the peer sets 20 % aside, and counts 1 GiB for the process, which the imported profiles do not have.
Ours gets what remains (`usable`), and in a second search the whole budget (`whole`). Only the first is compared.

Prices: the peer's plan is imported and evaluated by our cost model and simulator; ours is exported and priced by the
peer's cost-model classes. Where its model prefers its own plan, each of its known defects is mended in turn, and the
one after which it no longer does is named (`benchmarks/peers/galvatron_repairs.py`).
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from peers import galvatron
from peers.cases import CASES, Case
from peers.verdicts import our_verdict, their_verdict

from shardwright.io import read_document, write_document
from shardwright.types import Cluster, NodeGroup, NodeType, Plan, Prediction, Strategy

MIB = 1 << 20
CONTEXT_MIB = 1024
"""What the peer counts for the process on every device (`pytorch_context_mem`)."""
SHARDWRIGHT = str(Path(sys.executable).with_name("shardwright"))


class Files(NamedTuple):
    """What a search of ours reads."""

    cluster: Path
    model: Path
    hardware: Path
    profile: Path

    @property
    def profiles(self) -> list[str]:
        """The options that evaluate needs too."""
        return ["--hardware", str(self.hardware), "--profile", str(self.profile)]

    @property
    def machines(self) -> list[str]:
        """The options that an import needs."""
        return ["--cluster", str(self.cluster), "--model", str(self.model)]


def files_of(case: Case, reference: Path, folder: Path) -> Files:
    """The imported profiles of a case, and its cluster written beside its answers."""
    node = NodeType(device="A100", devices_per_node=case.devices_per_node, memory_bytes=80 << 30)
    nodes = (NodeGroup(node_type="a100", count=case.nodes),)
    cluster = folder / "cluster.json"
    write_document(cluster, Cluster(name=case.hardware, nodes=nodes, node_types={"a100": node}))
    model, hardware = reference / "models" / f"{case.model}.json", reference / "hardware" / f"{case.hardware}.h5"
    return Files(cluster, model, hardware, reference / "profiles" / f"{case.profile}.h5")


def powers_of_two(greatest: int) -> list[int]:
    """1, 2, 4, ... up to a power of two."""
    return [1 << i for i in range(greatest.bit_length())]


def request_of(case: Case, name: str, budget_mib: int) -> dict[str, Any]:
    """The search file of a case within a budget."""
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
    """Our best plan within a budget, null where nothing fits; `outer` is what embedding and head both must be."""
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
    """Seconds and MiB of a plan under our cost model."""
    estimate = prediction.estimate
    return {
        "simulated_s": estimate.simulated_step_time_s,
        "closed_form_s": estimate.objective_s,
        "memory_mib": [round(stage.memory_bytes / MIB) for stage in estimate.stages],
        "warnings": list(prediction.warnings),
    }


def evaluate_theirs(config: dict[str, Any], case: Case, files: Files, folder: Path) -> dict[str, Any]:
    """The peer's plan under our cost model and simulator."""
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
    """Our plan as the peer's config, or why its format cannot say it."""
    out, log = folder / f"{name}.config.json", folder / "export.log"
    command = [SHARDWRIGHT, "export", str(folder / f"{name}.json"), "--to", "galvatron", "--out", str(out)]
    code, _ = galvatron.run(command, log, expected=(0, 2))
    return dict(json.loads(out.read_text())) if code == 0 else log.read_text().splitlines()[-1].partition(".json: ")[2]


def sayable(case: Case, files: Files, folder: Path, usable: dict[str, Any]) -> dict[str, Any]:
    """Our plan with the peer's config of it; where its format cannot say it, our best that it can.

    It has one strategy for embedding and head: each of them is searched with, and the fastest plan is taken.
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
    """One line: pipeline stages, microbatches, and the runs of equal layers, embedding and head at the ends."""

    def said(strategy: Strategy) -> str:
        recompute = getattr(strategy, "recompute", "none")
        kind = f"tp{strategy.tp_size} dp{strategy.dp_size} {strategy.data_parallel}"
        return kind + (" recomputed" if recompute != "none" else "")

    runs = [f"{len(list(run))} x {text}" for text, run in groupby(map(said, plan.layers))]
    cut = ",".join(str(sum(b - a for a, b in stage.layers)) for stage in plan.stages)
    ends = f"embedding {said(plan.embedding)}; head {said(plan.head)}"
    return f"pp{len(plan.stages)} ({cut}), {plan.num_microbatches} microbatches: {', '.join(runs)}; {ends}"


def compare(case: Case, python: Path, work: Path, reference: Path) -> dict[str, Any]:
    """Both searches of a case and all prices."""
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


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The results as a table in Markdown."""
    head = ["case", "CPU s: theirs", "ours", "s a step, simulated: theirs", "ours", "MiB: theirs", "ours", "budget"]
    head += ["so"]
    lines = [[*head, "s a step, its model: theirs", "ours", "its verdict"], ["---"] * (len(head) + 3)]
    for row in rows:
        ours, theirs, peer = row["usable"], row["our_price_of_theirs"], row["their_prices"]
        mine = ours.get("priced", {"simulated_s": float("nan"), "memory_mib": [0]})
        lines.append([
            row["case"]["name"], f"{row['peer']['ran']['cpu_s']:.1f}", f"{ours['ran']['cpu_s']:.2f}",
            f"{theirs['simulated_s']:.4f}", f"{mine['simulated_s']:.4f}",
            str(max(theirs["memory_mib"])), str(max(mine["memory_mib"])), str(ours["budget_mib"]), row["our_verdict"],
            f"{peer['theirs']['step_s']:.4f}", f"{peer['ours']['step_s']:.4f}" if "ours" in peer else "-",
            row["their_verdict"],
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine() -> dict[str, str | float]:
    """Where and when it runs, and how busy it is before: other work makes CPU seconds longer."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.machine()
    return {"cpu": name, "python": platform.python_version(), "load": os.getloadavg()[0]} | {
        "date": datetime.now(UTC).date().isoformat()
    }


def main() -> None:
    """Run the cases one after another and keep what was found."""
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
    print(table(rows))
    if options.out:
        options.out.write_text(json.dumps({"machine": where, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
