"""Other systems' own classes and parsers, where their packages are installed: whether they take a file.

`docs/testing.md` says how to install them. What is absent is not asked; the lists beside the tests always are.
"""

import argparse
import ast
import json
import shlex
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from math import prod
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from megatron_parser import parser
from packaging.version import Version

_DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
}
_RENAMED = {
    "layernorm_epsilon": "norm_epsilon",
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
    "fp8_param": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
}
"""Fields of megatron-core that its `core_transformer_config_from_args` takes from options of other names."""


def asked_of_torchtitan(text: str) -> None:
    """Have torchtitan's `ConfigManager` read a file, and its `ParallelDims` check the degrees."""
    if find_spec("torchtitan") is None:
        return
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    with NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        read = ConfigManager().parse_args(["--job.config_file", file.name]).parallelism
    sizes = {name: getattr(read, key) for name, key in _DEGREES.items()}
    ParallelDims(
        **sizes,
        ep=read.expert_parallel_degree,
        etp=read.expert_tensor_parallel_degree,
        world_size=prod(sizes.values()),
    )


def asked_of_megatron(text: str) -> None:
    """Have megatron-core's configuration of a model check itself with what the arguments say."""
    if find_spec("megatron") is None:
        return
    from megatron.core import utils

    # Transformer Engine, whose build needs CUDA: experts in FP8 ask for its version alone.
    with patch.object(utils, "_te_version", Version("2.9.0")):
        megatron_config(parser().parse_args(shlex.split(text)))


def megatron_config(options: argparse.Namespace, **changes: object) -> Any:
    """Return megatron-core's configuration as its `core_transformer_config_from_args` makes it, but for changes."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from torch import bfloat16, float16, float32

    given = vars(options)
    kind = MLATransformerConfig if given["multi_latent_attention"] else TransformerConfig
    values = {field.name: given.get(_RENAMED.get(field.name, field.name)) for field in fields(kind)}
    values |= {
        "add_bias_linear": not given["disable_bias_linear"],
        "pipeline_dtype": bfloat16 if given["bf16"] else float16 if given["fp16"] else float32,
        "virtual_pipeline_model_parallel_size": _virtual_stages(given),
        "num_layers_in_first_pipeline_stage": given["decoder_first_pipeline_num_layers"],
        "num_layers_in_last_pipeline_stage": given["decoder_last_pipeline_num_layers"],
        "cp_comm_type": given["cp_comm_type"][0],
        **changes,
    }
    # Options that are left out have the configuration's defaults, but for this one, whose default is None.
    queries = {"q_lora_rank": given["q_lora_rank"]} if given["multi_latent_attention"] else {}
    return kind(**{name: value for name, value in values.items() if value is not None} | queries)


def _virtual_stages(given: Mapping[str, int | None]) -> int | None:
    per_stage = given["num_layers_per_virtual_pipeline_stage"]
    stages = given["pipeline_model_parallel_size"]
    return None if per_stage is None else given["num_layers"] // stages // per_stage


def asked_of_deepspeed(text: str) -> None:
    """Have DeepSpeed's configuration check itself on as many ranks as its batch is for."""
    if find_spec("deepspeed") is None:
        return
    from deepspeed.runtime import config

    given = json.loads(text)
    passes = given["gradient_accumulation_steps"] * given["train_micro_batch_size_per_gpu"]
    ranks = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: given["train_batch_size"] // passes)
    with patch.object(config, "dist", ranks):
        assert config.DeepSpeedConfig(given).zero_optimization_stage == given["zero_optimization"]["stage"]


def asked_of_accelerate(text: str) -> None:
    """Have accelerate's own classes take the arguments that a script gives them."""
    if find_spec("accelerate") is None:
        return
    names: dict[str, object] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), "accelerate.py", "exec"), names)
    untried = ("Accelerator", "get_peft_model")  # of a GPU, and of a model
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in untried:
            eval(compile(ast.Expression(node), "accelerate.py", "eval"), names)


def launch_asked_of_accelerate(text: str) -> None:
    """Have `accelerate launch` read its configuration file, in which it refuses keys that it does not know."""
    if find_spec("accelerate") is None:
        return
    from accelerate.commands.config.config_args import load_config_from_file

    with NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        read = load_config_from_file(file.name)
    assert read.num_processes == json.loads(text)["num_processes"]
