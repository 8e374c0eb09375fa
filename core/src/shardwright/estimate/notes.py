"""Notes of an estimated profile: its assumptions, its sources, and the error seen on published figures."""

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.estimate.hardware import NETWORK_STEP_S, START_S, NodeRates
from shardwright.estimate.layers import ATTENTION_BACKWARD, KERNEL_START_S
from shardwright.estimate.machines import TYPICAL_PRODUCT, Efficiencies, Rates, flash_share, matrix_efficiency
from shardwright.estimate.overlap import Overlap
from shardwright.estimate.runtimes import OPERATOR_S, AttentionKernel, Runtime
from shardwright.plan.process_groups import COMMUNICATOR_BYTES
from shardwright.types import MIB, NARROW_BITS

SEEN_ERROR = (
    "seen against 272 measured layer times of FASOP (A100, A10) and Sailor (V100, A100, GH200): "
    "median error 14 %, worst 74 %"
)
SEEN_LINK_ERROR = (
    "seen against 154 measured all_reduce times of vTrain (A100, V100, one node): median error 23 %, worst 80 %"
)
"""Errors seen with the default efficiencies; `benchmarks/analytic.py` computes both."""

_NARROW_NOTE = (
    "Products with the weights of blocks are in {}; attention, embedding and head, and what is kept and sent, are in "
    "bfloat16. Casts and the second copy of the weights are not counted."
)


class Process(NamedTuple):
    """Device memory of a process outside its tensors, in bytes, by use; None if it is not known."""

    context_bytes: int | None = None
    communicator_bytes: int | None = None
    """Buffers of each NCCL communicator."""
    slack_bytes: int | None = None
    """Memory that the allocator has reserved but does not use."""

    @property
    def bytes(self) -> int:
        """Return the bytes of a process under any plan; unknown sizes are replaced by assumptions."""
        context, slack, _ = self._sizes
        return context + slack

    @property
    def of_each_communicator(self) -> int:
        """Return the given or assumed bytes of each NCCL communicator."""
        return self._sizes[2]

    @property
    def text(self) -> str:
        """Return a sentence on the parts of this memory, and on which of them were given."""
        parts = (f"{size} {use}" if given is None else f"{given} {use} (given)" for use, given, size in self._parts)
        return f"{self.bytes} bytes a process: {', '.join(parts)}"

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(given if given is not None else assumed for _, given, assumed in self._parts)

    @property
    def _parts(self) -> tuple[tuple[str, int | None, int], ...]:
        """Return use, given size and assumed size of each part; the context includes PyTorch's and cuBLAS's kernels."""
        return (
            ("for CUDA's context", self.context_bytes, 512 * MIB),
            ("that the allocator keeps unused", self.slack_bytes, 0),
            (
                "more for each NCCL communicator of a plan, a quarter for an edge of its pipeline",
                self.communicator_bytes,
                COMMUNICATOR_BYTES,
            ),
        )


def model_notes(
    rates: Rates, efficiencies: Efficiencies, compute: str, runtime: Runtime, process: Process, compiled: bool
) -> str:
    """Return the notes of a model profile, one sentence per line; the first says that nothing was measured."""
    device, kernels = rates.device, "fused kernels" if runtime.fused else "single operators, as in transformers"
    matrix = matrix_efficiency(rates, efficiencies, compute)
    return "\n".join(
        (
            _head(SEEN_ERROR, efficiencies),
            f"Efficiencies are not fitted: large products reach {TYPICAL_PRODUCT:g} of the best one where the table "
            "has it, else 0.6 (whole steps of large models reach 0.44 to 0.52, Narayanan et al. 2021); copies reach "
            "0.8 to 0.9 of the memory bandwidth; NCCL reaches 0.75 to 0.9 of NVLink.",
            "Times are a roofline (Williams, Waterman, Patterson 2009): products by the longer of operations and "
            "bytes, then what is kept written and read once, then kernels and messages; a backward pass is two forward "
            "passes and what is replayed.",
            _rate_note("matrix", rates.matrix(compute), "FLOP/s", matrix)
            + f" {compute}; {_origin(rates.matrix_flops_per_s, device.peaks_source)}.",
            _rate_note("memory", rates.memory, "bytes/s", efficiencies.memory)
            + f"; {_origin(rates.memory_bytes_per_s, device.memory_bytes_per_s_source)}.",
            _link_note(rates, efficiencies),
            _attention_note(rates, efficiencies, runtime),
            *((_NARROW_NOTE.format(compute.upper()),) if compute in NARROW_BITS else ()),
            _launch_note(runtime, compiled),
            "Activations are those of Korthikanti et al. (2022), derived from the model's own shapes; workspace is the "
            "largest tensor of a part with its gradient, and what is replayed.",
            f"It is assumed that norms and activation functions are {kernels}"
            + (", and that torch.compile fuses those of blocks." if compiled else "."),
            "States: AdamW with two moments in the parameters' format; its step is bound by memory.",
            f"assumed: {process.text}; {runtime.text}.",
            *(f"{runtime.name}: {source}." for source in runtime.sources),
            "step_overhead_s and resident_bytes are absent.",
        )
    )


def hardware_notes(
    rates: Sequence[Rates], efficiencies: Efficiencies, between: NodeRates | None, overlap: Overlap | None
) -> str:
    """Return the notes of a hardware profile, one sentence per line; the first says that nothing was measured."""
    across = "one node, so nothing crosses nodes"
    if between is not None:
        across = f"between nodes {between.text} bytes/s a node (given) x {efficiencies.link:g}"
    return "\n".join(
        (
            _head(SEEN_LINK_ERROR, efficiencies),
            "Messages follow the alpha-beta model (Hockney 1994) of ring algorithms (Patarasuk, Yuan 2009): "
            f"{START_S * 1e6:g} us, a latency a step, and the bytes a rank sends over the link.",
            *(_link_note(one, efficiencies) for one in rates),
            f"Between nodes a step takes {(between.step_s if between else NETWORK_STEP_S) * 1e6:g} us; {across}.",
            "Overlap of messages with computation is absent." if overlap is None else f"assumed: {overlap.text}.",
        )
    )


def _head(seen: str, efficiencies: Efficiencies) -> str:
    """Return the first sentence, which predictions repeat."""
    other = "" if efficiencies == Efficiencies() else " (with the default efficiencies, which these are not)"
    return f"analytic, nothing was measured: {seen}{other}."


def _launch_note(runtime: Runtime, compiled: bool) -> str:
    how = "fitted to published layer times" if runtime.operator_s == OPERATOR_S else "given"
    kernels = (
        "compiled" if compiled else "eager, with as few kernels as compiled ones" if runtime.few_kernels else "eager"
    )
    if not runtime.operator_s:
        how = "given: CUDA graphs replay kernels"
    return (
        f"It is assumed that a kernel adds {KERNEL_START_S * 1e6:g} us and takes the host {runtime.operator_s * 1e6:g} "
        f"us ({how}), and that blocks are {kernels}."
    )


def _attention_note(rates: Rates, efficiencies: Efficiencies, runtime: Runtime) -> str:
    if runtime.attention is AttentionKernel.EAGER:
        return "attention is made of matrix products and keeps its scores."
    share, source = flash_share(rates.device, runtime.attention)
    if share is None or efficiencies.matrix is not None:
        return "It is assumed that flash attention is as fast as other products."
    return f"flash attention reaches {share:g} of the matrix rate, backward {ATTENTION_BACKWARD:g} times: {source}."


def _link_note(rates: Rates, efficiencies: Efficiencies) -> str:
    device = rates.device
    source = _origin(rates.link_bytes_per_s, device.link_bytes_per_s_source)
    reached = _rate_note(f"{device.link} link of {rates.name}", rates.link, "bytes/s", efficiencies.link)
    return f"{reached}, {device.link_step_s * 1e6:g} us a step; {source}."


def _rate_note(label: str, rate: float, unit: str, efficiency: float) -> str:
    return f"{label} {rate:.4g} {unit} x {efficiency:g} reached"


def _origin(given: float | None, source: str | None) -> str:
    return "given on the command line" if given is not None else str(source)


# Errors of estimates for published runs: stored only here, and equal to the figures in docs/accuracy.md.


SPARE_SHARE = 0.08
"""Share of a device's memory that is left free. Of the given published runs that are then predicted to fit, fewer than
a tenth failed, including crashes for other reasons."""
MEMORY_RANGE = (0.88, 1.23)
"""Range of the ratio of measured to predicted memory that contains over nine in ten of the 480 given published runs
with tensor parallelism inside a node (5th to 95th percentile: 0.89 to 1.21); nine in ten of these runs are
nanotron's."""
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
"""Setting of PyTorch's allocator (before 2.9 PYTORCH_CUDA_ALLOC_CONF) without which a run that would fit may not."""
SEEN = (
    "Such estimates were off on published runs: layer times by 14 % in the median and 74 % at worst, all-reduce times "
    "by 23 % and 80 % (docs/analytic.md); docs/accuracy.md has whole plans."
)
MEMORY_SEEN = (
    f"memory: nine of ten published runs held {MEMORY_RANGE[0]:g} to {MEMORY_RANGE[1]:g} times what was predicted "
    "(docs/accuracy.md)"
)


def memory_range(predicted_bytes: float) -> tuple[float, float]:
    """Return the range of bytes that contains nine of ten published runs with this predicted value."""
    low, high = MEMORY_RANGE
    return low * predicted_bytes, high * predicted_bytes
