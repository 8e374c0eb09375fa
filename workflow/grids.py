"""Grids: models x clusters x memory budgets x batch sizes x search spaces, as config/grids/*.yaml ask for them."""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import asdict

from configuration import Workflow, spelled_options
from configuration_checks import converted
from configuration_files import read_yaml
from grid_types import GridCluster, GridSettings, Profiles, Published
from shardwright_formats.io import BadInput
from shardwright_formats.types import GIB, Cluster
from shardwright_search.space.request import Grid, SearchRequest, Space

_REFERENCE = "results/reference"
_FOLDER = "results/grids"
_PUBLISHED = f"{_REFERENCE}/hetu-galvatron/galvatron/models"


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
        named = {"--hardware": self.hardware, "--profile": self.profile}
        return [word for option, paths in named.items() for path in paths for word in (option, path)]


class GridFile:
    """A grid, with the documents and the paths of everything that is made for it."""

    def __init__(self, name: str, root: Path, workflow: Workflow) -> None:
        self.name, self._workflow = name, workflow
        self.file = root / "config" / "grids" / f"{name}.yaml"
        self.of = converted(read_yaml(self.file), GridSettings, "", str(self.file))
        self._own = self.of.profiles is Profiles.OWN
        if self.is_of_configuration:
            self._check()

    @property
    def is_of_configuration(self) -> bool:
        """Return whether the configuration has the models and clusters of a grid of own ones; True for other grids."""
        of = self._workflow.of
        clusters = {cluster for _, cluster in self.pairs} | {front.cluster for front in self.of.fronts.values()}
        models = {self._described(model) for model in self.of.models}
        return not self._own or (models <= of.models.keys() and clusters <= of.clusters.keys())

    @property
    def folder(self) -> str:
        """Return the folder of the grid's parts."""
        return f"{_FOLDER}/{self.name}"

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return every model with each of its clusters."""
        return tuple((model, cluster) for model, of in self.of.models.items() for cluster in of.clusters)

    def parts(self, folder: str) -> list[str]:
        """Return the path of a file of every pair in one of the grid's folders."""
        return [f"{self.folder}/{folder}/{model}@{cluster}.json" for model, cluster in self.pairs]

    @property
    def measurements(self) -> list[str]:
        """Return the paths of the grid's measurements; empty where its plans are not run."""
        return self.parts("measured") if self.of.measure else []

    def cells_json(self, model: str, cluster: str) -> str:
        """Return the grid document of a model on a cluster."""
        of = self.of.models[model]
        budgets = set(product(of.memory_gib or self.of.memory_gib, of.global_batch_size or self.of.global_batch_size))
        budgets |= {(each.memory_gib, each.global_batch_size) for each in of.published if each.cluster == cluster}
        searches = [
            self._search(model, f"{_size_name(*size)}-{space.replace('+', '.')}", *size, space)
            for size, space in product(sorted(budgets), self.of.spaces)
        ]
        return _document(Grid, {"searches": searches}, str(self.file))

    def front_json(self, name: str) -> str:
        """Return the search document of a front."""
        of = self.of.fronts[name]
        asked = self._search(of.model, name, of.memory_gib, of.global_batch_size, of.space)
        return _document(SearchRequest, asked, str(self.file))

    def front_inputs(self, name: str) -> Inputs:
        """Return the files that the search of a front reads."""
        return self.inputs(self.of.fronts[name].model, self.of.fronts[name].cluster)

    @property
    def fronts(self) -> list[str]:
        """Return the paths of the tables of the grid's fronts."""
        return [f"{self.folder}/fronts/{name}/front.csv" for name in self.of.fronts]

    def cluster_json(self, name: str) -> str:
        """Return the document of a cluster that published tables are of."""
        parts = self._nodes_of(name)
        nodes = [{"node_type": self._node_type(part), "count": count} for part, count in parts.items()]
        node_types = {self._node_type(part): _node_of(self.of.clusters[part]) for part in parts}
        return _document(Cluster, {"name": name, "nodes": nodes, "node_types": node_types}, str(self.file))

    def _nodes_of(self, cluster: str) -> Mapping[str, int]:
        """Return the number of nodes by cluster of a single device."""
        mixed = self.of.mixed_clusters.get(cluster)
        return mixed.nodes_of if mixed else {cluster: self.of.clusters[cluster].nodes}

    def _node_type(self, cluster: str) -> str:
        return self.of.clusters[cluster].device.lower()

    def inputs(self, model: str, cluster: str) -> Inputs:
        """Return the files that a search of a pair reads."""
        if self._own:
            own, node_types = self._described(model), self._workflow.of.clusters[cluster].node_types
            return Inputs(
                cluster=f"results/clusters/{cluster}.json",
                model=f"results/models/{own}.json",
                hardware=(f"results/hardware/{cluster}.h5",),
                profile=tuple(f"results/profiles/{own}@{node_type}.h5" for node_type in node_types),
            )
        of, parts = self.of.models[model], self._nodes_of(cluster)
        profiles = [(of.profile or model).replace("{device}", self.of.clusters[part].device) for part in parts]
        return Inputs(
            cluster=f"{self.folder}/clusters/{cluster}.json",
            model=f"{_REFERENCE}/models/{self._described(model)}.json",
            hardware=tuple(f"{_REFERENCE}/hardware/{part}.h5" for part in parts),
            profile=tuple(f"{_REFERENCE}/profiles/{profile}.h5" for profile in profiles),
        )

    def published(self, model: str, cluster: str) -> list[tuple[str, Published]]:
        """Return the published plans of a pair, each with the path of its plan as it is imported."""
        folder = f"{self.folder}/published/{model}@{cluster}"
        return [
            (f"{folder}/{_size_name(each.memory_gib, each.global_batch_size)}.json", each)
            for each in self.of.models[model].published
            if each.cluster == cluster
        ]

    def published_lines(self, model: str, cluster: str) -> Iterator[str]:
        """Yield the commands that import and evaluate the published plans of a pair, for `shardwright-search batch`."""
        files = self.inputs(model, cluster)
        for path, each in self.published(model, cluster):
            further = [] if each.num_microbatches is None else ["--num-microbatches", str(each.num_microbatches)]
            yield shlex.join([
                "import", "galvatron", f"{_PUBLISHED}/{each.file}", "--cluster", files.cluster,
                "--model", files.model, "--sequence-parallel", each.sequence_parallel,
                "--precision-reduce", "float32", *further, "--out", path,
            ])  # fmt: skip
            prediction = path.removesuffix(".json") + ".prediction.json"
            yield shlex.join(["evaluate", path, *files.profiles, "--out", prediction])

    def _described(self, model: str) -> str:
        """Return the name of the model's file, or of the configuration's model."""
        return self.of.models[model].description or model

    def even_folder(self, model: str, cluster: str) -> str | None:
        """Return the folder of the even plans of a pair, or None where it has none."""
        return f"{self.folder}/even/{model}@{cluster}" if self.of.models[model].even else None

    def even_lines(self, model: str, cluster: str) -> Iterator[str]:
        """Yield the commands that make and evaluate each batch size's even plan, for `shardwright-search batch`."""
        of, files = self.of.models[model], self.inputs(model, cluster)
        batches = of.global_batch_size or self.of.global_batch_size
        for batch, path in ((batch, f"{self.even_folder(model, cluster)}/b{batch}.json") for batch in batches):
            if of.even is not None:
                options = spelled_options(asdict(of.even) | self._computed(model) | {"global_batch_size": batch})
                plan = ["--cluster", files.cluster, "--model", files.model, *options, "--name", "even", "--out", path]
                yield shlex.join(["uniform", *plan])
                prediction = path.removesuffix(".json") + ".prediction.json"
                yield shlex.join(["evaluate", path, *files.profiles, "--out", prediction])

    def _computed(self, model: str) -> dict[str, Any]:
        """Return the number formats and kernels of a model's searches, as options of a plan."""
        asked = self._search(model, "even", None, 1, Space.FULL)
        request = converted(asked, SearchRequest, "", str(self.file))
        formats = {
            f"precision_{name}": getattr(request.precision, name) for name in ("parameters", "compute", "reduce")
        }
        return formats | {"attention": str(request.attention), "compile": request.compile}

    def _search(self, model: str, name: str, memory_gib: float | None, batch: int, space: str) -> Mapping[str, Any]:
        own = self._workflow.computed_as(self._described(model)) if self._own else {}
        asked = {"name": name, "memory_gib": memory_gib, "global_batch_size": batch, "space": space}
        return own | self.of.search | self.of.models[model].search | asked

    def _check(self) -> None:
        if Space.FULL not in self.of.spaces:
            raise BadInput(self.file, f"spaces: {Space.FULL} is missing, beside which the others stand", "add it")
        for name, mixed in self.of.mixed_clusters.items():
            for cluster in mixed.nodes_of.keys() - self.of.clusters.keys():
                raise BadInput(
                    self.file, f"mixed_clusters.{name}: there is no cluster {cluster!r}", "add it to clusters"
                )
            for model, of in self.of.models.items():
                if any(each.cluster == name for each in of.published):
                    raise BadInput(self.file, f"models.{model}: published plans are of one device", "name its cluster")
        reference = self.of.clusters.keys() | self.of.mixed_clusters.keys()
        known = self._workflow.of.clusters.keys() if self._own else reference
        for model, of in self.of.models.items():
            for cluster in (*of.clusters, *(each.cluster for each in of.published)):
                if cluster not in known:
                    raise BadInput(self.file, f"models.{model}: there is no cluster {cluster!r}", "add it to clusters")
        for model, cluster in self.pairs:
            self.cells_json(model, cluster)
        for name in self.of.fronts:
            self._check_front(name, known)

    def _check_front(self, name: str, clusters: Collection[str]) -> None:
        of, where = self.of.fronts[name], f"fronts.{name}"
        if of.model not in self.of.models:
            raise BadInput(self.file, f"{where}: there is no model {of.model!r}", "add it to models")
        if of.cluster not in clusters:
            raise BadInput(self.file, f"{where}: there is no cluster {of.cluster!r}", "add it to clusters")
        self.front_json(name)
        cluster = self._workflow.cluster(of.cluster) if self._own else json.loads(self.cluster_json(of.cluster))
        for node_type, node in cluster["node_types"].items():
            if node["usd_per_hour"] is None:
                raise BadInput(self.file, f"{where}: nodes of {node_type} have no price", "give them usd_per_hour")


def _node_of(cluster: GridCluster) -> dict[str, Any]:
    memory_bytes = int(cluster.memory_gib * GIB)
    found = {"device": cluster.device, "devices_per_node": cluster.devices_per_node, "memory_bytes": memory_bytes}
    return found | {"usd_per_hour": cluster.usd_per_hour}


def read_grids(root: Path, workflow: Workflow) -> dict[str, GridFile]:
    """Return the grids by name; those of own models are left out where the configuration has not all of them.

    Raises BadInput.
    """
    files = sorted((root / "config" / "grids").glob("*.yaml"))
    every = {path.stem: GridFile(path.stem, root, workflow) for path in files}
    return {name: grid for name, grid in every.items() if grid.is_of_configuration}


def _size_name(memory_gib: float, batch: int) -> str:
    """Return the prefix of the cells' names for a budget and batch, which also names the published plan for both."""
    return f"m{memory_gib:g}-b{batch}"


def _document(kind: type[Cluster | Grid | SearchRequest], content: Mapping[str, Any], file: str) -> str:
    converted(content, kind, "", file)
    return json.dumps({"format": kind.FORMAT, "version": kind.VERSION, **content}, sort_keys=True, allow_nan=False)
