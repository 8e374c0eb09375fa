"""The table of devices, with the source of each figure, and the rates that devices are taken to reach."""

import tomllib
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from shardwright_estimate.layers import Machine
from shardwright_estimate.messages import STEP_S, Link, moved_bytes
from shardwright_estimate.runtimes import SHARDWRIGHT, AttentionKernel, Runtime
from shardwright_formats.io import BadInput, Value, did_you_mean, first_odd, read_bytes
from shardwright_formats.types import (
    EMBEDDING,
    FP8,
    GIB,
    HEAD,
    NonNegativeNumber,
    PositiveBytes,
    PositiveSeconds,
    Rate,
    whole,
)
from shardwright_formats.types.hardware_profile import Collective

_MAX_BYTES = 2**20
_Text = Annotated[str, Meta(min_length=1)]
_Share = Annotated[float, Meta(gt=0, le=1)]
_MEASURED_ON = 8
"""Devices of `all_reduce_s`."""
_SOURCED = (
    "best_product",
    "best_fp8_product",
    "flash_attention",
    "flash_attention_3",
    "memory_bytes",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "all_reduce_s",
    "pcie_bytes_per_s",
    "usd_per_hour",
)


class Device(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of device. A figure that nobody confirmed is absent, and each that is there has a source."""

    names: Annotated[tuple[_Text, ...], Meta(min_length=1)]
    """Names of the device as its driver gives them."""
    peaks: dict[Literal["float32", "tf32", "float16", "bfloat16", "fp8"], Rate] = {}  # noqa: RUF012 (msgspec copies it)
    """Dense matrix products by number format, in FLOP/s."""
    peaks_source: _Text | None = None
    best_product: _Share | None = None
    """Share of the peak that the best matrix product in 16 bit was measured to reach."""
    best_product_source: _Text | None = None
    best_fp8_product: _Share | None = None
    """Share of the peak that the best matrix product in FP8 was measured to reach."""
    best_fp8_product_source: _Text | None = None
    flash_attention: _Share | None = None
    """Share of the peak that FlashAttention-2 was measured to reach."""
    flash_attention_source: _Text | None = None
    flash_attention_3: _Share | None = None
    """Share of the peak that FlashAttention-3, or cuDNN's kernel, was measured to reach."""
    flash_attention_3_source: _Text | None = None
    memory_bytes: PositiveBytes | None = None
    memory_bytes_source: _Text | None = None
    memory_bytes_per_s: Rate | None = None
    memory_bytes_per_s_source: _Text | None = None
    link: Literal["nvlink", "xgmi", "pcie"] = "pcie"
    """Kind of link between the devices of a node."""
    link_bytes_per_s: Rate | None = None
    """Bandwidth of that link in one direction."""
    link_bytes_per_s_source: _Text | None = None
    all_reduce_s: Annotated[tuple[tuple[PositiveBytes, PositiveSeconds], ...], Meta(min_length=1)] | None = None
    """Bytes of messages, ascending, and the times that 8 devices of a node were measured to all_reduce them in."""
    all_reduce_s_source: _Text | None = None
    pcie_bytes_per_s: Rate | None = None
    """Bandwidth of PCIe in one direction."""
    pcie_bytes_per_s_source: _Text | None = None
    usd_per_hour: NonNegativeNumber | None = None
    """Price that one provider asks for one device; indicative."""
    usd_per_hour_source: _Text | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) is not None for name in _SOURCED} | {"peaks": bool(self.peaks)}
        for name, there in given.items():
            if there != (getattr(self, f"{name}_source") is not None):
                raise ValueError(f"{name} and {name}_source need one another")


class DeviceTable(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every known device by its short key."""

    revised: Annotated[str, whole(r"\d{4}-\d{2}-\d{2}")]
    """Day on which the table was last changed: the date of what is made from it."""
    devices: Annotated[dict[_Text, Device], Meta(min_length=1)]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for key, device in self.devices.items():
            for name in (key, *device.names):
                if name in seen:
                    raise ValueError(f"two devices are called {name!r}")
                seen.add(name)


def read_devices(path: Path | None = None) -> DeviceTable:
    """Read a table of devices, by default the one of this package; BadInput says what is wrong with it."""
    if path is None:
        with as_file(files("shardwright_estimate") / "devices.toml") as shipped:
            return read_devices(shipped)
    content = read_bytes(path, _MAX_BYTES)
    try:
        raw = tomllib.loads(content.decode())
        if (odd := first_odd(raw)) is not None:
            raise BadInput(path, odd, "correct the file")
        return msgspec.convert(raw, DeviceTable)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(path, f"is no TOML ({error})", "correct the file") from None
    except msgspec.ValidationError as error:
        raise BadInput(path, f"is no table of devices ({error})", "see devices.toml of shardwright-estimate") from None


def device_named(table: DeviceTable, name: str, option: str = "--device") -> tuple[str, Device]:
    """Return a device by its key or a driver's name, with the name that profiles of it carry: the driver's.

    Raises BadInput naming the option that has the name when the table has none of it.
    """
    if name in table.devices:
        return table.devices[name].names[0], table.devices[name]
    for device in table.devices.values():
        if name in device.names:
            return name, device
    names = [*table.devices, *(driver_name for device in table.devices.values() for driver_name in device.names)]
    meant = did_you_mean(name, names, f"choose from {', '.join(table.devices)}")
    raise BadInput(option, f"{name!r} is not in the table of devices", meant)


def device_lines(table: DeviceTable) -> Iterator[str]:
    """Yield the lines of each device: its key and names, and each figure with its source."""
    for key, device in table.devices.items():
        yield f"{key} ({', '.join(device.names)})"
        peaks = ", ".join(f"{name} {rate / 1e12:g}" for name, rate in device.peaks.items())
        figures = (
            ("matrix products, TFLOP/s", peaks or None, device.peaks_source),
            ("best product, of the peak", _scaled(device.best_product, 1), device.best_product_source),
            ("best FP8 product, of the peak", _scaled(device.best_fp8_product, 1), device.best_fp8_product_source),
            ("FlashAttention-2, of the peak", _scaled(device.flash_attention, 1), device.flash_attention_source),
            ("FlashAttention-3, of the peak", _scaled(device.flash_attention_3, 1), device.flash_attention_3_source),
            ("memory, GiB", _scaled(device.memory_bytes, GIB), device.memory_bytes_source),
            ("memory, GB/s", _scaled(device.memory_bytes_per_s, 1e9), device.memory_bytes_per_s_source),
            (
                f"{device.link} link one way, GB/s",
                _scaled(device.link_bytes_per_s, 1e9),
                device.link_bytes_per_s_source,
            ),
            ("all_reduce among 8, us by KiB", _all_reduce_text(device), device.all_reduce_s_source),
            ("PCIe one way, GB/s", _scaled(device.pcie_bytes_per_s, 1e9), device.pcie_bytes_per_s_source),
            ("USD an hour, indicative", _scaled(device.usd_per_hour, 1), device.usd_per_hour_source),
        )
        for label, figure, source in figures:
            yield f"  {label}: absent" if figure is None else f"  {label}: {figure} [{source}]"


def _all_reduce_text(device: Device) -> str | None:
    return ", ".join(f"{size >> 10} {time_s * 1e6:g}" for size, time_s in device.all_reduce_s or ()) or None


def _scaled(value: float | None, unit: float) -> str | None:
    return None if value is None else f"{value / unit:.4g}"


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
        rate = self.matrix_flops_per_s or peak
        return self._given(rate, f"no rate for {compute} matrix products", "--matrix-tflop-s")

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
            fix = f"give {option}, or choose another format"
            raise BadInput(f"device {self.name}", f"the table has {problem}", fix)
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


def matrix_efficiency(rates: Rates, efficiencies: Efficiencies, compute: str = "bfloat16") -> float:
    """Return the share of a device's published rate that large products reach; FP8 has that of 16 bits by default."""
    if efficiencies.matrix is not None:
        return efficiencies.matrix
    best = (rates.device.best_fp8_product if compute == FP8 else None) or rates.device.best_product
    return UNKNOWN_PRODUCT if best is None else TYPICAL_PRODUCT * best


def flash_share(device: Device, kernel: AttentionKernel) -> tuple[float | None, str | None]:
    """Return the share of the peak that a kernel reaches on a device, and who says so; None where nobody does."""
    if kernel is AttentionKernel.FLASH3 and device.flash_attention_3 is not None:
        return device.flash_attention_3, device.flash_attention_3_source
    return device.flash_attention, device.flash_attention_source


def machine_of(
    rates: Rates, compute: str, efficiencies: Efficiencies, runtime: Runtime = SHARDWRIGHT, compiled: bool = False
) -> Machine:
    """Return what a device reaches in a number format under a runtime.

    Raises BadInput where neither table nor option has a figure.
    """
    memory, peak = rates.memory * efficiencies.memory, rates.matrix(compute)
    flash, _ = flash_share(rates.device, runtime.attention)
    return Machine(
        peak * matrix_efficiency(rates, efficiencies),
        memory,
        link_of(rates, efficiencies),
        None if flash is None or efficiencies.matrix is not None else peak * flash,
        runtime.operator_s,
        compiled or runtime.few_kernels,
        runtime.message_pieces,
    )


class Machines(NamedTuple):
    """What a device reaches in blocks, and in embedding and head, of which no recipe computes products in FP8."""

    blocks: Machine
    ends: Machine

    def reached_in(self, type_name: str) -> Machine:
        """Return what the device reaches in a type of layer."""
        return self.ends if type_name in (EMBEDDING, HEAD) else self.blocks


def machines_of(
    rates: Rates, compute: str, efficiencies: Efficiencies, runtime: Runtime = SHARDWRIGHT, compiled: bool = False
) -> Machines:
    """Return what a device reaches in a number format; raise BadInput where neither table nor option has a figure.

    FP8 is of products with a block's weights: attention, embedding and head stay in bfloat16, at the table's rate.
    """
    if compute != FP8:
        machine = machine_of(rates, compute, efficiencies, runtime, compiled)
        return Machines(machine, machine)
    ends = machine_of(rates._replace(matrix_flops_per_s=None), "bfloat16", efficiencies, runtime, compiled)
    blocks = ends._replace(
        flops_per_s=rates.matrix(FP8) * matrix_efficiency(rates, efficiencies, FP8),
        attention_flops_per_s=ends.attention_flops_per_s or ends.flops_per_s,
    )
    return Machines(blocks, ends)


def link_of(rates: Rates, efficiencies: Efficiencies) -> Link:
    """Return the link of a device to the others of its node; a rate or an efficiency that is given holds for all sizes.

    Raises BadInput where neither table nor option has a figure.
    """
    published = rates.device.all_reduce_s or ()
    if rates.link_bytes_per_s is not None or efficiencies.link != Efficiencies().link:
        published = ()
    moved = tuple((moved_bytes(Collective.ALL_REDUCE, _MEASURED_ON, size), time_s) for size, time_s in published)
    return Link(rates.link * efficiencies.link, STEP_S[rates.device.link], moved)
