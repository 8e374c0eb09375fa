"""How the memory use of other runtimes differs from this project's, with sources; the cost model applies it.

Layers' figures and parameters' bytes are adjusted by these habits before they reach the solver, so that a search, a
prediction and the accuracy benchmark count in the same way.
"""

from enum import StrEnum
from math import ceil

from msgspec.structs import replace

from shardwright.estimate.part import Part
from shardwright.io import Value
from shardwright.types import Recompute, RecomputedPart


class Module(StrEnum):
    """Modules that Megatron's `--recompute-modules` recomputes in addition to a plan's recomputation."""

    MOE_ACT = "moe_act"
    """The results of experts' activation functions and gates."""
    LAYERNORM = "layernorm"
    """The outputs of norms, which are inputs of the matrix products that follow."""
    MLA_UP_PROJ = "mla_up_proj"
    """Queries, keys and values, which are computed from their latents."""
    CORE_ATTN = "core_attn"
    """Scores of attention, which flash kernels do not keep anyway."""
    MOE = "moe"
    """The router and its experts as a whole."""


MODULES = {
    RecomputedPart.NORMS: Module.LAYERNORM,
    RecomputedPart.EXPERT_ACTIVATIONS: Module.MOE_ACT,
    RecomputedPart.LATENTS: Module.MLA_UP_PROJ,
}
"""Megatron's modules by the part that they recompute; no module recomputes activation functions outside experts."""
LIGHT = tuple(MODULES.values())
"""Modules that `Recompute.LIGHT` recomputes."""


class Held(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A runtime's habits in memory; the defaults are this project's runtime (FSDP2, as `check` shows)."""

    loss_bytes: int = 2
    """Bytes per logit while the loss is computed, including what is kept of it; with 2, only a slice of the logits is
    in float32 at a time."""
    sharded_loss_bytes: int | None = None
    """`loss_bytes` if the logits are split over tensor-parallel ranks; None if it is the same number."""
    whole_gradients: bool = False
    """Whether the gradients of all layers of a rank exist unsharded for the whole step, until ZeRO scatters them."""
    compute_gradients: bool = False
    """Whether gradients in the compute format are kept in addition to the wider ones that data parallelism reduces."""
    fused_gate: bool = False
    """Whether the activation function and its gate are one kernel, which keeps its inputs but not the activation."""
    narrow_inputs: bool = False
    """Whether inputs of matrix products in FP8 or NVFP4 are kept in that format."""
    narrow_parameters: bool = False
    """Whether matrices of matrix products in FP8 or NVFP4 are parameters in that format, which ZeRO gathers. Under DDP,
    their copies, plain and transposed, exist for the whole step in addition to parameters in 16 bits."""
    every_second_product: bool = False
    """Whether selective recomputation keeps only attention's result and every second matrix product."""
    gathered_inputs: bool = False
    """Whether the inputs of a block's two parts, gathered under tensor parallelism, are kept until its backward
    pass."""
    recomputed: tuple[Module, ...] = ()
    """Modules that are recomputed in the backward pass in addition to the plan's recomputation."""
    activations: bool = False
    """Whether activation functions outside experts are recomputed in the backward pass."""
    ties: bool = False
    """Whether a stage that has both embedding and head holds their tied parameters only once, which are counted for the
    embedding. It is assumed that both are sharded in the same way, as in the systems that do so."""
    reserved: float = 1.0
    """Ratio of the memory that the allocator has reserved on the device to the peak memory of its tensors."""

    @property
    def text(self) -> str:
        """Return the assumptions in words."""
        words = [f"{self.loss_bytes} bytes a logit in the loss"]
        words += [text for name, text in _WORDS if getattr(self, name)]
        if self.recomputed:
            words.append(f"{', '.join(self.recomputed)} recomputed (--recompute-modules)")
        return ", ".join(words) + (f", {self.reserved:g} times its tensors reserved" if self.reserved != 1 else "")

    def under(self, recompute: Recompute) -> "Held":
        """Return these habits for a layer with a kind of recomputation, whose parts are added as modules."""
        parts = recompute.parts
        if not parts:
            return self
        modules = (module for part, module in MODULES.items() if part in parts)
        activations = RecomputedPart.ACTIVATIONS in parts
        return replace(self, recomputed=tuple(dict.fromkeys((*self.recomputed, *modules))), activations=activations)

    def frees_activation(self, part: Part) -> bool:
        """Return whether the results of a part's activation function are recomputed."""
        return Module.MOE_ACT in self.recomputed if part.is_expert else self.activations and part.name == "mlp"

    def part(self, part: Part, itemsize: int, narrow_bits: float | None, is_sharded: bool) -> Part:
        """Return a part of a layer with the tensors that this runtime saves.

        `itemsize`: bytes per element of the compute format. `narrow_bits`: bits per element if the part's matrix
        products are in FP8 or NVFP4, else None. `is_sharded`: whether tensor-parallel ranks shard the part.
        """
        kept = self._without_recomputed(replace(part, inside=part.inside - self.fused_gate * part.gate))
        of_logit = self.loss_bytes if self.sharded_loss_bytes is None or not is_sharded else self.sharded_loss_bytes
        if of_logit > itemsize:
            # The largest tensor is counted twice: with its gradient.
            size = (of_logit - itemsize) * part.logits // 2
            kept = replace(kept, widest_bytes=max(kept.widest_bytes, size))
        if not self.narrow_inputs or narrow_bits is None:
            return kept

        def spared(inputs: int) -> int:
            return itemsize * inputs - ceil(inputs * narrow_bits / 8)

        # Attention also keeps its result, which its backward pass needs in the compute format.
        return replace(
            kept,
            inside_bytes=kept.inside_bytes - spared(kept.inputs) + part.attended,
            whole_bytes=kept.whole_bytes - spared(kept.whole_inputs),
            outside_bytes=kept.outside_bytes - spared(kept.outside_inputs),
        )

    def _without_recomputed(self, part: Part) -> Part:
        """Return a part without the saved tensors that recomputed modules do not keep."""
        if Module.LAYERNORM in self.recomputed:
            whole = part.whole - part.whole_normed
            part = replace(part, outside=part.outside - part.normed, outside_inputs=0, whole=whole, whole_normed=0)
        if Module.MLA_UP_PROJ in self.recomputed and part.from_latents:
            part = replace(part, inside=part.inside - part.from_latents, whole=part.latents, whole_bytes=0)
        if Module.CORE_ATTN in self.recomputed:
            part = replace(part, scores=0, score_bytes=0)
        if self.frees_activation(part):
            part = replace(part, inside=part.products, inputs=0)
        if Module.MOE in self.recomputed and part.is_expert:
            part = replace(part, inside=0, inputs=0, whole=0, whole_inputs=0, whole_bytes=0)
        return part


_WORDS = (
    ("whole_gradients", "all gradients held all step long"),
    ("compute_gradients", "gradients in the compute format beside reduced ones"),
    ("fused_gate", "gates in one kernel"),
    ("narrow_inputs", "inputs of FP8 and NVFP4 products kept in these formats"),
    ("narrow_parameters", "parameters of FP8 and NVFP4 products gathered in these formats"),
    ("every_second_product", "every second product recomputed"),
    ("gathered_inputs", "gathered inputs of blocks kept"),
)

OURS = Held()
_RESERVED = 1.03
"""Ratio of peak reserved to peak allocated memory: the median, of 1.02 to 1.11, over the eight given model cards of
Megatron Bridge that have both (examples/model_verification_cards of NVIDIA-NeMo/Megatron-Bridge 067f987)."""
BY_TRANSFORMERS = Held(loss_bytes=12, ties=True, reserved=_RESERVED)
"""transformers/loss/loss_utils.py: `logits.float()`, of which F.cross_entropy keeps log-probabilities, in addition to
its gradient and the gradient's bf16 copy: 12.25 bytes per logit by torch's own count of a forward and backward pass.
transformers/modeling_utils.py: `tie_weights` makes embedding and head one parameter."""
BY_GALVATRON = Held(loss_bytes=10, reserved=_RESERVED)
"""vocab_parallel_cross_entropy of Galvatron's copy of Megatron: bf16 logits, their float32 copy, the softmax."""
BY_MEGATRON_CORE = Held(
    loss_bytes=6,
    whole_gradients=True,
    fused_gate=True,
    narrow_inputs=True,
    narrow_parameters=True,
    ties=True,
    reserved=_RESERVED,
)
"""megatron/core/distributed/param_and_grad_buffer.py: one contiguous buffer of gradients.
core/fusions/fused_cross_entropy.py, its native fused cross entropy (validate_args refuses Transformer Engine's): logits
or their gradient in bf16 together with the softmax in float32. core/fusions/fused_bias_swiglu.py keeps its input.
Transformer Engine's linear.py keeps inputs quantized, and weights with their transpose over all micro-batches.
--fp8-param-gather and --fp4-param-gather, which need the distributed optimizer, make these the parameters, and send
them except in MXFP8 (core/distributed/param_and_grad_buffer.py). core/models/gpt/gpt_model.py: on the embedding's stage
the output layer has no separate weight."""
BY_TORCHTITAN = Held(loss_bytes=12, sharded_loss_bytes=18, every_second_product=True, reserved=1.12)
"""torchtitan/components/loss.py: cross entropy of float32 logits, as in transformers. Under tensor parallelism
torch/distributed/tensor/parallel/loss.py, whose backward pass holds the logits in bf16, and in float32 their
log-probabilities, the labels' gradient, exponentials and their sum. Its policy of selective recomputation by operator
keeps every second matrix product (distributed/activation_checkpoint.py). Only Qwen3 among its models ties embedding and
head, so that no model is assumed to. `reserved` is fitted to the eight given runs that printed peak reserved memory."""
BY_NANOTRON = Held(
    loss_bytes=10, whole_gradients=True, compute_gradients=True, gathered_inputs=True, ties=True, reserved=1.07
)
"""models/llama.py: bf16 logits, their float32 copy, and the shifted copy that becomes the softmax
(parallel/tensor_parallel/functional.py). Buckets of DistributedDataParallel hold bf16 gradients in addition to the
float32 ones of optim/gradient_accumulator.py. Column-parallel products keep what they gathered.
parallel/tied_parameters.py: tied parameters. `reserved` is fitted to the given readings of rank 0 (helpers.py,
`log_throughput`)."""
BY_MEGATRON_DEEPSPEED = Held(loss_bytes=10, whole_gradients=True, compute_gradients=True, reserved=1.253)
"""Megatron-DeepSpeed of 2022. megatron/core/tensor_parallel/cross_entropy.py: bf16 logits, float32 ones and softmax.
runtime/bf16_optimizer.py: bf16 gradients in addition to float32 ones. `reserved` is fitted to the 30 given readings of
nvidia-smi from BLOOM's runs."""
