"""Grids of searches in config/grids/*.yaml: models x clusters x memory budgets x batch sizes x search spaces."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from itertools import product
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, field
from msgspec.structs import asdict

from configuration import Workflow, command_line, document_text, spelled_options
from configuration_checks import converted, read_yaml
from configuration_normal import check_load, load_options, load_sha256, runs_of, said
from configuration_types import Imbalance, Name, Text
from shardwright.io import BadInput, Document, Value
from shardwright.types import GIB, MAX_DEVICES, Cluster, Count, Gib, NonNegativeNumber, PositiveNumber
from shardwright_search.space.request import Counts, Grid, SearchRequest, Space

# The types of the content of a file of config/grids.


Devices = Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
Gibs = Annotated[tuple[Gib | None, ...], Meta(min_length=1)]
"""Memory budgets of one device in GiB; null: all the memory of each device."""


class Profiles(StrEnum):
    """The source of a grid's profiles."""

    REFERENCE = "reference"
    """Published profiles, imported by `snakemake reference`."""
    OWN = "own"
    """Profiles of models and clusters that the configuration has."""


class GridCluster(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster whose hardware tables are published."""

    device: Text
    nodes: Devices
    devices_per_node: Devices
    memory_gib: Gib
    """Memory of one device in GiB, which no budget may exceed."""
    usd_per_hour: NonNegativeNumber | None = None
    """Price of one node in USD per hour, which fronts need."""


class MixedCluster(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster composed of nodes of several other clusters of the grid."""

    nodes_of: Annotated[dict[Name, Devices], Meta(min_length=2)]
    """Number of nodes from each cluster, in this order; their links and profiles are taken from these clusters."""


class PublishedTime(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published step time of the authors' best plan, shown next to ours for the same budget and batch."""

    cluster: Name
    memory_gib: Gib | None = None
    global_batch_size: Count
    step_s: PositiveNumber
    plan: Text
    """The authors' plan in words."""
    space: str | None = None
    """The grid's space that equals the authors' search space; its best plan is shown as well."""


class Front(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The exact front of step time against price over all sub-clusters of a cluster."""

    model: Name
    """Name of a model of the grid."""
    cluster: Name
    """Name of a cluster that has as many nodes of each type as can be rented."""
    global_batch_size: Count
    space: str = str(Space.FULL)
    memory_gib: Gib | None = None
    """Memory budget of one device in GiB; null: all its memory."""
    published_step_s: dict[str, PositiveNumber] = field(default_factory=dict)
    """Published step times in seconds by nodes, such as 1xa100+3xa10, in the order of the cluster's node types."""


class Published(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that Galvatron ships, compared with ours for the same cluster, budget and batch."""

    cluster: Name
    memory_gib: Gib
    global_batch_size: Count
    file: Text
    """Path of its strategy file, below galvatron/models."""
    sequence_parallel: Literal["none", "megatron"] = "none"
    num_microbatches: Count | None = None
    """Number of microbatches, instead of the file's number if that gives unequal sizes."""


class Even(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that is not searched: the same number of layers on each pipeline stage, all with one strategy."""

    pp: Count
    """Number of pipeline stages."""
    num_microbatches: Count
    tp: Count = 1
    """Number of ranks of a tensor-parallel group; the remaining ranks of a stage are data-parallel."""
    cp: Count = 1
    """Number of ranks over which the positions of a sample are split, also in attention (context parallelism)."""
    context: Literal["gather", "ring"] = "gather"
    """Whether the keys and values of other ranks are gathered, or passed around a ring."""
    ep: Count | None = None
    """Number of groups over which experts are distributed; null: each rank has a part of every expert's features."""
    etp: Count | None = None
    """Number of ranks over which the features of each expert of a group are split."""


class GridModel(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of a grid; its defaults are the grid's values."""

    clusters: Annotated[tuple[Name, ...], Meta(min_length=1)]
    profile: Text | None = None
    """Imported profile of a reference model; by default it has the model's name. {device}: the cluster's device."""
    description: Name | None = None
    """Name of the model file, or of the configuration's model for own profiles; by default the model's name."""
    memory_gib: Gibs | None = None
    global_batch_size: Counts | None = None
    search: dict[str, Any] = field(default_factory=dict)
    imbalance: Imbalance | None = None
    """Load of experts, in the same form as in a search of the configuration."""
    published: tuple[Published, ...] = ()
    published_times: tuple[PublishedTime, ...] = ()
    even: Even | None = None
    """Even plan that is compared with the searched plans."""


class Measured(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of steps in the measurement of a grid's plans."""

    steps: Count
    warmup_steps: Count


class GridSettings(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of config/grids."""

    profiles: Profiles
    models: Annotated[dict[Name, GridModel], Meta(min_length=1)]
    clusters: dict[Name, GridCluster] = field(default_factory=dict)
    """Clusters of a grid with reference profiles."""
    mixed_clusters: dict[Name, MixedCluster] = field(default_factory=dict)
    """Clusters with several types of devices, of a grid with reference profiles."""
    memory_gib: Gibs
    global_batch_size: Counts
    source_of_times: Text | None = None
    """Source of the published times."""
    spaces: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Search spaces, with `full` among them."""
    search: dict[str, Any] = field(default_factory=dict)
    """Further keys that every search of the grid has."""
    fronts: dict[Name, Front] = field(default_factory=dict)
    measure: Measured | None = None
    """Measure every plan, for so many steps; null: do not run plans."""


_REFERENCE = "results/reference"
CELLS_OF_A_PART = 64
"""Number of cells in a part, which is searched in its own job."""


class Inputs(NamedTuple):
    """The files that a search of a model on a cluster reads."""

    cluster: str
    model: str
    hardware: tuple[str, ...]
    """Paths of the hardware profiles, one for the links of each type of device."""
    profile: tuple[str, ...]
    """Paths of the model profiles, one for each type of device."""


class GridFile:
    """A grid, with the content of its files, their paths, and the commands of its jobs."""

    def __init__(self, file: Path, workflow: Workflow) -> None:
        self._workflow = workflow
        self.file = file
        self.folder = f"results/grids/{file.stem}"
        """Folder of the grid's files."""
        settings = converted(read_yaml(self.file), GridSettings, "", str(self.file))
        self.settings = converted(said(settings), GridSettings, "", str(self.file))
        self._is_local = self.settings.profiles is Profiles.OWN
        if self.is_of_configuration:
            self._check()

    @property
    def is_of_configuration(self) -> bool:
        """Return whether the configuration has the models and clusters that the grid refers to."""
        known = self._workflow.settings
        clusters = {cluster for _, cluster in self.pairs} | {front.cluster for front in self.settings.fronts.values()}
        models = {self._described(model) for model in self.settings.models}
        return not self._is_local or (models <= known.models.keys() and clusters <= known.clusters.keys())

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return every (model, cluster) of the grid."""
        return tuple((name, cluster) for name, model in self.settings.models.items() for cluster in model.clusters)

    def parts(self, folder: str) -> list[str]:
        """Return the path of every (model, cluster) pair's file in one of the grid's folders."""
        return [f"{self.folder}/{folder}/{model}@{cluster}.json" for model, cluster in self.pairs]

    @property
    def measurements(self) -> list[str]:
        """Return the paths of the grid's measurements; empty if its plans are not run."""
        return self.parts("measured") if self.settings.measure else []

    @property
    def fronts(self) -> list[str]:
        """Return the path of the table of each front of the grid."""
        return [f"{self.folder}/fronts/{name}/front.csv" for name in self.settings.fronts]

    def waits_for(self, model: str, cluster: str) -> dict[str, Any]:
        """Return the inputs of a job that searches a pair: its files, the run of its load, and Galvatron's tables."""
        sdist = [f"{_REFERENCE}/hetu-galvatron"] if [*self.published(model, cluster)] else []
        runs = runs_of(self._workflow.settings, self.settings.models[model].imbalance)
        return {**self.inputs(model, cluster)._asdict(), "load": runs, "sdist": sdist}

    def front_waits_for(self, name: str) -> dict[str, Any]:
        """Return the inputs of a job that searches a front."""
        front = self.settings.fronts[name]
        return {**self.waits_for(front.model, front.cluster), "sdist": []}

    def load_sha256(self, model: str) -> str:
        """Return the hash of the file with a model's load of experts; an empty string for other loads."""
        imbalance = self.settings.models[model].imbalance
        return load_sha256(self._workflow.settings, self._workflow.folder, imbalance)

    def cells_json(self, model: str, cluster: str) -> str:
        """Return the grid document with all searches of a model on a cluster, as JSON."""
        return self._document(Grid, {"searches": self._cells(model, cluster)})

    def part_json(self, model: str, cluster: str, part: int) -> str:
        """Return the grid document with one part of the searches of a model on a cluster, as JSON."""
        return self._document(
            Grid, {"searches": self._cells(model, cluster)[part * CELLS_OF_A_PART : (part + 1) * CELLS_OF_A_PART]}
        )

    def answered_parts(self, model: str, cluster: str) -> list[str]:
        """Return the paths of the answers to a pair's parts; empty if one job searches the whole pair."""
        parts = ceil(len(self._cells(model, cluster)) / CELLS_OF_A_PART)
        return [f"{self.folder}/answers/{model}@{cluster}/{part}.json" for part in range(parts) if parts > 1]

    def part_words(self, model: str, cluster: str) -> list[str]:
        """Return the options of the command that searches a part."""
        return spelled_options({**self._named(model, cluster), "folder": "results/cells"})

    def _cells(self, model: str, cluster: str) -> list[Mapping[str, Any]]:
        entry, usual = self.settings.models[model], self.settings
        sizes = set(product(entry.memory_gib or usual.memory_gib, entry.global_batch_size or usual.global_batch_size))
        for stated in (entry.published, entry.published_times):
            sizes |= {(each.memory_gib, each.global_batch_size) for each in stated if each.cluster == cluster}
        return [
            self._search(model, f"{_size_name(*size)}-{space.replace('+', '.')}", *size, space)
            for size, space in product(sorted(sizes, key=_ascending), self.settings.spaces)
        ]

    @property
    def published_times_json(self) -> str:
        """Return the published step times for the grid's cells and fronts, as JSON."""
        models, fronts = self.settings.models.items(), self.settings.fronts.items()
        cells = [{"model": name, **asdict(each)} for name, model in models for each in model.published_times]
        by_nodes = {name: front.published_step_s for name, front in fronts if front.published_step_s}
        return json.dumps({"source": self.settings.source_of_times, "cells": cells, "fronts": by_nodes})

    def front_json(self, name: str) -> str:
        """Return the search document of a front, as JSON."""
        front = self.settings.fronts[name]
        search = self._search(front.model, name, front.memory_gib, front.global_batch_size, front.space)
        return self._document(SearchRequest, search)

    def cluster_json(self, name: str) -> str:
        """Return the cluster document, as JSON, of a cluster whose tables are published."""
        clusters, parts = self.settings.clusters, self._nodes_of(name)
        types = {part: clusters[part].device.lower() for part in parts}
        nodes = [{"node_type": types[part], "count": count} for part, count in parts.items()]
        node_types = {types[part]: _node_type(asdict(clusters[part])) for part in parts}
        return self._document(Cluster, {"name": name, "nodes": nodes, "node_types": node_types})

    def _nodes_of(self, cluster: str) -> Mapping[str, int]:
        """Return a cluster's number of nodes by cluster with one type of device, of which it is composed."""
        mixed = self.settings.mixed_clusters.get(cluster)
        return mixed.nodes_of if mixed else {cluster: self.settings.clusters[cluster].nodes}

    def inputs(self, model: str, cluster: str) -> Inputs:
        """Return the paths of the files that a search of a pair reads."""
        described = self._described(model)
        if self._is_local:
            node_types = self._workflow.settings.clusters[cluster].node_types
            return Inputs(
                cluster=f"results/clusters/{cluster}.json",
                model=f"results/models/{described}.json",
                hardware=(f"results/hardware/{cluster}.h5",),
                profile=tuple(f"results/profiles/{described}@{node_type}.h5" for node_type in node_types),
            )
        profile, parts = self.settings.models[model].profile or model, self._nodes_of(cluster)
        profiles = [profile.replace("{device}", self.settings.clusters[part].device) for part in parts]
        return Inputs(
            cluster=f"{self.folder}/clusters/{cluster}.json",
            model=f"{_REFERENCE}/models/{described}.json",
            hardware=tuple(f"{_REFERENCE}/hardware/{part}.h5" for part in parts),
            profile=tuple(f"{_REFERENCE}/profiles/{name}.h5" for name in profiles),
        )

    def commands(self, model: str, cluster: str) -> list[str]:
        """Return the commands of a pair's job, for `shardwright batch`: plans that are not searched, then the cells."""
        given = [*self._imports(model, cluster), *self._even_plans(model, cluster)]
        priced = (
            command_line("evaluate", plan, **self._profiles(model, cluster), out=_beside(plan)) for plan, _ in given
        )
        cells = command_line(
            "grid", f"{self.folder}/asked/{model}@{cluster}.json", **self._named(model, cluster),
            folder="results/cells", out=f"{self.folder}/answers/{model}@{cluster}.json",
        )  # fmt: skip
        return [*(line for pair in zip((line for _, line in given), priced, strict=True) for line in pair), cells]

    def front_words(self, name: str) -> list[str]:
        """Return the words of the command that searches a front."""
        front, folder = self.settings.fronts[name], f"{self.folder}/fronts/{name}"
        named = self._named(front.model, front.cluster)
        return ["rent", *spelled_options({**named, "search": f"{folder}.search.json", "out": folder})]

    def published(self, model: str, cluster: str) -> Iterator[tuple[str, Published]]:
        """Yield the published plans of a pair, each with the path of the imported plan."""
        for plan in self.settings.models[model].published:
            if plan.cluster == cluster:
                size = _size_name(plan.memory_gib, plan.global_batch_size)
                yield f"{self.folder}/plans/{model}@{cluster}/{size}.json", plan

    def _imports(self, model: str, cluster: str) -> Iterator[tuple[str, str]]:
        files = self.inputs(model, cluster)
        for path, plan in self.published(model, cluster):
            yield path, command_line(
                "import", "galvatron", f"{_REFERENCE}/hetu-galvatron/galvatron/models/{plan.file}",
                cluster=files.cluster, model=files.model, sequence_parallel=plan.sequence_parallel,
                precision_reduce="float32", num_microbatches=plan.num_microbatches, out=path,
            )  # fmt: skip

    def _even_plans(self, model: str, cluster: str) -> Iterator[tuple[str, str]]:
        """Yield the paths of a pair's evenly cut plans, one for each batch size, with the commands that make them."""
        entry, files = self.settings.models[model], self.inputs(model, cluster)
        if entry.even is None:
            return
        request = converted(self._search(model, "even", None, 1, Space.FULL), SearchRequest, "", str(self.file))
        numbers = ("parameters", "compute", "reduce")
        computed = {f"precision_{name}": getattr(request.precision, name) for name in numbers}
        for batch in entry.global_batch_size or self.settings.global_batch_size:
            path = f"{self.folder}/plans/{model}@{cluster}/even-b{batch}.json"
            yield path, command_line(
                "uniform", cluster=files.cluster, model=files.model, **asdict(entry.even), **computed,
                attention=str(request.attention), compile=request.compile,
                global_batch_size=batch, name="even", out=path,
            )  # fmt: skip

    def _profiles(self, model: str, cluster: str) -> dict[str, Any]:
        """Return the options that give a command the profiles and load of a pair."""
        files, workflow = self.inputs(model, cluster), self._workflow
        words = load_options(workflow.settings, workflow.folder, self.settings.models[model].imbalance)
        load = {"imbalance": words[1]} if words else {}
        return {"hardware": list(files.hardware), "profile": list(files.profile), **load}

    def _named(self, model: str, cluster: str) -> dict[str, Any]:
        files = self.inputs(model, cluster)
        return {"cluster": files.cluster, "model": files.model, **self._profiles(model, cluster)}

    def _described(self, model: str) -> str:
        """Return the name of the model's file or, for own profiles, of the configuration's model."""
        return self.settings.models[model].description or model

    def _search(self, model: str, name: str, memory_gib: float | None, batch: int, space: str) -> Mapping[str, Any]:
        profiled = self._workflow.computed_as(self._described(model)) if self._is_local else {}
        cell = {"name": name, "memory_gib": memory_gib, "global_batch_size": batch, "space": space}
        search = {**profiled, **self.settings.search, **self.settings.models[model].search, **cell}
        return said(converted(search, SearchRequest, "", str(self.file)))

    def _document(self, kind: type[Document], content: Mapping[str, Any]) -> str:
        converted(content, kind, "", str(self.file))
        return document_text(kind, content)

    def _check(self) -> None:
        settings = self.settings
        if Space.FULL not in settings.spaces:
            raise BadInput(self.file, f"spaces: {Space.FULL} is missing, which the others are compared with", "add it")
        for name, mixed in settings.mixed_clusters.items():
            self._check_known(f"mixed_clusters.{name}", "cluster", mixed.nodes_of, settings.clusters)
        reference = settings.clusters.keys() | settings.mixed_clusters.keys()
        known = self._workflow.settings.clusters.keys() if self._is_local else reference
        for name in settings.models:
            self._check_model(name, known)
        for model, cluster in self.pairs:
            self.cells_json(model, cluster)
        for name, front in settings.fronts.items():
            self._check_known(f"fronts.{name}", "model", [front.model], settings.models)
            self._check_known(f"fronts.{name}", "cluster", [front.cluster], known)
            self._check_front(name)

    def _check_model(self, name: str, clusters: Collection[str]) -> None:
        """Raise BadInput for unknown names, and for a published time without a matching row or without a source."""
        model, where = self.settings.models[name], f"models.{name}"
        plans, times = model.published, model.published_times
        self._check_known(where, "cluster", (*model.clusters, *(each.cluster for each in plans)), clusters)
        if any(each.cluster in self.settings.mixed_clusters for each in plans):
            raise BadInput(self.file, f"{where}: published plans need one type of device", "name its cluster")
        self._check_known(f"{where}.published_times", "cluster", (each.cluster for each in times), model.clusters)
        spaces = (each.space for each in times if each.space is not None)
        self._check_known(f"{where}.published_times", "space", spaces, self.settings.spaces)
        fronts = (front.published_step_s for front in self.settings.fronts.values())
        if self.settings.source_of_times is None and any((times, *fronts)):
            raise BadInput(self.file, f"{where}.published_times: has no source", "give source_of_times")
        config, folder = self._workflow.settings, self._workflow.folder
        check_load(config, folder, model.imbalance, f"{where}.imbalance", str(self.file))

    def _check_known(self, where: str, kind: str, names: Iterable[str], known: Collection[str]) -> None:
        for name in names:
            if name not in known:
                raise BadInput(self.file, f"{where}: there is no {kind} {name!r}", f"add it to {kind}s")

    def _check_front(self, name: str) -> None:
        self.front_json(name)
        cluster = self.settings.fronts[name].cluster
        content = self._workflow.cluster(cluster) if self._is_local else json.loads(self.cluster_json(cluster))
        for node_type, node in content["node_types"].items():
            if node["usd_per_hour"] is None:
                raise BadInput(
                    self.file, f"fronts.{name}: nodes of {node_type} have no price", "give them usd_per_hour"
                )


def _node_type(cluster: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: cluster[name] for name in ("device", "devices_per_node", "usd_per_hour")}
    return {**kept, "memory_bytes": int(cluster["memory_gib"] * GIB)}


def _beside(plan: str) -> str:
    return plan.removesuffix(".json") + ".prediction.json"


def _ascending(size: tuple[float | None, int]) -> tuple[bool, float, int]:
    """Return a sort key of a (budget, batch size): by budget, with the whole device last, then by batch size."""
    return size[0] is None, size[0] or 0.0, size[1]


def _size_name(memory_gib: float | None, batch: int) -> str:
    """Return the prefix of cell names for a budget and a batch size; a published plan for both has it as its name."""
    return f"whole-b{batch}" if memory_gib is None else f"m{memory_gib:g}-b{batch}"


def read_grids(folders: Iterable[Path], workflow: Workflow) -> dict[str, GridFile]:
    """Return the grids in the folders' `grids/` by name, except those with models or clusters not configured.

    A grid of a later folder replaces one of the same name. Raises BadInput if a file is no valid grid.
    """
    files = {path.stem: path for folder in folders for path in sorted((folder / "grids").glob("*.yaml"))}
    grids = {name: GridFile(path, workflow) for name, path in files.items()}
    return {name: grid for name, grid in grids.items() if grid.is_of_configuration}
