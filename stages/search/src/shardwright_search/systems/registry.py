"""Systems that plans are searched and exported for, one file each: a new one is entered here and in `System`."""

from collections.abc import Mapping

from shardwright_search.options import System
from shardwright_search.systems.accelerate import ACCELERATE
from shardwright_search.systems.deepspeed import DEEPSPEED
from shardwright_search.systems.entry import Entry
from shardwright_search.systems.galvatron import GALVATRON
from shardwright_search.systems.megatron import MEGATRON, TUNED_MEGATRON
from shardwright_search.systems.megatron_bridge import MEGATRON_BRIDGE, TUNED_BRIDGE
from shardwright_search.systems.torchtitan import TORCHTITAN

SYSTEMS: Mapping[System, Entry] = {
    System.ACCELERATE: ACCELERATE,
    System.DEEPSPEED: DEEPSPEED,
    System.GALVATRON: GALVATRON,
    System.MEGATRON: MEGATRON,
    System.MEGATRON_BRIDGE: MEGATRON_BRIDGE,
    System.TORCHTITAN: TORCHTITAN,
}
TUNED: Mapping[System, Entry] = {System.MEGATRON: TUNED_MEGATRON, System.MEGATRON_BRIDGE: TUNED_BRIDGE}
"""The systems whose recipes for speed run experts in another way (`--tuned`)."""
