"""Devices that a written name may mean: `4090`, `RTX4090`, `H200-SXM` and `h100-sxm5-80gb` are all understood."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_BRANDS = {"NVIDIA", "AMD", "GEFORCE", "RTX", "TESLA", "INSTINCT", "HGX", "DGX", "GPU", "G", "GB", "GIB"}
"""Words, such as brands, that do not distinguish one device from another."""
_WORD = re.compile(r"RTX|PRO|[A-Z]*\d+(?:[A-Z]{1,2}(?![A-Z]))?|[A-Z]+")
_FORM = re.compile(r"(SXM|PCIE|OAM|NVL|HBM)\d*E?")
_MEMORY = re.compile(r"(\d{2,3})(?:GB?)?")
_OFFERED = 0.93
"""The least share of its nominal gigabytes that a device's driver offers: an L40S and a B200 have the least, 0.93."""
_GIB = 2**30
_FORM_OF_LINK = {"nvlink": "SXM", "xgmi": "OAM", "pcie": "PCIE"}


class Known(NamedTuple):
    """Facts of a device by which a name is matched: words, form, memory and number."""

    labels: tuple[str, ...]
    """Its key, and its names."""
    link: str
    memory_bytes: int | None


class _Spelling(NamedTuple):
    """A device's name, split into words, form and memory."""

    words: frozenset[str]
    forms: frozenset[str]
    memory_gb: int | None


def devices_meant(name: str, devices: Mapping[str, Known]) -> tuple[str, ...]:
    """Return the keys of the devices that a name may mean.

    A name means a device if each of its words, its form (SXM, PCIe) and its memory are the device's, and the device's
    number is among its words. A name with exactly the words of some devices means only these.
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
    """Return whether a device may be sold with a memory: its driver offers a little less, in GB or in GiB."""
    if memory_gb is None or device.memory_bytes is None:
        return True
    return _OFFERED * memory_gb * 1e9 <= device.memory_bytes <= memory_gb * _GIB


def _has_number(word: str) -> bool:
    return any(map(str.isdecimal, word))
