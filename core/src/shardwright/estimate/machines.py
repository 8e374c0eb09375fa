"""Achievable rates of a device: its published rates times efficiencies, for a runtime."""

from typing import Literal, NamedTuple

from msgspec.structs import replace

from shardwright.devices.table import Device, DeviceTable, device_named
from shardwright.estimate.hardware import Link, moved_bytes
from shardwright.estimate.layers import ATTENTION_BACKWARD, FLASH2_BACKWARD, ExpertHabits, Machine
from shardwright.estimate.runtimes import SHARDWRIGHT, AttentionKernel, Runtime
from shardwright.io import BadInput
from shardwright.types import EMBEDDING, FP8, HEAD, NARROW_BITS, NVFP4
from shardwright.types.hardware_profile import Collective

FP8_ATTENTION = 1.5
"""Ratio of attention's rate in FP8 to its rate in 16 bits: assumed."""
_MEASURED_ON = 8
"""Number of devices with which the table's `all_reduce_s` was measured."""
TYPICAL_PRODUCT = 0.85
"""Ratio of a typical large matrix product's rate to the best one: 0.8 to 0.9 (compute/accelerator/benchmarks of the
same source as the best products)."""
UNKNOWN_PRODUCT = 0.6
"""Assumed ratio of reached to peak rate: whole steps of large models reach 0.44 to 0.52 (Narayanan et al. 2021), large
matrix products 0.8."""


class Efficiencies(NamedTuple):
    """Ratios of reached to published rates: round numbers with a reason, not fitted to any measurement."""

    matrix: float | None = None
    """Ratio for matrix products; if None, `TYPICAL_PRODUCT` times the device's best ratio, or `UNKNOWN_PRODUCT` if that
    is unknown."""
    memory: float = 0.75
    """Ratio for memory bandwidth: a plain copy reaches 0.8 to 0.9, kernels with strided or reduced axes less."""
    link: float = 0.75
    """Ratio for links: NCCL's ring collectives reach 0.75 to 0.9 of NVLink's rate with large messages."""


class Rates(NamedTuple):
    """A device's published rates, some of which options may override."""

    name: str
    """Name that profiles of the device carry."""
    device: Device
    matrix_flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None

    def matrix(self, compute: str) -> float:
        """Return the FLOP/s of matrix products in a number format; BadInput if neither table nor option has it."""
        rate = self.matrix_flops_per_s or self.device.peak(compute)
        return self._given(rate, f"no rate for {compute} matrix products", "--matrix-tflop-s, or choose another format")

    @property
    def memory(self) -> float:
        """Return the memory bandwidth in bytes/s; raise BadInput if neither table nor option has it."""
        rate = self.memory_bytes_per_s or self.device.memory_bytes_per_s
        return self._given(rate, "no memory bandwidth", "--memory-gbyte-s")

    @property
    def link(self) -> float:
        """Return the bytes/s of the link to the node's other devices in one direction; BadInput if it is not given."""
        rate = self.link_bytes_per_s or self.device.link_bytes_per_s
        return self._given(rate, "no link bandwidth", "--link-gbyte-s")

    def _given(self, rate: float | None, problem: str, option: str) -> float:
        if rate is None:
            raise BadInput(f"device {self.name}", f"the table has {problem}", f"give {option}")
        return rate


def rates_of(
    table: DeviceTable,
    name: str,
    matrix_flops_per_s: float | None = None,
    memory_bytes_per_s: float | None = None,
    link_bytes_per_s: float | None = None,
) -> Rates:
    """Return the rates of a device, which is named by its key or its driver's name."""
    driver_name, device = device_named(table, name)
    return Rates(driver_name, device, matrix_flops_per_s, memory_bytes_per_s, link_bytes_per_s)


def matrix_efficiency(rates: Rates, efficiencies: Efficiencies, compute: str = "bfloat16") -> float:
    """Return the share of a device's published rate that large matrix products reach in a number format."""
    if efficiencies.matrix is not None:
        return efficiencies.matrix
    if (reached := rates.device.reached.get(_format(compute))) is not None:
        return reached
    best = (rates.device.best_fp8_product if compute == FP8 else None) or rates.device.best_product
    return UNKNOWN_PRODUCT if best is None else TYPICAL_PRODUCT * best


def _format(compute: str) -> Literal["bfloat16", "fp8", "nvfp4"]:
    """Return the format whose published whole-step rates apply to a number format."""
    return NVFP4 if compute == NVFP4 else FP8 if compute == FP8 else "bfloat16"


def flash_share(device: Device, kernel: AttentionKernel) -> tuple[float | None, str | None]:
    """Return the share of the peak that an attention kernel reaches on a device, and its source; None if unknown."""
    if kernel is AttentionKernel.FLASH3 and device.flash_attention_3 is not None:
        return device.flash_attention_3, device.flash_attention_3_source
    return device.flash_attention, device.flash_attention_source


def machine_of(
    rates: Rates, compute: str, efficiencies: Efficiencies, runtime: Runtime = SHARDWRIGHT, compiled: bool = False
) -> Machine:
    """Return the achievable rates of a device in a number format under a runtime.

    Raises BadInput if neither table nor option has a rate.
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
        FLASH2_BACKWARD if runtime.attention is AttentionKernel.FLASH2 else ATTENTION_BACKWARD,
        runtime.whole_scores_from,
        runtime.copies_gathers,
        ExpertHabits(
            runtime.graphs, runtime.kernels_an_expert[compute in NARROW_BITS], runtime.fused_experts, runtime.bias_bytes
        ),
        # torch.compile keeps the inputs and outputs of a gated feed-forward part's matrix products: in a Llama block 17
        # times the stream instead of 20, with or without low-rank matrices (functorch's min-cut partitioner).
        replace(runtime.held, fused_gate=runtime.held.fused_gate or compiled),
    )


class Machines(NamedTuple):
    """Achievable rates of a device in blocks, and in embedding and head, whose products are never in FP8 or NVFP4."""

    blocks: Machine
    ends: Machine

    def reached_in(self, type_name: str) -> Machine:
        """Return the achievable rates for a layer type."""
        return self.ends if type_name in (EMBEDDING, HEAD) else self.blocks


def machines_of(
    rates: Rates, compute: str, efficiencies: Efficiencies, runtime: Runtime = SHARDWRIGHT, compiled: bool = False
) -> Machines:
    """Return the achievable rates in a number format; raise BadInput if neither table nor option has a rate.

    FP8 and NVFP4 apply to matrix products with a block's weights: attention, embedding and head stay in bfloat16, at
    the table's rate.
    """
    if compute not in NARROW_BITS:
        machine = machine_of(rates, compute, efficiencies, runtime, compiled)
        return Machines(machine, machine)
    ends = machine_of(rates._replace(matrix_flops_per_s=None), "bfloat16", efficiencies, runtime, compiled)
    attention = ends.attention_flops_per_s or ends.flops_per_s
    blocks = ends._replace(
        flops_per_s=rates.matrix(compute) * matrix_efficiency(rates, efficiencies, compute),
        attention_flops_per_s=attention * (FP8_ATTENTION if runtime.fp8_attention and compute == FP8 else 1),
        experts=ends.experts._replace(kernels=runtime.kernels_an_expert[True]),
    )
    return Machines(blocks, ends)


def link_of(rates: Rates, efficiencies: Efficiencies) -> Link:
    """Return the link to other devices of the node; a given rate or efficiency applies to all message sizes.

    Raises BadInput if neither table nor option has a rate.
    """
    published = rates.device.all_reduce_s or ()
    if rates.link_bytes_per_s is not None or efficiencies.link != Efficiencies().link:
        published = ()
    moved = tuple((moved_bytes(Collective.ALL_REDUCE, _MEASURED_ON, size), time_s) for size, time_s in published)
    return Link(rates.link * efficiencies.link, rates.device.link_step_s, moved)
