"""The mapping of a folder's tensors to the parameters of a plan's model, and the check that both models agree."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from shardwright_formats.io import BadInput
from shardwright_formats.types import HEAD, Model
from shardwright_train.models.base import Family
from shardwright_train.weights.folder import CONFIG, Stored, listed, read_config, stored_tensors

_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FREE = re.compile(
    r"(initializer|summary|pooler|output)_.*|.*_token_id|use_cache|pretraining_tp|layer_types|.*dropout.*"
)
"""Keys of a configuration that say nothing about what its weights compute."""
_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older files of transformers hold in addition to parameters."""
_REMEDY = "describe the model from this folder and plan for that"


@dataclass(frozen=True)
class Agreement:
    """A folder's tensors under the names that the stock model has for its parameters."""

    tensors: Mapping[str, tuple[Stored, ...]]
    """Tensors by parameter; a tied parameter has every one that the folder holds of it."""
    aliases: Mapping[str, str]
    """Tied names, each with the name of the parameter that it equals."""
    new: tuple[str, ...]
    """Parameters of the head that the folder lacks."""
    surplus: tuple[str, ...]
    """Keys of the folder that the model does not use."""

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that parameters are read from, in the order of their names."""
        return tuple(sorted({stored.file for stored in chain.from_iterable(self.tensors.values())}))

    def notes(self, kept_in: str) -> list[str]:
        """Return messages for the user: parameters drawn anew, ignored keys, and a change of format."""
        found = {_FLOATS[stored.dtype] for stored in chain.from_iterable(self.tensors.values())}
        said = []
        if self.new:
            said.append(f"drawn anew: {listed(self.new)}")
        if self.surplus:
            said.append(f"not used: {listed(self.surplus)}")
        if found - {kept_in}:
            said.append(f"stored in {listed(found)}, kept in {kept_in}")
        return said


def agree(folder: Path, model: Model, family: Family, allow_new: bool) -> Agreement:
    """Match a folder with a plan's model; `allow_new` lets parameters of the head be missing.

    Raises BadInput in one line for a configuration or a shape that is not the model's, for parameters that are missing,
    and for surplus ones inside its blocks.
    """
    _check_configuration(folder / CONFIG, read_config(folder), model, family)
    stock: Any = family.stock_model(model)
    shapes = {name: tuple(x.shape) for name, x in stock.state_dict().items()}
    aliases: dict[str, str] = dict(stock.all_tied_weights_keys)
    found: dict[str, tuple[Stored, ...]] = {}
    surplus: list[str] = []
    transforms = _by_kind(get_model_conversion_mapping(stock))
    for key, stored in stored_tensors(folder).items():
        # A file may be older than transformers, or of the base model without a head.
        name, _ = rename_source_key(key, *transforms, stock.base_model_prefix, shapes)
        if name in shapes:
            _check_form(stored, shapes[name])
            own = aliases.get(name, name)
            found[own] = (*found.get(own, ()), stored)
        elif not _is_buffer(name, stock):
            surplus.append(name)
    if inner := [name for name in surplus if any(name.startswith(f"{parts.path}.") for parts in family.parts.values())]:
        raise BadInput(folder, f"has what the model's blocks lack: {listed(inner)}", _REMEDY)
    new = _missing(folder, set(shapes) - set(aliases) - set(found), _of_head(model, family), allow_new)
    return Agreement(found, aliases, new, tuple(sorted(surplus)))


def stored_names(stock: Any, names: Sequence[str]) -> dict[str, str]:
    """Return the names under which transformers now stores parameters of a stock model."""
    transforms = [t.reverse_transform() for t in get_model_conversion_mapping(stock, add_legacy=False)[::-1]]
    renamings, converters = _by_kind(transforms)
    return {name: rename_source_key(name, renamings, converters, reverse=True)[0] for name in names}


def _by_kind(transforms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    return renamings, [one for one in transforms if isinstance(one, WeightConverter)]


def _is_buffer(name: str, stock: Any) -> bool:
    patterns = (*_BUFFERS, *(stock._keys_to_ignore_on_load_unexpected or ()))
    return any(re.search(pattern, name) for pattern in patterns)


def _check_form(stored: Stored, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        what = f"{stored.key} has the shape {list(stored.shape)}, the model's is {list(shape)}"
        raise BadInput(stored.file, what, _REMEDY)
    if stored.dtype not in _FLOATS:
        what = f"{stored.key} is stored as {stored.dtype}, which is not trained"
        raise BadInput(stored.file, what, f"store it as one of {', '.join(_FLOATS)}")


def _missing(folder: Path, missing: set[str], head: set[str], allow_new: bool) -> tuple[str, ...]:
    if missing - head:
        raise BadInput(folder, f"lacks {listed(missing - head)}", "fetch the whole model, or its own configuration")
    if missing and not allow_new:
        what = f"lacks {listed(missing)} of the model's head"
        raise BadInput(folder, what, "take a folder that has them, or let them be drawn anew with --new-weights")
    return tuple(sorted(missing))


def _of_head(model: Model, family: Family) -> set[str]:
    return {family.hugging_face_name(model, HEAD, name) for name in family.parameter_names(model, HEAD)}


def _check_configuration(file: Path, config: Mapping[str, Any], model: Model, family: Family) -> None:
    """Raise BadInput where a config.json is not that of the model, in anything that its weights are used for."""
    if (kind := config.get("model_type")) != family.facts.model_type:
        raise BadInput(file, f"model_type is {kind!r}, the plan's model is a {family.facts.model_type}", _REMEDY)
    try:
        found, wanted = family.configured(config).to_dict(), family.configuration(model).to_dict()
    except ValueError as error:
        raise BadInput(file, str(error), "correct the configuration") from None
    free = set(PreTrainedConfig().to_dict()) | {*family.facts.ignored, *family.facts.dropouts.keys}
    for key in sorted(set(found) | set(wanted)):
        if found.get(key) != wanted.get(key) and key not in free and not _FREE.fullmatch(key):
            raise BadInput(file, f"{key} is {found.get(key)}, of the plan's model {wanted.get(key)}", _REMEDY)
