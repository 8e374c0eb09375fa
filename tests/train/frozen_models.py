"""Tiny models of which parts are frozen or have low-rank matrices, random plans for them, and what stock ones are."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import UNSET
from msgspec.structs import replace
from random_plans import random_plan
from safetensors.torch import save_file
from tiny_models import initial_layer, tiny
from torch import Tensor, nn

from shardwright.models.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_of_config
from shardwright.models.frozen import FrozenPart, freeze
from shardwright.models.low_rank import adapt, adapter_config
from shardwright.types import HEAD, LOW_RANK, Model, Plan, base_type
from shardwright_train.models.base import family_named, family_of
from shardwright_train.weights.reading import PREFIX, as_in_file

FROZEN = {
    "all but the last two": ("llama", ("embedding", "layers[:2]")),
    "all but the head": ("gpt2", ("embedding.*wpe*", "layers", "head.transformer.*")),
    "the head alone": ("llama", ("embedding", "layers")),
    "feed-forward": ("bert", ("layers.*output.dense.*", "layers.intermediate.*")),
    "the encoder": ("t5", ("embedding", "layers[0:2]", "head.lm_head.weight")),
    "matrices between": ("qwen3", ("layers[1:3].*proj*",)),
    "a stretch": ("vit", ("layers[1:3]",)),
    "a vision tower": ("llava", ("embedding.model.vision_tower*", "layers[0:2]")),
    "all before a projector": ("llava", ("embedding", "layers[0:2]", "head")),
    "norms": ("olmo2", ("layers.*norm*",)),
}
"""What is frozen, by the family and the options that say so."""


LORA = {
    "queries and values": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "all matrices": ("qwen3", {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}),
    "feed-forward": ("t5", {"r": 2, "lora_alpha": 2, "target_modules": ["wo", "wi_0"], "use_rslora": True}),
    "a tower and its text": ("llava", {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "fc1"]}),
    "latents": ("deepseek_v3", {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"}),
    "latents without experts": ("deepseek_v2", {"r": 3, "target_modules": ["kv_a_proj_with_mqa", "kv_b_proj", "gate"]}),
    "experts": ("mixtral", {"r": 2, "lora_alpha": 5, "target_modules": "all-linear", "use_rslora": True}),
    "last matrices of experts": ("qwen3_moe", {"r": 3, "target_modules": ["down_proj", "q_proj"]}),
    "first matrices of experts": ("qwen3_moe", {"r": 2, "target_modules": ["gate_proj", "up_proj"]}),
    "matrices side by side": ("modernbert", {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}),
    "turned matrices": ("gpt2", {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}),
    "a classifier": ("vit", {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}),
    "a head's dense": ("roberta", {"r": 3, "target_modules": "all-linear"}),
    "a pyramid": ("swin", {"r": 3, "target_modules": "all-linear", "exclude_modules": ["q_proj"]}),
    "some layers": (
        "gemma2",
        {
            "r": 3,
            "target_modules": ["q_proj", "model.layers.2.mlp.up_proj"],
            "layers_to_transform": [1, 3],
            "rank_pattern": {"layers.3.self_attn.q_proj": 5},
            "alpha_pattern": {"up_proj": 4},
        },
    ),
    "outputs": ("bert", {"r": 4, "lora_alpha": 8, "target_modules": ["attention.output.dense", "intermediate.dense"]}),
}
"""Low-rank matrices by family and adapter_config.json; A and B are drawn at random, so that both have gradients."""


def lora_model(name: str, **changes: object) -> Model:
    """The tiny model with low-rank matrices."""
    family, config = LORA[name]
    config = {"peft_type": "LORA", "init_lora_weights": False, **config, **changes}
    return adapt(tiny(family), adapter_of_config(config, "test"), "test")


def lora_plan(name: str, number: int, world_size: int, **fixed: object) -> Plan:
    """A random plan for such a model."""
    plan = random_plan(lora_model(name), number, world_size, **fixed)  # type: ignore[arg-type]
    return replace(plan, name=f"lora of {name}, {plan.name}")


def frozen_model(name: str) -> Model:
    """The tiny model with what a name says frozen."""
    family, parts = FROZEN[name]
    return freeze(tiny(family), tuple(map(FrozenPart.parse, parts)))


def frozen_plan(name: str, number: int, world_size: int, **fixed: object) -> Plan:
    """A random plan for such a model."""
    plan = random_plan(frozen_model(name), number, world_size, **fixed)  # type: ignore[arg-type]
    return replace(plan, name=f"{name} frozen, {plan.name}")


def frozen_names(model: Model) -> set[str]:
    """The stock model's names of what is not trained."""
    family = family_named(model.family, "test")
    layers = ("embedding", *(f"layers[{i}]" for i in range(len(model.layers))), "head")
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for layer in layers:
        described = {p.name: p for p in model.type_of(layer).parameters}
        for local in family.parameter_names(model, layer):
            parameter = described[family.described_name(base_type(layer), local)]
            names[parameter.frozen is not True or parameter.is_buffer].add(family.owner_name(model, layer, local))
    assert not names[True] & names[False]
    return names[False]


def write_initial_adapter(folder: Path, model: Model, seed: int = 0) -> None:
    """Write the low-rank matrices of a seed as peft does."""
    family, tensors = family_of(model, "test"), dict[str, Tensor]()
    for layer in (*(f"layers[{i}]" for i in range(len(model.layers))), HEAD):
        described = {p.name: p for p in model.type_of(layer).parameters}
        for local, values in initial_layer(model, layer, seed).items():
            if LOW_RANK in local:
                held = as_in_file(values.view(described[local].shape), described[local]).contiguous()
                tensors[f"{PREFIX}{family.full_name(model, layer, local)}"] = held
    (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(model)))
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def adapted(stock: nn.Module, model: Model) -> dict[str, nn.Parameter]:
    """Give a stock model the adapter that a folder says, as peft opens it, and return its matrices by name."""
    from peft import PeftModel

    assert model.low_rank is not UNSET
    with TemporaryDirectory() as folder:
        write_initial_adapter(Path(folder), model)
        PeftModel.from_pretrained(stock, folder, is_trainable=True, autocast_adapter_dtype=False)
    return {name.replace(".default.", "."): p for name, p in stock.named_parameters() if p.requires_grad}
