"""Published runs as this project's plans: what was run, and what it took."""

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
    """The cluster of a set of runs, as its source states it."""

    device: str
    """Key of the table of devices."""
    node_gbit_s: tuple[tuple[int, float], ...] = ()
    """What a node sends in Gbit/s, by the number of nodes that a group spans; reached already where `measured`."""
    gbit_s_by_collective: tuple[tuple[Collective, tuple[tuple[int, float], ...]], ...] = ()
    """The same of collectives that have rates of their own."""
    measured: bool = False
    step_us: float | None = None
    """Latency of a step from a node to the next, in place of the estimates'."""
    memory_gbyte_s: float | None = None
    """In place of the table's, where the source has another variant of the device."""
    memory_bytes: int | None = None
    """In place of the table's."""
    devices_per_node: int = 8
    counts_process: bool = False
    """Whether memory was read from the driver, process and all, and not from the allocator."""


class Run(NamedTuple):
    """One measured run of a uniform plan."""

    set: str
    group: str
    """Runs that can take one another's place: the same work on the same devices."""
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
    """Where the layers are cut, in the order of the layers, if not evenly."""
    measured_s: float | None = None
    measured_bytes: float | None = None
    """Of the fullest device, or of the first where `read_on_first`."""
    read_on_first: bool = False
    """Whether memory was read on rank 0 alone, which is in the first pipeline stage."""
    uncounted: tuple[str, ...] = ()
    """Fields of its runtime that are left at their defaults."""
    failed: bool = False
    """It did not run: out of memory, or for another reason that is not known."""
    cp_size: int = 1
    """Context-parallel ranks, in a ring."""
    ep_size: int = 1
    """Groups of ranks that share experts out."""
    etp_size: int = 1
    """Ranks of a group that share the features of each of its experts."""
    chunks: int = 1
    """Layer ranges of a pipeline stage, in interleaved turns where there are several."""
    compute: ComputeType = "bfloat16"
    reduce: DType = "float32"
    compiled: bool = False
    """Whether torch.compile compiled the blocks."""
    launch_us: float = 42.0
    """Time of the host for each kernel."""
    habits: tuple[tuple[str, Any], ...] = ()
    """Habits of its runtime, by their fields, that this run had otherwise than by default."""
    habits_left_out: tuple[str, ...] = ()
    """Habits of its runtime, by their fields, that are taken to be as this project's."""

    modules: tuple[Module, ...] = ()
    """Modules that are recomputed by themselves."""

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self.devices // (self.tp_size * self.cp_size * self.pp_size)

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self.micro_batch_size * self.dp_size * self.num_microbatches


def rows_of(folder: Path, columns: Sequence[str], name: str = "runs.csv") -> Iterator[dict[str, str]]:
    """Yield the rows of a set's file; BadInput where it or a column is absent."""
    path = folder / name
    if not path.is_file():
        raise BadInput(path, "is absent", "give the folder of the published runs with --reference")
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if missing := sorted(set(columns) - set(reader.fieldnames or ())):
            raise BadInput(path, f"has no column {missing[0]}", "see the README of the set")
        yield from reader


def known(folder: Path, row: Mapping[str, str], column: str, words: Collection[str]) -> str:
    """Return a row's word, which is one of some; BadInput where it is another."""
    if (word := row[column]) not in words:
        raise BadInput(folder / "runs.csv", f"{column} {word!r} is not known", f"use {', '.join(words)}")
    return word
