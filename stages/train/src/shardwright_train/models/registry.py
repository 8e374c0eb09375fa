"""The model families the runtime can train; of this package and of transformers, what is asked for is imported."""

from functools import cache
from importlib import import_module
from typing import NamedTuple

from shardwright_formats.io.errors import BadInput
from shardwright_train.models.base import Family
from shardwright_train.models.stock import stock_class


class _Row(NamedTuple):
    """Where a family is, and the stock model whose modules it takes."""

    module: str
    family: str
    stock: str


_ROWS = {
    "bert": _Row("bert", "Bert", "BertForMaskedLM"),
    "gpt2": _Row("gpt2", "GPT2", "GPT2LMHeadModel"),
    "llama": _Row("llama", "Llama", "LlamaForCausalLM"),
    "mistral": _Row("llama", "Llama", "MistralForCausalLM"),
    "qwen2": _Row("llama", "Llama", "Qwen2ForCausalLM"),
    "qwen3": _Row("llama", "Llama", "Qwen3ForCausalLM"),
    "t5": _Row("t5", "T5", "T5ForConditionalGeneration"),
    "vit": _Row("vit", "ViT", "ViTForImageClassification"),
}
"""By the `model_type` of a config.json."""


def family_named(name: str, file: object) -> Family:
    """The family of a name that stands in `file`; BadInput when there is none."""
    if name not in _ROWS:
        raise BadInput(file, f"model family {name!r} cannot be trained", f"use one of: {', '.join(sorted(_ROWS))}")
    return _family(name)


@cache
def _family(name: str) -> Family:
    row = _ROWS[name]
    family: type[Family] = getattr(import_module(f"{__package__}.{row.module}"), row.family)
    return family(name, stock_class(name, row.stock))
