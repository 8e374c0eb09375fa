"""Grids: models x clusters x memory budgets x batch sizes x search spaces, as config/grids/*.yaml ask for them."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict

from configuration import Workflow, command_line, document_text, spelled_options
from configuration_checks import converted
from configuration_files import read_yaml
from expert_loads import check_load, load_options, load_sha256, runs_of
from grid_types import GridCluster, GridSettings, Profiles, Published
from shardwright_formats.io import BadInput, Document
from shardwright_formats.types import GIB, Cluster
from shardwright_search.space.request import Grid, SearchRequest, Space

_REFERENCE = "results/reference"


class Inputs(NamedTuple):
    """The files that a search of a model on a cluster reads."""

    cluster: str
    model: str
    hardware: tuple[str, ...]
    """Hardware profiles, one of each device's links."""
    profile: tuple[str, ...]
    """Model profiles, one of the model on each device."""

    @property
    def profiles(self) -> list[str]:
        """Return the options that name both kinds of profile."""
        return spelled_options({"hardware": list(self.hardware), "profile": list(self.profile)})


class GridLoad(NamedTuple):
    """The load of experts that the searches of a model are given."""

    runs: list[str]
    """File that shows that the run of the load is done, if it is that of a run."""
    options: list[str]
    """The option that says the load, if there is one."""
    sha256: str
    """Hash of the load's file; empty for other loads."""


class GridFile:
    """A grid, with the documents and the paths of everything that is made for it."""

    def __init__(self, file: Path, workflow: Workflow) -> None:
        self._workflow = workflow
        self.file = file
        self.folder = f"results/grids/{file.stem}"
        """Folder of the grid's parts."""
        self.settings = converted(read_yaml(self.file), GridSettings, "", str(self.file))
        self._is_local = self.settings.profiles is Profiles.OWN
        if self.is_of_configuration:
            self._check()

    @property
    def is_of_configuration(self) -> bool:
        """Return whether the configuration has the models and clusters that a grid takes from it, if it takes any."""
        known = self._workflow.settings
        clusters = {cluster for _, cluster in self.pairs} | {front.cluster for front in self.settings.fronts.values()}
        models = {self._described(model) for model in self.settings.models}
        return not self._is_local or (models <= known.models.keys() and clusters <= known.clusters.keys())

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return every model with each of its clusters."""
        return tuple((name, cluster) for name, model in self.settings.models.items() for cluster in model.clusters)

    def parts(self, folder: str) -> list[str]:
        """Return the path of a file of every pair in one of the grid's folders."""
        return [f"{self.folder}/{folder}/{model}@{cluster}.json" for model, cluster in self.pairs]

    @property
    def measurements(self) -> list[str]:
        """Return the paths of the grid's measurements; empty where its plans are not run."""
        return self.parts("measured") if self.settings.measure else []

    def load_of(self, model: str) -> GridLoad:
        """Return the load of a model's experts."""
        config, folder, imbalance = (
            self._workflow.settings,
            self._workflow.folder,
            self.settings.models[model].imbalance,
        )
        files, options = runs_of(config, imbalance), load_options(config, folder, imbalance)
        return GridLoad(files, options, load_sha256(config, folder, imbalance))

    def load_of_front(self, front: str) -> GridLoad:
        """Return the load of the experts of a front's model."""
        return self.load_of(self.settings.fronts[front].model)

    def cells_json(self, model: str, cluster: str) -> str:
        """Return the grid document of a model on a cluster."""
        entry, usual = self.settings.models[model], self.settings
        sizes = set(product(entry.memory_gib or usual.memory_gib, entry.global_batch_size or usual.global_batch_size))
        sizes |= {(each.memory_gib, each.global_batch_size) for each in entry.published if each.cluster == cluster}
        stated = (each for each in entry.published_times if each.cluster == cluster)
        sizes |= {(each.memory_gib, each.global_batch_size) for each in stated}
        searches = [
            self._search(model, f"{_size_name(*size)}-{space.replace('+', '.')}", *size, space)
            for size, space in product(sorted(sizes, key=_ascending), self.settings.spaces)
        ]
        return self._document(Grid, {"searches": searches})

    @property
    def published_times_json(self) -> str:
        """Return the step times that others state, of the grid's cells and of its fronts."""
        models, fronts = self.settings.models.items(), self.settings.fronts.items()
        cells = [{"model": name, **asdict(each)} for name, model in models for each in model.published_times]
        by_nodes = {name: front.published_step_s for name, front in fronts if front.published_step_s}
        return json.dumps({"source": self.settings.source_of_times, "cells": cells, "fronts": by_nodes})

    def front_json(self, name: str) -> str:
        """Return the search document of a front."""
        front = self.settings.fronts[name]
        search = self._search(front.model, name, front.memory_gib, front.global_batch_size, front.space)
        return self._document(SearchRequest, search)

    def front_inputs(self, name: str) -> Inputs:
        """Return the files that the search of a front reads."""
        return self.inputs(self.settings.fronts[name].model, self.settings.fronts[name].cluster)

    @property
    def fronts(self) -> list[str]:
        """Return the paths of the tables of the grid's fronts."""
        return [f"{self.folder}/fronts/{name}/front.csv" for name in self.settings.fronts]

    def cluster_json(self, name: str) -> str:
        """Return the document of a cluster that published tables are of."""
        clusters, parts = self.settings.clusters, self._nodes_of(name)
        types = {part: clusters[part].device.lower() for part in parts}
        nodes = [{"node_type": types[part], "count": count} for part, count in parts.items()]
        node_types = {types[part]: _node_type(clusters[part]) for part in parts}
        return self._document(Cluster, {"name": name, "nodes": nodes, "node_types": node_types})

    def _nodes_of(self, cluster: str) -> Mapping[str, int]:
        """Return the number of nodes by cluster of a single device."""
        mixed = self.settings.mixed_clusters.get(cluster)
        return mixed.nodes_of if mixed else {cluster: self.settings.clusters[cluster].nodes}

    def inputs(self, model: str, cluster: str) -> Inputs:
        """Return the files that a search of a pair reads."""
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

    def published(self, model: str, cluster: str) -> list[tuple[str, Published]]:
        """Return the published plans of a pair, each with the path of its plan as it is imported."""
        folder = f"{self.folder}/published/{model}@{cluster}"
        plans = (plan for plan in self.settings.models[model].published if plan.cluster == cluster)
        return [(f"{folder}/{_size_name(plan.memory_gib, plan.global_batch_size)}.json", plan) for plan in plans]

    @property
    def published_folders(self) -> list[str]:
        """Return the folders of published plans, one for each pair that has any."""
        return [f"{self.folder}/published/{'@'.join(pair)}" for pair in self.pairs if self.published(*pair)]

    def published_lines(self, model: str, cluster: str) -> Iterator[str]:
        """Yield the commands that import and evaluate the published plans of a pair, for `shardwright-search batch`."""
        files = self.inputs(model, cluster)
        for path, plan in self.published(model, cluster):
            yield command_line(
                "import", "galvatron", f"{_REFERENCE}/hetu-galvatron/galvatron/models/{plan.file}",
                cluster=files.cluster, model=files.model, sequence_parallel=plan.sequence_parallel,
                precision_reduce="float32", num_microbatches=plan.num_microbatches, out=path,
            )  # fmt: skip
            yield _evaluation(path, files, self.load_of(model).options)

    def _described(self, model: str) -> str:
        """Return the name of the model's file, or of the configuration's model."""
        return self.settings.models[model].description or model

    def even_folders(self, model: str, cluster: str) -> list[str]:
        """Return the folder of a pair's even plans, in a list that is empty where it has none."""
        return [f"{self.folder}/even/{model}@{cluster}"] if self.settings.models[model].even else []

    def even_lines(self, model: str, cluster: str) -> Iterator[str]:
        """Yield the commands that make and evaluate each batch size's even plan, for `shardwright-search batch`."""
        entry, files = self.settings.models[model], self.inputs(model, cluster)
        if entry.even is None:
            return
        for batch in entry.global_batch_size or self.settings.global_batch_size:
            path = f"{self.folder}/even/{model}@{cluster}/b{batch}.json"
            yield command_line(
                "uniform", cluster=files.cluster, model=files.model, **asdict(entry.even), **self._computed(model),
                global_batch_size=batch, name="even", out=path,
            )  # fmt: skip
            yield _evaluation(path, files, self.load_of(model).options)

    def _computed(self, model: str) -> dict[str, Any]:
        """Return the number formats and kernels of a model's searches, as options of a plan."""
        search = self._search(model, "even", None, 1, Space.FULL)
        request = converted(search, SearchRequest, "", str(self.file))
        numbers = ("parameters", "compute", "reduce")
        formats = {f"precision_{name}": getattr(request.precision, name) for name in numbers}
        return formats | {"attention": str(request.attention), "compile": request.compile}

    def _search(self, model: str, name: str, memory_gib: float | None, batch: int, space: str) -> Mapping[str, Any]:
        profiled = self._workflow.computed_as(self._described(model)) if self._is_local else {}
        cell = {"name": name, "memory_gib": memory_gib, "global_batch_size": batch, "space": space}
        return {**profiled, **self.settings.search, **self.settings.models[model].search, **cell}

    def _document(self, kind: type[Document], content: Mapping[str, Any]) -> str:
        converted(content, kind, "", str(self.file))
        return document_text(kind, content)

    def _check(self) -> None:
        settings = self.settings
        if Space.FULL not in settings.spaces:
            raise BadInput(self.file, f"spaces: {Space.FULL} is missing, beside which the others stand", "add it")
        for name, mixed in settings.mixed_clusters.items():
            self._check_cluster(f"mixed_clusters.{name}", mixed.nodes_of, settings.clusters)
            for model, entry in settings.models.items():
                if any(each.cluster == name for each in entry.published):
                    raise BadInput(self.file, f"models.{model}: published plans are of one device", "name its cluster")
        reference = settings.clusters.keys() | settings.mixed_clusters.keys()
        known = self._workflow.settings.clusters.keys() if self._is_local else reference
        for model, entry in settings.models.items():
            self._check_cluster(
                f"models.{model}", (*entry.clusters, *(each.cluster for each in entry.published)), known
            )
            self._check_published_times(model)
            where = f"models.{model}.imbalance"
            check_load(self._workflow.settings, self._workflow.folder, entry.imbalance, where, str(self.file))
        for model, cluster in self.pairs:
            self.cells_json(model, cluster)
        for name in settings.fronts:
            self._check_front(name, known)

    def _check_published_times(self, name: str) -> None:
        """Raise BadInput for a time without a row of the grid's table to stand beside, or without a source."""
        model, where = self.settings.models[name], f"models.{name}.published_times"
        for each in model.published_times:
            self._check_cluster(where, (each.cluster,), model.clusters)
            if each.space is not None and each.space not in self.settings.spaces:
                raise BadInput(self.file, f"{where}: there is no space {each.space!r}", "add it to spaces")
        times = (model.published_times, *(front.published_step_s for front in self.settings.fronts.values()))
        if any(times) and self.settings.source_of_times is None:
            raise BadInput(self.file, f"{where}: nobody is named who states them", "give source_of_times")

    def _check_cluster(self, where: str, clusters: Iterable[str], known: Collection[str]) -> None:
        for cluster in clusters:
            if cluster not in known:
                raise BadInput(self.file, f"{where}: there is no cluster {cluster!r}", "add it to clusters")

    def _check_front(self, name: str, clusters: Collection[str]) -> None:
        front, where = self.settings.fronts[name], f"fronts.{name}"
        if front.model not in self.settings.models:
            raise BadInput(self.file, f"{where}: there is no model {front.model!r}", "add it to models")
        self._check_cluster(where, (front.cluster,), clusters)
        self.front_json(name)
        local = self._is_local
        cluster = self._workflow.cluster(front.cluster) if local else json.loads(self.cluster_json(front.cluster))
        for node_type, node in cluster["node_types"].items():
            if node["usd_per_hour"] is None:
                raise BadInput(self.file, f"{where}: nodes of {node_type} have no price", "give them usd_per_hour")


def _node_type(cluster: GridCluster) -> dict[str, Any]:
    return {
        "device": cluster.device,
        "devices_per_node": cluster.devices_per_node,
        "memory_bytes": int(cluster.memory_gib * GIB),
        "usd_per_hour": cluster.usd_per_hour,
    }


def _evaluation(plan: str, files: Inputs, load: Iterable[str]) -> str:
    """Return the command that evaluates a plan."""
    prediction = plan.removesuffix(".json") + ".prediction.json"
    return command_line("evaluate", plan, *files.profiles, *load, out=prediction)


def _ascending(size: tuple[float | None, int]) -> tuple[bool, float, int]:
    """Return a key by which budgets ascend, the whole device last, and then batches."""
    return size[0] is None, size[0] or 0.0, size[1]


def _size_name(memory_gib: float | None, batch: int) -> str:
    """Return the prefix of the cells' names for a budget and batch, which also names the published plan for both."""
    return f"whole-b{batch}" if memory_gib is None else f"m{memory_gib:g}-b{batch}"


def read_grids(folders: Iterable[Path], workflow: Workflow) -> dict[str, GridFile]:
    """Return the grids of the folders' `grids/` by name, except those of models or clusters that are not configured.

    A grid of a later folder replaces an earlier one of its name. Raises BadInput.
    """
    files = {path.stem: path for folder in folders for path in sorted((folder / "grids").glob("*.yaml"))}
    grids = {name: GridFile(path, workflow) for name, path in files.items()}
    return {name: grid for name, grid in grids.items() if grid.is_of_configuration}
