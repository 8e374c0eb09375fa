"""Initial weights from a folder of config.json and safetensors; nothing outside the folder is read.

Its tensors are matched with the parameters of a plan's model; a rank reads only the parts of them that it holds.
Low-rank matrices come from a folder in peft's format, which is written here, too.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import UNSET
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

from shardwright.io import BadInput, check_regular, read_object, sha256_of_file, sha256_of_value, sync_path
from shardwright.models.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter
from shardwright.models.alike import QUANTIZED, read_configuration
from shardwright.models.alike import read_config as read_keys_of
from shardwright.models.config_keys import without_notes
from shardwright.models.low_rank import SECOND, adapter_config
from shardwright.models.mtp import DEPTHS_KEY, mtp_depth, without_mtp
from shardwright.plan.layout import Box
from shardwright.types import EMBEDDING, HEAD, LOW_RANK, Model, Parameter
from shardwright_train.checkpoints.tensors import read_tensors, saved_dtypes
from shardwright_train.models.base import Family
from shardwright_train.models.configuration import check_only
from shardwright_train.parallel.data import torch_dtype
from shardwright_train.parallel.world import World
from shardwright_train.weights.stored import (
    AGAIN,
    FLOATS,
    Pieces,
    Source,
    Stored,
    header,
    opened,
    piece_shape,
    row_ranges,
    source_of,
    stacked_shape,
    tensors_of_files,
    with_values,
)

# The low-rank matrices of a folder in peft's format (adapter_config.json and safetensors), read and written.


PREFIX = "base_model.model."
"""Prefix that peft adds to the stock model's names of modules."""
_FOR_ADAPTER = "describe the model with --lora from this folder, and plan for that"


class AdapterTensor(NamedTuple):
    """A low-rank matrix in a file, and the parameter that it fills."""

    stored: Stored
    parameter: Parameter

    def read(self, window: Tensor, box: Box) -> None:
        """Fill a tensor with the part `box` of the parameter; raise BadInput if the file has changed since."""
        with opened(self.stored.file, self.stored.key) as held:
            values = from_file(held.get_tensor(self.stored.key), self.parameter)
            window.copy_(values[tuple(slice(low, high) for low, high in box)])


def open_adapter(folder: Path, model: Model, family: Family) -> dict[str, AdapterTensor]:
    """Match the low-rank matrices of a folder with an adapted model's, by their full names.

    Raises BadInput in one line if names, shapes, formats or scaling differ from the model's description, or if the
    model was described with another file.
    """
    if model.low_rank is UNSET:
        raise BadInput(folder, "the plan's model has no low-rank matrices", _FOR_ADAPTER)
    if not (file := folder / ADAPTER_WEIGHTS).is_file():
        raise BadInput(folder, f"has no {ADAPTER_WEIGHTS}", "pass a folder that peft or `convert` wrote")
    _check_adapter(folder, model)
    stored, found = header(file), dict[str, AdapterTensor]()
    for name, parameter in low_rank_parameters(model, family):
        if (tensor := stored.pop(f"{PREFIX}{name}", None)) is None:
            raise BadInput(file, f"{PREFIX}{name} is missing, but the plan's model trains it", _FOR_ADAPTER)
        shape = tuple(as_in_file(torch.empty(parameter.shape, device="meta"), parameter).shape)
        if tensor.shape != shape or tensor.dtype not in FLOATS:
            held, wanted = f"{list(tensor.shape)} of {tensor.dtype}", f"{list(shape)} of {', '.join(FLOATS)}"
            raise BadInput(file, f"{tensor.key} is {held}, but the plan's model has {wanted}", _FOR_ADAPTER)
        found[name] = AdapterTensor(tensor, parameter)
    others = [key for key in stored if not family.may_lack(model, key.removeprefix(PREFIX))]
    if others:
        raise BadInput(file, f"{others[0]} is not a parameter that the plan's model trains", _FOR_ADAPTER)
    return found


def _check_adapter(folder: Path, model: Model) -> None:
    """Raise BadInput if an adapter's scaling or weights differ from those the model was described with."""
    (given, *_), file, wanted = *read_adapter(folder), model.low_rank
    assert wanted is not UNSET
    kept = {name: getattr(wanted, name) for name in ("targets", "starts_at_zero", "alphas")}
    if wanted.weights_sha256 not in (UNSET, given.weights_sha256):
        raise BadInput(folder / ADAPTER_WEIGHTS, "is not the adapter that the model was described with", _FOR_ADAPTER)
    if replace(given, **kept, weights_sha256=wanted.weights_sha256) != wanted:
        raise BadInput(file, "r, lora_alpha or use_rslora differs from the plan's model", _FOR_ADAPTER)


def low_rank_parameters(model: Model, family: Family) -> Iterator[tuple[str, Parameter]]:
    """Yield all low-rank matrices by their full names."""
    for layer in (EMBEDDING, *(f"layers[{number}]" for number in range(len(model.layers))), HEAD):
        for parameter in model.type_of(layer).parameters:
            if LOW_RANK in parameter.name:
                yield family.full_name(model, layer, parameter.name), parameter


def as_in_file(values: Tensor, parameter: Parameter) -> Tensor:
    """Return a low-rank matrix in peft's form: [rows, columns], with all experts' matrices in one.

    For experts A is [experts x rank, inputs] and B is [outputs, rank x experts].
    """
    if parameter.ep_dim is not UNSET and parameter.name.endswith(SECOND):
        return values.flatten(1, -2).permute(1, 2, 0).flatten(1)
    return values.flatten(0, -2)


def from_file(values: Tensor, parameter: Parameter) -> Tensor:
    """Return a low-rank matrix from peft's form in the described shape."""
    if parameter.ep_dim is not UNSET and parameter.name.endswith(SECOND):
        experts, *_, rank = parameter.shape
        values = values.unflatten(1, (rank, experts)).permute(2, 0, 1)
    return values.reshape(parameter.shape)


def write_adapter(folder: Path, checkpoint: Path, model: Model, family: Family, dtype: str | None) -> None:
    """Write the low-rank matrices of a checkpoint into a folder, in format `dtype`; None: the format that was saved."""
    config = adapter_config(model)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    saved, parameters = saved_dtypes(checkpoint), dict(low_rank_parameters(model, family))
    tensors = {
        name: torch.empty(parameter.shape, dtype=saved[name] if dtype is None else torch_dtype(dtype))
        for name, parameter in parameters.items()
    }
    read_tensors(checkpoint, dict(tensors))
    in_files = {f"{PREFIX}{name}": as_in_file(x, parameters[name]).contiguous() for name, x in tensors.items()}
    save_file(in_files, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    shutil.copymode(
        folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    )  # safetensors leaves it readable only for its owner
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        sync_path(folder / name)


# The folder of a whole model.


CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")
_MAX_FILE = 2**60
_SHOWN = 8
_FREE = re.compile(r"(initializer|summary|pooler|output)_.*|.*_token_id|use_cache|pretraining_tp|.*dropout.*")
"""Keys of a configuration that do not affect what the weights compute."""
_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older files of transformers hold in addition to parameters."""
_REMEDY = "describe the model from this folder and plan for that"
_Slices = tuple[slice | int, ...]


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder; raise BadInput if it is missing. Code that it names is not run."""
    if not folder.is_dir():
        raise BadInput(folder, "is not a folder", "pass one with config.json and safetensors files")
    return read_configuration(inside(folder, CONFIG))


def refuse_code(file: Path, content: Mapping[str, Any]) -> None:
    """Raise BadInput if a tokenizer's configuration names code that comes with it."""
    if "auto_map" in content:
        problem = "auto_map names code that comes with the folder, which is not run here"
        raise BadInput(file, problem, "use a tokenizer built into transformers")


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a folder by key, from one file or from the files in its index, without reading any.

    Raises BadInput naming a file that is missing, lies outside, is not a valid safetensors file, or has no such key.
    """
    if (folder / SINGLE).exists():
        return header(inside(folder, SINGLE))
    if not (folder / INDEX).exists():
        problem = f"has neither {SINGLE} nor {INDEX}"
        raise BadInput(folder, problem, "save the model with safetensors: pickled weights are not read")
    index = inside(folder, INDEX)
    named = _weight_map(index)
    headers = {name: header(inside(folder, name)) for name in sorted(set(named.values()))}
    if absent := [key for key, name in named.items() if key not in headers[name]]:
        raise BadInput(index, f"maps {absent[0]} to {named[absent[0]]}, which does not contain it", AGAIN)
    return {key: headers[name][key] for key, name in named.items()}


def inside(folder: Path, name: str) -> Path:
    """Return a file of a folder; raise BadInput if it is not a regular file, or if it is a link out of the folder.

    The Hub's own cache may link to its blobs: `snapshots/REVISION/FILE` to `blobs/`, two folders up.
    """
    home = folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    file = folder / name
    try:
        target = file.resolve(strict=True)
    except (OSError, RuntimeError):
        raise BadInput(file, "does not exist", AGAIN) from None
    if target.parent not in (home, blobs):
        raise BadInput(file, "is a link out of its folder", "put the file itself there")
    check_regular(target, _MAX_FILE)
    return file


def listed(names: Iterable[str]) -> str:
    """Return names in one line; if there are many, only the first few, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def _weight_map(index: Path) -> dict[str, str]:
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise BadInput(index, "has no weight_map from tensors to files", AGAIN)
    for key, name in files.items():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise BadInput(index, f"puts {key} in {name!r}, which is not a safetensors file of its folder", AGAIN)
    return files


@dataclass(frozen=True)
class Weights:
    """A folder's tensors, by the stock model's names of parameters, with which a run begins."""

    tensors: Mapping[str, tuple[Stored, ...]]
    """Tensors by parameter; a tied parameter has all tensors that the folder contains for it."""
    pieces: Mapping[str, Pieces]
    """Experts' parameters that the folder stores in pieces."""
    aliases: Mapping[str, str]
    """Tied names, each with the name of the parameter that it equals."""
    new: tuple[str, ...]
    """Parameters of the head, and of layers that predict further tokens, that the folder does not have."""
    surplus: tuple[str, ...]
    """Keys of the folder that the model does not use."""
    adapter: Mapping[str, AdapterTensor]
    """Low-rank matrices of a trained adapter, by their full names; empty if they are drawn."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files from which parameters are read, in the order of their names."""
        of_scales = {stored.scales.file for stored in self._all if stored.scales is not None}
        return tuple(sorted({stored.file for stored in self._all} | of_scales))

    @property
    def _all(self) -> Iterator[Stored]:
        held = (pieces.tensors.values() for pieces in self.pieces.values())
        return chain(*self.tensors.values(), *held, (each.stored for each in self.adapter.values()))

    def notes(self, kept_in: str) -> list[str]:
        """Return messages for the user: newly drawn parameters, ignored keys, and a change to format `kept_in`."""
        dtypes = {FLOATS[each.dtype] if each.scales is None else each.scales.format for each in self._all}
        notes = [f"newly initialized: {listed(self.new)}"] if self.new else []
        notes += [f"not used: {listed(self.surplus)}"] if self.surplus else []
        return notes + ([f"stored in {listed(dtypes)}, kept in {kept_in}"] if dtypes - {kept_in} else [])

    def read(self, window: Tensor, name: str, shape: Sequence[int], box: Box) -> bool:
        """Fill a tensor with the block `box` of a parameter with a `shape`; return False if it must be drawn.

        Raises BadInput if the file has changed since, or contains two different values of a tied parameter.
        """
        if (held := self.pieces.get(name) or self.adapter.get(name)) is not None:
            held.read(window, box)
            return True
        first, *others = self.tensors.get(self.aliases.get(name, name), (None,))
        if first is None:
            return False
        _read(first, window, shape, box)
        for other in others:
            other_window = torch.empty_like(window)
            _read(other, other_window, shape, box)
            if not torch.equal(other_window, window):
                problem = f"{other.key} differs from {first.key}, but the model ties them"
                remedy = "describe the model with tie_word_embeddings false, if it can be so"
                raise BadInput(other.file, problem, remedy)
        return True

    def sha256(self, world: World) -> str:
        """Return a hash of the files, which the ranks compute together."""
        files = self.files
        share = files[world.rank :: world.size]
        hashes = world.together(lambda: {file.name: sha256_of_file(file) for file in share})
        parts = world.all_say(hashes, dict[str, str])
        return sha256_of_value({name: digest for part in parts for name, digest in part.items()})


def open_weights(folder: Path, model: Model, family: Family, allow_new: bool, adapter: Path | None = None) -> Weights:
    """Match a folder, and a trained `adapter`, with a plan's model.

    `allow_new`: whether parameters of the head, and of layers that predict further tokens, may be missing. Raises
    BadInput in one line for a configuration or a shape that differs from the model, for other missing parameters, and
    for surplus parameters inside blocks.
    """
    config = read_config(folder)
    _check_configuration(folder / CONFIG, config, model, family)
    stock: Any = family.stock_model(model)
    shapes = {name: tuple(x.shape) for name, x in stock.state_dict().items()}
    aliases: dict[str, str] = dict(stock.all_tied_weights_keys)
    copies = family.copies(model)
    shapes |= {name: shapes[owner] for name, owner in copies.items()}
    aliases |= {name: aliases.get(owner, owner) for name, owner in copies.items()}
    matches: dict[str, tuple[Stored, ...]] = {}
    surplus: list[str] = []
    renamings, converters = _by_kind(get_model_conversion_mapping(stock))
    pieces: dict[str, Pieces] = {}
    held = tensors_of_files(family, shapes)
    file_shapes = {name: stacked_shape(parts.values()) for name, parts in held.items()}
    for key, stored in with_values(folder / CONFIG, config.get(QUANTIZED), stored_tensors(folder)).items():
        # A file may be older than transformers, or contain the base model without a head.
        name, pattern = rename_source_key(key, renamings, converters, stock.base_model_prefix, file_shapes)
        source = source_of(pattern, converters)
        if name in held and source is not None and (place := source.place(key)) is not None:
            _check_form(stored, piece_shape(shapes[name], source))
            pieces.setdefault(name, Pieces(shapes[name], source, {})).tensors[place] = stored
        elif name in held:
            _check_form(stored, file_shapes[name])
            for parameter, rows in _rows_of(stored, held[name]):
                tied = aliases.get(parameter, parameter)
                matches[tied] = (*matches.get(tied, ()), rows)
        elif family.may_lack(model, name) or not _is_buffer(name, stock):
            surplus.append(name)
    blocks = tuple(f"{parts.path}." for parts in family.parts.values())
    if inner := [name for name in surplus if name.startswith(blocks) and not family.may_lack(model, name)]:
        raise BadInput(folder, f"has tensors that the model's blocks do not: {listed(inner)}", _REMEDY)
    drawn = (HEAD, *(f"layers[{i}]" for i, kind in enumerate(model.layers) if mtp_depth(kind)))
    head = {family.hugging_face_name(model, each, p) for each in drawn for p in family.parameter_names(model, each)}
    for name, stored_name in stored_names(stock, tuple(pieces)).items():
        if (problem := pieces[name].wrong(name, stored_name, is_whole=name in matches)) is not None:
            raise BadInput(folder, problem, _REMEDY)
    new = _missing(folder, set(shapes) - set(aliases) - set(matches) - set(pieces), head, allow_new)
    trained = {} if adapter is None else open_adapter(adapter, model, family)
    return Weights(matches, pieces, aliases, new, tuple(sorted(surplus)), trained)


def stored_names(stock: Any, names: Sequence[str]) -> dict[str, str]:
    """Return the names under which transformers now stores parameters of a stock model, by the parameters' names."""
    mapping = get_model_conversion_mapping(stock, add_legacy=False)[::-1]
    # A prefix that some files have is no part of the names.
    transforms = [t.reverse_transform() for t in mapping if not isinstance(t, PrefixChange)]
    renamings, converters = _by_kind(transforms)
    return {name: rename_source_key(name, renamings, converters, reverse=True)[0] for name in names}


def source_of_name(stock: Any, name: str) -> Source | None:
    """Return the first matrix, in files, of each expert of a parameter; None if files store the parameter whole."""
    _, converters = _by_kind(get_model_conversion_mapping(stock, add_legacy=False))
    patterns = (c.source_patterns[0] for c in converters if any(map(name.endswith, c.target_patterns)))
    return source_of(next(patterns, None), converters)


def _by_kind(transforms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    return renamings, [one for one in transforms if isinstance(one, WeightConverter)]


def _is_buffer(name: str, stock: Any) -> bool:
    patterns = (*_BUFFERS, *(stock._keys_to_ignore_on_load_unexpected or ()))
    return any(re.search(pattern, name) for pattern in patterns)


def _rows_of(stored: Stored, parameters: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Stored]]:
    """Yield the parameters in a tensor of a file, each with its rows."""
    if len(parameters) == 1:
        yield next(iter(parameters)), stored
        return
    for name, begin, _ in row_ranges(parameters):
        yield name, stored._replace(shape=parameters[name], first=begin)


def _check_form(stored: Stored, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        problem = f"{stored.key} has the shape {list(stored.shape)}, the model's is {list(shape)}"
        raise BadInput(stored.file, problem, _REMEDY)
    if stored.dtype not in FLOATS and stored.scales is None:
        problem = f"{stored.key} is stored as {stored.dtype}, which cannot be trained"
        raise BadInput(stored.file, problem, f"store it as one of {', '.join(FLOATS)}")


def _missing(folder: Path, missing: set[str], head: set[str], allow_new: bool) -> tuple[str, ...]:
    if missing - head:
        raise BadInput(folder, f"lacks {listed(missing - head)}", "fetch the whole model, or its own configuration")
    if missing and not allow_new:
        problem = f"lacks {listed(missing)} of the model's head, or of layers that predict further tokens"
        raise BadInput(folder, problem, "use a folder that has them, or initialize them with --new-weights")
    return tuple(sorted(missing))


def _check_configuration(file: Path, config: Mapping[str, Any], model: Model, family: Family) -> None:
    """Raise BadInput if a config.json differs from the model in anything that its weights depend on."""
    config = config if model.is_traced else read_keys_of(config, file).config
    if (kind := config["model_type"]) != family.facts.model_type:
        raise BadInput(file, f"model_type is {kind!r}, but the plan's model is a {family.facts.model_type}", _REMEDY)
    try:
        if not model.is_traced:
            config, _ = without_notes(family.facts, config)
            check_only(config, family.facts)
        main = replace(model, layers=without_mtp(model.layers))
        given, wanted = family.configured(config).to_dict(), family.configuration(main).to_dict()
    except ValueError as error:
        raise BadInput(file, str(error), "correct the configuration") from None
    free = set(PreTrainedConfig().to_dict()) | {*family.facts.keys.ignored, *family.facts.dropouts.keys, DEPTHS_KEY}
    for key in sorted(set(given) | set(wanted)):
        if given.get(key) != wanted.get(key) and key not in free and not _FREE.fullmatch(key):
            raise BadInput(file, f"{key} is {given.get(key)}, but {wanted.get(key)} in the plan's model", _REMEDY)


def _read(stored: Stored, window: Tensor, shape: Sequence[int], box: Box) -> None:
    if not window.numel():
        return
    with opened(stored.file, stored.key) as held:
        for place, part in _parts(tuple(shape), stored.shape, box):
            window[place].copy_(stored.part(held, _moved(part, stored.first)))


def _moved(part: tuple[slice, ...], rows: int) -> tuple[slice, ...]:
    """Return slices of a tensor, shifted by the offset of its rows."""
    return (slice(part[0].start + rows, part[0].stop + rows), *part[1:]) if rows else part


def _parts(shape: tuple[int, ...], stored: tuple[int, ...], box: Box) -> Iterator[tuple[_Slices, tuple[slice, ...]]]:
    """Yield slices of a window and of a stored tensor for the parts of a box: one for each of the fused matrices."""
    ranges = tuple(slice(low, high) for low, high in box)
    if shape == stored:
        yield (...,), ranges  # type: ignore[misc]
        return
    dim = next(i for i, (size, length) in enumerate(zip(shape, stored, strict=False)) if size != length)
    width, (low, high) = shape[dim + 1], box[dim + 1]
    for place, number in enumerate(range(*box[dim])):
        columns = slice(number * width + low, number * width + high)
        yield (*(slice(None),) * dim, place), (*ranges[:dim], columns, *ranges[dim + 2 :])
