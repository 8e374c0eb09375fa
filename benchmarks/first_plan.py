"""A newcomer's first plans, by the commands, beside what one would choose by hand: benchmarks/results/first-plan.md.

    python benchmarks/first_plan.py            # prints the table
    python benchmarks/first_plan.py --write    # and writes it
    python benchmarks/first_plan.py --workflow # makes the plans with Snakemake too, and compares

Models, machines and searches are those of config/first-plan.yaml. All is estimated from shapes: no GPU takes part.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from accuracy_parts.commands import run, write_json_document

from shardwright.devices.utilization import model_flops_utilization
from shardwright.io import one_line_errors, read_document
from shardwright.models.registry import read_presets
from shardwright.types import Estimate, Model, Plan, Prediction
from shardwright_search.advise.choices import RULES, plan_of_rule, reading_of
from shardwright_search.advise.question import Question, question_of
from shardwright_search.advise.report import plan_words
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import read_profiles
from shardwright_search.options import AdviseOptions

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "config" / "first-plan.yaml"
PAGE = ROOT / "benchmarks" / "results" / "first-plan.md"
GIB = 2**30

BY_HAND = {
    "rule:tp8": "tp of a node, fewest stages, ZeRO-1",
    "rule:smallest": "smallest tp x pp that fits, ZeRO-1",
    "rule:nvidia-table": "NVIDIA's table",
    "zero=3,mbs=1,recompute=selective": "FSDP, selective recomputation",
    "zero=3,mbs=1,recompute=full": "FSDP, full recomputation",
}
"""What is chosen without a search: as `shardwright advise --against` takes it, and in words."""


class Row(NamedTuple):
    """A plan and what is predicted of it."""

    what: str
    plan: Plan
    estimate: Estimate


class Files(NamedTuple):
    """What the commands of one search write, and the plan."""

    hardware: Path
    profile: Path
    plan: Path


def main() -> None:
    """Make the plans and the table."""
    parser = argparse.ArgumentParser(description="First plans beside those made by hand.")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.relative_to(ROOT)}")
    parser.add_argument("--workflow", action="store_true", help="make the plans with Snakemake too")
    asked = parser.parse_args()
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as place, one_line_errors():
        made = {name: run_commands(name, config, Path(place)) for name in config["searches"]}
        if asked.workflow:
            _check_workflow(made, Path(place))
        text = "\n".join(_table(config, made))
    print(text)
    if asked.write:
        PAGE.write_text(f"{text}\n", encoding="utf-8")


def run_commands(name: str, config: Mapping[str, Any], place: Path) -> Files:
    """The commands for one search of the configuration, in a folder of its own."""
    folder = place / name
    folder.mkdir()
    search, model, cluster, settings = _documents(name, config)
    preset = read_presets()[model["preset"]]
    write_json_document(folder / "config.json", None, **preset.config)
    for kind, document in {"cluster": cluster, "profile_settings": settings, "search": search}.items():
        write_json_document(folder / f"{kind}.json", kind, **document)
    files = Files(folder / "hardware.h5", folder / "profile.h5", folder / "plan.json")
    described, of_cluster = folder / "model.json", ("--cluster", folder / "cluster.json")
    across = config["clusters"][config["searches"][name]["cluster"]].get("inter_node_gbit_s")
    network = () if across is None else ("--inter-node-gbit-s", across)
    length = ("--sequence-length", preset.sequence_length)
    run("shardwright", "train", "describe", folder, "--name", name, *length, "--out", described)
    made = ("--out", files.profile, "--hardware-out", files.hardware)
    of_model = ("--model", described, "--settings", folder / "profile_settings.json")
    run("shardwright", "profile", "analytic", *of_model, *of_cluster, *network, *made)
    profiles = ("--hardware", files.hardware, "--profile", files.profile)
    space = ("--search", folder / "search.json")
    run("shardwright", "plan", *of_cluster, "--model", described, *profiles, *space, "--out", files.plan)
    return files


def _documents(name: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The search file, the model's entry, the cluster and the profile settings of a search."""
    asked = dict(config["searches"][name])
    model, cluster = config["models"][asked.pop("model")], asked.pop("cluster")
    settings = {key: value for key, value in config["profiles"][model["profile"]].items() if key != "source"}
    search = {"name": name, "precision": settings["precision"]} | asked
    nodes, kinds = config["clusters"][cluster]["nodes"], {}
    for kind in {group["node_type"] for group in nodes}:
        own = dict(config["node_types"][kind])
        kinds[kind] = {"memory_bytes": round(own.pop("memory_gib") * GIB)} | own
    return search, model, {"name": cluster, "nodes": nodes, "node_types": kinds}, settings


def _table(config: Mapping[str, Any], made: Mapping[str, Files]) -> Iterator[str]:
    yield "| | plan | s a step | tokens/s | full-square MFU | GiB of a GPU | times as long |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for name, files in made.items():
        question = question_for(name, config, files.plan.parent)
        best, *others = rows(files, question)
        limit = best.plan.cluster.node_types[best.plan.cluster.nodes[0].node_type].memory_bytes
        gpus = f"{question.cluster.num_devices} x {question.cluster.nodes[0].node_type}"
        step = f"{best.plan.global_batch_size} x {best.plan.model.sequence_length} tokens"
        yield f"| **{name}**, {gpus}, {step} | | | | | | |"
        for row in (best, *others):
            yield _line(row, best, question, limit)


def _line(row: Row, best: Row, question: Question, limit: int) -> str:
    took, samples = row.estimate.simulated_step_time_s, row.estimate.samples_per_s
    tokens, share = samples * row.plan.model.sequence_length, model_flops_utilization(row.plan, took)
    size = f"{row.estimate.memory_bytes / GIB:.1f}" + (" (does not fit)" if row.estimate.memory_bytes > limit else "")
    ratio = took / best.estimate.simulated_step_time_s
    figures = f"{took:.2f} | {tokens:,.0f} | {share.full_square:.0%} | {size} | {ratio:.2f}"
    return f"| {row.what} | {plan_words(row.plan)} | {figures} |"


def rows(files: Files, question: Question) -> Iterator[Row]:
    """The planned one first, then those made by hand, priced with the same profiles."""
    plan = read_document(files.plan, Plan)
    yield Row("planned", plan, read_document(files.plan.with_suffix(".prediction.json"), Prediction).estimate)
    profiles = read_profiles([files.hardware], [files.profile])
    limit = plan.cluster.node_types[plan.cluster.nodes[0].node_type].memory_bytes

    def priced(own: Plan) -> Estimate:
        return evaluate(own, profiles, timeline=False).estimate

    for text, words in BY_HAND.items():
        rule = text.removeprefix("rule:")
        if rule in RULES:
            own = plan_of_rule(rule, question, lambda tried: priced(tried).memory_bytes <= limit)
        else:
            own = reading_of(text, question.setting).plan
        yield Row(words, own, priced(own))


def question_for(name: str, config: Mapping[str, Any], folder: Path) -> Question:
    """What `advise` is asked of the same model and machine, so that it makes plans by hand."""
    search = config["searches"][name]
    cluster = config["clusters"][search["cluster"]]
    (group,) = cluster["nodes"]
    kind = config["node_types"][group["node_type"]]
    gpus = f"{group['count']}x{kind['devices_per_node']}:{kind['device']}"
    precision = config["profiles"][config["models"][search["model"]]["profile"]]["precision"]["compute"]
    across = str(cluster["inter_node_gbit_s"]) if group["count"] > 1 else None
    batch, length = search["global_batch_size"], read_document(folder / "model.json", Model).sequence_length
    return question_of(
        AdviseOptions(
            model=str(folder), seq=length, gpus=gpus, batch=batch, precision=precision, inter_node_gbit_s=across
        )
    )


def _check_workflow(made: Mapping[str, Files], place: Path) -> None:
    """Make the plans by the workflow; the same bytes are expected of the plans' layers and times."""
    folder = place / "workflow"
    folder.mkdir()
    targets = [f"results/plans/{name}.json" for name in made]
    run(
        "snakemake",
        "--snakefile",
        ROOT / "Snakefile",
        "--cores",
        1,
        "--configfile",
        CONFIG,
        "--directory",
        folder,
        *targets,
    )
    for name, files in made.items():
        own, other = (read_document(path, Plan) for path in (files.plan, folder / "results" / "plans" / f"{name}.json"))
        same = (own.layers, own.stages, own.num_microbatches) == (other.layers, other.stages, other.num_microbatches)
        print(f"{name}: the workflow's plan is {'the same' if same else 'ANOTHER'}")


if __name__ == "__main__":
    main()
