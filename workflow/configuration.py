"""The configuration, checked and converted to the documents that the stages read.

Everything here is pure. The Snakefile reads the configuration once and asks for a `Workflow`, from which it takes the
content of the files to write, their dependencies, and the resources of jobs.
"""

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configuration_checks import (
    Section,
    check_data,
    check_model_keys,
    check_references,
    check_texts,
    converted,
    read_preset,
    typed,
)
from configuration_normal import check_load, folder_of_data, located, normal
from configuration_types import RANDOM, Configuration, Data, ModelChoice, Profile, Run, Search, Source
from shardwright.command.options import options_of
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput, Document
from shardwright.io.versions import PRODUCT, versions_text
from shardwright.types import GIB, Cluster
from shardwright_search.space.request import SearchRequest
from shardwright_train.data.corpora import Source as Corpus
from shardwright_train.data.split import LossOn
from shardwright_train.options import RunOptions
from slurm_jobs import Component, components_of, job_minutes, job_resources
from strict_yaml import RUN_MIN, any_of

_OFF = {option.field: option.off for option in options_of(RunOptions) if option.off}
"""Options of `shardwright train run` that switch off a default, by key."""
_KINDS = {Corpus.IMAGES: "images", Corpus.CAPTIONS: "pairs", Corpus.SPEECH: "pairs"}
"""Kinds of data by source, for sources that are not text."""
_FILES = {
    "text": ("data.json", "tokens.bin"),
    "completions": ("data.json", "tokens.bin", "targets.bin"),
    "images": ("images.npy", "labels.npy"),
    "pairs": ("tokens.npy", "samples.npy"),
}
"""Files that a run waits for, by kind of data."""
_PATHS = {"text", "tokenizer", "weights", "adapter", "resume_from"}
"""Keys whose value may be the path of a user's file or folder."""


def _kind(data: Data) -> str:
    """Return the kind of files that an entry of `data` becomes."""
    marked = data.loss_on is LossOn.COMPLETIONS
    return _KINDS.get(data.source, "completions" if marked else "text")


@dataclass(frozen=True)
class Workflow:
    """The configuration, checked to be consistent."""

    settings: Configuration
    sections: Section
    """Sections of the configuration in canonical form, without defaults."""
    presets: Mapping[str, Section]
    """The `config` and the `sequence_length` of each model's preset, without the configuration's overrides."""
    folder: Path
    """Folder of the configuration; relative paths that do not exist in the working folder are looked up there."""

    def cluster_json(self, name: str, *, priced: bool = True) -> str:
        """Return a cluster's document as JSON; not `priced` for hardware measurements, which do not need prices."""
        return document_text(Cluster, self.cluster(name, priced=priced))

    def cluster(self, name: str, *, priced: bool = True) -> Section:
        """Return a cluster's content; `1x<node type>` is one node of that type, without its price, for profiling."""
        if (node_type := name.removeprefix("1x")) != name and node_type in self.settings.node_types:
            devices = self.settings.node_types[node_type].profiled_devices
            changed = {} if devices is None else {"devices_per_node": devices}
            types = {node_type: self._node_type(node_type, priced=False) | changed}
            groups = [{"node_type": node_type, "count": 1}]
        else:
            types = {each: self._node_type(each, priced=priced) for each in self.settings.clusters[name].node_types}
            groups = self.sections["clusters"][name]["nodes"]
        return {"name": name, "nodes": groups, "node_types": types}

    def model_config_json(self, name: str) -> str:
        """Return a model's Hugging Face configuration as JSON: its preset's, with the configuration's overrides."""
        model = self.sections["models"][name]
        overrides = {key: value for key, value in model.items() if key not in ModelChoice.__struct_fields__}
        return _canonical({**self.presets[name]["config"], **overrides})

    def sequence_length(self, model: str) -> int:
        """Return the number of tokens of one sample of a model."""
        settings = self.settings.models[model]
        return int(settings.sequence_length or self.presets[model]["sequence_length"])

    def profile_of(self, model: str) -> Profile:
        """Return the profile settings of a model."""
        return self.settings.profiles[self.settings.models[model].profile]

    def analytic_models(self) -> str:
        """Return a regular expression that matches the models whose profiles are estimated, not measured."""
        return any_of(name for name in self.settings.models if self.profile_of(name).source is Source.ANALYTIC)

    def analytic_clusters(self) -> str:
        """Return a regular expression that matches the clusters whose hardware is estimated, not measured."""
        return any_of(name for name, cluster in self.settings.clusters.items() if cluster.hardware is Source.ANALYTIC)

    def profile_json(self, name: str) -> str:
        """Return the document of profile settings as JSON: which strategies and micro-batch sizes are measured."""
        settings = _fields(self.sections["profiles"][name], ProfileSettings.__struct_fields__)
        return document_text(ProfileSettings, settings)

    def search_json(self, name: str) -> str:
        """Return the document of a search as JSON, with the number formats and kernels of its model's profile."""
        search = self.sections["searches"][name]
        request = _fields(search, SearchRequest.__struct_fields__)
        return document_text(SearchRequest, {"name": name, **self.computed_as(search["model"]), **request})

    def computed_as(self, model: str) -> Section:
        """Return the number formats and kernels with which a model is profiled, as keys of a search."""
        profile = self.sections["profiles"][self.settings.models[model].profile]
        return _fields(profile, ("precision", "attention", "compile"))

    def describe_options(self, described: str) -> list[str]:
        """Return the options of `shardwright train describe` for MODEL, or for MODEL@LENGTH (another length)."""
        model, _, length = described.partition("@")
        trained = _fields(self.sections["models"][model], ("frozen", "lora"))
        return spelled_options({"name": model, "sequence_length": length or self.sequence_length(model), **trained})

    def described(self, model: str) -> list[str]:
        """Return the paths of a model's descriptions at each profiled length, its own sequence length first."""
        _, *lengths = self.profile_of(model).lengths(self.sequence_length(model))
        return [f"results/models/{name}.json" for name in (model, *(f"{model}@{length}" for length in lengths))]

    def measure_options(self, model: str) -> list[str]:
        """Return the options of `shardwright train measure` that state how long a model's probes are measured."""
        keys = ("steps", "warmup_steps", "min_time_s")
        return spelled_options({key: getattr(self.profile_of(model), key) for key in keys})

    def estimate_options(self, model: str) -> list[str]:
        """Return the options of `shardwright profile analytic` on devices, for a model whose profile is estimated."""
        return spelled_options(self.sections["profiles"][self.settings.models[model].profile].get("estimate") or {})

    def options(self, section: str, name: str, without: Iterable[str] = ()) -> list[str]:
        """Return the keys of an entry of a section as options of a command."""
        entry = self.sections[section][name]
        return spelled_options({key: self._located(key, value) for key, value in entry.items() if key not in without})

    def _located(self, key: str, value: object) -> object:
        """Return a value of the configuration; if it is a path that exists only next to the file, the path there."""
        return located(self.folder, value) if key in _PATHS and isinstance(value, str) else value

    def network_options(self, cluster: str) -> list[str]:
        """Return the options of `shardwright profile analytic` on links, for a cluster whose hardware is estimated."""
        return self.options("clusters", cluster, ("nodes", "hardware", "hardware_time_budget_s", "all_nodes_here"))

    def corrections_of(self, search: str) -> list[str]:
        """Return a list with the correction file of a search; empty if the search has none."""
        source = self.settings.searches[search].correction
        return [] if source is None else [f"results/corrections/{source}.json"]

    def profiles_of(self, search: Search) -> list[str]:
        """Return the paths of the model profiles that a search reads, one for each node type."""
        node_types = self.settings.clusters[search.cluster].node_types
        return [f"results/profiles/{search.model}@{node_type}.h5" for node_type in node_types]

    def copied_from(self, run: str) -> str | None:
        """Return the folder whose tokenizer a run's model gets: the weights' folder, else its data's, or None."""
        entry = self.settings.runs[run]
        if entry.weights is not None:
            return located(self.folder, str(entry.weights))
        parts, data = self._parts(entry.data), self.settings.data
        return next((self.data_folder(part) for part in parts if data[part].source is not Corpus.IMAGES), None)

    def convert_options(self, run: str) -> list[str]:
        """Return the options of `shardwright train convert` for a run, except its files."""
        copied = self.copied_from(run)
        best = ["--best"] if self.settings.runs[run].export == "best" else []
        return best if copied is None else ["--copy-from", copied, *best]

    def run_options(self, run: str) -> list[str]:
        """Return the options of `shardwright train run`, except its plan, data and folders."""
        options = self.options("runs", run, ("search", "data", "valid_data", "export"))
        valid = self.settings.runs[run].valid_data
        return options if valid is None else [*options, "--valid-data", self.data_folder(valid)]

    def parents_of(self, run: str) -> list[str]:
        """Return a list with the checkpoint from which a run branches, as in `run_options`; empty for other runs."""
        parent = self.settings.runs[run].resume_from
        return [] if parent is None else [located(self.folder, str(parent))]

    def data_folder(self, name: str) -> str:
        """Return the value of `--data` for an entry of `data`: its folder, or `random`."""
        return name if name == RANDOM else f"results/data/{folder_of_data(self.settings, name)}"

    def data_files(self, run: str) -> list[str]:
        """Return the paths of the data files that a run reads, including evaluation data."""
        entry, files = self.settings.runs[run], list[str]()
        for name in (entry.data, entry.valid_data or RANDOM):
            parts = self._parts(name)
            if parts not in ((), (name,)):
                files.append(f"{self.data_folder(name)}/blend.json")
            for part in parts:
                files += [f"{self.data_folder(part)}/{end}" for end in _FILES[_kind(self.settings.data[part])]]
        return list(dict.fromkeys(files))

    def vocabulary_size(self, run: Run) -> int:
        """Return the largest vocabulary of the data that a run reads; 0 if none states its size."""
        parts = (*self._parts(run.data), *self._parts(run.valid_data or RANDOM))
        return max((self.settings.data[part].vocab_size or 0 for part in parts), default=0)

    def _parts(self, name: str) -> tuple[str, ...]:
        """Return the entries of `data` for which a name stands: itself, a blend's parts, or none for random samples."""
        return () if name == RANDOM else tuple(self.settings.data[name].blend or (name,))

    def blend_json(self, name: str) -> str:
        """Return the document of a blend as JSON."""
        from shardwright_train.data.sampling import BlendedData

        weights = {
            folder_of_data(self.settings, part): of for part, of in (self.settings.data[name].blend or {}).items()
        }
        datasets = [{"folder": f"../{folder}", "weight": weight} for folder, weight in weights.items()]
        return document_text(BlendedData, {"datasets": datasets})

    def data_pattern(self, kind: str) -> str:
        """Return a regular expression that matches the folders of data of a kind (a key of `_FILES`), except blends."""
        unblended = ((name, data) for name, data in self.settings.data.items() if data.blend is None)
        names = (name for name, data in unblended if _kind(data) == kind)
        return any_of(folder_of_data(self.settings, name) for name in names)

    def measured_searches(self) -> tuple[str, ...]:
        """Return the searches whose plans are measured: the requested ones, and those on which others depend."""
        needed = {*self.settings.validate.searches, *(each.correction for each in self.settings.searches.values())}
        return tuple(name for name in self.settings.searches if name in needed)

    def profiled_pairs(self) -> tuple[tuple[str, str], ...]:
        """Return every (model, node type) whose profile some search needs."""
        searches, clusters = self.settings.searches.values(), self.settings.clusters
        pairs = ((each.model, node_type) for each in searches for node_type in clusters[each.cluster].node_types)
        return tuple(dict.fromkeys(pairs))

    def components(self, cluster: str) -> tuple[Component, ...]:
        """Return the components of a job on all nodes of a cluster."""
        return components_of(self.settings.clusters[cluster], self.settings.node_types)

    def one_node(self, node_type: str) -> tuple[Component, ...]:
        """Return the components of a job on one node."""
        return (Component(1, self.settings.node_types[node_type].slurm),)

    def resource_names(self) -> tuple[str, ...]:
        """Return the names of the resources that any job requests.

        The optional ones are left out if no node type has them, so that a default of the cluster's profile holds.
        """
        names = (job_resources(self.one_node(node_type), 1) for node_type in self.settings.node_types)
        return tuple(dict.fromkeys(name for each in names for name in each))

    def _node_type(self, name: str, *, priced: bool) -> dict[str, Any]:
        node = self.settings.node_types[name]
        return {
            "device": node.device,
            "devices_per_node": node.devices_per_node,
            "memory_bytes": int(node.memory_gib * GIB),
            **({} if node.domain_devices is None else {"domain_devices": node.domain_devices}),
            "usd_per_hour": self.sections["node_types"][name].get("usd_per_hour") if priced else None,
        }


def load_workflow(config: Section, file: str) -> Workflow:
    """Return a configuration after all checks: of its shape, references between names, presets, keys of models, data.

    Raises BadInput if a check fails.
    """
    check_texts(config, file)
    settings = typed(config, file)
    check_references(settings, file)
    presets = {name: read_preset(name, model, file) for name, model in settings.models.items()}
    for name, model in config["models"].items():
        check_model_keys(name, model, presets[name]["config"], file)
    sections = normal(config, settings)
    settings = typed(sections, file)
    workflow = Workflow(settings, sections, presets, Path(file).parent)
    for name in settings.clusters:
        converted(workflow.cluster(name), Cluster, f"clusters.{name}", file)
    check_data(settings, config, file)
    for name, search in settings.searches.items():
        check_load(settings, workflow.folder, search.imbalance, f"searches.{name}.imbalance", file)
    for name, run in settings.runs.items():
        rows = json.loads(workflow.model_config_json(settings.searches[run.search].model)).get("vocab_size")
        tokens = workflow.vocabulary_size(run)
        if isinstance(rows, int) and tokens > rows:
            problem = f"runs.{name}: its data has {tokens} tokens, its model's vocabulary {rows}"
            raise BadInput(file, problem, "raise the model's vocab_size or lower the data's")
        minutes = job_minutes(workflow.components(settings.searches[run.search].cluster), RUN_MIN)
        if run.grace_s is not None and run.grace_s > 30 * minutes:
            problem = f"runs.{name}.grace_s: {run.grace_s:g} s are over half of a job of {minutes} min"
            raise BadInput(file, problem, "set less, or raise node_types.<name>.slurm.runtime_min")
    return workflow


def _fields(entry: Section, names: Iterable[str]) -> Section:
    return {name: entry[name] for name in names if name in entry}


def upgrade_versions() -> str:
    """Return the versions of the programs that compute results without measuring."""
    return versions_text([PRODUCT], on_gpu=False)


def spelled_options(values: Section) -> list[str]:
    """Return keys and their values as options of a command; a list repeats its option."""
    return [word for key, value in values.items() for word in _option(f"--{key.replace('_', '-')}", key, value)]


def command_line(*words: str, **options: object) -> str:
    """Return a command as one line of a batch, with the options whose value is not None; a list repeats its option."""
    given = {name: value for name, value in options.items() if value is not None}
    return shlex.join([*words, *spelled_options(given)])


def _option(name: str, key: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [name if value else _OFF.get(key) or name.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [word for each in value for word in (name, str(each))]
    return [name, str(value)]


def document_text(kind: type[Document], content: Section) -> str:
    """Return a document of a kind with some content as JSON."""
    return _canonical({"format": kind.FORMAT, "version": kind.VERSION, **content})


def _canonical(value: Section) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
