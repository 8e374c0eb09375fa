"""Experts in advice: the parts that ranks share a layer's experts out in, in searched plans."""

from msgspec import UNSET

from shardwright.types import Model


def searched_ep_sizes(model: Model, devices: int) -> tuple[int, ...]:
    """Return the powers of two that divide the experts of all layers, up to the devices; () where there are none."""
    numbers = {kind.experts.number for name in model.layers if (kind := model.types[name]).experts is not UNSET}
    powers = (1 << power for power in range(devices.bit_length())) if numbers else ()
    return tuple(size for size in powers if size <= devices and all(number % size == 0 for number in numbers))
