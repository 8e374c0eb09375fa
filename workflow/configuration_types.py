"""The types of a configuration's sections.

python workflow/configuration_types.py            # write workflow/schemas/config.schema.json, in the repository's root
python workflow/configuration_types.py --check    # exit 1 if it is not up to date
"""

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from shardwright.estimate.runtimes import AttentionKernel, Graphs, RuntimeName
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import Removed, Value
from shardwright.schema.generate import write_or_check
from shardwright.types import (
    MAX_DEVICES,
    Count,
    Gib,
    Microseconds,
    NodeGroup,
    NonNegativeCount,
    NonNegativeNumber,
    PositiveNumber,
    PositiveSeconds,
    Seconds,
    whole,
)
from shardwright.types.strategy import Dispatcher
from shardwright_search.space.request import SearchRequest
from shardwright_train.options import PrepareOptions, RunOptions

Name = Annotated[str, whole("[A-Za-z0-9][A-Za-z0-9._-]*", max_length=100)]
Text = Annotated[str, Meta(min_length=1, max_length=1000)]
Word = Annotated[str, whole(r"""[^\s;'"`$\\]+""", max_length=200)]
"""A word for Slurm, without spaces and quotes."""

File = Annotated[str, whole("[^{}]+", max_length=1000)]
"""A path, without braces, which Snakemake would take for wildcards."""
Image = Annotated[str, whole("[A-Za-z0-9._/][A-Za-z0-9._/:@+-]*", max_length=1000)]
"""The address or the path of a container image; the shell to which Snakemake passes it leaves it unchanged."""

Imbalance = Annotated[float, Meta(ge=1, le=MAX_DEVICES)] | File
"""Ratio of the load of the fullest rank's experts to the mean rank's; or the load of a run, by its name or file."""

_NUMBER = r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?"
_UP_TO = rf"([0-9]+:)?{_NUMBER}(,([0-9]+:)?{_NUMBER})*"
_RATES = rf"{_UP_TO}(\+[a-z0-9_]+={_UP_TO})*"
_SLOWDOWNS = f"{_NUMBER}:{_NUMBER}(,{_NUMBER}:{_NUMBER})?"
_Efficiency = Annotated[float, Meta(ge=1e-3, le=1)]
RANDOM = "random"
"""Name that stands for random samples as a run's data."""
_UNSAID: Path = msgspec.field(default_factory=Path)
"""Default of a key whose value the workflow sets: see DECIDED."""

SCHEMA = "workflow/schemas/config.schema.json"


class Source(StrEnum):
    """The origin of a profile."""

    MEASURED = "measured"
    ANALYTIC = "analytic"
    """Estimated from shapes and a table of devices, and marked as estimated."""


class Slurm(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The resources that a job on a node requests from Slurm."""

    partition: Word | None = None
    account: Word | None = None
    constraint: Word | None = None
    gpus_per_node: Annotated[str, whole("([A-Za-z0-9_-]+:)?[0-9]+")] | None = None
    cpus_per_node: Count = 1
    mem_mb: Count = 4000
    runtime_min: Count | None = None
    socket_interface: Word | None = None
    """Network interface that gloo and NCCL use between nodes, such as `ib0`; by default they choose one."""


class NodeKind(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of node."""

    device: Text
    """Name of the devices as the driver gives it, or `cpu`; or `cpu/2`, a CPU slowed by that factor."""
    devices_per_node: Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
    """Number of devices of a node; each device is one rank."""
    profiled_devices: Annotated[int, Meta(ge=1, le=MAX_DEVICES)] | None = None
    """Number of devices used to profile models; null: all of a node. More if several nodes are the same machine."""
    memory_gib: Gib
    """Memory of one device in GiB."""
    domain_devices: Annotated[int, Meta(ge=1, le=MAX_DEVICES)] | None = None
    """Maximum number of devices in one NVLink domain, which may span nodes, as 72 for GB200 NVL72; null: one node's."""
    usd_per_hour: NonNegativeNumber | None = None
    """Price of one node in USD per hour."""
    slurm: Slurm = Slurm()


class ClusterNodes(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster to plan for."""

    nodes: Annotated[tuple[NodeGroup, ...], Meta(min_length=1)]
    """Groups of nodes in rank order."""
    hardware: Source = Source.MEASURED
    hardware_time_budget_s: PositiveSeconds | None = None
    """Seconds that the hardware sweep may take."""
    all_nodes_here: bool = False
    """Start the ranks of all nodes on one machine, to try plans for a cluster that does not exist."""
    inter_node_gbit_s: PositiveNumber | Annotated[str, whole(_RATES)] | None = None
    """Bandwidth from one node to others in Gbit/s, or `2:400,4:300+all_gather=2:200,4:150`; for analytic hardware."""
    network_step_us: Microseconds | None = None
    """Latency of one step of a collective between nodes, in µs; for analytic hardware."""
    overlap_slowdowns: Annotated[str, whole(_SLOWDOWNS)] | None = None
    """Factors by which overlap slows computation and collectives, as `1.25:1.1`; for analytic hardware."""
    runtime: RuntimeName | None = None
    """Runtime whose overlap is assumed, as in `estimate` of a profile; for analytic hardware."""

    def __post_init__(self) -> None:
        if self.hardware is Source.MEASURED and self.hardware_time_budget_s is None:
            raise ValueError("hardware_time_budget_s is missing: how long its hardware is measured")
        if self.hardware is Source.ANALYTIC and self.num_nodes > 1 and self.inter_node_gbit_s is None:
            raise ValueError(
                "inter_node_gbit_s is missing: what one of its several nodes sends, as nothing is measured"
            )
        for name in ("overlap_slowdowns", "network_step_us", "runtime"):
            if self.hardware is Source.MEASURED and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} does not apply to measured hardware: leave it out, or set `hardware: analytic`"
                )

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return sum(group.count for group in self.nodes)

    @property
    def num_machines(self) -> int:
        """Return the number of machines on which the commands for all nodes are started."""
        return 1 if self.all_nodes_here else self.num_nodes

    @property
    def node_types(self) -> tuple[str, ...]:
        """Return the names of the cluster's node types, in the order of its ranks."""
        return tuple(dict.fromkeys(group.node_type for group in self.nodes))


class ModelChoice(Value, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A model; keys of its Hugging Face configuration may be added."""

    preset: Name | None = None
    """Name of a published model, as `shardwright models` lists them."""
    config: Text | None = None
    """A config.json, or its folder, instead of a preset."""
    profile: Name
    sequence_length: Count | None = None
    """Tokens of one sample."""
    frozen: tuple[Text, ...] = ()
    """Parts that are not trained, as `describe --frozen` takes them."""
    lora: Text | None = None
    """An adapter_config.json of peft, or its folder: only its low-rank matrices are trained."""

    def __post_init__(self) -> None:
        if (self.preset is None) == (self.config is None):
            raise ValueError("a model needs either preset or config")


class Estimate(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of the devices of an analytic profile, as options of `shardwright profile analytic`."""

    runtime: RuntimeName | None = None
    """Runtime whose kernels are assumed."""
    attention: AttentionKernel | None = None
    """Attention kernel whose rate is assumed."""
    fused: bool = False
    """Assume one kernel for each norm and each activation function."""
    dispatcher: Dispatcher | None = None
    """How rows are sent to the ranks of their experts."""
    overlap_experts: bool = False
    """Assume that the exchanges of experts overlap with the computation of another micro-batch."""
    graphs: Graphs | None = None
    """Parts of the model that CUDA graphs replay."""
    fused_experts: bool = False
    """Assume one operator for the experts of a layer."""
    launch_us: Microseconds | None = None
    """Time of the host to launch one kernel, in µs; 0 if CUDA graphs replay all kernels."""
    context_mib: NonNegativeCount | None = None
    """Memory of a CUDA context on a device, in MiB."""
    communicator_mib: NonNegativeCount | None = None
    """Buffers of one NCCL communicator, in MiB."""
    allocator_slack_mib: NonNegativeCount | None = None
    """Device memory that the allocator has reserved but does not use, in MiB."""
    matrix_efficiency: _Efficiency | None = None
    """Ratio of reached to published rate of matrix products."""
    memory_efficiency: _Efficiency | None = None
    """Ratio of reached to published memory bandwidth."""


class Profile(ProfileSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is measured of a model, and for how long; or from what it is estimated."""

    source: Source = Source.MEASURED
    estimate: Estimate | None = None
    """Figures of an analytic profile that differ from the defaults."""
    steps: Count | None = None
    """Number of measured steps of each probe."""
    warmup_steps: Count | None = None
    min_time_s: Seconds = 0.0
    """Minimum time for which each probe is measured, in seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source is Source.MEASURED and None in (self.steps, self.warmup_steps):
            raise ValueError("steps and warmup_steps are missing: how long each probe is measured")
        if self.source is Source.MEASURED and self.estimate is not None:
            raise ValueError("estimate does not apply to measured profiles: leave it out, or set `source: analytic`")


class Data(PrepareOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A data set: text to tokenize, images to decode, captions or speech, or a blend of texts."""

    text: str = ""
    blend: dict[Name, Annotated[float, Meta(gt=0, le=1e9)]] | None = None
    """Weights of other entries of `data` by name, instead of `text`."""
    out: Path = _UNSAID


class Search(SearchRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search for a plan."""

    REMOVED: ClassVar[Mapping[str, Removed]] = {
        **SearchRequest.REMOVED,
        "select": Removed("leave it out, and narrow the search to the plan that was measured best", ("predicted",)),
    }

    name: str = ""
    model: Name
    cluster: Name
    correction: Name | None = None
    """Name of a search whose measured plans correct this search's predictions."""
    imbalance: Imbalance | None = None
    """Ratio of the positions of the fullest rank's experts to the mean rank's, of at least 1; or a run that logs the
    load of experts, or its load.json. null: the same number of positions for each expert."""


class Run(RunOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=False):
    """A training run with the plan of a search."""

    search: Name
    data: Name  # type: ignore[assignment]
    """Name of an entry of `data` to train on; `random`: random samples."""
    valid_data: Name | None = None  # type: ignore[assignment]
    """Name of an entry of `data` to evaluate on."""
    export: bool | Literal["best"] = False
    """Write model/, which transformers can open, in the run's folder: from the last checkpoint, or from the `best`."""
    plan: Path = _UNSAID
    out: Path = _UNSAID
    checkpoints: Path = _UNSAID


class Validate(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The searches whose plan and runners-up are measured."""

    searches: tuple[Name, ...]
    steps: Count
    warmup_steps: Count


class Configuration(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sections of a configuration; those from node_types to runs contain entries by name."""

    node_types: dict[Name, NodeKind]
    clusters: dict[Name, ClusterNodes]
    models: dict[Name, ModelChoice]
    profiles: dict[Name, Profile]
    data: dict[Name, Data]
    searches: dict[Name, Search]
    runs: dict[Name, Run]
    validate: Validate
    pictures: tuple[File, ...] = ()
    """Additional pictures for the report, SVG, such as `results/grids/fasop/fronts/bert/front.svg`, which is made if
    it is listed here."""
    container: Image | None = None
    """Image in which every job runs under `--sdm apptainer`, such as `shardwright.sif`; see `docs/containers.md`."""
    rerun_on_upgrade: bool = False
    """Repeat descriptions, estimates, fits and searches if the programs' version changes; measurements are kept."""


DECIDED: dict[str, dict[str, str]] = {
    "searches": {
        "name": "the key of the search sets it",
        "precision": "the model's profile sets it",
        "attention": "the model's profile sets it",
        "compile": "the model's profile sets it",
    },
    "data": {"out": "the workflow names its files"},
    "runs": dict.fromkeys(("plan", "out", "checkpoints", "log_dir"), "the workflow names its files")
    | dict.fromkeys(("nnodes", "node_rank", "rendezvous"), "the cluster sets it")
    | dict.fromkeys(
        ("replan_hardware", "replan_profile", "replan_search", "replan_imbalance"), "the run's search sets them"
    ),
}
"""Keys of the stages' types that cannot be set in a configuration, by section, with the reason."""


def components(kind: type) -> dict[str, dict[str, Any]]:
    """Return the JSON Schemas of a type and of the types that it contains, by name."""
    as_text = {"type": "string"}
    _, schemas = msgspec.json.schema_components([kind], schema_hook=lambda _: as_text, ref_template="#/$defs/{name}")
    return schemas


def generated() -> str:
    """Return the JSON Schema of a configuration, for editors; it does not check references between entries."""
    schemas = components(Configuration)
    for section, kind in {"searches": Search, "data": Data, "runs": Run}.items():
        for key in DECIDED[section]:
            del schemas[kind.__name__]["properties"][key]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$ref": "#/$defs/Configuration"}
    return json.dumps(head | {"$defs": schemas}, indent=1) + "\n"


def main() -> int:
    """Write or check the schema; return the exit code."""
    return write_or_check(f"python {sys.argv[0]}", {SCHEMA: generated()})


if __name__ == "__main__":
    sys.exit(main())
