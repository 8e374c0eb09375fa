"""Systems that plans are exported for, one file each: a new system is entered here and in the option `--to`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.types import Plan
from shardwright_search.interop.galvatron import galvatron_file
from shardwright_search.interop.launch import Launch, megatron_launch
from shardwright_search.interop.megatron import megatron_arguments
from shardwright_search.interop.target import Exported
from shardwright_search.interop.torchtitan import torchtitan_toml
from shardwright_search.options import System


class Exporter(NamedTuple):
    """Functions that write a plan for a system; they raise BadInput, naming the plan's file, for what it cannot run."""

    export: Callable[[Plan, Path], Exported]
    launch: Callable[[Plan, Path, Path | None], tuple[Exported, Launch]] | None = None
    """Function that also writes scripts, on the hosts of a file; None where the system has none."""


EXPORTERS: Mapping[System, Exporter] = {
    System.GALVATRON: Exporter(galvatron_file),
    System.MEGATRON: Exporter(megatron_arguments, megatron_launch),
    System.TORCHTITAN: Exporter(torchtitan_toml),
}
