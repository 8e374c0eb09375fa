"""The constants that estimates assume for a device, compared with S2 and S0: one list for the report and `adopt`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_kit.plans import LLAMA, model_of
from gpu_kit.prepare import DEVICE, setting_of_h200
from harness import table

from shardwright.devices.table import Device, read_devices
from shardwright.estimate.layers import ATTENTION_BACKWARD, KERNEL_START_S
from shardwright.estimate.machines import TYPICAL_PRODUCT, UNKNOWN_PRODUCT, Efficiencies
from shardwright.estimate.parts import block_kernels
from shardwright.estimate.runtimes import OPERATOR_S
from shardwright.types import MIB

_CONTEXT_BYTES = 512 * MIB
_LARGE_FLOPS = 1e12
"""Number of operations from which a matrix product counts as large."""


class Assumption(NamedTuple):
    """A constant of estimates and its measured value; None if the rows for it do not exist."""

    name: str
    assumed: float
    measured: float | None
    unit: float = 1.0
    entry: str | None = None
    """The key of the device's entry in the table of devices."""


def entry_of(device: str) -> tuple[str, Device]:
    """Return the key and the entry of a device in the table; by default those of the device that the kit is for."""
    table = read_devices()
    return next(
        ((key, one) for key, one in table.devices.items() if device in one.names), (DEVICE, table.devices[DEVICE])
    )


def assumptions(
    device: str, rows: Mapping[str, Any], contexts: Mapping[str, Any] | None = None
) -> Sequence[Assumption]:
    """Return every constant of a device; `rows`: the rows of step S2; `contexts`: the rows of step S0."""
    _, entry = entry_of(device)
    peak, memory = entry.peaks["bfloat16"], entry.memory_bytes_per_s
    best = UNKNOWN_PRODUCT / TYPICAL_PRODUCT if entry.best_product is None else entry.best_product
    flash = entry.flash_attention or TYPICAL_PRODUCT * best
    products = [r for name, r in rows.items() if name.startswith("product: ")]
    large = sorted(r["random_flops_per_s"] / peak for r in products if r["flops"] >= _LARGE_FLOPS)

    def attention(kernel: str, way: str) -> float | None:
        row = rows.get(f"attention: {kernel}, 8192 of 128")
        return None if row is None else row[f"{way}_flops_per_s"] / peak

    def moved(name: str) -> float | None:
        return None if name not in rows else rows[name]["bytes_per_s"] / (memory or float("inf"))

    def found(row: str, key: str) -> float | None:
        return None if row not in rows else float(rows[row][key])

    def over(kernel: str) -> float | None:
        forward, backward = attention(kernel, "forward"), attention(kernel, "backward")
        return None if not forward or not backward else ATTENTION_BACKWARD * forward / backward

    block = "host: an eager Llama block"
    eager = (contexts or {}).get("context, modules eagerly")
    # From the passes of a small block on the host, which does not wait for the device there.
    per_kernel = [found(block, f"{way}_s_per_kernel") for way in ("forward", "backward")]
    host = None if None in per_kernel else sum(x for x in per_kernel if x is not None) / 2
    kernels = block_kernels(_block_type())
    return (
        Assumption("best product, of the peak", best, max(large, default=None), 1, "best_product"),
        Assumption("large products, median", TYPICAL_PRODUCT * best, _median(large)),
        Assumption("flash kernel forward, of the peak", flash, attention("flash", "forward"),
                   1, "flash_attention"),
        Assumption("cuDNN's kernel forward", entry.flash_attention_3 or flash, attention("cudnn", "forward"),
                   1, "flash_attention_3"),
        Assumption("flash kernel, backward over forward", ATTENTION_BACKWARD, over("flash")),
        Assumption("cuDNN's kernel, backward over forward", ATTENTION_BACKWARD, over("cudnn")),
        Assumption("memory, a copy, of the peak", Efficiencies().memory, moved("memory: copy")),
        Assumption("memory, an eager norm", Efficiencies().memory, moved("memory: RMSNorm of single operators")),
        Assumption("memory, fused AdamW", Efficiencies().memory, moved("fused AdamW")),
        Assumption("host for each kernel, us", OPERATOR_S, host, 1e-6),
        Assumption("device for a small kernel, us", KERNEL_START_S, found("device: a small kernel", "s_per_kernel"),
                   1e-6),
        Assumption("kernels of a block, forward", kernels, found(block, "forward_kernels")),
        Assumption("kernels of a block, backward", 2 * kernels, found(block, "backward_kernels")),
        Assumption("CUDA's context, MiB", _CONTEXT_BYTES, eager and eager["with_libraries_bytes"], MIB),
    )  # fmt: skip


def lines_of(found: Sequence[Assumption]) -> list[str]:
    """Return the table of all constants."""
    told = []
    for one in found:
        measured = "-" if one.measured is None else f"{one.measured / one.unit:.3g}"
        over = "-" if not one.measured else f"{one.assumed / one.measured:.2f}"
        told.append([one.name, f"{one.assumed / one.unit:.3g}", measured, over])
    return [*table("constant|assumed|measured|ratio", told)]


def _block_type() -> Any:  # noqa: ANN401
    model = model_of(setting_of_h200(Path(".kit")), LLAMA, 1)
    return model.types[model.layers[0]]


def _median(values: Sequence[float]) -> float | None:
    return values[len(values) // 2] if values else None
