"""Named runtimes: what each does beside a plan, as estimates take it, and who says so.

No figure here is fitted to a measured run; the host's time for each kernel is, to layer times (`layers.OPERATOR_S`).
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from shardwright_estimate.hardware import Overlap, Slowdowns, overlap_slowdowns
from shardwright_estimate.layers import OPERATOR_S
from shardwright_formats.command import Options
from shardwright_formats.io import Value
from shardwright_formats.types import Attention, Microseconds, NonNegativeNumber


class AttentionKernel(StrEnum):
    """The attention kernel that estimates take the rate of."""

    FLASH2 = "flash2"
    """FlashAttention-2, as in PyTorch and the flash-attn package."""
    FLASH3 = "flash3"
    """FlashAttention-3 or cuDNN's kernel where the table of devices has its rate, else FlashAttention-2."""
    EAGER = "eager"
    """Matrix products and a softmax that keep all scores, as in runs of 2022 and before."""


class RuntimeName(StrEnum):
    """The runtimes that are known."""

    SHARDWRIGHT = "shardwright"
    MEGATRON_CORE = "megatron-core"
    TORCHTITAN = "torchtitan"
    NANOTRON = "nanotron"


class Runtime(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The habits of a runtime beside its plan."""

    name: RuntimeName
    fused: bool
    """Whether norms and activation functions are one kernel each, which keeps its input alone."""
    few_kernels: bool = False
    """Whether a block starts as few kernels as a compiled one."""
    attention: AttentionKernel
    message_pieces: Annotated[int, Meta(ge=1)] = 1
    """Pieces of a tensor-parallel message inside a node of which all but one hide behind products; 1 hides nothing."""
    overlap: Overlap | None = None
    """Slowdowns of data parallelism and computation beside one another; None: one after the other."""
    operator_s: NonNegativeNumber = OPERATOR_S
    """Time of the host for each kernel."""
    sources: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return what is assumed of the runtime in words."""
        hidden = "are not hidden behind products"
        if self.message_pieces > 1:
            hidden = f"hide behind products but for one piece of {self.message_pieces}"
        beside = "one after the other with computation"
        if self.overlap is not None:
            inside, across = (f"{one.compute:g} and {one.collective:g}" for one in self.overlap)
            beside = f"beside computation, with slowdowns of {inside} inside a node, {across} across nodes"
        return (
            f"runtime {self.name}: {'fused kernels' if self.fused else 'single operators'}, attention "
            f"{self.attention}, tensor-parallel messages {hidden}, data parallelism {beside}, "
            f"{self.operator_s * 1e6:g} us of the host for each kernel"
        )


_BESIDE = Overlap(Slowdowns(1.19, 1.0), Slowdowns(1.19, 1.0))
_BESIDE_SOURCE = (
    "Lee et al. 2025, arXiv 2507.03114: computation beside collectives is 18.9 % slower in the mean, 40 % at most; "
    "that collectives are not is assumed"
)

SHARDWRIGHT = Runtime(
    name=RuntimeName.SHARDWRIGHT,
    fused=False,
    attention=AttentionKernel.FLASH2,
    sources=(
        "models of transformers, attention by scaled_dot_product_attention; what overlaps is told by a measured "
        "hardware profile or --overlap-slowdowns",
    ),
)
"""The runtime of this project, of which a plan's own settings say the rest."""

RUNTIMES: Mapping[RuntimeName, Runtime] = MappingProxyType(
    {
        runtime.name: runtime
        for runtime in (
            SHARDWRIGHT,
            Runtime(
                name=RuntimeName.MEGATRON_CORE,
                fused=True,
                few_kernels=True,
                attention=AttentionKernel.FLASH3,
                message_pieces=4,
                overlap=_BESIDE,
                sources=(
                    "kernels and attention of Transformer Engine, whose fused attention is cuDNN's on Hopper "
                    "(transformer_engine/pytorch/attention, get_attention_backend)",
                    "NVIDIA NeMo, docs/source/features/optimizations/communication_overlap.rst: tensor-parallel "
                    "messages go in bulk or in pieces beside products, of which one reduce-scatter stays exposed; 4 "
                    "pieces in nemo/collections/llm/recipes/tp_overlap_configs/userbuffers.py",
                    "the same page: reduce-scatter and all-gather of data parallelism go beside computation",
                    _BESIDE_SOURCE,
                ),
            ),
            Runtime(
                name=RuntimeName.TORCHTITAN,
                fused=False,
                attention=AttentionKernel.FLASH2,
                overlap=_BESIDE,
                sources=(
                    "torchtitan/models/norms.py: RMSNorm of single operators; torchtitan/parallelisms: "
                    "aten._scaled_dot_product_flash_attention, which is FlashAttention-2",
                    "Liang et al. 2024, TorchTitan, section 2: FSDP2 gathers and reduces beside computation, "
                    "asynchronous tensor parallelism is an option and not taken",
                    _BESIDE_SOURCE,
                ),
            ),
            Runtime(
                name=RuntimeName.NANOTRON,
                fused=True,
                attention=AttentionKernel.FLASH2,
                sources=(
                    "nanotron/models: flash_attn_varlen_func of flash-attn 2 and its fused RMSNorm",
                    "nanotron/parallel/tensor_parallel: a gather of tp_linear_async_communication goes beside the "
                    "products of the rank's own piece, which is not counted; nor are the reductions that hooks of "
                    "optim/gradient_accumulator.py begin in the last backward pass",
                ),
            ),
        )
    }
)
"""Every known runtime by its name."""


class RuntimeOptions(Options, frozen=True, kw_only=True):
    """The runtime that estimates assume, and what is known better of it."""

    runtime: RuntimeName = RuntimeName.SHARDWRIGHT
    """Runtime whose kernels and overlap are assumed; the next four options stand in for one of its habits."""
    attention: AttentionKernel | None = None
    """Attention kernel whose rate is taken: flash2, flash3 (or cuDNN's), eager; by default the runtime's."""
    fused: bool = False
    """Norms and activation functions are one kernel each, whatever the runtime."""
    launch_us: Microseconds | None = None
    """Time of the host for each kernel, in µs: by default the runtime's, 42 as of eager PyTorch; 0 where CUDA graphs
    replay kernels."""
    overlap_slowdowns: str | None = None
    """Slowdowns of a computation and a collective of data parallelism that overlap, as factors of time, as 1.25:1.1;
    inside a node and across nodes as 1.25:1.1,1.05:1.2. By default as the runtime has it."""

    @property
    def assumed(self) -> Runtime:
        """Return the runtime as the options have it; raise BadInput naming the option at fault."""
        known = RUNTIMES[self.runtime]
        return replace(
            known,
            attention=self.attention or known.attention,
            fused=self.fused or known.fused,
            operator_s=known.operator_s if self.launch_us is None else self.launch_us / 1e6,
            overlap=known.overlap if self.overlap_slowdowns is None else overlap_slowdowns(self.overlap_slowdowns),
        )


def attention_of(runtime: Runtime, asked: Attention) -> tuple[AttentionKernel, Attention]:
    """Return the kernel that gives the rate, and the plan's attention, by those of the runtime and the settings."""
    if asked is Attention.AUTO:
        return runtime.attention, Attention.EAGER if runtime.attention is AttentionKernel.EAGER else asked
    if asked in (Attention.EAGER, Attention.SDPA_MATH):
        return AttentionKernel.EAGER, asked
    fused = asked is Attention.SDPA and runtime.attention is not AttentionKernel.EAGER
    return runtime.attention if fused else AttentionKernel.FLASH2, asked
