"""The options of the commands of `shardwright profile`."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, ValidationError, convert

from shardwright.command import POSITIONAL, Options
from shardwright.estimate.runtimes import RuntimeOptions
from shardwright.io import BadInput
from shardwright.launch.nodes import NodeOptions
from shardwright.types import (
    Count,
    Microseconds,
    Name,
    NonNegativeCount,
    NonNegativeNumber,
    PositiveSeconds,
    Precision,
    Seconds,
    SequenceParallel,
    Tokens,
)

_MessageBytes = Annotated[int, Meta(ge=4, le=2**50)]
_Rate = Annotated[float, Meta(ge=0.001, le=1e9)]
_Efficiency = Annotated[float, Meta(ge=0.001, le=1)]


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    parts = [part for part in (text or "").split(",") if part]
    if not all(len(part) < 10 and part.isascii() and part.isdigit() and int(part) for part in parts):
        raise BadInput(option, f"{text!r:.40} is not a list of whole numbers", "write them as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


class HardwareOptions(NodeOptions, frozen=True, kw_only=True):
    """Time messages and devices, and how they slow each other down: gloo among devices named `cpu`, else NCCL.

    Starts one process per device of this node. All groups of one size work at the same time, as in training. Each
    message is four times as large as the one before, at least up to 1 MiB, and as far as the time budget allows. It is
    repeated until its median is known to within 3 %, its share of the time is spent, or --max-repeats is reached. A
    killed sweep continues when the same command is run again: its measurements are in OUT.journal until OUT is written.
    """

    cluster: Path
    """The cluster, JSON (shardwright.cluster)."""
    time_budget: PositiveSeconds
    """Time for the sweep in seconds, not counting the start-up."""
    out: Path
    """The hardware profile to write, HDF5; node 0 writes it."""
    min_bytes: _MessageBytes = 1024
    """Smallest message, in bytes."""
    max_bytes: _MessageBytes = 256 * 1024**2
    """Largest message, if time allows, in bytes."""
    max_repeats: Count = 100
    """Maximum number of repeats of each message."""


class ProbesOptions(Options, frozen=True, kw_only=True):
    """Write probes: plans with few layers, from which `fit` learns what one layer costs.

    For `cp_sizes` in the settings, further plans check the times that are derived for context parallelism.
    """

    model: tuple[Path, ...]
    """The model description, JSON (shardwright.model); once more for each further sequence length."""
    cluster: Path
    """The cluster, JSON (shardwright.cluster)."""
    node_type: Name
    """The cluster's node type to measure on, with all its devices."""
    settings: Path
    """Profile settings, JSON (shardwright.profile_settings)."""
    out: Path
    """The probes to write, JSON (shardwright.plans)."""


class ModelOptions(Options, frozen=True, kw_only=True):
    """Profile all of a model: describe it, write its probes, measure them on this node, and fit.

    Needs the stage train. Measurements are kept in OUT.work until the profile is written: started again, the command
    continues. For `cp_sizes` in the settings, it prints the ratio of the measured to the derived time of a rank's share
    of positions.
    """

    folder: Annotated[Path, POSITIONAL]
    """Folder that holds a Hugging Face config.json."""
    name: Name
    """Name of the model, which is written into the profile."""
    sequence_length: Tokens
    """Tokens (or patches) of one sample."""
    cluster: Path
    """The cluster, JSON (shardwright.cluster)."""
    node_type: Name
    """The cluster's node type to measure on: this node, all its devices."""
    settings: Path
    """Profile settings, JSON (shardwright.profile_settings)."""
    out: Path
    """The model profile to write, HDF5."""
    frozen: tuple[str, ...] = ()
    """Part of the model that is not trained, as `shardwright train describe` takes it; may be repeated."""
    lora: Path | None = None
    """An adapter_config.json of peft, or its folder: only its low-rank matrices are trained."""
    steps: Count = 5
    """Minimum number of timed steps of each probe."""
    warmup_steps: Count = 2
    """Steps before the timed ones."""
    min_time_s: Seconds = 1.0
    """Minimum time of each probe, in seconds."""


class FitOptions(Options, frozen=True, kw_only=True):
    """Turn the measured probes of one model on one device into its profile: seconds and bytes per layer."""

    measurements: tuple[Path, ...]
    """Measurements of the probes, JSON (shardwright.measurement); may be repeated."""
    out: Path
    """The model profile to write, HDF5."""


class ShowOptions(Options, frozen=True, kw_only=True):
    """Print a profile as tables: times in s, ms or µs, memory in KiB, MiB or GiB, bandwidth in MB/s or GB/s."""

    file: Annotated[Path, POSITIONAL]
    """A hardware profile or a model profile, HDF5."""
    picture: Path | None = None
    """Also draw points, fits and residuals into this file: .svg; .png and .pdf need CairoSVG."""
    tables: bool = True
    """Print the tables."""


class ImportOptions(Options, frozen=True, kw_only=True):
    """Options that all imports have in common."""

    device: Name
    """Name of the device that was measured, as clusters name it."""
    out: Path
    """The profile to write, HDF5."""


class ImportModelOptions(ImportOptions, frozen=True, kw_only=True):
    """Options that all imports of model profiles have in common."""

    backward_ratio: NonNegativeNumber
    """Ratio of backward to forward time, without recomputation; the imported files do not contain it."""
    micro_batch_sizes: str | None = None
    """Micro-batch sizes, in samples, to write rows for even if they were not measured, as 1,2,4."""
    precision: str = "float32/bfloat16/float32"
    """Number formats that were measured: parameters/compute/reduce."""

    def __post_init__(self) -> None:
        try:
            _ = self.formats
        except (ValueError, ValidationError):
            fix = "write it as float32/bfloat16/float32"
            raise BadInput("--precision", f"{self.precision!r} is unknown", fix) from None

    @property
    def formats(self) -> Precision:
        """Return `precision` in a plan's form."""
        parameters, compute, reduce = self.precision.split("/")
        return convert({"parameters": parameters, "compute": compute, "reduce": reduce}, Precision)

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Return `micro_batch_sizes` as numbers."""
        return _numbers("--micro-batch-sizes", self.micro_batch_sizes)


class GalvatronOptions(ImportModelOptions, frozen=True, kw_only=True):
    """Import a model's times and memory as hetu-galvatron 2.4.0 measures them.

    Galvatron times forward passes on one GPU. All other values of a row are derived or assumed, and marked so.
    """

    computation: Path
    """Times: computation_profiling_*.json, in ms."""
    memory: Path | None = None
    """Memory: memory_profiling_*.json, in MiB."""
    model: tuple[Path, ...] = ()
    """The model, JSON (shardwright.model); may be repeated, once for each sequence length."""
    type: tuple[str, ...] = ()
    """NAME,LAYERS,POSITIONS,FEATURES,HEADS instead of --model, once for each type of layer, in order."""
    name: Name = "galvatron"
    """Name of the model, if it is given by --type."""
    model_out: Path | None = None
    """Model description to write, JSON (shardwright.model); needed with --type."""
    tp_sizes: str = "1"
    """Tensor-parallel sizes, in ranks, as 1,2,4; above 1 times are assumed."""
    hardware: Path | None = None
    """Hardware profile, HDF5, for the times of tensor parallelism's collectives."""
    sequence_parallel: Literal["none", "megatron"] | None = None
    """Kind of sequence parallelism whose memory tables are taken; by default megatron, if the file has them."""
    attention: str = "auto"
    """Attention kernel that was measured."""
    repair: bool = False
    """Leave out or level impossible times, and report it; by default they are an error."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return `tp_sizes` as numbers."""
        return _numbers("--tp-sizes", self.tp_sizes) or (1,)

    @property
    def tables(self) -> SequenceParallel | None:
        """Return the kind of tables to read from a memory file; None: megatron's if it has them."""
        return None if self.sequence_parallel is None else SequenceParallel(self.sequence_parallel)


class GalvatronHardwareOptions(ImportOptions, frozen=True, kw_only=True):
    """Import a cluster's bandwidths and times as hetu-galvatron 2.4.0 measures them."""

    cluster: Name
    """Name of the cluster in all later files."""
    allreduce: tuple[Path, ...] = ()
    """allreduce_bandwidth_*.json, in GB/s (1e9); may be repeated; the first file with a figure counts."""
    p2p: tuple[Path, ...] = ()
    """p2p_bandwidth_*.json, in GB/s (1e9); may be repeated."""
    sp_time: tuple[Path, ...] = ()
    """sp_time_*.json, in ms for messages in MiB, preferred to bandwidths; may be repeated."""
    overlap: Path | None = None
    """overlap_coefficient.json: the factor by which overlap slows computation and messages."""


class FasopOptions(ImportModelOptions, frozen=True, kw_only=True):
    """Import the layer times of FASOP: one forward time per kind of layer, at micro-batch size 1, tp_size 1, 2, 4."""

    times: Path
    """Layer times, CSV, in s: config/reference/fasop-layer-times.csv."""
    constants: Path
    """Constants, JSON: config/reference/fasop-constants.json."""
    model_name: str
    """FASOP's model: gpt2XL, bert or T5."""
    gpu: str
    """FASOP's GPU: A100 or A10."""
    model: Path
    """The model, JSON (shardwright.model)."""
    precision: str = "float32/float16/float32"
    """Number formats to assume: parameters/compute/reduce."""
    growth: Path | None = None
    """Factors of times at larger micro-batches, JSON: config/reference/fasop-growth.json; by default in proportion."""


class FasopHardwareOptions(ImportOptions, frozen=True, kw_only=True):
    """Write a hardware profile from FASOP's bandwidths; none of it was timed."""

    constants: Path
    """Constants, JSON: config/reference/fasop-constants.json."""
    setting: str
    """FASOP's set of bandwidths: default (4 GPUs per node) or pareto (8)."""
    gpu: str
    """FASOP's GPU: A100 or A10."""
    nodes: Annotated[int, Meta(ge=1, le=100_000)]
    """Number of nodes."""
    cluster: Name
    """Name of the cluster in all later files."""


class AnalyticOptions(RuntimeOptions, frozen=True, kw_only=True):
    """Estimate profiles of devices that nobody has measured yet, from shapes and published rates.

    Every number is marked `analytic`, and the notes of the file say what was assumed and how far such numbers were from
    measured ones. Prefer measured profiles if you have devices to measure on.
    """

    model: tuple[Path, ...] = ()
    """The model, JSON (shardwright.model); may be repeated for the same model at other sequence lengths."""
    settings: Path | None = None
    """Profile settings, JSON (shardwright.profile_settings), as `probes` takes them."""
    out: Path | None = None
    """The model profile to write, HDF5."""
    device: Name | None = None
    """A device that the command `devices` lists, by its key or its driver's name."""
    cluster: Path | None = None
    """The cluster, JSON (shardwright.cluster)."""
    node_type: Name | None = None
    """The node type of the cluster for whose device the model profile is."""
    hardware_out: Path | None = None
    """The cluster's hardware profile to write, HDF5."""
    inter_node_gbit_s: str | None = None
    """Bandwidth from one node to others, all devices together, in Gbit/s.

    One number; or 2:400,4:300 by the maximum number of nodes that a group of ranks spans, if wide groups get less.
    Collectives with rates of their own follow: 2:400,4:300+all_gather=2:200,4:150+reduce_scatter=2:200,4:150.
    """
    network_step_us: Microseconds | None = None
    """Latency of one step of a collective between nodes, in µs; by default 14. It needs --inter-node-gbit-s."""
    context_mib: NonNegativeCount | None = None
    """Memory of a CUDA context on a device, in MiB, as an idle process takes; by default 512."""
    communicator_mib: NonNegativeCount | None = None
    """Buffers of one NCCL communicator, in MiB; by default 480."""
    allocator_slack_mib: NonNegativeCount | None = None
    """Device memory that the allocator has reserved but does not use, in MiB; by default 0."""
    matrix_efficiency: _Efficiency | None = None
    """Ratio of reached to published rate of matrix products, also in attention; the default depends on the device."""
    memory_efficiency: _Efficiency = 0.75
    """Ratio of reached to published memory bandwidth."""
    link_efficiency: _Efficiency = 0.75
    """Ratio of reached to published bandwidth of links and networks."""
    matrix_tflop_s: _Rate | None = None
    """Published rate of matrix products in TFLOP/s, instead of the table's rate."""
    memory_gbyte_s: _Rate | None = None
    """Published memory bandwidth in GB/s, instead of the table's bandwidth."""
    link_gbyte_s: _Rate | None = None
    """Published link bandwidth in one direction in GB/s, instead of the table's bandwidth."""
    devices: Path | None = None
    """Another table of devices, TOML."""


class DevicesOptions(Options, frozen=True, kw_only=True):
    """List the devices that `analytic` knows, with the source of each figure; prices are indicative."""

    devices: Path | None = None
    """Another table of devices, TOML."""
