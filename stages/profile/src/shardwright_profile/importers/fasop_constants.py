"""FASOP's constants, and hardware profiles from its bandwidths."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import Value, read_object, sha256_of_file
from shardwright_formats.io.table import Source
from shardwright_formats.types.hardware_profile import Collective, CollectiveKey, HardwareProfile
from shardwright_profile.importers.hardware_points import HardwarePoint, hardware_profile, link_points
from shardwright_profile.options import FasopHardwareOptions

_MAX_BYTES = 1024**2
_MAX_RANKS = 1024
_BITS = 8

Positive = Annotated[float, Meta(gt=0, le=1e15)]


class _Links(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    inter_node: Positive
    intra_node: Positive


class FasopConstants(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What FASOP's source has as numbers; settings are `default` and `pareto`."""

    citation: str
    sequence_lengths: dict[str, Annotated[int, Meta(ge=1)]]
    bandwidth_bits_per_s: dict[str, dict[str, _Links]]
    """By setting and GPU, as on the data sheet."""
    bandwidth_divisors: _Links
    """FASOP prices with the bandwidths over these."""
    gpus_per_node: dict[str, Annotated[int, Meta(ge=1, le=64)]]
    usable_memory_gib: dict[str, Positive]
    usd_per_node_hour: dict[str, dict[str, Positive]]
    backward_over_forward: Positive

    def __post_init__(self) -> None:
        if missing := sorted(set(self.bandwidth_bits_per_s) - set(self.gpus_per_node)):
            raise ValueError(f"no gpus_per_node of {missing[0]!r}")


def read_fasop_constants(file: Path) -> FasopConstants:
    """Read the constants; BadInput names what cannot be right."""
    try:
        return msgspec.convert(read_object(file, _MAX_BYTES), FasopConstants)
    except msgspec.ValidationError as error:
        raise BadInput(file, str(error), "correct the file") from None


def fasop_hardware(constants: FasopConstants, options: FasopHardwareOptions) -> HardwareProfile:
    """Times of messages by bandwidth alone, all derived; BadInput where the constants have no such GPU or setting."""
    file, setting, gpu = options.constants, options.setting, options.gpu
    links = constants.bandwidth_bits_per_s.get(setting, {}).get(gpu)
    if links is None:
        known = ", ".join(
            sorted(f"{name} {of}" for name, gpus in constants.bandwidth_bits_per_s.items() for of in gpus)
        )
        raise BadInput(file, f"no bandwidth of {setting} {gpu}, only of {known}", "ask for one of these")
    a_node, by = constants.gpus_per_node[setting], constants.bandwidth_divisors
    if options.nodes * a_node > _MAX_RANKS:
        raise BadInput("--nodes", f"more than {_MAX_RANKS} GPUs", "ask for fewer nodes")
    notes = [
        f"Made from {file.name}, SHA-256 {sha256_of_file(file)}.",
        f"Figures of {constants.citation}.",
        f"Bandwidths of setting {setting!r} over FASOP's divisors; nothing here was timed, and latency is left out.",
    ]
    points = [
        *_points(False, a_node, links.intra_node / _BITS / by.intra_node),
        *_points(True, options.nodes * a_node if options.nodes > 1 else 0, links.inter_node / _BITS / by.inter_node),
    ]
    return hardware_profile(options.cluster, options.device, notes, points, None)


def _points(across: bool, most: int, bytes_per_s: float) -> Iterator[HardwarePoint]:
    """Of groups of up to `most` ranks."""
    for ranks, consecutive, collective in product(range(2, most + 1), (False, True), Collective):
        if collective is not Collective.P2P or ranks == 2:
            key = CollectiveKey(collective, ranks, consecutive, across)
            yield from link_points(key, bytes_per_s, Source.DERIVED)
