"""Hardware profiles from the bandwidth and time tables of hetu-galvatron.

An all-reduce of B MB (1e6 bytes) among n ranks takes 2(n-1)/n B/W milliseconds at a bus bandwidth of W GB/s (1e9):
that is the definition of nccl-tests. Galvatron's cost model divides MiB by W instead, which is 4.6 % too low; that is
not repeated here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

from shardwright.estimate.hardware import unsized_overlap
from shardwright.estimate.overlap import Slowdowns
from shardwright.io import BadInput
from shardwright.io.table import Source
from shardwright.types import MIB
from shardwright.types.hardware_profile import Collective, CollectiveKey, HardwareProfile
from shardwright_profile.importers.documents import (
    HardwarePoint,
    halves,
    hardware_profile,
    link_points,
    made_from,
    write_imported,
)
from shardwright_profile.importers.galvatron.keys import read_numbers
from shardwright_profile.options import GalvatronHardwareOptions

_Figure = TypeVar("_Figure")

_CLUSTER = re.compile(r".*_(?P<nodes>[1-9]\d{0,4})nodes_(?P<gpus>[1-9]\d{0,2})gpus_per_node\.json")
_BANDWIDTH = re.compile(r"allreduce_size_(?P<ranks>[1-9]\d{0,5})_consec_(?P<consecutive>[01])")
_SEND = re.compile(r"pp_size_(?P<ranks>[1-9]\d{0,5})")
_TIME = re.compile(r"(?P<kind>allreduce|all2all)_size_(?P<ranks>[1-9]\d{0,5})_(?P<mib>[1-9]\d{0,5})MB_time")
_OVERLAP = "overlap_coe"
_GIGA = 1e9


class _Cluster(NamedTuple):
    """The cluster on which a file was measured, according to its name."""

    nodes: int
    gpus_per_node: int

    def key(self, collective: Collective, group_size: int, consecutive: bool) -> CollectiveKey:
        """Return a collective's key: consecutive ranks fill nodes; other groups are spread evenly over all nodes."""
        most = min(group_size, self.gpus_per_node)
        return CollectiveKey(collective, group_size, most if consecutive else -(-group_size // self.nodes), consecutive)


def import_galvatron_hardware(options: GalvatronHardwareOptions) -> HardwareProfile:
    """Return the profile that the tables determine; if two files state the same figure, the first counts.

    Measured times of whole collectives are preferred to bandwidths, and their disagreement is noted. An all-gather and
    a reduce-scatter take half as long as an all-reduce each (ring, derived). If no all-to-all was timed, the bus
    bandwidth of the all-reduce is assumed for it. Raises BadInput if a table has an impossible value, or if no table
    of collectives is given.
    """
    if not (options.allreduce or options.sp_time):
        raise BadInput("--allreduce", "no table of collectives", "pass --allreduce or --sp-time")
    notes = [*made_from(*options.allreduce, *options.p2p, *options.sp_time, options.overlap)]
    notes.append("Times by bandwidth are without latency; errors are not known.")
    timed = _first(item for file in options.sp_time for item in _timed(file, notes))
    bandwidths = _first(item for file in options.allreduce for item in _bandwidths(file, notes))
    notes += _disagreements(timed, bandwidths)
    reduces = {key: list(link_points(key, rate, Source.DERIVED)) for key, rate in bandwidths.items()}
    reduces |= {key: points for key, points in timed.items() if key.collective is Collective.ALL_REDUCE}
    to_all = Collective.ALL_TO_ALL
    exchanges = {CollectiveKey.from_fields(key, collective=to_all): rate for key, rate in bandwidths.items()}
    assumed = {key: list(link_points(key, rate, Source.ASSUMED)) for key, rate in exchanges.items() if key not in timed}
    if assumed:
        notes.append("Where no all-to-all was timed, the all-reduce's bus bandwidth is assumed for it.")
    notes.append("All-gather and reduce-scatter are half of the all-reduce, as on a ring (derived).")
    points = list(chain(*reduces.values(), *assumed.values()))
    points += [point for key, measured in timed.items() if key not in reduces for point in measured]
    points += [half for point in chain(*reduces.values()) for half in halves(point)]
    for key, rate in _sends(options.p2p, notes).items():
        points += link_points(key, rate, Source.DERIVED)
    overlap = None
    if options.overlap is not None:
        cluster = _cluster((*options.allreduce, *options.sp_time)[0])
        reduce = cluster.key(Collective.ALL_REDUCE, cluster.nodes * cluster.gpus_per_node, True)
        slowdown = _overlap(options.overlap, notes)
        overlap = unsized_overlap(reduce, Slowdowns(slowdown, slowdown), Source.MEASURED)
    return hardware_profile(options.cluster, options.device, notes, points, overlap)


def write_galvatron_hardware(options: GalvatronHardwareOptions) -> None:
    """Write the profile of a cluster that Galvatron measured."""
    write_imported(options.out, import_galvatron_hardware(options))


def _first(items: Iterable[tuple[CollectiveKey, _Figure]]) -> dict[CollectiveKey, _Figure]:
    """Return one figure for each kind of collective, from the first file that has it."""
    figures: dict[CollectiveKey, _Figure] = {}
    for key, figure in items:
        figures.setdefault(key, figure)
    return figures


def _timed(file: Path, notes: list[str]) -> Iterator[tuple[CollectiveKey, list[HardwarePoint]]]:
    """Yield the times of whole collectives among consecutive ranks, from the file's ms for messages in MiB."""
    cluster, by_key = _cluster(file), dict[CollectiveKey, list[HardwarePoint]]()
    for match, time_ms in _matches(file, _TIME, notes):
        collective = Collective.ALL_REDUCE if match["kind"] == "allreduce" else Collective.ALL_TO_ALL
        key = cluster.key(collective, int(match["ranks"]), True)
        point = HardwarePoint(key, int(match["mib"]) * MIB, time_ms / 1000, Source.MEASURED)
        by_key.setdefault(key, []).append(point)
    for key, points in by_key.items():
        points.sort()
        for small, large in pairwise(points):
            if large.time_s < small.time_s:
                notes.append(
                    f"{key.collective.value} of {key.group_size} ranks takes {small.time_s * 1000:.4g} ms at"
                    f" {small.message_bytes // MIB} MiB and {large.time_s * 1000:.4g} ms at"
                    f" {large.message_bytes // MIB} MiB: kept as measured."
                )
        yield key, points


def _bandwidths(file: Path, notes: list[str]) -> Iterator[tuple[CollectiveKey, float]]:
    cluster = _cluster(file)
    for match, giga in _matches(file, _BANDWIDTH, notes):
        yield cluster.key(Collective.ALL_REDUCE, int(match["ranks"]), match["consecutive"] == "1"), giga * _GIGA


def _sends(files: Iterable[Path], notes: list[str]) -> dict[CollectiveKey, float]:
    """Return the bytes per second of sends by layout; if several strides were timed, the slowest, with a note."""
    known: dict[CollectiveKey, list[float]] = {}
    for file in files:
        cluster = _cluster(file)
        world = cluster.nodes * cluster.gpus_per_node
        in_file: dict[CollectiveKey, list[float]] = {}
        for match, giga in _matches(file, _SEND, notes):
            stride = world // int(match["ranks"])
            on_a_node = 1 if cluster.nodes > 1 else 2
            in_file.setdefault(CollectiveKey(Collective.P2P, 2, on_a_node, stride == 1), []).append(giga * _GIGA)
        known = in_file | known
    for key, rates in known.items():
        if len(rates) > 1:
            figures = ", ".join(f"{rate / _GIGA:.4g}" for rate in rates)
            where = "across nodes" if key.group.across_nodes else "inside a node"
            notes.append(f"Of sends {where} over several distances ({figures} GB/s) the slowest is taken.")
    return {key: min(rates) for key, rates in known.items()}


def _overlap(file: Path, notes: list[str]) -> float:
    for _, factor in _matches(file, re.compile(_OVERLAP), notes):
        if factor < 1:
            raise BadInput(file, f"{_OVERLAP} is {factor:g}, a speed-up", "measure it again")
        notes.append(f"{_OVERLAP} slows computation and data-parallel messages alike; of which size is not known.")
        return factor
    raise BadInput(file, f"has no {_OVERLAP}", "pass overlap_coefficient.json")


def _disagreements(
    timed: Mapping[CollectiveKey, list[HardwarePoint]], bandwidths: Mapping[CollectiveKey, float]
) -> Iterator[str]:
    for key in sorted(timed.keys() & bandwidths.keys()):
        large = timed[key][-1]
        (by_rate,) = link_points(key, bandwidths[key], Source.DERIVED, (large.message_bytes,))
        yield (
            f"An all-reduce of {large.message_bytes // MIB} MiB among {key.group_size} neighbours takes"
            f" {large.time_s * 1000:.4g} ms by sp_time and {by_rate.time_s * 1000:.4g} ms by bandwidth:"
            " sp_time is taken."
        )


def _matches(file: Path, grammar: re.Pattern[str], notes: list[str]) -> Iterator[tuple[re.Match[str], float]]:
    unknown = []
    for key, value in read_numbers(file).items():
        if value <= 0:
            raise BadInput(file, f"{key!r} is {value:g}, not positive", "measure it again")
        if match := grammar.fullmatch(key):
            yield match, value
        else:
            unknown.append(key)
    if unknown:
        notes.append(f"Keys of {file.name} that are not understood were passed over: {', '.join(unknown[:5])}.")


def _cluster(file: Path) -> _Cluster:
    if (match := _CLUSTER.fullmatch(file.name)) is None:
        problem = "its name does not state the number of nodes and GPUs"
        raise BadInput(file, problem, "name it ..._1nodes_8gpus_per_node.json, as Galvatron does")
    return _Cluster(int(match["nodes"]), int(match["gpus"]))
