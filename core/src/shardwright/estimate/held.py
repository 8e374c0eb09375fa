"""How the memory of other runtimes differs from this one's, each with its source; the cost model uses it.

Layers' figures and parameters' bytes are made with these habits on the way into the solver, so that a search, a
prediction and the accuracy benchmark count the same.
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
    """The product of an expert's activation and gate."""
    LAYERNORM = "layernorm"
    """The outputs of norms, which are inputs of the products that follow."""
    MLA_UP_PROJ = "mla_up_proj"
    """Queries, keys and values from their latents."""
    CORE_ATTN = "core_attn"
    """Scores of attention, which flash kernels do not keep anyway."""
    MOE = "moe"
    """A router and its experts as a whole."""


MODULES = {
    RecomputedPart.NORMS: Module.LAYERNORM,
    RecomputedPart.EXPERT_ACTIVATIONS: Module.MOE_ACT,
    RecomputedPart.LATENTS: Module.MLA_UP_PROJ,
}
"""Modules by the parts that they are; none is of activation functions that are not experts'."""
LIGHT = tuple(MODULES.values())
"""Modules that `Recompute.LIGHT` recomputes."""


class Held(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A runtime's habits in memory; the defaults are this project's, as FSDP2 and `check` show."""

    loss_bytes: int = 2
    """Bytes of each logit while the loss is computed, with what is kept of it; float32 ones a slice at a time if 2."""
    sharded_loss_bytes: int | None = None
    """The same if the logits are split over tensor-parallel ranks; None: the same number."""
    whole_gradients: bool = False
    """Whether the gradients of all layers of a rank are there all step long, before ZeRO scatters them."""
    compute_gradients: bool = False
    """Whether gradients in the compute format are kept in addition to the wider ones that data parallelism reduces."""
    fused_gate: bool = False
    """Whether a gate's activation and product are one kernel, which keeps what enters it and no activation."""
    narrow_inputs: bool = False
    """Whether inputs of products in FP8 or NVFP4 are kept in it."""
    narrow_parameters: bool = False
    """Whether matrices of products in FP8 or NVFP4 are parameters in it, which ZeRO gathers; under DDP their copies, in
    both orders, stay all step long in addition to parameters in 16 bits."""
    every_second_product: bool = False
    """Whether selective recomputation keeps attention and every second product only."""
    gathered_inputs: bool = False
    """Whether the inputs of a block's two parts, gathered under tensor parallelism, stay until its backward pass."""
    recomputed: tuple[Module, ...] = ()
    """Modules that are computed again in the backward pass, beside what the plan's recomputation does."""
    activations: bool = False
    """Whether activation functions other than experts' are computed again in the backward pass."""
    ties: bool = False
    """Whether a stage that has embedding and head holds what they tie once; what it takes of that is the embedding's.

    That both are shared out alike is taken for granted, as the systems that do so share them out."""
    reserved: float = 1.0
    """Memory that the allocator has taken of the device over what its tensors take at their peak."""

    @property
    def text(self) -> str:
        """Return the assumptions in words."""
        words = [f"{self.loss_bytes} bytes a logit in the loss"]
        words += [text for name, text in _WORDS if getattr(self, name)]
        if self.recomputed:
            words.append(f"{', '.join(self.recomputed)} recomputed (--recompute-modules)")
        return ", ".join(words) + (f", {self.reserved:g} times its tensors reserved" if self.reserved != 1 else "")

    def under(self, recompute: Recompute) -> "Held":
        """Return what is held of a layer with a kind of recomputation, which may be of modules."""
        parts = recompute.parts
        if not parts:
            return self
        modules = (module for part, module in MODULES.items() if part in parts)
        activations = RecomputedPart.ACTIVATIONS in parts
        return replace(self, recomputed=tuple(dict.fromkeys((*self.recomputed, *modules))), activations=activations)

    def frees_activation(self, part: Part) -> bool:
        """Return whether the activation function of a part is computed again."""
        return Module.MOE_ACT in self.recomputed if part.is_expert else self.activations and part.name == "mlp"

    def part(self, part: Part, itemsize: int, narrow_bits: float | None, is_sharded: bool) -> Part:
        """Return a part of a layer with the tensors that this runtime saves.

        `itemsize` is the compute format's. `narrow_bits`: of an element of its products in FP8 or NVFP4, if they are.
        `is_sharded`: tensor-parallel ranks shard it.
        """
        kept = self._without_recomputed(replace(part, inside=part.inside - self.fused_gate * part.gate))
        of_logit = self.loss_bytes if self.sharded_loss_bytes is None or not is_sharded else self.sharded_loss_bytes
        if of_logit > itemsize:
            # Of the largest tensor there are two, itself and its gradient.
            size = (of_logit - itemsize) * part.logits // 2
            kept = replace(kept, widest_bytes=max(kept.widest_bytes, size))
        if not self.narrow_inputs or narrow_bits is None:
            return kept

        def spared(inputs: int) -> int:
            return itemsize * inputs - ceil(inputs * narrow_bits / 8)

        # Attention keeps its result, too, which its backward pass needs as it was.
        return replace(
            kept,
            inside_bytes=kept.inside_bytes - spared(kept.inputs) + part.attended,
            whole_bytes=kept.whole_bytes - spared(kept.whole_inputs),
            outside_bytes=kept.outside_bytes - spared(kept.outside_inputs),
        )

    def _without_recomputed(self, part: Part) -> Part:
        """Return a part without the saved tensors of recomputed modules."""
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
"""Peak of reserved over allocated memory: the median of the eight given cards of Megatron Bridge that have both
(examples/model_verification_cards of NVIDIA-NeMo/Megatron-Bridge 067f987), 1.02 to 1.11."""
BY_TRANSFORMERS = Held(loss_bytes=12, ties=True, reserved=_RESERVED)
"""transformers/loss/loss_utils.py: `logits.float()`, of which F.cross_entropy keeps log-probabilities, in addition to
its gradient and the gradient's bf16 copy: 12.25 bytes a logit by torch's own count of a forward and backward pass.
transformers/modeling_utils.py: `tie_weights` makes one parameter of both."""
BY_GALVATRON = Held(loss_bytes=10, reserved=_RESERVED)
"""vocab_parallel_cross_entropy of its copy of Megatron: bf16 logits, their float32 copy, the softmax."""
BY_MEGATRON_CORE = Held(
    loss_bytes=6,
    whole_gradients=True,
    fused_gate=True,
    narrow_inputs=True,
    narrow_parameters=True,
    ties=True,
    reserved=_RESERVED,
)
"""megatron/core/distributed/param_and_grad_buffer.py: one contiguous buffer of gradients; its native fused cross
entropy (core/fusions/fused_cross_entropy.py), as its validate_args refuses Transformer Engine's: logits or their
gradient in bf16 beside the softmax in float32;
megatron/core/fusions/fused_bias_swiglu.py keeps its input; Transformer Engine's linear.py keeps inputs quantized, and
weights with their transpose over all micro-batches; --fp8-param-gather and --fp4-param-gather, which need the
distributed optimizer, make these the parameters, and send them but in MXFP8
(core/distributed/param_and_grad_buffer.py);
megatron/core/models/gpt/gpt_model.py: the output layer of the embedding's stage has no weight of its own."""
BY_TORCHTITAN = Held(loss_bytes=12, sharded_loss_bytes=18, every_second_product=True, reserved=1.12)
"""torchtitan/components/loss.py: cross entropy of float32 logits, as transformers'; under tensor parallelism
torch/distributed/tensor/parallel/loss.py, whose backward pass holds the logits in bf16, and in float32 their
log-probabilities, the gradient of the labels', exponentials and their sum. Its policy of selective recomputation by
operator keeps every second matrix product (distributed/activation_checkpoint.py). Of its models Qwen3 alone ties, so
none is taken to. `reserved` is fitted to the eight given runs whose peak of reserved memory it printed."""
BY_NANOTRON = Held(
    loss_bytes=10, whole_gradients=True, compute_gradients=True, gathered_inputs=True, ties=True, reserved=1.07
)
"""models/llama.py: bf16 logits, their float32 copy, and the shifted copy that becomes the softmax
(parallel/tensor_parallel/functional.py). Buckets of DistributedDataParallel hold bf16 gradients beside the float32 ones
of optim/gradient_accumulator.py. Column-parallel products keep what they gathered. parallel/tied_parameters.py.
`reserved` is fitted to the given readings of rank 0 (helpers.py, `log_throughput`)."""
BY_MEGATRON_DEEPSPEED = Held(loss_bytes=10, whole_gradients=True, compute_gradients=True, reserved=1.253)
"""Megatron-DeepSpeed of 2022. megatron/core/tensor_parallel/cross_entropy.py: bf16 logits, float32 ones and softmax.
runtime/bf16_optimizer.py: bf16 gradients beside float32 ones. `reserved` is fitted to the 30 given readings of
nvidia-smi of BLOOM's runs."""
