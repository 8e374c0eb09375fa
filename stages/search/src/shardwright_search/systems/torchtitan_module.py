"""torchtitan 0.3: a plan as a Python module, which `--module` and `--config` name.

It reads no TOML; fields have the names of 0.2.2's keys (`config/configs.py`, `trainer.py`). Attention is flex, or of
variable lengths, which is FlashAttention-2; context parallelism gathers keys, and needs flex attention.
"""

import json
from collections.abc import Mapping

from msgspec import UNSET

from shardwright.models.traits import Torchtitan
from shardwright.types import FP8, ContextParallel, Plan
from shardwright_search.space.uniform import UniformStrategy
from shardwright_search.systems.exporting import scaled_in

MODULE = "torchtitan_plan"
STARTS = f"-m torchtitan.train --module {MODULE} --config plan"
_TEXT = '''\
"""The plan {name} for torchtitan 0.3, where this file is: `{starts}`.

Text and tokenizer are those of torchtitan's tests, in a clone of its repository, until you name yours.
"""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.quantization import {converter}
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.{model} import model_registry
from torchtitan.trainer import Trainer

FLAVOR = {flavor}
CONVERTERS = [{converters}]
TRAINING = {training}
PARALLELISM = {parallelism}


def plan() -> Trainer.Config:
    """Return the configuration that the plan decides."""
    spec = model_registry(FLAVOR, attn_backend="{attention}", converters=CONVERTERS)
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(**TRAINING, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(**PARALLELISM),
        activation_checkpoint={recompute},
        compile=CompileConfig(enable={compiled}),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
    )
'''


def obstacle_of_module(
    plan: Plan, uniform: UniformStrategy, blocks: Torchtitan | None, sections: Mapping[str, Mapping[str, object]]
) -> str | None:
    """Return which part of a plan for 0.2.2 torchtitan 0.3 does not support; None: it supports it, too."""
    experts = uniform.layer.experts
    if blocks is None or not blocks.is_in_0_3:
        return f"{plan.model.family} model"
    if "flavor" not in sections["model"]:
        return f"registered sizes of {plan.model.name}"
    if sections["activation_checkpoint"]["mode"] == "selective":
        return "recomputation of every n-th layer"
    if experts is not UNSET and experts.etp_size > 1:
        return "features of experts that ranks share (etp_size)"
    if uniform.shares_context and uniform.layer.context is ContextParallel.RING:
        return "ring of keys and values"
    return None


def module_of(plan: Plan, uniform: UniformStrategy, sections: Mapping[str, Mapping[str, object]]) -> str:
    """Return the module of the sections of 0.2.2's configuration, for a plan without an obstacle."""
    parallelism = {
        key: value
        for key, value in sections["parallelism"].items()
        if key not in ("context_parallel_rotate_method", "expert_tensor_parallel_degree")
    }
    parts = parallelism.get("module_fqns_per_model_part")
    if isinstance(parts, list):
        parallelism["module_fqns_per_model_part"] = [
            ["lm_head" if name == "output" else name for name in part] for part in parts
        ]
    if uniform.shares_context:
        parallelism["context_parallel_load_balancer"] = "ptrr"
    mxfp8 = scaled_in(plan) == "mxfp8"
    converter = "MXFP8LinearConverter" if mxfp8 else "Float8LinearConverter"
    chosen = 'fqns=["layers"]' if mxfp8 else 'filter_fqns=["lm_head"]'
    return _TEXT.format(
        name=" ".join(plan.name.split()),
        starts=STARTS,
        model=sections["model"]["name"],
        flavor=json.dumps(sections["model"]["flavor"]),
        converter=converter,
        converters=f"{converter}.Config({chosen}, model_compile_enabled={plan.compile})"
        if plan.precision.compute == FP8
        else "",
        training=_literal(sections["training"]),
        parallelism=_literal(parallelism),
        attention="flex" if uniform.shares_context else "varlen",
        recompute="FullAC.Config()" if sections["activation_checkpoint"]["mode"] == "full" else "None",
        compiled=plan.compile,
    )


def _literal(values: Mapping[str, object]) -> str:
    return "".join(("{\n", *(f'    "{key}": {json.dumps(value)},\n' for key, value in values.items()), "}"))
