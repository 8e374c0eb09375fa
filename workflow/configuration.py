"""The configuration, checked and turned into the documents that the stages read.

Everything here is pure: the Snakefile reads the configuration once, asks for a `Workflow` and takes the texts of the
files to write, what depends on what, and the resources of a job from it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configuration_checks import (
    ANALYTIC,
    OWN_MODEL_KEYS,
    ConfigurationError,
    Section,
    check_model_keys,
    check_references,
    check_shape,
    read_preset,
    read_yaml,
)

__all__ = ["ConfigurationError", "Workflow", "check_model_keys", "load_workflow", "read_yaml"]

_GIB = 1024**3
_WORKFLOW_KEYS = ("model", "cluster", "select", "correction")
_MEASURE_KEYS = ("source", "steps", "warmup_steps", "min_time_s")
_NO_NAME = "(?!)"
# Said in full: inside a job of Snakemake's plugin, srun finds no SLURM_* variable to take the numbers from.
_SRUN = "srun --nodes={0} --ntasks={0} --ntasks-per-node=1 --kill-on-bad-exit=1"
_OPTIONAL_RESOURCES = {"partition": "slurm_partition", "account": "slurm_account", "constraint": "constraint"}


@dataclass(frozen=True)
class Workflow:
    """The configuration, known to hold together."""

    file: str
    """Where it was read, for messages."""
    sections: Section
    presets: Mapping[str, Section]
    """The presets in use, by name."""

    def __getitem__(self, section: str) -> Any:  # noqa: ANN401
        """One section of the configuration, as YAML gave it."""
        return self.sections[section]

    def cluster_json(self, name: str) -> str:
        """The document of a cluster; `1x<node type>` is one node of that type, without its price, for profiling."""
        if (node_type := name.removeprefix("1x")) != name and node_type in self["node_types"]:
            priced, groups = False, [{"node_type": node_type, "count": 1}]
        else:
            priced, groups = True, self["clusters"][name]["nodes"]
        used = dict.fromkeys(str(group["node_type"]) for group in groups)
        types = {used_type: self._node_type(used_type, priced) for used_type in used}
        return _document("shardwright.cluster", {"name": name, "nodes": groups, "node_types": types})

    def model_config_json(self, name: str) -> str:
        """The Hugging Face configuration of a model: its preset's, with what the configuration says otherwise."""
        model = self["models"][name]
        overrides = {key: value for key, value in model.items() if key not in OWN_MODEL_KEYS}
        return _canonical({**self.presets[model["preset"]]["config"], **overrides})

    def sequence_length(self, model: str) -> int:
        """Tokens of one sample."""
        settings = self["models"][model]
        return int(settings.get("sequence_length", self.presets[settings["preset"]]["sequence_length"]))

    def further_lengths(self, model: str) -> tuple[int, ...]:
        """The sequence lengths that a model is profiled at beside its own."""
        settings = self.profile_of(model)
        asked = settings.get("sequence_lengths") or ()
        if isinstance(asked, Mapping):
            asked = _thinned(asked, settings.get("grid", "fewest"))
        return tuple(length for length in asked if length != self.sequence_length(model))

    def profile_of(self, model: str) -> Section:
        """The profile settings of a model."""
        found: Section = self["profiles"][self["models"][model]["profile"]]
        return found

    def analytic_models(self) -> str:
        """A regular expression of the models whose profiles are estimated, not measured."""
        names = (name for name in self["models"] if self.profile_of(name).get("source") == ANALYTIC)
        return "|".join(map(re.escape, names)) or _NO_NAME

    def analytic_clusters(self) -> str:
        """A regular expression of the clusters whose hardware is estimated, not measured."""
        names = (name for name, cluster in self["clusters"].items() if cluster.get("hardware") == ANALYTIC)
        return "|".join(map(re.escape, names)) or _NO_NAME

    def profile_json(self, name: str) -> str:
        """The document of profile settings: which strategies and micro-batch sizes are measured."""
        settings = {key: value for key, value in self["profiles"][name].items() if key not in _MEASURE_KEYS}
        return _document("shardwright.profile_settings", settings)

    def search_json(self, name: str) -> str:
        """The document of a search; number formats and attention kernel are those that its model was profiled in."""
        search = self["searches"][name]
        profile = self.profile_of(search["model"])
        asked = {key: value for key, value in search.items() if key not in _WORKFLOW_KEYS}
        inherited = {key: profile[key] for key in ("precision", "attention") if key in profile}
        return _document("shardwright.search", {"name": name} | inherited | asked)

    def selects(self, search: str) -> bool:
        """Whether runs of a search take its measured winner, not the predicted best."""
        return bool(self["searches"][search].get("select") == "measured")

    def plan_of(self, search: str) -> str:
        """The plan file that runs of a search take."""
        return f"results/{'selected' if self.selects(search) else 'plans'}/{search}.json"

    def correction_of(self, search: str) -> str | None:
        """The correction file that a search is given."""
        learned_from = self["searches"][search].get("correction")
        return None if learned_from is None else f"results/corrections/{learned_from}.json"

    def measured_searches(self) -> tuple[str, ...]:
        """The searches whose plan and runners-up are run for a few steps: those asked for, and those others rest on."""
        needed = {of.get("correction") for of in self["searches"].values()} | set(self["validate"]["searches"])
        return tuple(name for name in self["searches"] if name in needed or self.selects(name))

    def node_types_of(self, cluster: str) -> tuple[str, ...]:
        """The node types of a cluster, in the order of its ranks."""
        return tuple(dict.fromkeys(group["node_type"] for group in self["clusters"][cluster]["nodes"]))

    def num_nodes(self, cluster: str) -> int:
        """Number of nodes of a cluster."""
        return sum(group["count"] for group in self["clusters"][cluster]["nodes"])

    def profiled_pairs(self) -> tuple[tuple[str, str], ...]:
        """Every (model, node type) that some search needs the profile of."""
        return tuple(
            dict.fromkeys(
                (search["model"], node_type)
                for search in self["searches"].values()
                for node_type in self.node_types_of(search["cluster"])
            )
        )

    def resources(self, node_type: str, num_nodes: int, runtime_min: int) -> dict[str, int | str]:
        """What a job that starts ranks on some nodes asks for, `runtime` in minutes and `mem_mb` for each node.

        Several nodes are started by srun, one task each; on one node the command starts its ranks itself.
        """
        slurm = self["node_types"][node_type].get("slurm", {})
        gpus = f" --gpus-per-node={slurm['gpus_per_node']}" if "gpus_per_node" in slurm else ""
        asked: dict[str, int | str] = {
            "nodes": num_nodes,
            "tasks": num_nodes,
            "mpi": _SRUN.format(num_nodes) if num_nodes > 1 else "",
            "cpus_per_task": slurm.get("cpus_per_node", 1),
            "mem_mb": slurm.get("mem_mb", 4000),
            "runtime": slurm.get("runtime_min", runtime_min),
            "slurm_extra": "--exclusive" + gpus,
        }
        return asked | {resource: slurm[key] for key, resource in _OPTIONAL_RESOURCES.items() if key in slurm}

    def resource_names(self) -> tuple[str, ...]:
        """The resources that some job asks for.

        The optional ones are left out where no node type has them, so that a default of the cluster's profile holds.
        """
        names = (self.resources(node_type, 1, 1) for node_type in self["node_types"])
        return tuple(dict.fromkeys(name for each in names for name in each))

    def _node_type(self, name: str, priced: bool) -> dict[str, Any]:
        node = self["node_types"][name]
        return {
            "device": node["device"],
            "devices_per_node": node["devices_per_node"],
            "memory_bytes": int(node["memory_gib"] * _GIB),
            "usd_per_hour": node.get("usd_per_hour") if priced else None,
        }


def _thinned(asked: Section, grid: str) -> tuple[int, ...]:
    """The lengths of a range that `shardwright-profile probes` will ask for: all, or four of them, evenly spaced."""
    every = range(asked["min"], asked["max"] + 1, asked["step"])
    if grid == "full" or len(every) <= 4:
        return tuple(every)
    return tuple(every[round(i * (len(every) - 1) / 3)] for i in range(4))


def load_workflow(config: Section, file: str, root: Path) -> Workflow:
    """Check a configuration whole: shape, names that refer to one another, presets and their keys.

    `root` is the repository's folder. Raises ConfigurationError.
    """
    schema = read_yaml(root / "workflow" / "schemas" / "config.schema.yaml")
    check_shape(config, schema, file)
    check_references(config, file)
    models = config["models"].items()
    presets = {model["preset"]: read_preset(model["preset"], name, file, root) for name, model in models}
    for name, model in models:
        check_model_keys(name, model, presets[model["preset"]]["config"], file)
    workflow = Workflow(file, config, presets)
    for name, run in config["runs"].items():
        _check_vocabulary(name, run, workflow)
    return workflow


def _document(format_name: str, content: Section) -> str:
    return _canonical({"format": format_name, "version": 1, **content})


def _canonical(value: Section) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _check_vocabulary(name: str, run: Section, workflow: Workflow) -> None:
    config = json.loads(workflow.model_config_json(workflow["searches"][run["search"]]["model"]))
    tokens, rows = workflow["data"][run["data"]]["vocab_size"], config.get("vocab_size")
    if rows is not None and tokens > rows:
        what = f"runs.{name}: its data has {tokens} tokens, its model's vocabulary {rows}"
        raise ConfigurationError(workflow.file, what, "raise the model's vocab_size or lower the data's")
