"""FASOP's constants, and hardware profiles from its bandwidths."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import Value, read_object, sha256_of_file
from shardwright_formats.io.table import Source
from shardwright_formats.types.hardware_profile import Collective, CollectiveKey, HardwareProfile
from shardwright_profile.importers.hardware_points import HardwarePoint, hardware_profile, link_points

_MAX_BYTES = 1024**2
_MAX_RANKS = 1024
_BITS = 8

Positive = Annotated[float, Meta(gt=0, le=1e15)]


class _Links(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    inter_node: Positive
    intra_node: Positive


class _Constants(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file; settings are `default` and `pareto`."""

    citation: str
    sequence_lengths: dict[str, Annotated[int, Meta(ge=1)]]
    bandwidth_bits_per_s: dict[str, dict[str, _Links]]
    bandwidth_divisors: _Links
    gpus_per_node: dict[str, Annotated[int, Meta(ge=1, le=64)]]
    usable_memory_gib: dict[str, Positive]
    usd_per_node_hour: dict[str, dict[str, Positive]]
    backward_over_forward: Positive


class FasopConstants(NamedTuple):
    """What FASOP's source has as numbers."""

    file: Path
    citation: str
    sequence_lengths: Mapping[str, int]
    links: Mapping[tuple[str, str], "FasopLinks"]
    """By setting and GPU."""


class FasopLinks(NamedTuple):
    """Bandwidths as FASOP prices with them: those of the data sheet over its divisors."""

    gpus_per_node: int
    inside_bytes_per_s: float
    across_bytes_per_s: float


def read_fasop_constants(file: Path) -> FasopConstants:
    """Read the constants; BadInput names what cannot be right."""
    try:
        found = msgspec.convert(read_object(file, _MAX_BYTES), _Constants)
    except msgspec.ValidationError as error:
        raise BadInput(file, str(error), "correct the file") from None
    if missing := set(found.bandwidth_bits_per_s) - set(found.gpus_per_node):
        raise BadInput(file, f"no gpus_per_node of {sorted(missing)[0]!r}", "add it")
    by = found.bandwidth_divisors
    links = {
        (setting, gpu): FasopLinks(
            found.gpus_per_node[setting],
            rates.intra_node / _BITS / by.intra_node,
            rates.inter_node / _BITS / by.inter_node,
        )
        for setting, gpus in found.bandwidth_bits_per_s.items()
        for gpu, rates in gpus.items()
    }
    return FasopConstants(file, found.citation, found.sequence_lengths, links)


def fasop_hardware(
    constants: FasopConstants, setting: str, gpu: str, nodes: int, cluster: str, device: str
) -> HardwareProfile:
    """Times of messages by bandwidth alone, all derived; BadInput where the constants have no such GPU or setting."""
    links = constants.links.get((setting, gpu))
    if links is None:
        known = ", ".join(sorted(f"{s} {g}" for s, g in constants.links))
        raise BadInput(constants.file, f"no bandwidth of {setting} {gpu}, only of {known}", "ask for one of these")
    if nodes * links.gpus_per_node > _MAX_RANKS:
        raise BadInput("--nodes", f"more than {_MAX_RANKS} GPUs", "ask for fewer nodes")
    notes = [
        f"Made from {constants.file.name}, SHA-256 {sha256_of_file(constants.file)}.",
        f"Figures of {constants.citation}.",
        f"Bandwidths of setting {setting!r} over FASOP's divisors; nothing here was timed, and latency is left out.",
    ]
    return hardware_profile(cluster, device, notes, list(_points(links, nodes)), None)


def _points(links: FasopLinks, nodes: int) -> Iterator[HardwarePoint]:
    world = nodes * links.gpus_per_node
    for across, most, rate in (
        (False, links.gpus_per_node, links.inside_bytes_per_s),
        (True, world if nodes > 1 else 0, links.across_bytes_per_s),
    ):
        for ranks in range(2, most + 1):
            for consecutive in (False, True):
                for collective in Collective:
                    if collective is not Collective.P2P or ranks == 2:
                        key = CollectiveKey(collective, ranks, consecutive, across)
                        yield from link_points(key, rate, Source.DERIVED)
