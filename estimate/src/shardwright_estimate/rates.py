"""What a device is taken to reach: published rates times stated efficiencies."""

from typing import NamedTuple

from shardwright_estimate.devices import Device, DeviceTable, device_named
from shardwright_estimate.layers import Machine
from shardwright_estimate.messages import STEP_S, Link
from shardwright_formats.io import BadInput

TYPICAL_PRODUCT = 0.85
"""A large product over the best one: 0.8 to 0.9 (compute/accelerator/benchmarks beside the table of best products)."""
UNKNOWN_PRODUCT = 0.6
"""Whole steps of large models reach 0.44 to 0.52 (Narayanan et al. 2021), large matrix products alone 0.8."""


class Efficiencies(NamedTuple):
    """Reached over published rates: round numbers with a reason, not fitted to any measurement."""

    matrix: float | None = None
    """None: `TYPICAL_PRODUCT` of what the device's best product reaches, `UNKNOWN_PRODUCT` where that is not known."""
    memory: float = 0.75
    """A plain copy reaches 0.8 to 0.9; kernels with strided or reduced axes less."""
    link: float = 0.75
    """Ring collectives of NCCL reach 0.75 to 0.9 of NVLink's rate on large messages."""


class Rates(NamedTuple):
    """A device's published rates; one given by hand stands in for the table's."""

    name: str
    """What profiles of the device carry."""
    device: Device
    matrix_flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None

    def matrix(self, compute: str) -> float:
        """FLOP/s of matrix products in a number format; BadInput where neither table nor option has it."""
        found = self.matrix_flops_per_s or next((r for name, r in self.device.peaks.items() if name == compute), None)
        return self._there(found, f"no rate for {compute} matrix products", "--matrix-tflop-s")

    @property
    def memory(self) -> float:
        """Memory bandwidth in bytes/s; BadInput where neither table nor option has it."""
        found = self.memory_bytes_per_s or self.device.memory_bytes_per_s
        return self._there(found, "no memory bandwidth", "--memory-gbyte-s")

    @property
    def link(self) -> float:
        """Bandwidth of the link to the node's other devices one way, bytes/s; BadInput where nothing has it."""
        found = self.link_bytes_per_s or self.device.link_bytes_per_s
        return self._there(found, "no link bandwidth", "--link-gbyte-s")

    def _there(self, found: float | None, what: str, option: str) -> float:
        if found is None:
            raise BadInput(f"device {self.name}", f"the table has {what}", f"give {option}, or choose another format")
        return found


def rates_of(
    table: DeviceTable,
    name: str,
    matrix_flops_per_s: float | None = None,
    memory_bytes_per_s: float | None = None,
    link_bytes_per_s: float | None = None,
) -> Rates:
    """The rates of a device by its key or its driver's name."""
    found, device = device_named(table, name)
    return Rates(found, device, matrix_flops_per_s, memory_bytes_per_s, link_bytes_per_s)


def matrix_efficiency(rates: Rates, efficiencies: Efficiencies) -> float:
    """What large products reach of a device's published rate."""
    if efficiencies.matrix is not None:
        return efficiencies.matrix
    best = rates.device.best_product
    return UNKNOWN_PRODUCT if best is None else TYPICAL_PRODUCT * best


def machine_of(rates: Rates, compute: str, efficiencies: Efficiencies) -> Machine:
    """Return what a device reaches in a number format; raise BadInput where neither table nor option has a figure."""
    memory, peak = rates.memory * efficiencies.memory, rates.matrix(compute)
    flash = rates.device.flash_attention
    return Machine(
        peak * matrix_efficiency(rates, efficiencies),
        memory,
        link_of(rates, efficiencies),
        None if flash is None or efficiencies.matrix is not None else peak * flash,
    )


def link_of(rates: Rates, efficiencies: Efficiencies) -> Link:
    """What joins a device to the others of its node; BadInput where neither the table nor an option has a figure."""
    return Link(rates.link * efficiencies.link, STEP_S[rates.device.link])
