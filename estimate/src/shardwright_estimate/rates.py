"""The rates that a device is taken to reach: published rates times stated efficiencies."""

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
    """Ratio of matrix products; None: `TYPICAL_PRODUCT` of the device's best product, else `UNKNOWN_PRODUCT`."""
    memory: float = 0.75
    """A plain copy reaches 0.8 to 0.9; kernels with strided or reduced axes less."""
    link: float = 0.75
    """Ring collectives of NCCL reach 0.75 to 0.9 of NVLink's rate on large messages."""


class Rates(NamedTuple):
    """A device's published rates; one given by hand stands in for the table's."""

    name: str
    """Name that profiles of the device carry."""
    device: Device
    matrix_flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None

    def matrix(self, compute: str) -> float:
        """Return the FLOP/s of matrix products in a number format; BadInput where neither table nor option has it."""
        peak = next((rate for name, rate in self.device.peaks.items() if name == compute), None)
        return self._given(
            self.matrix_flops_per_s or peak, f"no rate for {compute} matrix products", "--matrix-tflop-s"
        )

    @property
    def memory(self) -> float:
        """Return the memory bandwidth in bytes/s; BadInput where neither table nor option has it."""
        rate = self.memory_bytes_per_s or self.device.memory_bytes_per_s
        return self._given(rate, "no memory bandwidth", "--memory-gbyte-s")

    @property
    def link(self) -> float:
        """Return the bandwidth of the link to the node's devices one way, bytes/s; BadInput where nothing has it."""
        rate = self.link_bytes_per_s or self.device.link_bytes_per_s
        return self._given(rate, "no link bandwidth", "--link-gbyte-s")

    def _given(self, rate: float | None, problem: str, option: str) -> float:
        if rate is None:
            raise BadInput(
                f"device {self.name}", f"the table has {problem}", f"give {option}, or choose another format"
            )
        return rate


def rates_of(
    table: DeviceTable,
    name: str,
    matrix_flops_per_s: float | None = None,
    memory_bytes_per_s: float | None = None,
    link_bytes_per_s: float | None = None,
) -> Rates:
    """Return the rates of a device by its key or its driver's name."""
    driver_name, device = device_named(table, name)
    return Rates(driver_name, device, matrix_flops_per_s, memory_bytes_per_s, link_bytes_per_s)


def matrix_efficiency(rates: Rates, efficiencies: Efficiencies) -> float:
    """Return the share of a device's published rate that large products reach."""
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
    """Return the link of a device to the others of its node; BadInput where neither table nor option has a figure."""
    return Link(rates.link * efficiencies.link, STEP_S[rates.device.link])
