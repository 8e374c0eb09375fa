"""Low-rank adaptation (LoRA, Hu et al. 2021) of a described model, as peft's adapter_config.json says it.

Beside each matrix W [outputs, inputs] that it names stand A [rank, inputs] and B [outputs, rank], which alone are
trained. Where tensor parallelism cuts W by its outputs, B is cut so and A is a replica that is applied inside the
region; where it cuts W by its inputs, A is cut so and B is the replica: what B A adds is then a part of the same sum
over the ranks as what W gives.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.types.low_rank import LOW_RANK, LowRank
from shardwright_formats.types.model import EMBEDDING, HEAD, LayerType, Model, Parameter, base_type
from shardwright_models.facts import Only
from shardwright_models.frozen import freeze_where
from shardwright_models.registry import facts_of

ADAPTER_CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
"""peft's word for all matrices of the blocks."""
_WEIGHT = ".weight"
_MAX_RANK = 2**16
_IGNORED = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "init_lora_weights", "task_type"),
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"),
        *("megatron_config", "megatron_core", "runtime_config", "layers_pattern", "qalora_group_size", "loftq_config"),
    )
)
"""Keys that are read here, or say nothing about what is trained."""
_ONLY = {
    "lora_dropout": Only(0, "nothing is dropped on the way to low-rank matrices"),
    "bias": Only("none", "the low-rank matrices alone are trained"),
    "fan_in_fan_out": Only(False, "matrices are torch's Linear"),
    "lora_bias": Only(False, "the low-rank matrices alone are trained"),
    "use_dora": Only(False, "there is no magnitude"),
    "use_qalora": Only(False, "the model is not quantized"),
}
_NOTHING: tuple[object, ...] = (None, False, [], {}, "")


def adapter_of_config(config: Mapping[str, Any], file: object) -> LowRank:
    """Return what an adapter_config.json of peft says; raise BadInput, naming the key, for what cannot be trained."""
    if (kind := config.get("peft_type")) != "LORA":
        raise BadInput(file, f"peft_type {kind!r} is not trained here", "use LORA")
    for key, value in config.items():
        only, reason = _ONLY.get(key, Only(None, "it is not known here"))
        if key not in _IGNORED and value not in (only, None) and (key in _ONLY or value not in _NOTHING):
            raise BadInput(file, f"{key} {value!r} cannot be trained: {reason}", "leave it out")
    targets, start = config.get("target_modules"), config.get("init_lora_weights", True)
    if targets == ALL_LINEAR:
        targets = [ALL_LINEAR]
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) and name for name in targets):
        raise BadInput(file, f"target_modules {targets!r} is no list of names", f"list them, or say {ALL_LINEAR}")
    if not isinstance(start, bool):
        raise BadInput(file, f"init_lora_weights {start!r} is not drawn here", "use true or false")
    return LowRank(
        rank=_number(config, "r", 8, file),
        alpha=_number(config, "lora_alpha", 8, file),
        targets=tuple(sorted(set(targets))),
        rank_stabilized=config.get("use_rslora") is True,
        starts_at_zero=start,
    )


def _number(config: Mapping[str, Any], key: str, default: int, file: object) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
        raise BadInput(file, f"{key} {value!r} is no whole number from 1 to {_MAX_RANK}", "correct it")
    return value


def adapt(model: Model, low_rank: LowRank, file: object) -> Model:
    """Return the model frozen, with low-rank matrices beside those that the adapter names.

    Raises BadInput, naming `file`, where a target is no matrix of a block, or none that can have them.
    """
    if _is_frozen_on_request(model):
        raise BadInput(file, "parts of the model are frozen besides", "take one of --frozen and --lora")
    names = {name for kind in model.layers for name, _ in _matrices(model.types[kind], low_rank.targets)}
    for target in low_rank.targets:
        if target != ALL_LINEAR and not any(map(re.compile(rf"(.*\.)?{re.escape(target)}").fullmatch, names)):
            raise BadInput(file, f"target_modules: {target} is no matrix of a block", "name modules of the blocks")
    kinds = {kind: _adapted(model, kind, low_rank) for kind in dict.fromkeys(model.layers)}
    ends = {name: model.types[name] for name in (EMBEDDING, HEAD)}
    extended = replace(model, types={**ends, **kinds}, low_rank=low_rank)
    return freeze_where(extended, lambda _, parameter: LOW_RANK not in parameter.name, file)


def _is_frozen_on_request(model: Model) -> bool:
    """Return whether parameters are frozen that the family trains; some have such that it never does."""
    facts = facts_of(model)
    config = facts.completed(facts.configured(model.config | facts.counted(model.layers, model.config)))
    kinds = (EMBEDDING, *dict.fromkeys(map(base_type, model.layers)), HEAD)
    never = {p.name for kind in kinds for p in facts.parameters(kind, config) if not p.trained}
    frozen = {p.name for kind in model.types.values() for p in kind.parameters if not p.trained}
    return not frozen <= never


def _adapted(model: Model, kind: str, low_rank: LowRank) -> LayerType:
    """Return a layer type with low-rank matrices behind the last parameter of each module that has them."""
    described, parameters = model.types[kind], list[Parameter]()
    matrices, added = dict(_matrices(described, low_rank.targets)), 0
    for number, parameter in enumerate(described.parameters):
        parameters.append(parameter)
        module, behind = _module(parameter), described.parameters[number + 1 : number + 2]
        if module in matrices and not (behind and _module(behind[0]) == module):
            pair = _pair(module, matrices[module], low_rank.rank)
            parameters += pair
            added += sum(p.numel(1) for p in pair)
    operations = described.forward_flops_per_sample + 2 * added * model.sequence_length
    return replace(described, parameters=tuple(parameters), forward_flops_per_sample=operations)


def _pair(module: str, weight: Parameter, rank: int) -> tuple[Parameter, Parameter]:
    """Return A [rank, inputs] and B [outputs, rank] of a matrix [outputs, inputs], of which one is cut as it is."""
    outputs, inputs = weight.shape
    by_outputs, by_inputs = weight.tp_dim == 0, weight.tp_dim == 1
    first = Parameter(
        name=f"{module}{LOW_RANK}A.weight", shape=(rank, inputs), tp_dim=1 if by_inputs else None, inside=by_outputs
    )
    second = Parameter(
        name=f"{module}{LOW_RANK}B.weight", shape=(outputs, rank), tp_dim=0 if by_outputs else None, inside=by_inputs
    )
    return first, second


def _matrices(kind: LayerType, targets: tuple[str, ...]) -> Iterator[tuple[str, Parameter]]:
    """Yield the matrices of a layer type that targets name, by the names of their modules."""
    for parameter in kind.parameters:
        module = _module(parameter)
        if parameter.name != f"{module}{_WEIGHT}" or len(parameter.shape) != 2 or parameter.inside or parameter.shared:
            continue
        if ALL_LINEAR in targets or any(f".{module}".endswith(f".{target}") for target in targets):
            yield module, parameter


def _module(parameter: Parameter) -> str:
    return parameter.name.rpartition(".")[0]


def adapter_config(low_rank: LowRank) -> dict[str, Any]:
    """Return the adapter_config.json with which peft opens an adapter of whatever model it is given."""
    return {
        "peft_type": "LORA",
        "r": low_rank.rank,
        "lora_alpha": int(low_rank.alpha) if float(low_rank.alpha).is_integer() else low_rank.alpha,
        "target_modules": ALL_LINEAR if ALL_LINEAR in low_rank.targets else list(low_rank.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": low_rank.rank_stabilized,
        "init_lora_weights": low_rank.starts_at_zero,
        "inference_mode": True,
    }
