"""Megatron-LM's options as its arguments.py has them, to read back what is exported."""

import argparse
import shlex
from pathlib import Path

from shardwright.types import Plan
from shardwright_search.systems.megatron import megatron_arguments


def parser() -> argparse.ArgumentParser:
    """The options of Megatron-LM's arguments.py (late 2025) that a plan can set, with its types and choices."""
    own = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in (
        "num-layers", "seq-length", "tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size",
        "global-batch-size", "recompute-num-layers", "num-layers-per-virtual-pipeline-stage",
        "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
        "num-distributed-optimizer-instances", "hidden-size", "ffn-hidden-size", "num-attention-heads", "kv-channels",
        "num-query-groups", "max-position-embeddings", "vocab-size", "make-vocab-size-divisible-by", "rotary-base",
        "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "expert-model-parallel-size",
        "context-parallel-size", "expert-tensor-parallel-size", "moe-shared-expert-intermediate-size",
        "moe-router-num-groups", "moe-router-group-topk",
        "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim",
    ):  # fmt: skip
        own.add_argument(f"--{name}", type=int)
    for name in (
        "norm-epsilon", "attention-dropout", "hidden-dropout", "rope-scaling-factor", "moe-aux-loss-coeff",
        "moe-router-topk-scaling-factor", "rotary-scaling-factor", "mscale", "mscale-all-dim",
    ):  # fmt: skip
        own.add_argument(f"--{name}", type=float)
    for name in (
        "sequence-parallel", "use-distributed-optimizer", "untie-embeddings-and-output-weights", "bf16", "fp16",
        "grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32", "use-megatron-fsdp",
        "no-gradient-accumulation-fusion", "group-query-attention", "swiglu", "disable-bias-linear", "add-qkv-bias",
        "qk-layernorm", "use-rope-scaling", "moe-grouped-gemm", "multi-latent-attention",
        "moe-router-pre-softmax", "moe-router-enable-expert-bias", "overlap-grad-reduce", "overlap-param-gather",
        "tp-comm-overlap", "cross-entropy-loss-fusion", "fp8-param-gather", "reuse-grad-buf-for-mxfp8-param-ag",
        "fp4-param-gather",
    ):  # fmt: skip
        own.add_argument(f"--{name}", action="store_true")
    own.add_argument("--moe-layer-freq", type=_layers)
    own.add_argument("--position-embedding-type", choices=["learned_absolute", "rope", "mrope", "relative", "none"])
    own.add_argument("--normalization", choices=["LayerNorm", "RMSNorm"])
    own.add_argument("--recompute-granularity", choices=["full", "selective"])
    modules = ["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act"]
    own.add_argument("--recompute-modules", nargs="*", choices=modules)
    own.add_argument("--moe-router-score-function", choices=["softmax", "sigmoid"], default="softmax")
    own.add_argument("--no-rope-fusion", action="store_false", dest="apply_rope_fusion", default=None)
    own.add_argument("--rope-type", choices=["rope", "yarn"])
    own.add_argument("--moe-router-load-balancing-type", choices=["aux_loss", "seq_aux_loss", "sinkhorn", "none"])
    own.add_argument("--moe-token-dispatcher-type", choices=["allgather", "alltoall", "flex"])
    own.add_argument("--cp-comm-type", nargs="+", default=["p2p"])
    own.add_argument("--recompute-method", choices=["uniform", "block"])
    own.add_argument("--data-parallel-sharding-strategy", default="no_shard")
    own.add_argument("--outer-dp-sharding-strategy", choices=["no_shard", "optim"])
    own.add_argument("--pipeline-model-parallel-layout")
    own.add_argument("--ckpt-format", default="torch_dist")
    own.add_argument("--tokenizer-type", choices=["HuggingFaceTokenizer", "NullTokenizer"])
    own.add_argument("--cross-entropy-fusion-impl", choices=["native", "te"])
    own.add_argument("--fp8-format", choices=["e4m3", "hybrid"], dest="fp8")
    own.add_argument("--fp8-recipe", choices=["tensorwise", "delayed", "mxfp8", "blockwise", "custom"])
    own.add_argument("--fp4-format", choices=["e2m1"], dest="fp4")
    own.add_argument("--fp4-recipe", choices=["nvfp4", "custom"])
    own.add_argument("--window-size")
    own.add_argument("--optimizer", choices=["adam", "sgd"])
    return own


def megatron(plan: Plan) -> argparse.Namespace:
    """What Megatron-LM would read of a plan's arguments."""
    return parser().parse_args(shlex.split(megatron_arguments(plan, Path("plan.json")).text))


def _layers(text: str) -> list[int]:
    """Its `moe_freq_type`: a sum of lists of 0 and 1, one number for each layer, in digits and signs alone."""
    assert set(text) <= set("0123456789*+[],() ")
    return eval(text)  # type: ignore[no-any-return]
