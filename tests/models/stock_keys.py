"""Writes config_keys.json of shardwright.models: `python tests/models/stock_keys.py`, under the pinned transformers."""

import importlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shardwright.models.config_keys import FILE, NOTES
from shardwright.models.facts import Family
from shardwright.models.families.llava import TOWERS
from shardwright.models.registry import FAMILIES
from shardwright_train.models.base import family_named
from shardwright_train.models.configuration import keys_of

TARGET = Path(__file__).parents[2] / "core/src/shardwright/models" / FILE
_OLDER = {"rope_theta": 10000.0, "rope_scaling": None}
"""Keys that classes with rope_parameters read from older files."""


def family_keys(family: Family) -> set[str]:
    """Return the keys of a family's files that mean something, those inside of its parts included."""
    runtime = family_named(family.model_type, "tests") if family.untrained is None else None
    own = CONFIG_MAPPING[family.model_type] if runtime is None else runtime.stock.config_class
    classes = [own, *(each for each in own.sub_configs.values() if "model_type" in vars(each))]
    if runtime is not None and "vision_config" in own.sub_configs:
        classes += [CONFIG_MAPPING[kind] for kind in getattr(runtime, "towers", TOWERS)]
    if hasattr(runtime, "text"):
        classes.append(runtime.text[0])
    return {key for each in classes for key in keys_of(each)}


def all_keys() -> tuple[set[str], set[str]]:
    """Return the keys of all classes of transformers, and those of them that are off in each class by default."""
    on, every = set[str](), set[str]()
    for config_class in config_classes():
        for key, default in _defaults(config_class).items():
            every.add(key)
            if default is MISSING or default:
                on.add(key)
    return every - NOTES, every - on - NOTES


def config_classes() -> Iterator[Any]:
    """Yield every configuration class of transformers."""
    for folder in sorted((Path(transformers.__file__).parent / "models").iterdir()):
        for file in sorted(folder.glob("configuration_*.py")):
            module = importlib.import_module(f"transformers.models.{folder.name}.{file.stem}")
            for each in vars(module).values():
                if inspect.isclass(each) and issubclass(each, PreTrainedConfig) and each.__module__ == module.__name__:
                    yield each


def _defaults(config_class: Any) -> dict[str, object]:
    """Return the keys that a class declares, with their defaults."""
    inside = [each for each in config_class.__mro__ if issubclass(each, PreTrainedConfig)]
    declared = {key for each in inside for key in inspect.get_annotations(each)}
    named = {key: getattr(config_class, key, MISSING) for key in (*declared, *config_class.attribute_map)}
    return named | (_OLDER if "rope_parameters" in named else {})


def content() -> dict[str, object]:
    """Return what the file holds."""
    families = {name: family_keys(family) for name, family in FAMILIES.items()}
    common = set.intersection(*families.values())
    every, off = all_keys()
    return {
        "transformers": transformers.__version__,
        "common": " ".join(sorted(common)),
        "families": {name: " ".join(sorted(keys - common)) for name, keys in families.items()},
        "others": " ".join(sorted(every - off - common)),
        "others_off": " ".join(sorted(off - common)),
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(content(), indent=1) + "\n")
