"""Exports are whole commands: what hides messages, FP8, low-rank matrices, and the module of torchtitan 0.3."""

import ast
import json
from pathlib import Path

import pytest
import torch
from accepted_files import TAKEN
from megatron_parser import megatron
from msgspec import UNSET
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.models.adapter_config import adapter_of_config
from shardwright.models.description import model_of_config
from shardwright.models.low_rank import adapt, adapter_config
from shardwright.models.registry import read_presets
from shardwright.types import (
    ContextParallel,
    DataParallel,
    GradientReduction,
    Plan,
    Precision,
    Recompute,
    SequenceParallel,
)
from shardwright_search.options import System, UniformRequest
from shardwright_search.systems.entry import Setting
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan

PLAN = Path("plan.json")
EVERY = GradientReduction.EVERY_MICROBATCH
FP8 = Precision(compute="fp8")
NVFP4 = Precision(compute="nvfp4")


def named(make, name: str, device: str = "NVIDIA H100 80GB HBM3", adapter: dict | None = None, **changes) -> Plan:
    """A plan of a preset for 8 devices."""
    preset = read_presets()[name]
    model = model_of_config(preset.config, name, 2048, name)
    if adapter is not None:
        model = adapt(model, adapter_of_config({"peft_type": "LORA", **adapter}, "adapter"), "adapter")
    cluster = make.cluster(8)
    types = {key: replace(node, device=device) for key, node in cluster.node_types.items()}
    precision = changes.pop("precision", Precision(compute="bfloat16"))
    asked = {"global_batch_size": 32, "num_microbatches": 2, "data_parallel": DataParallel.ZERO2, **changes}
    plan = uniform_plan("mine", UniformRequest(**asked), model, replace(cluster, node_types=types))
    return replace(plan, precision=precision)


def test_megatron_hides_what_its_price_assumes_and_no_more(make):
    """Its user buffers need split sequences, and have none for latents; a lone rank reduces nothing."""
    split = {"tp_size": 2, "sequence_parallel": SequenceParallel.MEGATRON}
    given = megatron(named(make, "llama-3-8b", **split))
    assert given.overlap_grad_reduce and given.overlap_param_gather and given.tp_comm_overlap
    assert given.cross_entropy_loss_fusion and given.cross_entropy_fusion_impl == "native"
    assert given.tokenizer_type == "NullTokenizer"
    assert not megatron(named(make, "llama-3-8b", tp_size=2)).tp_comm_overlap
    assert not megatron(named(make, "deepseek-v2-lite", **split)).tp_comm_overlap
    replicas = megatron(named(make, "llama-3-8b", data_parallel=DataParallel.DDP))
    assert replicas.overlap_grad_reduce and not replicas.overlap_param_gather
    assert not megatron(named(make, "llama-3-8b", **{**split, "tp_size": 8})).overlap_grad_reduce


@pytest.mark.parametrize(
    ("device", "recipe", "kind", "mixed", "converter"),
    [
        ("NVIDIA H100 80GB HBM3", "tensorwise", "hybrid", "bf16_with_fp8_current_scaling_mixed", "float8"),
        ("NVIDIA B200", "mxfp8", "e4m3", "bf16_with_mxfp8_mixed", "mx"),
        ("NVIDIA GB300", "mxfp8", "e4m3", "bf16_with_mxfp8_mixed", "mx"),
    ],
)
def test_fp8_is_exported_with_the_scaling_that_the_device_has(make, device, recipe, kind, mixed, converter):
    plan = named(make, "llama-3-8b", device, precision=FP8)
    given = megatron(plan)
    assert (given.bf16, given.fp8_recipe, given.fp8) == (True, recipe, kind)
    assert given.fp8_param_gather and given.reuse_grad_buf_for_mxfp8_param_ag == (recipe == "mxfp8")
    assert f"cfg.mixed_precision = {mixed!r}" in SYSTEMS[System.MEGATRON_BRIDGE].export(plan, PLAN).text
    titan = SYSTEMS[System.TORCHTITAN].export(replace(plan, gradient_reduction=EVERY), PLAN)
    assert f'converters = ["quantize.linear.{converter}"]' in titan.text
    ((_, module),) = titan.beside
    assert ("MXFP8LinearConverter.Config(" in module) == (converter == "mx")
    for system in (System.MEGATRON, System.MEGATRON_BRIDGE, System.TORCHTITAN):
        entry, whole = SYSTEMS[system], replace(plan, gradient_reduction=EVERY) if system == "torchtitan" else plan
        text = entry.export(whole, PLAN).text
        TAKEN[system](text)
        read = entry.read(text, entry.file_name, Setting(plan.model, plan.cluster, 32, FP8)).plan
        assert read.layers == plan.layers and read.precision == FP8
    for system in (System.DEEPSPEED, System.ACCELERATE, System.GALVATRON):
        with pytest.raises(BadInput, match="cannot express precision float32/fp8/float32"):
            SYSTEMS[system].export(plan, PLAN)


def test_nvfp4_is_exported_to_megatron_and_nowhere_else(make):
    plan = named(make, "llama-3-8b", "NVIDIA GB300", precision=NVFP4)
    given = megatron(plan)
    assert (given.bf16, given.fp4_recipe, given.fp4, given.fp8) == (True, "nvfp4", "e2m1", None)
    assert given.fp4_param_gather and not given.fp8_param_gather and given.cross_entropy_loss_fusion
    assert "cfg.mixed_precision = 'bf16_with_nvfp4_mixed'" in SYSTEMS[System.MEGATRON_BRIDGE].export(plan, PLAN).text
    for system in (System.MEGATRON, System.MEGATRON_BRIDGE):
        entry, text = SYSTEMS[system], SYSTEMS[system].export(plan, PLAN).text
        TAKEN[system](text)
        read = entry.read(text, entry.file_name, Setting(plan.model, plan.cluster, 32, NVFP4)).plan
        assert read.layers == plan.layers and read.precision == NVFP4
    replicas = megatron(named(make, "llama-3-8b", "NVIDIA B200", data_parallel=DataParallel.DDP, precision=NVFP4))
    assert replicas.fp4 and not replicas.fp4_param_gather
    sharded = named(make, "llama-3-8b", "NVIDIA B200", data_parallel=DataParallel.ZERO3, precision=NVFP4)
    with pytest.raises(BadInput, match=r"cannot express layers\[0\]: zero3 in nvfp4: choose zero2"):
        SYSTEMS[System.MEGATRON].export(replace(sharded, gradient_reduction=EVERY), PLAN)
    for system in (System.DEEPSPEED, System.ACCELERATE, System.GALVATRON, System.TORCHTITAN):
        with pytest.raises(BadInput, match="cannot express precision float32/nvfp4/float32"):
            SYSTEMS[system].export(replace(plan, gradient_reduction=EVERY), PLAN)


@pytest.mark.parametrize(
    ("model", "modules"),
    [
        ("llama-3-8b", ["layernorm"]),
        ("qwen3-30b-a3b", ["layernorm", "moe_act"]),
        ("deepseek-v3", ["layernorm", "moe_act", "mla_up_proj"]),
    ],
)
def test_light_recomputation_is_of_the_modules_that_a_model_has_and_is_read_back(make, model, modules):
    plan = named(make, model, recompute=Recompute.LIGHT)
    given = megatron(plan)
    assert (given.recompute_granularity, given.recompute_modules) == ("selective", modules)
    for system in (System.MEGATRON, System.MEGATRON_BRIDGE):
        text = SYSTEMS[system].export(plan, PLAN).text
        TAKEN[system](text)
        setting = Setting(plan.model, plan.cluster, plan.global_batch_size, plan.precision)
        read = SYSTEMS[system].read(text, SYSTEMS[system].file_name, setting).plan
        assert {layer.recompute for layer in read.layers} == {Recompute.LIGHT}
    mixed = replace(plan, layers=(replace(plan.layers[0], recompute=Recompute.NONE), *plan.layers[1:]))
    with pytest.raises(BadInput, match="cannot express"):
        SYSTEMS[System.MEGATRON].export(mixed, PLAN)
    for system in (System.TORCHTITAN, System.ACCELERATE, System.DEEPSPEED, System.GALVATRON):
        with pytest.raises(BadInput, match="cannot express"):
            SYSTEMS[system].export(replace(plan, gradient_reduction=EVERY), PLAN)


def test_parameters_in_fp8_are_asked_for_as_far_as_the_price_assumes_them(make):
    """They want the distributed optimizer, which one rank may have, too; Megatron-FSDP has buffers of its own."""
    replicas = megatron(named(make, "llama-3-8b", "NVIDIA B200", data_parallel=DataParallel.DDP, precision=FP8))
    assert replicas.fp8 and not (replicas.fp8_param_gather or replicas.use_distributed_optimizer)
    split = {"tp_size": 8, "sequence_parallel": SequenceParallel.MEGATRON}
    alone = megatron(named(make, "llama-3-8b", precision=FP8, **split))
    assert alone.fp8_param_gather and alone.use_distributed_optimizer and not alone.overlap_param_gather
    plan = named(make, "llama-3-8b", "NVIDIA B200", data_parallel=DataParallel.ZERO3, precision=FP8)
    fsdp = megatron(replace(plan, gradient_reduction=EVERY))
    assert fsdp.use_megatron_fsdp and fsdp.fp8_param_gather and not fsdp.reuse_grad_buf_for_mxfp8_param_ag
    assert not megatron(named(make, "llama-3-8b")).fp8_param_gather


@pytest.mark.parametrize(
    ("adapter", "named_modules"),
    [
        ({"r": 4, "target_modules": ["q_proj", "v_proj"]}, ["q_proj", "v_proj"]),
        ({"r": 4, "target_modules": ["up_proj"], "layers_to_transform": [0, 3]}, None),
        ({"r": 4, "target_modules": "all-linear", "rank_pattern": {"q_proj": 8}}, None),
    ],
)
@pytest.mark.parametrize("system", [System.ACCELERATE, System.DEEPSPEED])
def test_low_rank_matrices_are_those_that_peft_makes(make, system, adapter, named_modules):
    """The exported lines make peft's own configuration, of which the described model has the matrices."""
    peft = pytest.importorskip("peft")
    plan = named(make, "llama-3.2-1b", adapter=adapter, gradient_reduction=EVERY)
    exported = SYSTEMS[system].export(plan, PLAN)
    text = exported.text if system is System.ACCELERATE else dict(exported.beside)["deepspeed_adapter.py"]
    assert "from peft import LoraConfig, get_peft_model\n" in text
    assert any("peft" in note for note in exported.notes)
    call = next(
        node for node in ast.walk(ast.parse(text)) if getattr(getattr(node, "func", None), "id", "") == "LoraConfig"
    )
    made = eval(compile(ast.Expression(call), "adapter", "eval"), {"LoraConfig": peft.LoraConfig})
    assert (made.r, made.use_rslora) == (4, False)
    if named_modules is not None:
        assert sorted(made.target_modules) == named_modules
    described = adapter_config(plan.model)
    assert made.rank_pattern == described["rank_pattern"]
    if system is System.ACCELERATE:
        entry = SYSTEMS[system]
        setting = Setting(plan.model, plan.cluster, 32, plan.precision)
        assert entry.read(text, entry.file_name, setting).plan.layers == plan.layers
        with pytest.raises(BadInput, match="trains low-rank matrices: ask with --lora"):
            entry.read(text, entry.file_name, setting._replace(model=named(make, "llama-3.2-1b").model))


@pytest.mark.parametrize("base", [UNSET, "4bit", "8bit"])
@pytest.mark.parametrize("system", [System.ACCELERATE, System.DEEPSPEED])
def test_low_rank_matrices_beside_a_base_in_16_bits_or_fewer_are_exported(make, system, base):
    """The classes of transformers and peft take the lines; FSDP2 shards no 8 bits, nor does ZeRO-3."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    precision = Precision(parameters="bfloat16", compute="bfloat16", reduce="bfloat16", base=base)
    adapter = {"r": 4, "target_modules": ["q_proj"]}
    changes = {"adapter": adapter, "precision": precision, "gradient_reduction": EVERY}
    plan = named(make, "llama-3.2-1b", **changes)
    refused = (
        plan
        if system is System.ACCELERATE
        else named(make, "llama-3.2-1b", data_parallel=DataParallel.ZERO3, **changes)
    )
    if base == "8bit":
        with pytest.raises(BadInput, match="cannot express a base of 8 bits"):
            SYSTEMS[system].export(refused, PLAN)
        if system is System.ACCELERATE:
            return
    exported = SYSTEMS[system].export(plan, PLAN)
    text = exported.text if system is System.ACCELERATE else dict(exported.beside)["deepspeed_adapter.py"]
    TAKEN[system](exported.text)
    module: dict = {}
    exec(text.replace("ACCELERATOR = Accelerator(", "PREPARED = dict("), module)
    assert module["LOADED"]["dtype"] is torch.bfloat16 and any("**LOADED" in note for note in exported.notes)
    assert "get_peft_model(model, ADAPTER, autocast_adapter_dtype=False)" in text
    assert isinstance(module["ADAPTER"], peft.LoraConfig)
    given = module["LOADED"].get("quantization_config")
    if base is UNSET:
        assert given is None
    else:
        assert isinstance(given, transformers.BitsAndBytesConfig)
        assert (given.load_in_4bit, given.load_in_8bit) == (base == "4bit", base == "8bit")
        assert base == "8bit" or (given.bnb_4bit_use_double_quant and given.bnb_4bit_quant_storage is torch.bfloat16)


def test_deepspeed_hides_messages_as_its_price_assumes(make):
    for changes in (
        {},
        {"gradient_reduction": EVERY},
        {"data_parallel": DataParallel.ZERO3, "gradient_reduction": EVERY},
    ):
        text = SYSTEMS[System.DEEPSPEED].export(named(make, "llama-3-8b", **changes), PLAN).text
        assert json.loads(text)["zero_optimization"]["overlap_comm"] is True


@pytest.mark.parametrize(
    ("name", "changes", "obstacle"),
    [
        ("llama-3-8b", {}, None),
        ("llama-2-7b", {}, "registered sizes of llama-2-7b"),
        ("llama-4-scout", {}, "llama4_text model"),
        ("llama-3-8b", {"cp_size": 2}, None),
        ("llama-3-8b", {"cp_size": 2, "context": ContextParallel.RING}, "ring of keys and values"),
    ],
)
def test_the_module_of_torchtitan_0_3_says_what_the_toml_says(make, name, changes, obstacle):
    given = {"data_parallel": DataParallel.ZERO3, "gradient_reduction": EVERY, **changes}
    exported = SYSTEMS[System.TORCHTITAN].export(named(make, name, **given), PLAN)
    if obstacle is not None:
        assert f"torchtitan 0.3 has no {obstacle}, 0.2.2 reads this file" in exported.notes
        assert exported.beside == ()
        return
    ((file, text),) = exported.beside
    assert file == "torchtitan_plan.py" and any("--module torchtitan_plan --config plan" in x for x in exported.notes)
    held = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
    }
    assert held["FLAVOR"] == "8B" and held["CONVERTERS"] == []
    assert held["TRAINING"]["global_batch_size"] == 32
    cp_size = changes.get("cp_size", 1)
    assert held["PARALLELISM"]["context_parallel_degree"] == cp_size
    assert held["PARALLELISM"]["data_parallel_shard_degree"] == 8 // cp_size
    assert held["PARALLELISM"].get("context_parallel_load_balancer") == ("ptrr" if cp_size > 1 else None)
    assert f'attn_backend="{"flex" if cp_size > 1 else "varlen"}"' in text
