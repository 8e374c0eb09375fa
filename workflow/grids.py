"""Grids: models x clusters x memory budgets x batch sizes x search spaces, as config/grids/*.yaml ask for them."""

import json
import shlex
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from configuration import Workflow
from configuration_checks import converted, read_yaml
from configuration_types import Name, Text
from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import Value
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.limits import MAX_DEVICES, Count, Gib
from shardwright_search.space.grid import Grid
from shardwright_search.space.request import Counts

_GIB = 1024**3
_REFERENCE = "results/reference"
_FOLDER = "results/grids"
_PUBLISHED = f"{_REFERENCE}/hetu-galvatron/galvatron/models"
Gibs = Annotated[tuple[Gib, ...], Meta(min_length=1)]


class Profiles(StrEnum):
    """Where a grid's profiles come from."""

    REFERENCE = "reference"
    """`snakemake reference`: published ones, imported."""
    OWN = "own"
    """The models and clusters of the configuration."""


class GridCluster(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster that published hardware tables are of."""

    device: Text
    nodes: Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
    devices_per_node: Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
    memory_gib: Gib
    """Of one device; budgets are at most that."""


class MixedCluster(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of several of the grid's other clusters."""

    nodes_of: Annotated[dict[Name, Annotated[int, Meta(ge=1, le=MAX_DEVICES)]], Meta(min_length=2)]
    """How many nodes of each, in this order; links and profiles are those of these clusters."""


class Published(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that Galvatron ships, to stand beside ours for the same cluster, budget and batch."""

    cluster: Name
    memory_gib: Gib
    global_batch_size: Count
    file: Text
    """Its strategy file, below galvatron/models."""
    sequence_parallel: Literal["none", "megatron"] = "none"
    num_microbatches: Count | None = None
    """Instead of the file's, where those are of unequal size."""


class GridModel(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of a grid; what is not said is the grid's."""

    clusters: Annotated[tuple[Name, ...], Meta(min_length=1)]
    profile: Text | None = None
    """Of reference models: the imported profile; by default named as the model. {device} stands for the cluster's."""
    description: Name | None = None
    """Of reference models: the model file; by default named as the model."""
    memory_gib: Gibs | None = None
    global_batch_size: Counts | None = None
    search: dict[str, Any] = msgspec.field(default_factory=dict)
    published: tuple[Published, ...] = ()


class Measured(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the plans of a grid are measured."""

    steps: Count
    warmup_steps: Count


class GridSettings(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of config/grids."""

    profiles: Profiles
    models: Annotated[dict[Name, GridModel], Meta(min_length=1)]
    clusters: dict[Name, GridCluster] = msgspec.field(default_factory=dict)
    """Of reference grids."""
    mixed_clusters: dict[Name, MixedCluster] = msgspec.field(default_factory=dict)
    """The same, of several devices."""
    memory_gib: Gibs
    global_batch_size: Counts
    spaces: Annotated[tuple[str, ...], Meta(min_length=1)]
    search: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further keys of every search."""
    measure: Measured | None = None
    """Run every plan for some steps."""


class Inputs(NamedTuple):
    """The files that a search of a model on a cluster reads."""

    cluster: str
    model: str
    hardware: tuple[str, ...]
    """A profile of each device's links."""
    profile: tuple[str, ...]
    """A profile of the model on each device."""

    @property
    def profiles(self) -> list[str]:
        """The options that name both kinds of profile."""
        named = {"--hardware": self.hardware, "--profile": self.profile}
        return [word for option, paths in named.items() for path in paths for word in (option, path)]


class GridFile:
    """One grid, with the documents and the paths of everything that is made for it."""

    def __init__(self, name: str, root: Path, workflow: Workflow) -> None:
        self.name, self._workflow = name, workflow
        self.file = root / "config" / "grids" / f"{name}.yaml"
        self.of = converted(read_yaml(self.file), GridSettings, "", str(self.file))
        self._own = self.of.profiles is Profiles.OWN
        if self.is_of_configuration:
            self._check()

    @property
    def is_of_configuration(self) -> bool:
        """Whether the configuration has the models and clusters of a grid of own ones."""
        of = self._workflow.of
        clusters = {cluster for _, cluster in self.pairs}
        return not self._own or (self.of.models.keys() <= of.models.keys() and clusters <= of.clusters.keys())

    @property
    def folder(self) -> str:
        """Where its parts lie."""
        return f"{_FOLDER}/{self.name}"

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Every model with each of its clusters."""
        return tuple((model, cluster) for model, of in self.of.models.items() for cluster in of.clusters)

    def parts(self, folder: str) -> list[str]:
        """A file of every pair in one of the grid's folders."""
        return [f"{self.folder}/{folder}/{model}@{cluster}.json" for model, cluster in self.pairs]

    @property
    def measurements(self) -> list[str]:
        """The measurements of the grid, where its plans are run."""
        return self.parts("measured") if self.of.measure else []

    def cells_json(self, model: str, cluster: str) -> str:
        """The grid file of a model on a cluster."""
        of = self.of.models[model]
        budgets = set(product(of.memory_gib or self.of.memory_gib, of.global_batch_size or self.of.global_batch_size))
        budgets |= {(each.memory_gib, each.global_batch_size) for each in of.published if each.cluster == cluster}
        searches = [
            self._search(model, memory_gib, batch, space)
            for (memory_gib, batch), space in product(sorted(budgets), self.of.spaces)
        ]
        return _document(Grid, {"searches": searches}, str(self.file))

    def cluster_json(self, name: str) -> str:
        """The cluster that published tables are of."""
        parts = self._nodes_of(name)
        nodes = [{"node_type": self._node_type(part), "count": count} for part, count in parts.items()]
        node_types = {self._node_type(part): _node_of(self.of.clusters[part]) for part in parts}
        return _document(Cluster, {"name": name, "nodes": nodes, "node_types": node_types}, str(self.file))

    def _nodes_of(self, cluster: str) -> Mapping[str, int]:
        """Nodes by the cluster that is of their device alone."""
        mixed = self.of.mixed_clusters.get(cluster)
        return mixed.nodes_of if mixed else {cluster: self.of.clusters[cluster].nodes}

    def _node_type(self, cluster: str) -> str:
        return self.of.clusters[cluster].device.lower()

    def inputs(self, model: str, cluster: str) -> Inputs:
        """What a search of a pair reads."""
        if self._own:
            (node_type,) = self._workflow.of.clusters[cluster].node_types
            return Inputs(
                cluster=f"results/clusters/{cluster}.json",
                model=f"results/models/{model}.json",
                hardware=(f"results/hardware/{cluster}.h5",),
                profile=(f"results/profiles/{model}@{node_type}.h5",),
            )
        of, parts = self.of.models[model], self._nodes_of(cluster)
        profiles = [(of.profile or model).replace("{device}", self.of.clusters[part].device) for part in parts]
        return Inputs(
            cluster=f"{self.folder}/clusters/{cluster}.json",
            model=f"{_REFERENCE}/models/{of.description or model}.json",
            hardware=tuple(f"{_REFERENCE}/hardware/{part}.h5" for part in parts),
            profile=tuple(f"{_REFERENCE}/profiles/{profile}.h5" for profile in profiles),
        )

    def published(self, model: str, cluster: str) -> list[tuple[str, Published]]:
        """The published plans of a pair, each with the path of its plan as it is imported."""
        folder = f"{self.folder}/published/{model}@{cluster}"
        return [
            (f"{folder}/{_size_name(each.memory_gib, each.global_batch_size)}.json", each)
            for each in self.of.models[model].published
            if each.cluster == cluster
        ]

    def published_lines(self, model: str, cluster: str) -> Iterator[str]:
        """The commands that import and evaluate the published plans of a pair, for `shardwright-search batch`."""
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

    def _search(self, model: str, memory_gib: float, batch: int, space: str) -> Mapping[str, Any]:
        name = f"{_size_name(memory_gib, batch)}-{space.replace('+', '.')}"
        own = self._workflow.computed_as(model) if self._own else {}
        asked = {"name": name, "memory_gib": memory_gib, "global_batch_size": batch, "space": space}
        return own | self.of.search | self.of.models[model].search | asked

    def _check(self) -> None:
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


def _node_of(cluster: GridCluster) -> dict[str, Any]:
    memory_bytes = int(cluster.memory_gib * _GIB)
    found = {"device": cluster.device, "devices_per_node": cluster.devices_per_node, "memory_bytes": memory_bytes}
    return found | {"usd_per_hour": None}


def read_grids(root: Path, workflow: Workflow) -> dict[str, GridFile]:
    """The grids by name; those of own models are left out where the configuration has not all of them.

    Raises BadInput.
    """
    files = sorted((root / "config" / "grids").glob("*.yaml"))
    every = {path.stem: GridFile(path.stem, root, workflow) for path in files}
    return {name: grid for name, grid in every.items() if grid.is_of_configuration}


def _size_name(memory_gib: float, batch: int) -> str:
    """What the cells of a budget and a batch begin with, and the published plan for both is called."""
    return f"m{memory_gib:g}-b{batch}"


def _document(kind: type[Grid | Cluster], content: Mapping[str, Any], file: str) -> str:
    converted(content, kind, "", file)
    return json.dumps({"format": kind.FORMAT, "version": kind.VERSION, **content}, sort_keys=True, allow_nan=False)
