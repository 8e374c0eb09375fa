"""A LoRA adapter of peft (Hu et al. 2021): its adapter_config.json, and the hash of its trained weights, if any."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from shardwright.io import BadInput, check_regular, read_object, sha256_of_file
from shardwright.models.low_rank_targets import ALL_LINEAR, Names, Targets
from shardwright.models.traits import Only
from shardwright.types.model import LowRank

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_MAX_RANK = 2**16
_MAX_BYTES = 2**40
_IGNORED = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "task_type"),
        *("megatron_config", "megatron_core", "runtime_config", "qalora_group_size", "loftq_config", "fan_in_fan_out"),
        *("eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
    )
)
"""Keys that are read here or have no effect: some only matter together with others, and peft corrects fan_in_fan_out
itself."""
_ONLY = {
    "lora_dropout": Only(0, "nothing is dropped on the way to low-rank matrices"),
    "bias": Only("none", "only the low-rank matrices are trained"),
    "lora_bias": Only(False, "only the low-rank matrices are trained"),
    "modules_to_save": Only(None, "no module is trained in full along with low-rank matrices"),
    "trainable_token_indices": Only(None, "no table rows are trained along with low-rank matrices"),
    "layer_replication": Only(None, "each layer is there once"),
    "use_dora": Only(False, "there is no magnitude"),
    "use_qalora": Only(False, "the model is not quantized"),
    **dict.fromkeys(
        ("velora_config", "monteclora_config", "kasa_config", "arrow_config", "use_bdlora", "alora_invocation_tokens"),
        Only(None, "low-rank matrices have no further parts"),
    ),
}
_TASKS = (None, "CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION")
"""Tasks for which peft trains only the low-rank matrices and no head."""
_DRAWN = ("gaussian", "orthogonal", "eva")
"""Ways of drawing low-rank matrices that leave the model's own matrices as they are."""
_NOTHING: tuple[object, ...] = (None, False, [], {}, "")


class Adapter(NamedTuple):
    """The configuration of an adapter."""

    low_rank: LowRank
    targets: Targets
    ranks: Mapping[str, int]
    """Ranks that differ from `low_rank.rank`, by regular expressions for the ends of names in the stock model."""
    alphas: Mapping[str, float]
    """Alphas that differ from `low_rank.alpha`, by regular expressions for the ends of names in the stock model."""


def read_adapter(given: Path) -> tuple[Adapter, Path]:
    """Return an adapter and its configuration file, from an adapter's folder or an adapter_config.json.

    From a folder, the adapter includes the hash of its trained weights. Raises BadInput, naming file and key, if it
    cannot be trained.
    """
    if not given.is_dir():
        return adapter_of_config(read_object(given), given), given
    file, weights = given / ADAPTER_CONFIG, given / ADAPTER_WEIGHTS
    if not weights.exists():
        if (given / _PICKLED).exists():
            raise BadInput(given / _PICKLED, "is pickled, which is not read", f"save it as {ADAPTER_WEIGHTS}")
        return adapter_of_config(read_object(file), file), file
    adapter = adapter_of_config(read_object(file), file, is_trained=True)
    check_regular(weights, _MAX_BYTES)
    return adapter._replace(low_rank=replace(adapter.low_rank, weights_sha256=sha256_of_file(weights))), file


def adapter_of_config(config: Mapping[str, Any], file: object, *, is_trained: bool = False) -> Adapter:
    """Return the adapter of an adapter_config.json of peft; raise BadInput, naming the key, if it cannot be trained.

    `is_trained`: its low-rank matrices are read from a file, not drawn.
    """
    if (kind := config.get("peft_type")) != "LORA":
        raise BadInput(file, f"peft_type {kind!r} is not supported", "use LORA")
    for key, value in config.items():
        only, reason = _ONLY.get(key, Only(None, "it is not known here"))
        if key not in _IGNORED and value not in (only, None) and (key in _ONLY or value not in _NOTHING):
            raise BadInput(file, f"{key} {value!r} cannot be trained: {reason}", "leave it out")
    if (task := config.get("task_type")) not in _TASKS:
        raise BadInput(
            file, f"task_type {task!r} cannot be trained: peft would also train the whole head", "leave it out"
        )
    targets = _targets(config, file)
    named = (targets.modules,) if isinstance(targets.modules, str) else targets.modules
    low_rank = LowRank(
        rank=_rank(config.get("r", 8), "r", file),
        alpha=_alpha(config.get("lora_alpha", 8), "lora_alpha", file),
        targets=tuple(sorted({*named, *targets.parameters})),
        rank_stabilized=config.get("use_rslora") is True,
        starts_at_zero=_starts_at_zero(config.get("init_lora_weights", True), file, is_trained),
    )
    ranks, alphas = (_pattern(config, key, file) for key in ("rank_pattern", "alpha_pattern"))
    return Adapter(
        low_rank,
        targets,
        {pattern: _rank(value, "rank_pattern", file) for pattern, value in ranks.items()},
        {pattern: _alpha(value, "alpha_pattern", file) for pattern, value in alphas.items()},
    )


def _targets(config: Mapping[str, Any], file: object) -> Targets:
    """Return the modules that a configuration specifies, in any of peft's ways."""
    modules, layers = config.get("target_modules"), config.get("layers_to_transform")
    parameters = _names(config, "target_parameters", file)
    if not isinstance(modules, str):
        modules = _names(config, "target_modules", file)
    if not modules and not parameters:
        raise BadInput(file, "target_modules names no modules", f"list them, or use {ALL_LINEAR}")
    excluded, patterns = config.get("exclude_modules"), config.get("layers_pattern")
    numbers = [layers] if isinstance(layers, int) else layers or None
    if numbers is not None and not (isinstance(numbers, list) and all(type(each) is int for each in numbers)):
        raise BadInput(file, f"layers_to_transform {layers!r} is not a list of numbers", "correct it")
    if isinstance(modules, str) and (numbers or patterns):
        problem = "layers_to_transform and layers_pattern need a list of target_modules, as in peft"
        raise BadInput(file, problem, "list the target_modules, or leave them out")
    if patterns and numbers is None:
        raise BadInput(file, "layers_pattern needs layers_to_transform, as in peft", "name the layers, too")
    return Targets(
        modules,
        excluded if isinstance(excluded, str) else _names(config, "exclude_modules", file),
        None if numbers is None else frozenset(numbers),
        (patterns,) if isinstance(patterns, str) and patterns else _names(config, "layers_pattern", file),
        parameters,
    )


def _names(config: Mapping[str, Any], key: str, file: object) -> Names:
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise BadInput(file, f"{key} {names!r} is not a list of names", "list names")
    return tuple(names)


def _rank(value: object, key: str, file: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_RANK:
        raise BadInput(file, f"{key} {value!r} is not a whole number from 1 to {_MAX_RANK}", "correct it")
    return value


def _alpha(value: object, key: str, file: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MAX_RANK:
        raise BadInput(file, f"{key} {value!r} is not a number above 0, up to {_MAX_RANK}", "correct it")
    return value


def _pattern(config: Mapping[str, Any], key: str, file: object) -> Mapping[str, Any]:
    pattern = config.get(key) or {}
    if not isinstance(pattern, Mapping):
        raise BadInput(file, f"{key} {pattern!r} is not a mapping from patterns to numbers", "correct it")
    return pattern


def _starts_at_zero(start: object, file: object, is_trained: bool) -> bool:
    if is_trained and start in _DRAWN:
        return True
    if not isinstance(start, bool):
        raise BadInput(file, f"init_lora_weights {start!r} is not supported", "use true or false")
    return start
