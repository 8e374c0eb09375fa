"""Systems that plans are searched and exported for, one file each: a new system is entered here and in `System`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from shardwright_formats.types import Plan
from shardwright_search.interop.accelerate import ACCELERATE
from shardwright_search.interop.deepspeed import DEEPSPEED
from shardwright_search.interop.galvatron import GALVATRON
from shardwright_search.interop.launch import Launch, megatron_launch
from shardwright_search.interop.limits import Target
from shardwright_search.interop.megatron import MEGATRON
from shardwright_search.interop.megatron_bridge import MEGATRON_BRIDGE
from shardwright_search.interop.target import Exported
from shardwright_search.interop.torchtitan import TORCHTITAN
from shardwright_search.options import System

TARGETS: Mapping[System, Target] = {
    System.ACCELERATE: ACCELERATE,
    System.DEEPSPEED: DEEPSPEED,
    System.GALVATRON: GALVATRON,
    System.MEGATRON: MEGATRON,
    System.MEGATRON_BRIDGE: MEGATRON_BRIDGE,
    System.TORCHTITAN: TORCHTITAN,
}
LAUNCHERS: Mapping[System, Callable[[Plan, object, Path | None], tuple[Exported, Launch]]] = {
    System.MEGATRON: megatron_launch,
}
"""Functions that also write scripts, on the hosts of a file."""
