"""What analytic profiles say that a layer keeps, against what transformers' own layers save for the backward pass."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from shardwright.estimate.expert_parts import PRODUCT_KERNELS, ROUTER_KERNELS
from shardwright.estimate.hardware import Link
from shardwright.estimate.held import Held
from shardwright.estimate.layers import Machine, estimate_layer
from shardwright.models.adapter_config import adapter_of_config
from shardwright.models.frozen import FrozenPart, freeze
from shardwright.models.low_rank import adapt
from shardwright.models.registry import FAMILIES
from shardwright.plan.axes import axes_of
from shardwright.types import Attention, LayerStrategy, Precision, Strategy
from shardwright_train.commands.documents import describe_folder
from shardwright_train.models.base import family_named
from shardwright_train.models.masks import Places, window_mask
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.torch_private import TorchDispatchMode

SAMPLES, LENGTH = 3, 96
CONFIGS = {
    "llama": {
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    },
    "qwen3": {
        "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 32,
    },
    "olmo2": {
        "model_type": "olmo2", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0,
    },
    "glm4": {
        "model_type": "glm4", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 32,
    },
    "granite": {
        "model_type": "granite", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "residual_multiplier": 0.22,
    },
    "gemma2": {
        "model_type": "gemma2", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 32, "sliding_window": 96,
    },
    "gemma2 windowed": {
        "model_type": "gemma2", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 32, "sliding_window": 40,
    },
    "gemma3": {
        "model_type": "gemma3_text", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 32, "sliding_window": 40,
    },
    "cohere": {
        "model_type": "cohere", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "use_qk_norm": True,
    },
    "cohere2 windowed": {
        "model_type": "cohere2", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "sliding_window": 40,
    },
    "mistral windowed": {
        "model_type": "mistral", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "sliding_window": 40,
    },
    "phi3": {
        "model_type": "phi3", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0,
    },
    "roberta": {
        "model_type": "roberta", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 64,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
    "modernbert": {
        "model_type": "modernbert", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0, "global_attn_every_n_layers": 2,
    },
    "modernbert windowed": {
        "model_type": "modernbert", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 64, "pad_token_id": 0, "local_attention": 32,
    },
    "smollm3": {
        "model_type": "smollm3", "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0,
        "no_rope_layer_interval": 3,  # the third block, which rotates nothing, keeps as much as others
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 96,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2", "hidden_size": 128, "moe_intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 64, "q_lora_rank": 48, "kv_lora_rank": 40, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 32, "n_routed_experts": 16, "num_experts_per_tok": 5,
    },
    **{
        f"llama4{normed}": {
            "model_type": "llama4_text", "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4,
            "num_experts_per_tok": 2, "head_dim": 32, "use_qk_norm": bool(normed),
        }
        for normed in ("", " normed")
    },
    **{
        f"gpt_oss{windowed}": {
            "model_type": "gpt_oss", "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4,
            "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": window,
        }
        for windowed, window in (("", 96), (" windowed", 40))
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "hidden_size": 128, "moe_intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "q_lora_rank": 48, "kv_lora_rank": 40,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "n_routed_experts": 16, "n_group": 4,
        "num_experts_per_tok": 5, "topk_group": 2, "first_k_dense_replace": 0,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "hidden_size": 128, "moe_intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 32, "num_experts": 16,
        "num_experts_per_tok": 5, "norm_topk_prob": True,
    },
}  # fmt: skip


def kernel_of(config):
    """The kernel that bounds of scores need, or the usual one."""
    return Attention.EAGER if config["model_type"] == "gemma2" else Attention.SDPA


def counted(config):
    """The key that counts the blocks."""
    return FAMILIES[config["model_type"]].counts[0]


def saved_bytes(config, layers, change=lambda model: None):
    """Bytes of the distinct tensors, parameters apart, that autograd saves in all layers of a model of so many."""
    of = {key: value for key, value in config.items() if key != "model_type"}
    of |= {counted(config): layers, "use_cache": False}
    made = AutoConfig.for_model(config["model_type"], **of)
    family = family_named(config["model_type"], "test")
    made._attn_implementation = family.kernel_name(kernel_of(config).value)
    model = family.stock(made).to(torch.bfloat16).train()
    change(model)
    run = runs_experts(model) if family.facts.experts else model.base_model
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(torch.zeros(SAMPLES, LENGTH, dtype=torch.long))
        return sum(storage.nbytes() for storage in held.values())


def runs_experts(stock):
    """The blocks of a stock model whose experts are computed as in runs, on one rank."""
    family = family_named(stock.config.model_type, "test")
    kinds = family.facts.layers(vars(stock.config))
    blocks = [family.block(stock, kind, index) for index, kind in enumerate(kinds)]
    stock.model.layers = nn.ModuleList(blocks)
    for block in blocks:
        part = block.get_submodule(family.part)
        part.experts.keeps_biases = 1.0
        part.tensor_parallel = SimpleNamespace(
            size=1, splits_everything=False, axes=axes_of(Strategy(tp_size=1, dp_size=1)),
            leave=lambda x: x, recomputation=Recomputation(keeps_last=False),
        )  # fmt: skip

    def run(tokens):
        states = (stock.model.embed_tokens(tokens),)
        places = torch.arange(LENGTH)[None]
        angles = family.rotation(family.angles(stock.model.rotary_emb, kinds[0], states[0], places))
        whole = Places.whole(LENGTH)
        constants = {"kernel": "sdpa", "window": None, "places": whole, "arguments": {"position_embeddings": angles}}
        for kind, block in zip(kinds, blocks, strict=True):
            window = family.facts.effective_window(kind, vars(stock.config), LENGTH)
            constants["mask"] = (
                None if window is None else window_mask(whole, window, states[0], family.facts.attention.mask)
            )
            states = family.call(block, states, {"tokens": tokens}, constants).states

    return run


@pytest.mark.parametrize("family", CONFIGS)
def test_a_layer_keeps_what_autograd_saves(family, tmp_path):
    config = CONFIGS[family]
    (tmp_path / "config.json").write_text(json.dumps(config | {counted(config): 3}))
    model = describe_folder(tmp_path, family, LENGTH)
    kind = model.layers[-1]
    measured = saved_bytes(config, 3) - saved_bytes(config, 2)
    found = estimate_layer(
        model, kind, LayerStrategy(type=kind, tp_size=1, dp_size=1), SAMPLES,
        Precision(parameters="float32", compute="bfloat16", reduce="float32"), kernel_of(config),
        Machine(1e12, 1e12, Link(1e12, 0.0)),
    ).activation_bytes  # fmt: skip
    # The estimate has no float32 sums of a softmax or a norm, of which there is one a position and head.
    heads = 6 if "qwen3" in family or family in ("gemma3", "cohere", "llama4 normed") else 0
    sums = SAMPLES * LENGTH * 4 * (4 + 4 + heads)
    # Nor has it GLM 4's cosines and sines, which each block repeats for pairs of features, once for all samples.
    sums += 2 * LENGTH * 2 * 16 if family == "glm4" else 0
    # Stock gives sdpa a mask of yes and no, which each block turns into numbers; in runs blocks share one of numbers.
    sums += SAMPLES * LENGTH**2 * 2 if "windowed" in family or family == "gemma3" else 0
    # Nor has it what Gemma multiplies by in its norms, four of the width and two of a head's: 1 and the weights.
    sums += 4 * (4 * 128 + 2 * 32) if family == "gemma3" else 0
    # Nor has it how often each expert is chosen in a sample.
    sums += SAMPLES * 16 * 4 if "deepseek" in family else 0
    # Nor has it, of gpt-oss, the position that heads have for their sinks, and the softmax over the chosen experts.
    sums += SAMPLES * (2 * (4 + 2) * (32 + 8) * 2 + LENGTH * 16) if "gpt_oss" in family else 0
    scores = SAMPLES * 4 * LENGTH**2 if kernel_of(config) is Attention.EAGER else 0
    assert measured - sums <= found <= measured + scores // 2


VIEWS = ("view", "_t", "transpose", "unsqueeze", "expand", "slice", "split", "unbind", "empty", "detach", "promote")


class Kernels(TorchDispatchMode):
    """Counts operators that compute something; products of all experts are one, as grouped ones are."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name().partition("::")[2].partition(".")[0]
        if name != "t" and not any(word in name for word in VIEWS):
            self.counts[name] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_start_about_as_many_kernels_as_are_counted(family):
    made = AutoConfig.for_model(family, **{key: x for key, x in CONFIGS[family].items() if key != "model_type"})
    made._attn_implementation = "sdpa"
    model = family_named(family, "test").stock(made).to(torch.bfloat16).train()
    runs_experts(model)
    part, states = model.model.layers[0].mlp, torch.randn(SAMPLES, LENGTH, 128, dtype=torch.bfloat16)
    part.losses = []
    with Kernels() as kernels:
        part(states)
    products = kernels.counts.pop("mm") - 1
    assert products == 2 * part.experts.num_experts
    # A sort is several kernels, and grouped products come with the ends of their groups, twice.
    counted = sum(kernels.counts.values()) - kernels.counts["cat"] + 1 + 2 + 2 * 2 + 3
    assert counted == pytest.approx(ROUTER_KERNELS + PRODUCT_KERNELS, abs=5)


def frozen(model):
    """Freeze all but the embedding of a stock model."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" in name or "wte" in name)


def adapted(model):
    """Give queries, values and the last matrix of a stock model low-rank matrices, behind a trained embedding."""
    from peft import LoraConfig, get_peft_model

    get_peft_model(model, LoraConfig(r=8, target_modules=SYSTEMS), autocast_adapter_dtype=False)
    model.get_input_embeddings().requires_grad_(True)


SYSTEMS = ["q_proj", "v_proj", "down_proj"]


@pytest.mark.parametrize(
    ("family", "change"), [*((family, frozen) for family in ("llama", "olmo2", "gpt2")), ("llama", adapted)]
)
def test_a_frozen_layer_keeps_what_autograd_saves(family, change, tmp_path):
    config = CONFIGS[family]
    (tmp_path / "config.json").write_text(json.dumps(config | {counted(config): 3}))
    model = describe_folder(tmp_path, family, LENGTH)
    if change is frozen:
        model = freeze(model, [FrozenPart.parse("layers")])
    else:
        adapter = {"peft_type": "LORA", "r": 8, "target_modules": SYSTEMS}
        model = adapt(model, adapter_of_config(adapter, "adapter"), "adapter")
    measured = saved_bytes(config, 3, change) - saved_bytes(config, 2, change)
    strategy = LayerStrategy(type=model.layers[-1], tp_size=1, dp_size=1)
    precision = Precision(parameters="float32", compute="bfloat16", reduce="float32")
    machine = Machine(1e12, 1e12, Link(1e12, 0.0))
    estimated = estimate_layer(model, strategy.type, strategy, SAMPLES, precision, Attention.SDPA, machine)
    sums = SAMPLES * LENGTH * 4 * (4 + 4)
    assert measured - sums <= estimated.activation_bytes <= measured


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_compiled_block_keeps_what_torch_s_partition_of_its_graph_keeps(family, tmp_path):
    config = CONFIGS[family]
    (tmp_path / "config.json").write_text(json.dumps(config))

    def by_partition(model):
        stack = model.base_model
        for block in getattr(stack, "layers", None) or stack.h:
            block.compile(backend="aot_eager_decomp_partition")

    measured = saved_bytes(config, 3, by_partition) - saved_bytes(config, 2, by_partition)
    model = describe_folder(tmp_path, family, LENGTH)
    strategy = LayerStrategy(type=model.layers[-1], tp_size=1, dp_size=1)
    precision = Precision(parameters="float32", compute="bfloat16", reduce="float32")
    machine = Machine(1e12, 1e12, Link(1e12, 0.0), compiled=True, held=Held(fused_gate=True))
    found = estimate_layer(model, strategy.type, strategy, SAMPLES, precision, Attention.SDPA, machine)
    assert found.activation_bytes == pytest.approx(measured, rel=0.02)


SWIN = {
    "model_type": "swin",
    "embed_dim": 64,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "image_size": 56,
    "window_size": 7,
}


@pytest.mark.parametrize(("layer", "block"), [("stage1", 0), ("stage1", 1), ("merge1", 0), ("stage2", 0)])
def test_a_layer_of_a_pyramid_keeps_what_autograd_saves(layer, block, tmp_path):
    """Without what it is given, which the layer before counts, and with what it hands on, which the next one keeps."""
    (tmp_path / "config.json").write_text(json.dumps(SWIN))
    model, family = describe_folder(tmp_path, "swin", 14 * 14), family_named("swin", "test")
    stock = family.stock(family.configuration(model))
    module = family.block(stock, layer, block).train()
    place = model.layers.index(layer) + block
    (tensor,) = model.received_by(f"layers[{place}]")
    states = torch.randn(SAMPLES, tensor.sequence_length, tensor.features, requires_grad=True)
    apart = {x.untyped_storage().data_ptr() for x in (states, *module.parameters())}
    held = {}

    def pack(saved):
        held[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        (out,) = family.call(module, (states,), {}, {"kernel": "sdpa"})
    held[out.untyped_storage().data_ptr()] = out.untyped_storage()
    measured = sum(storage.nbytes() for place, storage in held.items() if place not in apart)
    found = estimate_layer(
        model, layer, LayerStrategy(type=layer, tp_size=1, dp_size=1), SAMPLES, Precision(), Attention.SDPA,
        Machine(1e12, 1e12, Link(1e12, 0.0)),
    ).activation_bytes  # fmt: skip
    assert found == pytest.approx(measured, rel=0.02)


def test_tensor_parallelism_shares_out_a_window_and_not_what_merges_patches(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SWIN))
    model = describe_folder(tmp_path, "swin", 14 * 14)

    def estimated(layer, tp_size):
        strategy = LayerStrategy(type=layer, tp_size=tp_size, dp_size=1)
        machine = Machine(1e9, 1e12, Link(1e15, 0.0))
        return estimate_layer(model, layer, strategy, SAMPLES, Precision(), Attention.SDPA, machine)

    assert estimated("merge1", 2) == estimated("merge1", 1)
    whole, half = estimated("stage2", 1), estimated("stage2", 2)
    assert half.forward_s == pytest.approx(whole.forward_s / 2, rel=0.01)
    assert half.activation_bytes < 0.7 * whole.activation_bytes
