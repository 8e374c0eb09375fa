"""What the runtimes of published runs hold beside what this project's own would: counted from their sources.

This project's runtime is what the cost model counts: bf16 logits kept, float32 ones a slice at a time, gradients summed
in float32, states as FSDP2 holds them. Bytes are of a logit, or of a parameter on one rank.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from accuracy_parts.public.runs import Run
from msgspec.structs import replace

from shardwright_estimate.runtimes import RUNTIMES as ASSUMED
from shardwright_estimate.runtimes import SHARDWRIGHT, AttentionKernel, RuntimeName
from shardwright_estimate.runtimes import Runtime as Assumed

__all__ = ["RUNTIMES", "Runtime", "runtime_of"]


class Runtime(NamedTuple):
    """What one runtime holds, in bytes."""

    loss: int
    """Of each logit while the loss is computed, with what is kept of it."""
    assumed: Assumed
    """What estimates take of it."""
    ddp_pass: int = 0
    """Beside the states, in passes, where data parallelism replicates them."""
    zero_pass: int = 0
    """The same where it shards them."""
    zero_end: int = 0
    """At the end of a step, when no activations are there, where it shards them."""
    gathered_inputs: int = 0
    """Inputs of each block, gathered under tensor parallelism, that stay until its backward pass where they fit."""
    pipelined_block_ms: Mapping[int, float] = MappingProxyType({})
    """The least time of a block and micro-batch, both passes, by tensor parallelism: in pipelines between nodes."""


_FUSED = replace(SHARDWRIGHT, fused=True)
_MEGATRON_2022 = replace(_FUSED, attention=AttentionKernel.EAGER)
"""Megatron-DeepSpeed of 2022 has a fused softmax and no flash attention (megatron/fused_kernels)."""

_NANOTRON_BLOCK_MS = MappingProxyType({2: 8.0, 4: 12.0, 8: 19.0, 16: 41.0, 32: 115.0})
"""Fitted to the playbook's 1B and 8B: the least of a stage's micro-batch over its blocks, of pipelines between nodes.

A block sends 12 collectives: about 0.15 ms for each of them and each rank of tensor parallelism inside a node, 0.3 ms
on four, whatever their bytes, and nothing for one rank. So the host spends it, on something that visits every rank.
torch's check of each collective (TORCH_DISTRIBUTED_DEBUG=DETAIL: a barrier and an all-gather through gloo) costs that
way; whether these runs, which were all started again after a repair of pipelines, had it is not recorded.
"""
RUNTIMES = {
    # Fused cross entropy of Transformer Engine (scripts/performance/helpers.py of NeMo), whose gradient takes the place
    # of bf16 logits; a contiguous buffer of gradients (megatron/core/distributed/param_and_grad_buffer.py).
    "megatron_core": Runtime(2, ASSUMED[RuntimeName.MEGATRON_CORE]),
    # models/llama.py: bf16 logits, their float32 copy, and the shifted copy that becomes the softmax
    # (parallel/tensor_parallel/functional.py). DistributedDataParallel's buckets hold bf16 gradients beside the float32
    # ones of optim/gradient_accumulator.py. all_gather_coalesced of distributed.py flattens all bf16 parameters once
    # for its output and torch's all_gather of a list once more.
    "nanotron": Runtime(
        10,
        ASSUMED[RuntimeName.NANOTRON],
        ddp_pass=2,
        zero_pass=2,
        zero_end=2 + 4,
        gathered_inputs=2,
        pipelined_block_ms=_NANOTRON_BLOCK_MS,
    ),
    # megatron/core/tensor_parallel/cross_entropy.py: bf16 logits, float32 and the softmax. Gradients in fp16 alone
    # (runtime/zero/stage_1_and_2.py), 2 in place of 4; or bf16 and float32 ones (runtime/bf16_optimizer.py).
    "megatron_deepspeed_fp16": Runtime(10, _MEGATRON_2022, ddp_pass=-2, zero_pass=-2),
    "megatron_deepspeed_bf16": Runtime(10, _MEGATRON_2022, ddp_pass=2, zero_pass=2),
    # torchtitan/train.py: logits in float32 for F.cross_entropy, whose backward pass has log-probabilities, their
    # gradient and that of the logits at once.
    "torchtitan": Runtime(12, ASSUMED[RuntimeName.TORCHTITAN]),
    # llmfoundry/models/mpt: flash-attn's fused cross entropy, whose gradient takes the place of bf16 logits.
    "llm_foundry": Runtime(2, _FUSED),
}


def runtime_of(run: Run) -> Runtime:
    """The runtime of a run, without what the run leaves uncounted."""
    return RUNTIMES[run.runtime]._replace(**{name: Runtime._field_defaults[name] for name in run.uncounted})
