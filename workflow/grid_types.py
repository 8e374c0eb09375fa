"""The types of a file of config/grids."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from configuration_types import Imbalance, Name, Text
from shardwright.io import Value
from shardwright.types import MAX_DEVICES, Count, Gib, NonNegativeNumber, PositiveNumber
from shardwright_search.space.request import Counts, Space

Devices = Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
Gibs = Annotated[tuple[Gib | None, ...], Meta(min_length=1)]
"""Budgets of one device in GiB; null: all that each device has."""


class Profiles(StrEnum):
    """The source of a grid's profiles."""

    REFERENCE = "reference"
    """Published profiles, imported by `snakemake reference`."""
    OWN = "own"
    """Profiles of the models and clusters of the configuration."""


class GridCluster(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster whose hardware tables are published."""

    device: Text
    nodes: Devices
    devices_per_node: Devices
    memory_gib: Gib
    """GiB of one device; budgets are at most that."""
    usd_per_hour: NonNegativeNumber | None = None
    """Price of one node, which fronts need."""


class MixedCluster(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster composed of nodes of several other clusters of the grid."""

    nodes_of: Annotated[dict[Name, Devices], Meta(min_length=2)]
    """Number of nodes from each cluster, in this order; links and profiles are these clusters'."""


class PublishedTime(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published step time of the authors' best plan, shown next to ours for the same sizes."""

    cluster: Name
    memory_gib: Gib | None = None
    global_batch_size: Count
    step_s: PositiveNumber
    plan: Text
    """Their plan in words."""
    space: str | None = None
    """The grid's space that is theirs, whose best plan is shown, too."""


class Front(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The exact front of step time against price over all sub-clusters of a cluster."""

    model: Name
    """Name of a model of the grid."""
    cluster: Name
    """Name of a cluster with the maximum number of nodes of each type that can be rented."""
    global_batch_size: Count
    space: str = str(Space.FULL)
    memory_gib: Gib | None = None
    """Budget of one device; null: all that it has."""
    published_step_s: dict[str, PositiveNumber] = field(default_factory=dict)
    """Step times that others state, by nodes such as 1xa100+3xa10, in the order of the cluster's node types."""


class Published(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that Galvatron ships, compared with ours for the same cluster, budget and batch."""

    cluster: Name
    memory_gib: Gib
    global_batch_size: Count
    file: Text
    """Path of its strategy file, below galvatron/models."""
    sequence_parallel: Literal["none", "megatron"] = "none"
    num_microbatches: Count | None = None
    """Number of microbatches instead of the file's, if the file's have unequal sizes."""


class Even(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that is not searched: equally many layers on each pipeline stage, all of one strategy."""

    pp: Count
    """Number of pipeline stages."""
    num_microbatches: Count
    tp: Count = 1
    """Ranks of a tensor-parallel group; the remaining ranks of a stage are data-parallel."""
    cp: Count = 1
    """Parts of the positions of a sample, in attention, too."""
    context: Literal["gather", "ring"] = "gather"
    """Whether keys and values of other ranks are gathered, or sent round."""
    ep: Count | None = None
    """Number of groups over which experts are distributed; null: each rank has its part of the features of all."""
    etp: Count | None = None
    """Ranks that share the features of each expert of a part."""


class GridModel(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of a grid; its defaults are the grid's values."""

    clusters: Annotated[tuple[Name, ...], Meta(min_length=1)]
    profile: Text | None = None
    """Imported profile of a reference model; by default named as the model. {device} stands for the cluster's."""
    description: Name | None = None
    """Name of the model file, or of the configuration's model for own profiles; by default the model's name."""
    memory_gib: Gibs | None = None
    global_batch_size: Counts | None = None
    search: dict[str, Any] = field(default_factory=dict)
    imbalance: Imbalance | None = None
    """Load of experts, in the same form as for a search of the configuration."""
    published: tuple[Published, ...] = ()
    published_times: tuple[PublishedTime, ...] = ()
    even: Even | None = None
    """Even plan to compare with the searched ones."""


class Measured(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of steps for which the plans of a grid are measured."""

    steps: Count
    warmup_steps: Count


class GridSettings(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of config/grids."""

    profiles: Profiles
    models: Annotated[dict[Name, GridModel], Meta(min_length=1)]
    clusters: dict[Name, GridCluster] = field(default_factory=dict)
    """Clusters of a grid with reference profiles."""
    mixed_clusters: dict[Name, MixedCluster] = field(default_factory=dict)
    """Clusters of several devices of a grid with reference profiles."""
    memory_gib: Gibs
    global_batch_size: Counts
    source_of_times: Text | None = None
    """Who states the published times."""
    spaces: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Search spaces, with `full` among them."""
    search: dict[str, Any] = field(default_factory=dict)
    """Further keys of every search."""
    fronts: dict[Name, Front] = field(default_factory=dict)
    measure: Measured | None = None
    """Run every plan for some steps."""
