"""Published runs in terms of this project's plans: what was run, and its time and memory."""

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.estimate.held import Module
from shardwright.io import BadInput
from shardwright.types import DataParallel, GradientReduction, Recompute, SequenceParallel
from shardwright.types.hardware_profile import Collective
from shardwright.types.plan import ComputeType, DType

GIB = 2**30


class Machine(NamedTuple):
    """The cluster of a set of runs, according to its source."""

    device: str
    """Key of the table of devices."""
    node_gbit_s: tuple[tuple[int, float], ...] = ()
    """Bandwidth of a node in Gbit/s, by the maximum number of nodes that a group spans; nominal unless `measured`."""
    gbit_s_by_collective: tuple[tuple[Collective, tuple[tuple[int, float], ...]], ...] = ()
    """The same for collectives that have rates of their own."""
    measured: bool = False
    step_us: float | None = None
    """Latency in µs of a step from a node to the next, in place of the estimates' value."""
    memory_gbyte_s: float | None = None
    """Memory bandwidth in place of the table's value, if the source has another variant of the device."""
    memory_bytes: int | None = None
    """Memory of a device in place of the table's value."""
    devices_per_node: int = 8
    counts_process: bool = False
    """Whether memory was read from the driver, including the process, and not from the allocator."""


class Run(NamedTuple):
    """One measured run of a uniform plan."""

    set: str
    group: str
    """Name of the group of runs that do the same work on the same devices."""
    name: str
    config: tuple[tuple[str, Any], ...]
    """The model's Hugging Face configuration."""
    sequence_length: int
    machine: Machine
    devices: int
    tp_size: int
    pp_size: int
    data_parallel: DataParallel
    micro_batch_size: int
    num_microbatches: int
    recompute: Recompute
    runtime: str
    """Key of the table of runtimes."""
    gradient_reduction: GradientReduction = GradientReduction.DEFERRED
    sequence_parallel: SequenceParallel = SequenceParallel.NONE
    cuts: tuple[int, ...] | None = None
    """Bounds of the layer ranges, in the order of the layers, if they are not even."""
    measured_s: float | None = None
    measured_bytes: float | None = None
    """Memory of the fullest device, or of the first device if `read_on_first`."""
    read_on_first: bool = False
    """Whether memory was read only on rank 0, which is in the first pipeline stage."""
    uncounted: tuple[str, ...] = ()
    """Fields of its runtime for which this project's values are taken."""
    failed: bool = False
    """Whether it did not run: it was out of memory, or the reason is not known."""
    cp_size: int = 1
    """Number of context-parallel ranks, in a ring."""
    ep_size: int = 1
    """Number of groups of ranks over which experts are distributed."""
    etp_size: int = 1
    """Number of ranks over which the features of each expert of a group are split."""
    chunks: int = 1
    """Number of layer ranges of a pipeline stage; several are interleaved."""
    compute: ComputeType = "bfloat16"
    reduce: DType = "float32"
    compiled: bool = False
    """Whether torch.compile compiled the blocks."""
    launch_us: float = 42.0
    """Time of the host to launch one kernel, in µs."""
    habits: tuple[tuple[str, Any], ...] = ()
    """Fields of its runtime, with their values, in which this run differed from the runtime's default."""
    habits_left_out: tuple[str, ...] = ()
    """Fields of its runtime that are assumed to have the values of this project's runtime."""

    modules: tuple[Module, ...] = ()
    """Modules that are recomputed by themselves."""

    @property
    def dp_size(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.devices // (self.tp_size * self.cp_size * self.pp_size)

    @property
    def global_batch_size(self) -> int:
        """Return the number of samples of a step."""
        return self.micro_batch_size * self.dp_size * self.num_microbatches


def rows_of(folder: Path, columns: Sequence[str], name: str = "runs.csv") -> Iterator[dict[str, str]]:
    """Yield the rows of a set's file; raise BadInput if the file or a column does not exist."""
    path = folder / name
    if not path.is_file():
        raise BadInput(path, "is absent", "give the folder of the published runs with --reference")
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if missing := sorted(set(columns) - set(reader.fieldnames or ())):
            raise BadInput(path, f"has no column {missing[0]}", "see the README of the set")
        yield from reader


def known(folder: Path, row: Mapping[str, str], column: str, words: Collection[str]) -> str:
    """Return a row's value in a column; raise BadInput if it is not one of `words`."""
    if (word := row[column]) not in words:
        raise BadInput(folder / "runs.csv", f"{column} {word!r} is not known", f"use {', '.join(words)}")
    return word
