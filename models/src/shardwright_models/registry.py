"""A registry of all families, keyed by the `model_type` of their config.json."""

from shardwright_formats.io import BadInput
from shardwright_formats.types import Model, base_type
from shardwright_models.facts import Config, Family
from shardwright_models.families.baichuan import BAICHUAN
from shardwright_models.families.bert import BERT
from shardwright_models.families.cohere import COHERE
from shardwright_models.families.cohere2 import COHERE2
from shardwright_models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from shardwright_models.families.experts import MIXTRAL, QWEN3_MOE
from shardwright_models.families.gemma2 import GEMMA2
from shardwright_models.families.gemma3 import GEMMA3
from shardwright_models.families.gemma3_images import GEMMA3_IMAGES
from shardwright_models.families.glm4 import GLM4
from shardwright_models.families.gpt2 import GPT2
from shardwright_models.families.gpt_oss import GPT_OSS
from shardwright_models.families.granite import GRANITE
from shardwright_models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from shardwright_models.families.llama4 import LLAMA4
from shardwright_models.families.llava import LLAVA
from shardwright_models.families.ministral import MINISTRAL
from shardwright_models.families.ministral3 import MINISTRAL3
from shardwright_models.families.modernbert import MODERNBERT
from shardwright_models.families.olmo2 import OLMO2
from shardwright_models.families.phi3 import PHI3
from shardwright_models.families.roberta import ROBERTA, XLM_ROBERTA
from shardwright_models.families.siglip import SIGLIP
from shardwright_models.families.smollm3 import SMOLLM3
from shardwright_models.families.swin import SWIN
from shardwright_models.families.t5 import T5
from shardwright_models.families.vit import VIT
from shardwright_models.families.whisper import WHISPER

_ALL = (
    BAICHUAN,
    BERT,
    COHERE,
    COHERE2,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA2,
    GEMMA3,
    GEMMA3_IMAGES,
    GLM4,
    GPT2,
    GPT_OSS,
    GRANITE,
    LLAMA,
    LLAMA4,
    LLAVA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    MODERNBERT,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    ROBERTA,
    SIGLIP,
    SMOLLM3,
    SWIN,
    T5,
    VIT,
    WHISPER,
    XLM_ROBERTA,
)
FAMILIES = {family.model_type: family for family in _ALL}
_UNFIT = {
    "qwen2_5_vl": "mrope_section and window_size follow the size of each image, which its configuration does not hold",
}
"""Reasons why models of a type cannot be trained, where they are likely to be asked for."""


def refusal(model_type: object, usual: str) -> str:
    """Return why no family is of a model_type: `usual`, unless there is a reason of its own."""
    reason = _UNFIT.get(model_type) if isinstance(model_type, str) else None
    return usual if reason is None else f"model_type {model_type!r} cannot be trained: {reason}"


def facts_of(model: Model) -> Family:
    """Return the facts of a described model's family.

    Raises BadInput for a family that nothing is known of, such as that of a description made from others' profiles.
    """
    if model.family not in FAMILIES:
        problem = f"nothing is known of the family {model.family!r}"
        raise BadInput(f"model {model.name}", problem, f"use a model of {', '.join(FAMILIES)}")
    return FAMILIES[model.family]


def facts_of_type(model: Model, type_name: str) -> tuple[Family, Config]:
    """Return the facts of a type of layer of a described model, and its configuration.

    Raises BadInput as `facts_of` does.
    """
    family, layer = facts_of(model), base_type(type_name)
    config = family.configured(model.config)
    return family.of_type(layer, config), family.of_layer(layer, config)
