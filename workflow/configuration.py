"""The configuration, checked and turned into the documents that the stages read.

Everything here is pure: the Snakefile reads the configuration once, asks for a `Workflow` and takes the texts of the
files to write, what depends on what, and the resources of a job from it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configuration_checks import Section, check_model_keys, check_references, converted, read_preset, typed
from configuration_files import check_texts
from configuration_types import Configuration, ModelChoice, Profile, Select, Source
from data_files import DataFiles, check_data
from shardwright_estimate.settings import ProfileSettings
from shardwright_formats.command.options import options_of
from shardwright_formats.io import BadInput, Document
from shardwright_formats.types import GIB, Cluster
from shardwright_search.space.request import SearchRequest
from shardwright_train.options import RunOptions
from slurm_jobs import Component, components_of, job_resources

_NO_NAME = "(?!)"
_OFF = {option.field: option.off for option in options_of(RunOptions) if option.off}
"""Options of `shardwright-train run` that switch off a default, by key."""


@dataclass(frozen=True)
class Workflow:
    """The configuration, checked to be consistent."""

    of: Configuration
    sections: Section
    """Sections of the configuration as YAML gave them, without defaults."""
    presets: Mapping[str, Section]
    """The presets in use, by name."""

    def cluster_json(self, name: str) -> str:
        """Return the document of a cluster."""
        return _document(Cluster, self.cluster(name))

    def unpriced_cluster_json(self, name: str) -> str:
        """Return a cluster's document without prices, for hardware sweeps: another price measures nothing again."""
        return _document(Cluster, self.cluster(name, priced=False))

    def cluster(self, name: str, *, priced: bool = True) -> Section:
        """Return a cluster's content; `1x<node type>` is one node of that type, without its price, for profiling."""
        if (node_type := name.removeprefix("1x")) != name and node_type in self.of.node_types:
            devices = self.of.node_types[node_type].profiled_devices
            own = {} if devices is None else {"devices_per_node": devices}
            types = {node_type: self._node_type(node_type, priced=False) | own}
            groups = [{"node_type": node_type, "count": 1}]
        else:
            types = {each: self._node_type(each, priced=priced) for each in self.of.clusters[name].node_types}
            groups = self.sections["clusters"][name]["nodes"]
        return {"name": name, "nodes": groups, "node_types": types}

    def model_config_json(self, name: str) -> str:
        """Return the Hugging Face configuration of a model: its preset's, with the configuration's overrides."""
        model = self.sections["models"][name]
        overrides = {key: value for key, value in model.items() if key not in ModelChoice.__struct_fields__}
        return _canonical({**self.presets[model["preset"]]["config"], **overrides})

    def sequence_length(self, model: str) -> int:
        """Return the number of tokens of one sample."""
        settings = self.of.models[model]
        return int(settings.sequence_length or self.presets[settings.preset]["sequence_length"])

    def further_lengths(self, model: str) -> tuple[int, ...]:
        """Return the sequence lengths that a model is profiled at, except its own."""
        return self.profile_of(model).lengths(self.sequence_length(model))[1:]

    def profile_of(self, model: str) -> Profile:
        """Return the profile settings of a model."""
        return self.of.profiles[self.of.models[model].profile]

    def analytic_models(self) -> str:
        """Return a regular expression of the models whose profiles are estimated, not measured."""
        return _any_of(name for name in self.of.models if self.profile_of(name).source is Source.ANALYTIC)

    def analytic_clusters(self) -> str:
        """Return a regular expression of the clusters whose hardware is estimated, not measured."""
        return _any_of(name for name, of in self.of.clusters.items() if of.hardware is Source.ANALYTIC)

    def profile_json(self, name: str) -> str:
        """Return the document of profile settings: which strategies and micro-batch sizes are measured."""
        known = ProfileSettings.__struct_fields__
        settings = {key: value for key, value in self.sections["profiles"][name].items() if key in known}
        return _document(ProfileSettings, settings)

    def search_json(self, name: str) -> str:
        """Return the document of a search; number formats and kernels are those that its model was profiled in."""
        search = self.sections["searches"][name]
        known = SearchRequest.__struct_fields__
        asked = {key: value for key, value in search.items() if key in known}
        return _document(SearchRequest, {"name": name} | self.computed_as(search["model"]) | asked)

    def computed_as(self, model: str) -> dict[str, Any]:
        """Return the number formats and kernels that a model is profiled in, as keys of a search."""
        profile = self.sections["profiles"][self.of.models[model].profile]
        return {key: profile[key] for key in ("precision", "attention", "compile") if key in profile}

    def describe_options(self, described: str) -> list[str]:
        """Return the options of `shardwright-train describe` for MODEL, or for MODEL@LENGTH."""
        model, _, length = described.partition("@")
        return spelled_options({"name": model, "sequence_length": length or self.sequence_length(model)})

    def described(self, model: str) -> list[str]:
        """Return the descriptions of a model at each length that it is profiled at, its own first."""
        names = (model, *(f"{model}@{length}" for length in self.further_lengths(model)))
        return [f"results/models/{name}.json" for name in names]

    def measure_options(self, model: str) -> list[str]:
        """Return the options of `shardwright-train measure` that say how long the probes of a model are measured."""
        known = ("steps", "warmup_steps", "min_time_s")
        return spelled_options({key: getattr(self.profile_of(model), key) for key in known})

    def estimate_options(self, model: str) -> list[str]:
        """Return the `shardwright-profile analytic` options on the devices that a model's profile is estimated for."""
        return spelled_options(self.sections["profiles"][self.of.models[model].profile].get("estimate") or {})

    def options(self, section: str, name: str, without: Iterable[str] = ()) -> list[str]:
        """Return the keys of an entry as options of a command."""
        entry = self.sections[section][name]
        return spelled_options({key: value for key, value in entry.items() if key not in without})

    def selects(self, search: str) -> bool:
        """Return whether runs of a search take its measured winner, not the predicted best."""
        return self.of.searches[search].select is Select.MEASURED

    def plan_of(self, search: str) -> str:
        """Return the plan file that runs of a search take."""
        return f"results/{'selected' if self.selects(search) else 'plans'}/{search}.json"

    def correction_of(self, search: str) -> str | None:
        """Return the correction file that a search is given, or None."""
        learned_from = self.of.searches[search].correction
        return None if learned_from is None else f"results/corrections/{learned_from}.json"

    def exported_runs(self) -> tuple[str, ...]:
        """Return the runs whose model is written as a folder."""
        return tuple(name for name, run in self.of.runs.items() if run.export)

    def copied_from(self, run: str) -> str | None:
        """Return the folder whose tokenizer goes with a run's model: that of its weights, else of its data, or None."""
        of = self.of.runs[run]
        return self.data_files.tokenizer_folder(str(of.data)) if of.weights is None else str(of.weights)

    def convert_options(self, run: str) -> list[str]:
        """Return the options of `shardwright-train convert` for a run, except its files."""
        copied = self.copied_from(run)
        best = ["--best"] if self.of.runs[run].export == "best" else []
        return best if copied is None else ["--copy-from", copied, *best]

    def run_options(self, run: str) -> list[str]:
        """Return the options of `shardwright-train run`, except its plan, data and folders."""
        said, valid = (
            self.options("runs", run, ("search", "data", "valid_data", "export")),
            self.of.runs[run].valid_data,
        )
        return said if valid is None else [*said, "--valid-data", self.data_files.folder(str(valid))]

    @property
    def data_files(self) -> DataFiles:
        """Return the files of the data."""
        return DataFiles(self.of.data)

    def blend_json(self, name: str) -> str:
        """Return the document of a blend."""
        from shardwright_train.data.sampling import BlendedData

        return _document(BlendedData, self.data_files.blend(name))

    def text_data(self) -> str:
        """Return a regular expression of the data that are texts."""
        return _any_of(self.data_files.texts())

    def image_data(self) -> str:
        """Return a regular expression of the data that are images."""
        return _any_of(self.data_files.images())

    def measured_searches(self) -> tuple[str, ...]:
        """Return the searches whose plan and runners-up are measured: those asked for, and those others depend on."""
        needed = {of.correction for of in self.of.searches.values()} | set(self.of.validate.searches)
        return tuple(name for name in self.of.searches if name in needed or self.selects(name))

    def profiled_pairs(self) -> tuple[tuple[str, str], ...]:
        """Return every (model, node type) that some search needs the profile of."""
        return tuple(
            dict.fromkeys(
                (search.model, node_type)
                for search in self.of.searches.values()
                for node_type in self.of.clusters[search.cluster].node_types
            )
        )

    def components(self, cluster: str) -> tuple[Component, ...]:
        """Return the components of a job on all nodes of a cluster."""
        return components_of(self.of.clusters[cluster], self.of.node_types)

    def one_node(self, node_type: str) -> tuple[Component, ...]:
        """Return the components of a job on one node."""
        return (Component(1, self.of.node_types[node_type].slurm),)

    def resource_names(self) -> tuple[str, ...]:
        """Return the names of the resources that some job asks for.

        The optional ones are left out where no node type has them, so that a default of the cluster's profile holds.
        """
        names = (job_resources(self.one_node(node_type), 1) for node_type in self.of.node_types)
        return tuple(dict.fromkeys(name for each in names for name in each))

    def _node_type(self, name: str, *, priced: bool) -> dict[str, Any]:
        node = self.of.node_types[name]
        return {
            "device": node.device,
            "devices_per_node": node.devices_per_node,
            "memory_bytes": int(node.memory_gib * GIB),
            "usd_per_hour": self.sections["node_types"][name].get("usd_per_hour") if priced else None,
        }


def load_workflow(config: Section, file: str, root: Path) -> Workflow:
    """Return a configuration checked whole: shape, names that refer to one another, presets and their keys.

    `root` is the repository's folder. Raises BadInput.
    """
    check_texts(config, file)
    of = typed(config, file)
    check_references(of, file)
    presets = {model.preset: read_preset(model.preset, name, file, root) for name, model in of.models.items()}
    for name, model in config["models"].items():
        check_model_keys(name, model, presets[model["preset"]]["config"], file)
    workflow = Workflow(of, config, presets)
    for name in of.clusters:
        converted(workflow.cluster(name), Cluster, f"clusters.{name}", file)
    check_data(of, config, file)
    for name, run in of.runs.items():
        rows = json.loads(workflow.model_config_json(of.searches[run.search].model)).get("vocab_size")
        parts = (part for data in (run.data, run.valid_data) if data for part in workflow.data_files.parts(str(data)))
        tokens = max((of.data[part].vocab_size or 0 for part in parts), default=0)
        if isinstance(rows, int) and tokens > rows:
            what = f"runs.{name}: its data has {tokens} tokens, its model's vocabulary {rows}"
            raise BadInput(file, what, "raise the model's vocab_size or lower the data's")
    return workflow


def spelled_options(said: Section) -> list[str]:
    """Return keys and their values as options of a command; a list repeats its option."""
    return [word for key, value in said.items() for word in _option(f"--{key.replace('_', '-')}", key, value)]


def _option(name: str, key: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [name if value else _OFF.get(key) or name.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [word for each in value for word in (name, str(each))]
    return [name, str(value)]


def _any_of(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names)) or _NO_NAME


def _document(kind: type[Document], content: Section) -> str:
    return _canonical({"format": kind.FORMAT, "version": kind.VERSION, **content})


def _canonical(value: Section) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
