"""Times of the collectives that tensor parallelism adds to a layer, priced with a hardware profile."""

from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io import BadInput
from shardwright_formats.semantics.communication import Message, loss_messages, region_messages
from shardwright_formats.semantics.groups import seconds_on
from shardwright_formats.semantics.schedules.passes import Pass
from shardwright_formats.types import HEAD, LayerStrategy, Model
from shardwright_formats.types.hardware_profile import HardwareProfile, read_hardware_profile


class Hardware(NamedTuple):
    """A hardware profile and the file it is from."""

    file: Path
    profile: HardwareProfile

    @classmethod
    def read(cls, file: Path) -> "Hardware":
        """Return the profile of a file."""
        return cls(file, read_hardware_profile(file))


def layer_traffic(
    hardware: Hardware, model: Model, strategy: LayerStrategy, samples: int, itemsize: int
) -> dict[Pass | None, float]:
    """Return the seconds that one layer spends on collectives for a microbatch of `samples` samples, by pass.

    The collectives, all inside the layer's tensor-parallel group, follow one another.
    """
    messages = list(region_messages(model, strategy.type, strategy, samples, itemsize, 1))
    if strategy.type == HEAD:
        messages += loss_messages(model.types[HEAD], strategy, samples, itemsize, 1)
    times_s: dict[Pass | None, float] = dict.fromkeys(Pass, 0.0)
    for message in messages:
        times_s[message.during] += _time_s(hardware, message) * message.times
    return times_s


def _time_s(hardware: Hardware, message: Message) -> float:
    """Return the time of a message on neighbouring ranks, inside a node where one holds them all."""
    neighbours = (message.collective, message.group_size, True)
    curves = hardware.profile.curves
    alike = (key for key in curves if (key.collective, key.group_size, key.consecutive) == neighbours)
    if (key := max(alike, key=lambda key: key.ranks_per_node, default=None)) is None:
        problem = f"no {message.collective} among {message.group_size} neighbouring ranks"
        raise BadInput(hardware.file, problem, "leave that size out of --tp-sizes, or give another profile")
    return seconds_on(hardware.profile, key, message.bytes)
