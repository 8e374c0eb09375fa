"""Named runtimes: the kernels, overlap and memory of the systems that run plans, with their sources.

Estimates use a runtime's kernels, its overlap, and what it holds in memory (`held`). Fitted to measurements are: the
host's time for each kernel (`OPERATOR_S`, to layer times), the kernels for each expert, the bytes that experts' biases
move, and nanotron's least time of a block in pipelines between nodes.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from shardwright.command import Options
from shardwright.estimate.held import (
    BY_GALVATRON,
    BY_MEGATRON_CORE,
    BY_MEGATRON_DEEPSPEED,
    BY_NANOTRON,
    BY_TORCHTITAN,
    BY_TRANSFORMERS,
    OURS,
    Held,
    Module,
)
from shardwright.estimate.overlap import Overlap, Slowdowns, overlap_slowdowns
from shardwright.io import Value
from shardwright.types import Attention, Microseconds, NonNegativeNumber
from shardwright.types.strategy import Dispatcher

OPERATOR_S = 42e-6
"""Seconds that the host takes for a kernel of eager PyTorch: Python, autograd, dispatch and driver.

Fitted with the kernels of `parts`: it minimizes the median (14 %) and the mean error over the 272 layer times of
benchmarks/analytic.py, including FASOP's, which the host limits.
"""


class AttentionKernel(StrEnum):
    """The attention kernel whose rate estimates use."""

    FLASH2 = "flash2"
    """FlashAttention-2, as in PyTorch and the flash-attn package."""
    FLASH3 = "flash3"
    """FlashAttention-3 or cuDNN's kernel if the device table has its rate, else FlashAttention-2."""
    EAGER = "eager"
    """Matrix products and a softmax that keep all scores, as in runs of 2022 and before."""


class Graphs(StrEnum):
    """The part of a step that CUDA graphs replay, so that the host does not start its kernels one by one."""

    NONE = "none"
    PARTIAL = "partial"
    """Everything except experts (Megatron's cuda_graph_scope of attn, moe_router and moe_preprocess)."""
    FULL = "full"
    """The whole iteration."""


class RuntimeName(StrEnum):
    """Names of the known runtimes."""

    SHARDWRIGHT = "shardwright"
    MEGATRON_CORE = "megatron-core"
    TORCHTITAN = "torchtitan"
    NANOTRON = "nanotron"
    LLM_FOUNDRY = "llm-foundry"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    GALVATRON = "galvatron"
    MEGATRON_DEEPSPEED = "megatron-deepspeed"


class Runtime(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The habits of a runtime that a plan does not determine."""

    name: RuntimeName
    fused: bool
    """Whether norms and activation functions are one kernel each, which keeps only its input."""
    few_kernels: bool = False
    """Whether a block starts as few kernels as a compiled one."""
    attention: AttentionKernel
    message_pieces: Annotated[int, Meta(ge=1)] = 1
    """Number of pieces of a tensor-parallel message inside a node; all except one overlap with matrix products. 1:
    nothing overlaps."""
    overlap: Overlap | None = None
    """Slowdowns of computation and of data parallelism that overlap; None if they do not overlap."""
    gathers_alone: bool = False
    """Whether ZeRO-2 gathers parameters at the end of the optimizer's step, which never overlaps with computation."""
    operator_s: NonNegativeNumber = OPERATOR_S
    """Seconds of the host for each kernel."""
    graphs: Graphs = Graphs.NONE
    """The part of a step that CUDA graphs replay."""
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    """How rows are sent to the ranks of their experts."""
    overlaps_experts: bool = False
    """Whether exchanges of experts overlap with the computation of another micro-batch, if the plan has one to
    compute."""
    fused_experts: bool = False
    """Whether experts are one fused operator, without separate passes that permute or quantize their rows."""
    fp8_attention: bool = False
    """Whether attention is in FP8, too, if matrix products are."""
    kernels_an_expert: tuple[int, int] = (0, 0)
    """Number of kernels that the runtime starts for each local expert in a forward pass: in 16 bits, and in fewer."""
    bias_bytes: int = 0
    """Bytes that a forward pass writes, and reads, for each element of a row if experts have biases."""
    whole_scores_from: int | None = None
    """Sequence length from which attention also computes masked scores; None if it never does."""
    copies_gathers: bool = False
    """Whether tensor-parallel messages along the sequence are copied on the device once more."""
    held: Held = OURS
    """How the runtime's memory differs from this project's runtime."""
    pipelined_block_ms: Mapping[int, float] = MappingProxyType({})
    """Least milliseconds of a block for a micro-batch, both passes together, in pipelines between nodes, by
    tensor-parallel size."""
    sources: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the assumptions about the runtime in words."""
        hidden = "are not hidden behind products"
        if self.message_pieces > 1:
            hidden = f"hide behind products but for one piece of {self.message_pieces}"
        beside = "one after the other with computation"
        if self.overlap is not None:
            inside, across = (f"{one.compute:g} and {one.collective:g}" for one in self.overlap)
            beside = f"beside computation, with slowdowns of {inside} inside a node, {across} across nodes"
        experts = f"experts' rows {_SENT[self.dispatcher]}{', overlapped' * self.overlaps_experts}"
        experts += f", experts in one operator{' and attention in FP8' * self.fp8_attention}" * self.fused_experts
        return (
            f"runtime {self.name}: {'fused kernels' if self.fused else 'single operators'}, attention "
            f"{self.attention}, tensor-parallel messages {hidden}, data parallelism {beside}, "
            f"{self.held.text}, {self.operator_s * 1e6:g} us of the host for each kernel, CUDA graphs: {self.graphs}, "
            f"{experts}"
        )

    def tuned(self, scaled_in: Literal["mxfp8", "nvfp4"] | None) -> "Runtime | None":
        """Return the runtime with the expert settings of its tuned recipes, or None if it has no such recipes.

        `scaled_in`: format of matrix products that are scaled in small blocks; None if they are not. (Megatron-Bridge
        067f987 and 0.6.2, perf_recipes.)
        """
        if self.name is not RuntimeName.MEGATRON_CORE:
            return None
        return replace(
            self,
            dispatcher=Dispatcher.PER_NODE,
            overlaps_experts=True,
            graphs=Graphs.FULL if scaled_in else Graphs.PARTIAL,
            fused_experts=scaled_in is not None,
            fp8_attention=scaled_in == "mxfp8",
        )


_SENT = {Dispatcher.ALL_TO_ALL: "all to all", Dispatcher.PER_NODE: "once to each node or NVLink domain"}


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
"""The runtime of this project; a plan's settings decide the rest."""

_NANOTRON_BLOCK_MS = MappingProxyType({2: 8.0, 4: 12.0, 8: 20.0, 16: 44.0, 32: 124.0})
"""Fitted to the playbook's 1B and 8B models: the least milliseconds of a stage's micro-batch for each block, in
pipelines between nodes, by tensor-parallel size.

A block sends 12 collectives: about 0.15 ms for each collective and each tensor-parallel rank inside a node, 0.3 ms on
four nodes, whatever their bytes, and nothing for one rank. So the host spends this time, on something that visits every
rank. torch's check of each collective (TORCH_DISTRIBUTED_DEBUG=DETAIL: a barrier and an all-gather through gloo) costs
time in this way; it is not recorded whether these runs, which were all restarted after a repair of pipelines, had it.
"""

_STOCK_MODELS = (
    "transformers/models/*/modeling_*.py: norms and activation functions of single operators, attention by "
    "scaled_dot_product_attention; loss/loss_utils.py: logits in float32",
)
"""Sources for systems that run the stock models of transformers."""

RUNTIMES: Mapping[RuntimeName, Runtime] = MappingProxyType(
    {
        runtime.name: runtime
        for runtime in (
            SHARDWRIGHT,
            Runtime(
                name=RuntimeName.MEGATRON_DEEPSPEED,
                fused=True,
                attention=AttentionKernel.EAGER,
                held=BY_MEGATRON_DEEPSPEED,
                sources=("megatron/fused_kernels of Megatron-DeepSpeed in 2022: a fused softmax, no flash attention",),
            ),
            Runtime(
                name=RuntimeName.MEGATRON_CORE,
                fused=True,
                few_kernels=True,
                attention=AttentionKernel.FLASH3,
                message_pieces=4,
                overlap=_BESIDE,
                # 4 kernels for casts and matrix products in FP8, 2 in 16 bits: fitted to given runs on B200. A bias is
                # multiplied, added and joined in float32 (`_apply_bias` of megatron/core/transformer/moe/experts.py):
                # 28 bytes forward and 40 backward by counting; written and read that is 168 for each element, as given
                # runs of gpt-oss show.
                kernels_an_expert=(2, 4),
                bias_bytes=28,
                held=BY_MEGATRON_CORE,
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
                copies_gathers=True,
                held=BY_TORCHTITAN,
                sources=(
                    "torchtitan/models/norms.py: RMSNorm of single operators; torchtitan/parallelisms: "
                    "aten._scaled_dot_product_flash_attention, which is FlashAttention-2",
                    "Liang et al. 2024, TorchTitan, section 2: FSDP2 gathers and reduces beside computation, "
                    "asynchronous tensor parallelism is an option and not taken",
                    _BESIDE_SOURCE,
                ),
            ),
            Runtime(
                name=RuntimeName.LLM_FOUNDRY,
                fused=True,
                attention=AttentionKernel.FLASH2,
                whole_scores_from=16_384,
                sources=(
                    "llmfoundry/models/mpt: attention and norms of flash-attn, and its fused cross entropy, whose "
                    "gradient takes the place of bf16 logits; that masked scores of long samples are computed is seen "
                    "in its published runs of 16,384 tokens and more",
                ),
            ),
            Runtime(
                name=RuntimeName.NANOTRON,
                fused=True,
                attention=AttentionKernel.FLASH2,
                overlap=_BESIDE,
                held=BY_NANOTRON,
                pipelined_block_ms=_NANOTRON_BLOCK_MS,
                gathers_alone=True,
                sources=(
                    "nanotron/models: flash_attn_varlen_func of flash-attn 2 and its fused RMSNorm",
                    "nanotron/optim/zero.py: the optimizer's step ends with the gather of all parameters",
                    "nanotron/parallel/tensor_parallel: a gather of tp_linear_async_communication goes beside the "
                    "products of the rank's own piece, which is not counted; reductions that hooks of "
                    "optim/gradient_accumulator.py begin in the last backward pass go beside it",
                    _BESIDE_SOURCE,
                ),
            ),
            Runtime(
                name=RuntimeName.ACCELERATE,
                fused=False,
                attention=AttentionKernel.FLASH2,
                overlap=_BESIDE,
                held=BY_TRANSFORMERS,
                sources=(
                    *_STOCK_MODELS,
                    "accelerate/utils/fsdp_utils.py: fully_shard of each block, FSDP2, which gathers and reduces "
                    "beside computation (Liang et al. 2024, TorchTitan, section 2)",
                    _BESIDE_SOURCE,
                ),
            ),
            Runtime(
                name=RuntimeName.DEEPSPEED,
                fused=False,
                attention=AttentionKernel.FLASH2,
                overlap=_BESIDE,
                gathers_alone=True,
                held=BY_TRANSFORMERS,
                sources=(
                    *_STOCK_MODELS,
                    "deepspeed/runtime/zero/config.py: overlap_comm reduces beside the backward pass, prefetch_bucket_"
                    "size gathers ahead; an export sets overlap_comm, which is off by default below stage 3",
                    "deepspeed/runtime/zero/stage_1_and_2.py: the optimizer's step ends with a gather of parameters",
                    _BESIDE_SOURCE,
                ),
            ),
            Runtime(
                name=RuntimeName.GALVATRON,
                fused=True,
                attention=AttentionKernel.FLASH2,
                overlap=_BESIDE,
                held=BY_GALVATRON,
                sources=(
                    "galvatron/models: flash_attn.ops.rms_norm; core/runtime/tensor_parallel/transformer.py: "
                    "flash_attn_varlen_func of flash-attn 2",
                    "galvatron/core/runtime/parallel.py: FullyShardedDataParallel, whose messages go beside "
                    "computation (Zhao et al. 2023, arXiv 2304.11277)",
                    _BESIDE_SOURCE,
                ),
            ),
        )
    }
)
"""Every known runtime by its name."""


class RuntimeOptions(Options, frozen=True, kw_only=True):
    """Options that choose the runtime to assume, and replace some of its figures."""

    runtime: RuntimeName | None = None
    """Runtime whose kernels and overlap are assumed: shardwright unless a system implies its runtime. Each of the next
    options replaces one of its habits."""
    attention: AttentionKernel | None = None
    """Attention kernel whose rate is used: flash2, flash3 (or cuDNN's), eager; by default the runtime's."""
    fused: bool = False
    """Norms and activation functions are one kernel each, whatever the runtime."""
    recompute_modules: tuple[Module, ...] = ()
    """Module that Megatron-LM recomputes in addition to a plan's recomputation: moe_act, layernorm, mla_up_proj,
    core_attn or moe (without counting that its rows are sent again); may be repeated."""
    launch_us: Microseconds | None = None
    """Time of the host for each kernel, in µs: by default the runtime's, which is 42 for eager PyTorch; 0 if CUDA
    graphs replay kernels."""
    dispatcher: Dispatcher | None = None
    """How rows are sent to the ranks of their experts: all-to-all, or per-node, once to each node or NVLink domain as
    in DeepEP and HybridEP; by default the runtime's."""
    overlap_experts: bool = False
    """Exchanges of experts overlap with the computation of another micro-batch, in plans with one pipeline stage or
    with interleaved ones, without full recomputation (Megatron's --overlap-moe-expert-parallel-comm)."""
    graphs: Graphs | None = None
    """What CUDA graphs replay: none, partial (all except experts) or full; by default the runtime's."""
    fused_experts: bool = False
    """Experts are one operator (Transformer Engine's operator fuser)."""
    overlap_slowdowns: str | None = None
    """Slowdowns of a computation and a collective of data parallelism that overlap, as factors of time, such as
    1.25:1.1; inside a node and across nodes, such as 1.25:1.1,1.05:1.2; by default the runtime's."""

    @property
    def assumed(self) -> Runtime:
        """Return this project's runtime, changed by the options; raise BadInput, naming the option at fault."""
        return self.assumed_of(SHARDWRIGHT)

    def assumed_of(self, implied: Runtime) -> Runtime:
        """Return the named runtime, or else the implied one, changed by the options.

        Raises BadInput, naming the option at fault.
        """
        known = implied if self.runtime is None else RUNTIMES[self.runtime]
        return replace(
            known,
            attention=self.attention or known.attention,
            fused=self.fused or known.fused,
            dispatcher=self.dispatcher or known.dispatcher,
            overlaps_experts=self.overlap_experts or known.overlaps_experts,
            graphs=self.graphs or known.graphs,
            fused_experts=self.fused_experts or known.fused_experts,
            operator_s=known.operator_s if self.launch_us is None else self.launch_us / 1e6,
            held=replace(known.held, recomputed=self.recompute_modules),
            overlap=known.overlap if self.overlap_slowdowns is None else overlap_slowdowns(self.overlap_slowdowns),
        )


def attention_of(runtime: Runtime, asked: Attention) -> tuple[AttentionKernel, Attention]:
    """Return the kernel whose rate applies, and the plan's attention, for a runtime and the requested attention."""
    if asked is Attention.AUTO:
        return runtime.attention, Attention.EAGER if runtime.attention is AttentionKernel.EAGER else asked
    if asked in (Attention.EAGER, Attention.SDPA_MATH):
        return AttentionKernel.EAGER, asked
    if asked is Attention.SDPA_CUDNN:
        return AttentionKernel.FLASH3, asked
    fused = asked is Attention.SDPA and runtime.attention is not AttentionKernel.EAGER
    return runtime.attention if fused else AttentionKernel.FLASH2, asked
