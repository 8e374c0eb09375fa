"""Low-rank matrices of a plan's model as peft makes them beside a stock model of transformers."""

import json

from msgspec import UNSET

from shardwright.models.low_rank import adapter_config
from shardwright.models.low_rank_targets import matched_names
from shardwright.types import Model

IMPORTED = "from peft import LoraConfig, get_peft_model\n"
_TEXT = '''

ADAPTER = LoraConfig(
{arguments}
)


def adapted(model):
    """Return the model with low-rank matrices, which alone are trained: prepare this one."""
    return get_peft_model(model, ADAPTER)
'''


def adapter_text(model: Model) -> str:
    """Return lines of Python that put the low-rank matrices beside a stock model; none where all of it is trained."""
    if model.low_rank is UNSET:
        return ""
    config = adapter_config(model) | {"inference_mode": False}
    config["target_modules"] = _shortest(model, config["target_modules"])
    given = {key: value for key, value in config.items() if key != "peft_type" and value not in (None, {}, [])}
    lines = (f"    {key}={value if isinstance(value, bool) else json.dumps(value)}," for key, value in given.items())
    return _TEXT.format(arguments="\n".join(lines))


def _shortest(model: Model, names: list[str]) -> list[str]:
    """Return the ends of names that say the same in every layer, where no other module has these; else the names."""
    ends = {name.rpartition(".")[2] for name in names}
    others = {name for name in matched_names(model) if name.rpartition(".")[2] in ends} - set(names)
    return names if others else sorted(ends)
