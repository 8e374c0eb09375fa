"""Time of messages: collectives, redistribution between layouts, and sends between pipeline stages."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from shardwright_formats.errors import BadInput
from shardwright_formats.hardware_profile import Collective, CollectiveKey
from shardwright_formats.model import BoundaryTensor
from shardwright_formats.placement import Layout, closed_groups, sent_elements
from shardwright_search.profiles import Profiles

__all__ = ["Duration", "collective_time", "redistribution_time", "send_time"]


class Duration(NamedTuple):
    """A time and what is doubtful about it."""

    time_s: float
    warning: str | None = None


def collective_time(
    profiles: Profiles,
    collective: Collective,
    groups: Sequence[Sequence[int]],
    node_of_rank: Sequence[int],
    message_bytes: int,
) -> Duration:
    """Time of a collective that several equally large groups do at once: that of the slowest kind of group.

    `message_bytes` is the full tensor, as defined by `Collective`. A group of one rank, or no bytes, takes no time.
    Raises BadInput when the hardware profile has no such group.
    """
    if message_bytes == 0 or len(groups[0]) == 1:
        return Duration(0.0)
    keys = {_key(collective, group, node_of_rank) for group in groups}
    return max((_on_curve(profiles, key, message_bytes) for key in sorted(keys)), key=lambda d: d.time_s)


def redistribution_time(
    profiles: Profiles,
    ranks: Sequence[int],
    node_of_rank: Sequence[int],
    source: Layout,
    target: Layout,
    samples: int,
    outputs: Sequence[BoundaryTensor],
    element_bytes: int,
) -> Duration:
    """Time to bring a microbatch's tensors from one layout to another, one way, all closed groups at once.

    A pass is one all_to_all per tensor on each closed group. A full all_to_all of n ranks sends (n-1)/n of its message
    to others; so a rank that sends x bytes waits as for a message of x n/(n-1) bytes.
    """
    total, warning = 0.0, None
    for tensor in outputs:
        length = tensor.sequence_length
        sent = sent_elements(source, target, samples, length, tensor.features)
        slowest = Duration(0.0)
        for group in closed_groups(source, target, samples, length):
            most = max(sent[rank] for rank in group) * element_bytes
            if most:
                message_bytes = ceil(most * len(group) / (len(group) - 1))
                members = [[ranks[rank] for rank in group]]
                taken = collective_time(profiles, Collective.ALL_TO_ALL, members, node_of_rank, message_bytes)
                slowest = max(slowest, taken, key=lambda d: d.time_s)
        total += slowest.time_s
        warning = warning or slowest.warning
    return Duration(total, warning)


def send_time(
    profiles: Profiles,
    senders: Sequence[int],
    receivers: Sequence[int],
    node_of_rank: Sequence[int],
    layout: Layout,
    samples: int,
    outputs: Sequence[BoundaryTensor],
    element_bytes: int,
) -> Duration:
    """Time to hand a microbatch to the next pipeline stage, one way: each rank sends its rectangle to its counterpart.

    Two ranks have no layout, so whichever of the measured p2p curves (neighbours or not) serves; across nodes where
    any pair is.
    """
    across = any(node_of_rank[a] != node_of_rank[b] for a, b in zip(senders, receivers, strict=True))
    consecutive = receivers[0] == senders[0] + 1
    key = CollectiveKey(Collective.P2P, 2, consecutive, across)
    if key not in profiles.hardware.curves:
        other = key._replace(consecutive=not consecutive)
        key = other if other in profiles.hardware.curves else key
    total, warning = 0.0, None
    for tensor in outputs:
        tokens = layout.rectangle(0, samples, tensor.sequence_length).tokens
        taken = _on_curve(profiles, key, tokens * tensor.features * element_bytes)
        total += taken.time_s
        warning = warning or taken.warning
    return Duration(total, warning)


def _key(collective: Collective, group: Sequence[int], node_of_rank: Sequence[int]) -> CollectiveKey:
    consecutive = list(group) == list(range(group[0], group[0] + len(group)))
    across = len({node_of_rank[rank] for rank in group}) > 1
    return CollectiveKey(collective, len(group), consecutive, across)


def _on_curve(profiles: Profiles, key: CollectiveKey, message_bytes: int) -> Duration:
    """Piecewise linear between measured sizes, constant below the smallest, the last segment's bandwidth above.

    Where noise makes the last segment fall, the largest message's own bandwidth stands in.
    """
    if (curve := profiles.hardware.curves.get(key)) is None:
        how = "neighbouring" if key.consecutive else "strided"
        where = "across nodes" if key.across_nodes else "inside a node"
        raise BadInput(
            profiles.hardware_file,
            f"no {key.collective} among {key.group_size} {how} ranks {where}",
            "measure the hardware of this cluster again",
        )
    sizes, times_s = curve
    if message_bytes <= sizes[-1]:
        return Duration(float(np.interp(message_bytes, sizes, times_s)))
    seconds_per_byte = times_s[-1] / sizes[-1]
    if len(sizes) > 1 and times_s[-1] > times_s[-2]:
        seconds_per_byte = (times_s[-1] - times_s[-2]) / (sizes[-1] - sizes[-2])
    time_s = float(times_s[-1] + (message_bytes - sizes[-1]) * seconds_per_byte)
    return Duration(
        time_s,
        f"extrapolated: {key.collective} among {key.group_size} ranks of {message_bytes} bytes, "
        f"measured up to {sizes[-1]}",
    )
