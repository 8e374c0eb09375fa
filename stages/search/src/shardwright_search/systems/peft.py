"""Python code that adds a plan's low-rank matrices to a stock model of transformers by peft.

Frozen matrices in 8 or 4 bits are those of bitsandbytes 0.49, of which ranks shard 4 bits alone: these lie in
tensors of the compute format (`bnb_4bit_quant_storage`; peft's pages on FSDP and on DeepSpeed).
"""

import json

from msgspec import UNSET

from shardwright.models.low_rank import adapter_config
from shardwright.models.low_rank_targets import matched_names
from shardwright.types import Model, Plan, Precision

IMPORTED = "from peft import LoraConfig, get_peft_model\n"
_TEXT = '''

ADAPTER = LoraConfig(
{arguments}
)


def adapted(model):
    """Return the model with low-rank matrices, which alone are trained: prepare this one."""
    return get_peft_model(model, ADAPTER{kept})
'''


_QUANTIZED = {
    "8bit": "BitsAndBytesConfig(load_in_8bit=True)",
    "4bit": (
        'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, '
        "bnb_4bit_compute_dtype=torch.{compute}, bnb_4bit_quant_storage=torch.{compute})"
    ),
}
"""Configurations of transformers' quantized models, by the bits of a plan's frozen matrices."""


def imported_for(plan: Plan) -> str:
    """Return the Python imports for `adapter_text`, except torch."""
    if plan.model.low_rank is UNSET:
        return ""
    return IMPORTED + ("" if plan.precision.base is UNSET else "from transformers import BitsAndBytesConfig\n")


def loading_text(precision: Precision) -> str:
    """Return Python lines with the arguments for loading the stock model; empty for plain float32."""
    given = [] if precision.parameters == "float32" else [f'"dtype": torch.{precision.parameters}']
    if precision.base is not UNSET:
        given.append(f'"quantization_config": {_QUANTIZED[precision.base].format(compute=precision.compute)}')
    return f"\n\nLOADED = {{{', '.join(given)}}}\n" if given else ""


def loading_notes(precision: Precision) -> tuple[str, ...]:
    """Return a note on how to use these lines."""
    return ("your script loads the model by from_pretrained(..., **LOADED)",) if loading_text(precision) else ()


def adapter_text(plan: Plan) -> str:
    """Return Python lines that add the low-rank matrices to a stock model; empty if all of it is trained.

    peft makes them in float32 beside 16 bits unless it is told not to.
    """
    model = plan.model
    if model.low_rank is UNSET:
        return ""
    config = adapter_config(model) | {"inference_mode": False}
    config["target_modules"] = _shortest(model, config["target_modules"])
    given = {key: value for key, value in config.items() if key != "peft_type" and value not in (None, {}, [])}
    lines = (f"    {key}={value if isinstance(value, bool) else json.dumps(value)}," for key, value in given.items())
    kept = "" if plan.precision.parameters == "float32" else ", autocast_adapter_dtype=False"
    return _TEXT.format(arguments="\n".join(lines), kept=kept)


def _shortest(model: Model, names: list[str]) -> list[str]:
    """Return the last parts of names if they name the same modules in every layer and no others; else the names."""
    ends = {name.rpartition(".")[2] for name in names}
    others = {name for name in matched_names(model) if name.rpartition(".")[2] in ends} - set(names)
    return names if others else sorted(ends)
