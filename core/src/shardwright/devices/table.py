"""The table of devices: published figures of each device, every figure with its source."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from shardwright.io import BadInput, Value, did_you_mean, first_odd, read_bytes
from shardwright.types import GIB, NonNegativeNumber, PositiveBytes, PositiveSeconds, Ranks, Rate, whole

_BRANDS = {"NVIDIA", "AMD", "GEFORCE", "RTX", "TESLA", "INSTINCT", "HGX", "DGX", "GPU", "G", "GB", "GIB"}
"""Words, such as brands, that do not distinguish one device from another."""
_WORD = re.compile(r"RTX|PRO|[A-Z]*\d+(?:[A-Z]{1,2}(?![A-Z]))?|[A-Z]+")
_FORM = re.compile(r"(SXM|PCIE|OAM|NVL|HBM)\d*E?")
_MEMORY = re.compile(r"(\d{2,3})(?:GB?)?")
_OFFERED = 0.93
"""Lowest ratio of the memory that a device's driver reports to its nominal gigabytes: 0.93, of an L40S and a B200."""
_GIB = 2**30
_FORM_OF_LINK = {"nvlink": "SXM", "xgmi": "OAM", "pcie": "PCIE"}


class Known(NamedTuple):
    """Facts of a device with which a name is compared: words, form, memory and number."""

    labels: tuple[str, ...]
    """The device's key, and its names."""
    link: str
    memory_bytes: int | None


class _Spelling(NamedTuple):
    """A device's name, split into words, form and memory."""

    words: frozenset[str]
    forms: frozenset[str]
    memory_gb: int | None


def devices_meant(name: str, devices: Mapping[str, Known]) -> tuple[str, ...]:
    """Return the keys of the devices that a name may mean.

    A name means a device if all of the name's words, form (SXM, PCIe) and memory apply to the device, and the device's
    number is among the name's words. If the name has exactly the words of some devices, it means only these.
    """
    written = _spelling(name)
    if not written.words:
        return ()
    fitting = {key: device for key, device in devices.items() if _fits(written, device)}
    exact = tuple(key for key, device in fitting.items() if written[:2] in (each[:2] for each in _labels(device)))
    return exact or tuple(fitting)


def _spelling(name: str) -> _Spelling:
    words, forms, memory_gb = set[str](), set[str](), None
    for word in _WORD.findall(name.upper()):
        if (form := _FORM.fullmatch(word)) is not None:
            forms.add(word if form[1] == "NVL" else form[1])
        elif words and (memory := _MEMORY.fullmatch(word)) is not None:
            memory_gb = int(memory[1])
        elif word not in _BRANDS:
            words.add(word)
    return _Spelling(frozenset(words), frozenset(forms), memory_gb)


def _labels(device: Known) -> Iterable[_Spelling]:
    return map(_spelling, device.labels)


def _fits(written: _Spelling, device: Known) -> bool:
    words = frozenset[str]().union(*(label.words for label in _labels(device)))
    forms = frozenset({_FORM_OF_LINK[device.link]}).union(*(label.forms for label in _labels(device)))
    numbers = set(filter(_has_number, words))
    return numbers <= written.words <= words and written.forms <= forms and _has_memory(device, written.memory_gb)


def _has_memory(device: Known, memory_gb: int | None) -> bool:
    """Return whether a device may be sold as having this memory: its driver reports a little less, in GB or GiB."""
    if memory_gb is None or device.memory_bytes is None:
        return True
    return _OFFERED * memory_gb * 1e9 <= device.memory_bytes <= memory_gb * _GIB


def _has_number(word: str) -> bool:
    return any(map(str.isdecimal, word))


_MAX_BYTES = 2**20
_Text = Annotated[str, Meta(min_length=1)]
_Share = Annotated[float, Meta(gt=0, le=1)]
_LINK_STEP_S = {"nvlink": 3e-6, "xgmi": 3e-6, "pcie": 6e-6}
"""Latency of one step of a collective, in seconds, by kind of link; rounded from NCCL's own cost model
(src/graph/tuning.cc, protocol Simple)."""


class Device(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of device. A figure that nobody confirmed is absent, and every other figure has a source."""

    names: Annotated[tuple[_Text, ...], Meta(min_length=1)]
    """Names of the device as its driver gives them."""
    short_names: tuple[_Text, ...] = ()
    """Short names that mean this device, although there are several similar ones."""
    peaks: dict[Literal["float32", "tf32", "float16", "bfloat16", "fp8", "nvfp4"], Rate] = {}  # noqa: RUF012 (msgspec copies it)
    """Rate of dense matrix products by number format, in FLOP/s."""
    peaks_source: _Text | None = None
    best_product: _Share | None = None
    """Share of the peak that the best matrix product in 16 bits was measured to reach."""
    best_product_source: _Text | None = None
    best_fp8_product: _Share | None = None
    """Share of the peak that the best matrix product in FP8 was measured to reach."""
    best_fp8_product_source: _Text | None = None
    reached: dict[Literal["bfloat16", "fp8", "nvfp4"], _Share] = {}  # noqa: RUF012 (msgspec copies it)
    """Share of the peak that matrix products of whole training steps reach, if it differs from what `best_product`
    implies."""
    reached_source: _Text | None = None
    mxfp8: bool = False
    """Whether the device's matrix units scale blocks of 32 elements in FP8 (MXFP8), as Blackwell's do."""
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
    """Bandwidth of `link` in one direction."""
    domain_devices: Ranks | None = None
    """The largest number of devices that the link connects, also across nodes; None if it is the devices of one
    node."""
    domain_devices_source: _Text | None = None
    link_bytes_per_s_source: _Text | None = None
    all_reduce_s: Annotated[tuple[tuple[PositiveBytes, PositiveSeconds], ...], Meta(min_length=1)] | None = None
    """Pairs of a message's bytes, ascending, and the measured time of an all_reduce of it by the 8 devices of a
    node."""
    all_reduce_s_source: _Text | None = None
    pcie_bytes_per_s: Rate | None = None
    """Bandwidth of PCIe in one direction."""
    pcie_bytes_per_s_source: _Text | None = None
    host_bytes_per_s: Rate | None = None
    """Rate of copies to or from host memory in one direction while all devices of a node copy; None if it is PCIe's
    rate."""
    host_bytes_per_s_source: _Text | None = None
    host_updates_per_s: Rate | None = None
    """Parameters per second that a node's host updates with AdamW for each of its devices, while it does for all."""
    host_updates_per_s_source: _Text | None = None
    network_bytes_per_s: Rate | None = None
    """Bandwidth from a node to others for each of its devices, in one direction."""
    network_bytes_per_s_source: _Text | None = None
    skypilot: _Text | None = None
    """Name of the device in SkyPilot's catalogue."""
    usd_per_hour: NonNegativeNumber | None = None
    """Price per hour that one provider asks for one device; indicative."""
    usd_per_hour_source: _Text | None = None

    def __post_init__(self) -> None:
        for source in (name for name in self.__struct_fields__ if name.endswith("_source")):
            name = source.removesuffix("_source")
            if (getattr(self, name) in (None, {})) != (getattr(self, source) is None):
                raise ValueError(f"{name} and {source} need each other")

    def peak(self, products: str) -> float | None:
        """Return the published rate of dense matrix products in a number format, in FLOP/s; None if there is none."""
        return next((rate for name, rate in self.peaks.items() if name == products), None)

    @property
    def link_step_s(self) -> float:
        """Return the latency of one step of a collective between two devices of a node, in seconds."""
        return _LINK_STEP_S[self.link]


class DeviceTable(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every known device by its short key."""

    revised: Annotated[str, whole(r"\d{4}-\d{2}-\d{2}")]
    """Day on which the table was last changed, which is also the date of everything made from it."""
    devices: Annotated[dict[_Text, Device], Meta(min_length=1)]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for key, device in self.devices.items():
            for name in (key, *device.names, *device.short_names):
                if name in seen:
                    raise ValueError(f"two devices are called {name!r}")
                seen.add(name)

    def key_of(self, name: str) -> str:
        """Return the key of the device that a name means; the name itself if it means no device or several."""
        meant = self.meant_by(name)
        return meant[0] if len(meant) == 1 else name

    def meant_by(self, name: str) -> tuple[str, ...]:
        """Return the keys of the devices that a name may mean; a key or a driver's name means only itself."""
        if name in self.devices or any(name in device.names for device in self.devices.values()):
            return (name,)
        return devices_meant(
            name,
            {
                key: Known((key, *device.names, *device.short_names), device.link, device.memory_bytes)
                for key, device in self.devices.items()
            },
        )


def read_devices(path: Path | None = None) -> DeviceTable:
    """Read a table of devices, by default the one of this package; raise BadInput if it is invalid."""
    if path is None:
        with as_file(files("shardwright.devices") / "devices.toml") as shipped:
            return read_devices(shipped)
    content = read_bytes(path, _MAX_BYTES)
    try:
        raw = tomllib.loads(content.decode())
        if (odd := first_odd(raw)) is not None:
            raise BadInput(path, odd, "correct the file")
        return msgspec.convert(raw, DeviceTable)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(path, f"is not valid TOML ({error})", "correct the file") from None
    except msgspec.ValidationError as error:
        raise BadInput(
            path, f"is not a table of devices ({error})", "see devices.toml of shardwright.devices"
        ) from None


@cache
def shipped_devices() -> Mapping[str, Device]:
    """Return the devices of this package's table, by the names that drivers report."""
    return {name: device for device in read_devices().devices.values() for name in device.names}


def device_named(table: DeviceTable, name: str, option: str = "--device") -> tuple[str, Device]:
    """Return the driver's name and the figures of the device that a name means; profiles are stored under that name.

    Raises BadInput, naming `option`, if the table has no such device, or several.
    """
    meant = table.meant_by(name)
    if len(meant) > 1:
        raise BadInput(option, f"{name!r} may be {' or '.join(meant)}", "give one of them")
    for key in meant:
        if key in table.devices:
            return table.devices[key].names[0], table.devices[key]
        return key, next(device for device in table.devices.values() if key in device.names)
    names = [*table.devices, *(driver_name for device in table.devices.values() for driver_name in device.names)]
    remedy = did_you_mean(name, names, f"choose from {', '.join(table.devices)}")
    raise BadInput(option, f"{name!r} is not in the table of devices", remedy)


_FIGURES = (
    ("matrix products, TFLOP/s", "peaks", 1e12),
    ("best product, of the peak", "best_product", 1),
    ("best FP8 product, of the peak", "best_fp8_product", 1),
    ("products of whole steps, of the peak", "reached", 1),
    ("FlashAttention-2, of the peak", "flash_attention", 1),
    ("FlashAttention-3, of the peak", "flash_attention_3", 1),
    ("memory, GiB", "memory_bytes", GIB),
    ("memory, GB/s", "memory_bytes_per_s", 1e9),
    ("{link} link one way, GB/s", "link_bytes_per_s", 1e9),
    ("devices of one {link} domain", "domain_devices", 1),
    ("all_reduce among 8, us by KiB", "all_reduce_s", 1e-6),
    ("PCIe one way, GB/s", "pcie_bytes_per_s", 1e9),
    ("network, GB/s", "network_bytes_per_s", 1e9),
    ("USD an hour, indicative", "usd_per_hour", 1),
)
"""Figures with their labels for people, and the unit of each."""


def device_lines(table: DeviceTable) -> Iterator[str]:
    """Yield the lines of each device: its key and names, and each figure with its source."""
    for key, device in table.devices.items():
        yield f"{key} ({', '.join(device.names)})"
        for label, name, unit in _FIGURES:
            figure = _text(getattr(device, name), unit)
            text = f"{figure} [{getattr(device, f'{name}_source')}]" if figure else "absent"
            yield f"  {label.format(link=device.link)}: {text}"


def _text(figure: float | dict[str, float] | tuple[tuple[int, float], ...] | None, unit: float) -> str | None:
    match figure:
        case dict():
            return ", ".join(f"{name} {rate / unit:g}" for name, rate in figure.items())
        case tuple():
            return ", ".join(f"{size >> 10} {time_s / unit:g}" for size, time_s in figure)
        case _:
            return None if figure is None else f"{figure / unit:.4g}"
