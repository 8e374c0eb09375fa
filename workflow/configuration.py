"""The configuration, checked and turned into the documents that the stages read.

Everything here is pure: the Snakefile reads the configuration once, asks for a `Workflow` and takes the texts of the
files to write, what depends on what, and the resources of a job from it.
"""

import ast
import difflib
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from jsonschema.exceptions import best_match

__all__ = ["ConfigurationError", "Workflow", "check_model_keys", "load_workflow", "read_yaml"]

Section = Mapping[str, Any]

_GIB = 1024**3
_OWN_MODEL_KEYS = ("preset", "profile", "sequence_length")
_MEASURE_KEYS = ("source", "steps", "warmup_steps", "least_time_s")
_ANALYTIC = "analytic"
_NO_NAME = "(?!)"
# Said in full: inside a job of Snakemake's plugin, srun finds no SLURM_* variable to take the numbers from.
_SRUN = "srun --nodes={0} --ntasks={0} --ntasks-per-node=1 --kill-on-bad-exit=1"
_OPTIONAL_RESOURCES = {"partition": "slurm_partition", "account": "slurm_account", "constraint": "constraint"}


class ConfigurationError(Exception):
    """Something in the configuration that cannot be used: where, what, and what to do, in one line."""

    def __init__(self, file: object, what: str, remedy: str) -> None:
        super().__init__(" ".join(f"{file}: {what}: {remedy}".split()))


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
        overrides = {key: value for key, value in model.items() if key not in _OWN_MODEL_KEYS}
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
        names = (name for name in self["models"] if self.profile_of(name).get("source") == _ANALYTIC)
        return "|".join(map(re.escape, names)) or _NO_NAME

    def analytic_clusters(self) -> str:
        """A regular expression of the clusters whose hardware is estimated, not measured."""
        names = (name for name, cluster in self["clusters"].items() if cluster.get("hardware") == _ANALYTIC)
        return "|".join(map(re.escape, names)) or _NO_NAME

    def profile_json(self, name: str) -> str:
        """The document of profile settings: which strategies and micro-batch sizes are measured."""
        settings = {key: value for key, value in self["profiles"][name].items() if key not in _MEASURE_KEYS}
        return _document("shardwright.profile_settings", settings)

    def search_json(self, name: str) -> str:
        """The document of a search; number formats and attention kernel are those that its model was profiled in."""
        search = self["searches"][name]
        profile = self.profile_of(search["model"])
        asked = {key: value for key, value in search.items() if key not in ("model", "cluster")}
        inherited = {key: profile[key] for key in ("precision", "attention") if key in profile}
        return _document("shardwright.search", {"name": name} | inherited | asked)

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
    _check_shape(config, schema, file)
    _check_references(config, file)
    models = config["models"].items()
    presets = {model["preset"]: _read_preset(model["preset"], name, file, root) for name, model in models}
    for name, model in models:
        check_model_keys(name, model, presets[model["preset"]]["config"], file)
    workflow = Workflow(file, config, presets)
    for name, run in config["runs"].items():
        _check_vocabulary(name, run, workflow)
    return workflow


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose outermost value is a mapping; raises ConfigurationError with the line."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(path, error.strerror or str(error), "check the path") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigurationError(path, f"not valid YAML{where} ({problem})", "correct the file") from None
    if not isinstance(content, dict):
        raise ConfigurationError(path, "holds no keys", "see config/README.md")
    return content


def _document(format_name: str, content: Section) -> str:
    return _canonical({"format": format_name, "version": 1, **content})


def _canonical(value: Section) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _check_shape(config: Section, schema: Section, file: str) -> None:
    error = best_match(jsonschema.Draft202012Validator(schema).iter_errors(config))
    if error is None:
        return
    where = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = list(error.schema.get("properties", ()))
        odd = sorted(set(error.instance) - set(known))[0]
        _refuse_key(f"{where}.{odd}" if where else odd, odd, known, file)
    what = " ".join(error.message.split())
    raise ConfigurationError(file, f"{where}: {what}" if where else what, "see config/README.md")


def _check_references(config: Section, file: str) -> None:
    for name, cluster in config["clusters"].items():
        for group in cluster["nodes"]:
            _refer(f"clusters.{name}.nodes", group["node_type"], config["node_types"], "node_types", file)
        several = sum(group["count"] for group in cluster["nodes"]) > 1
        if several and cluster.get("hardware") == _ANALYTIC and "inter_node_gbit_s" not in cluster:
            what = f"clusters.{name}: its hardware is analytic and it has several nodes"
            raise ConfigurationError(file, what, "give inter_node_gbit_s, what one node sends to others")
    for name, model in config["models"].items():
        _refer(f"models.{name}.profile", model["profile"], config["profiles"], "profiles", file)
    for name, search in config["searches"].items():
        _refer(f"searches.{name}.model", search["model"], config["models"], "models", file)
        _refer(f"searches.{name}.cluster", search["cluster"], config["clusters"], "clusters", file)
    for name, run in config["runs"].items():
        _refer(f"runs.{name}.search", run["search"], config["searches"], "searches", file)
        _refer(f"runs.{name}.data", run["data"], config["data"], "data", file)
    for search in config["validate"]["searches"]:
        _refer("validate.searches", search, config["searches"], "searches", file)


def _refer(where: str, name: str, section: Section, section_name: str, file: str) -> None:
    if name not in section:
        raise ConfigurationError(file, f"{where}: {name!r} is not under {section_name}", _hint(name, section))


def _read_preset(preset: str, model: str, file: str, root: Path) -> Section:
    folder = root / "config" / "models"
    path = folder / f"{preset}.yaml"
    if not path.is_file():
        known = sorted(found.stem for found in folder.glob("*.yaml"))
        raise ConfigurationError(
            file, f"models.{model}.preset: there is no config/models/{preset}.yaml", _hint(preset, known)
        )
    content = read_yaml(path)
    if set(content) != {"sequence_length", "config"} or "model_type" not in content["config"]:
        what = "a preset holds sequence_length, and config with model_type"
        raise ConfigurationError(path, what, "see its neighbours")
    return content


def check_model_keys(name: str, model: Section, preset: Section, file: str) -> None:
    """Refuse what neither the preset nor its family's configuration class knows; raises ConfigurationError."""
    unknown = [key for key in model if key not in _OWN_MODEL_KEYS and key not in preset]
    if not unknown:
        return
    fields, aliases = _config_class_keys(preset["model_type"])
    known = sorted({*preset, *fields, *_OWN_MODEL_KEYS})
    for key in unknown:
        if key in aliases:
            what = f"models.{name}.{key} is called {aliases[key]} in a {preset['model_type']} configuration"
            raise ConfigurationError(file, what, f"write {aliases[key]}")
        if key not in known:
            _refuse_key(f"models.{name}.{key}", key, known, file)


def _config_class_keys(model_type: str) -> tuple[set[str], dict[str, str]]:
    """The fields and the aliases of a Hugging Face configuration class, read from its source.

    Importing transformers takes seconds, which every call of snakemake would pay for.
    """
    package = importlib.util.find_spec("transformers")
    origin = Path(package.origin).parent if package is not None and package.origin else Path()
    module = model_type.replace("-", "_")
    source = origin / "models" / module / f"configuration_{module}.py"
    if not source.is_file():
        return set(), {}
    fields: set[str] = set()
    aliases: dict[str, str] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                fields.add(item.target.id)
            elif isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "attribute_map":
                aliases |= ast.literal_eval(item.value)
    return fields, aliases


def _check_vocabulary(name: str, run: Section, workflow: Workflow) -> None:
    config = json.loads(workflow.model_config_json(workflow["searches"][run["search"]]["model"]))
    tokens, rows = workflow["data"][run["data"]]["vocab_size"], config.get("vocab_size")
    if rows is not None and tokens > rows:
        what = f"runs.{name}: its data has {tokens} tokens, its model's vocabulary {rows}"
        raise ConfigurationError(workflow.file, what, "raise the model's vocab_size or lower the data's")


def _refuse_key(where: str, key: str, known: Iterable[str], file: str) -> None:
    raise ConfigurationError(file, f"{where} is no known key", _hint(key, known))


def _hint(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
