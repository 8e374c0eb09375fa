"""Export of a checkpoint's model as a folder for transformers: all or nothing, with one file in memory at a time."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from msgspec import UNSET
from safetensors.torch import save_file
from torch import Tensor

from shardwright.io import BadInput, read_document, read_object, sync_path, system_fault
from shardwright.models.mtp import DEPTHS_KEY, FINAL_NORM, mtp_layers, without_mtp
from shardwright.types import EMBEDDING, GIB, HEAD, Model, Plan, RunResult
from shardwright_train.checkpoints.choice import check_files, read_record
from shardwright_train.checkpoints.folders import identity_of
from shardwright_train.checkpoints.tensors import read_tensors, saved_dtypes
from shardwright_train.data.tokenizer import SETTINGS, TOKENIZER, end_of, read_tokenizer, rows_of
from shardwright_train.models.base import Family, family_of
from shardwright_train.models.configuration import keys_of
from shardwright_train.options import ConvertOptions
from shardwright_train.parallel.data import torch_dtype
from shardwright_train.weights.reading import (
    CONFIG,
    INDEX,
    inside,
    read_config,
    refuse_code,
    source_of_name,
    stored_names,
    write_adapter,
)
from shardwright_train.weights.stored import (
    Source,
    key_of,
    piece_shape,
    places,
    row_ranges,
    stacked_shape,
    tensors_of_files,
)

_COPIED = (
    *("generation_config.json", "preprocessor_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *(TOKENIZER, "vocab.json", "added_tokens.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja"),
)
"""Files copied along with a model's weights."""
_SETTINGS = SETTINGS[1]
_LABELS = ("id2label", "label2id")
_FORMATS = ("dtype", "torch_dtype")


class _Exported(NamedTuple):
    """A tensor of an exported file: its name, its shape, and the parameters whose rows it contains, in order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    saved_shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the parameters in the checkpoint, by their names there."""
    rows: Mapping[str, tuple[int, ...]]
    """Shapes of the parameters in the file, by the same names."""
    place: tuple[int, ...] = ()
    """Indices in the saved shape of the tensor's only parameter if the tensor is a piece of it; otherwise empty."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor's values."""
        return prod(self.shape) * self.dtype.itemsize

    def windows(self, values: Tensor) -> dict[str, Tensor]:
        """Return the parts of the tensor that its parameters fill, by their names in the checkpoint."""
        parts = {name: values[begin:end] for name, begin, end in row_ranges(self.rows)} if len(self.rows) > 1 else {}
        return {name: parts.get(name, values).view(shape) for name, shape in self.saved_shapes.items()}


def export(options: ConvertOptions) -> None:
    """Write the requested folder.

    Raises BadInput if the checkpoint is damaged or belongs to another model, or if the folder already exists.
    """
    plan = read_document(options.plan, Plan)
    family = family_of(plan.model, options.plan)
    checkpoint = _checkpoint(_folder(options.checkpoint, best=options.best), plan.model)
    if plan.model.low_rank is not UNSET:
        with _complete_or_none(options.out) as folder:
            write_adapter(folder, checkpoint, plan.model, family, options.dtype)
        return
    copied = () if options.copy_from is None else tuple(_to_copy(options.copy_from, plan.model, family))
    asked = None if options.dtype is None else torch_dtype(options.dtype)
    parameters = tuple(_parameters(plan.model, family, saved_dtypes(checkpoint), asked))
    end = None if options.copy_from is None else end_of(options.copy_from)
    config = _config(plan.model, family, options.copy_from, parameters[0].dtype) | _ends(plan.model, end)
    with _complete_or_none(options.out) as folder:
        _write_json(folder / CONFIG, config)
        _write_tensors(folder, checkpoint, parameters, int(options.file_gib * GIB))
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        if end is not None and not (folder / _SETTINGS).exists():
            _write_json(folder / _SETTINGS, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end[0]})


def _folder(given: Path, *, best: bool) -> Path:
    """Return the requested checkpoint: the given one, or a run's last or best."""
    if not given.is_file():
        if best:
            raise BadInput(given, "--best needs a run, not a checkpoint", "pass the run's DONE.json")
        return given
    done = read_document(given, RunResult)
    if not best:
        return Path(done.checkpoint)
    if done.best is None:
        raise BadInput(given, "records no best checkpoint", "train with --keep-best, or leave out --best")
    return Path(done.best.checkpoint)


def _checkpoint(checkpoint: Path, model: Model) -> Path:
    record = read_record(checkpoint)
    if record.identity.model_sha256 != identity_of(model):
        raise BadInput(checkpoint, "was saved under another model than the plan's", "pass a plan for the same model")
    check_files(checkpoint, record, range(len(record.files)))
    return checkpoint


def _parameters(
    model: Model, family: Family, dtypes: Mapping[str, torch.dtype], asked: torch.dtype | None
) -> Iterator[_Exported]:
    """Yield the parameters of the stock model, each once: of tied parameters and replicas only the first."""
    stock: Any = family.stock_model(model)
    saved_as: dict[str, tuple[str, tuple[int, ...]]] = {}
    buffers = set[str]()
    kinds = {EMBEDDING: EMBEDDING, **{f"layers[{i}]": kind for i, kind in enumerate(model.layers)}, HEAD: HEAD}
    for layer, kind in kinds.items():
        shapes = {parameter.name: parameter.shape for parameter in model.types[kind].parameters}
        held_whole = {parameter.name for parameter in model.types[kind].parameters if parameter.is_buffer}
        buffers |= {family.hugging_face_name(model, layer, name) for name in held_whole}
        for local in family.parameter_names(model, layer):
            saved = family.full_name(model, layer, local), shapes[family.described_name(kind, local)]
            saved_as.setdefault(family.hugging_face_name(model, layer, local), saved)
    kept = [name for name in saved_as if name not in stock.all_tied_weights_keys]
    held = tensors_of_files(family, {name: tuple(stock.get_parameter(name).shape) for name in kept})
    exported = dict[str, _Exported]()
    for name, file_name in stored_names(stock, tuple(held)).items():
        shapes = {saved_as[parameter][0]: shape for parameter, shape in held[name].items()}
        dtype = dtypes[next(iter(shapes))] if asked is None else asked
        dtype = torch.promote_types(dtype, torch.float32) if name in buffers else dtype
        saved_shapes = dict(saved_as[parameter] for parameter in held[name])
        whole = _Exported(file_name, stacked_shape(shapes.values()), dtype, saved_shapes, shapes)
        exported[name] = whole
        yield from _pieces(whole, source_of_name(stock, name))
    # Like published files, with the copies in layers that predict further tokens.
    for name, owner in family.copies(model).items():
        if f".{FINAL_NORM}." not in name:
            yield exported[stock.all_tied_weights_keys.get(owner, owner)]._replace(name=name)


def _pieces(whole: _Exported, source: Source | None) -> Iterator[_Exported]:
    """Yield a tensor, or the pieces that files store in its place: one for each expert and matrix."""
    if source is None:
        yield whole
        return
    alone, shape = len(source.patterns) == 1, piece_shape(whole.shape, source)
    for place in places(whole.shape, source):
        name = key_of(whole.name, source, place)
        yield whole._replace(name=name, shape=shape, place=(place.expert,) if alone else tuple(place))


def _write_tensors(folder: Path, checkpoint: Path, parameters: Sequence[_Exported], max_bytes: int) -> None:
    by_name = {one.name: one for one in parameters}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda one: one.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        part = [by_name[name] for name in names]
        tensors = {one.name: torch.empty(one.shape, dtype=one.dtype) for one in part if not one.place}
        windows = [one.windows(tensors[one.name]) for one in part if not one.place]
        wholes = {
            name: torch.empty(shape, dtype=one.dtype)
            for one in part
            if one.place
            for name, shape in one.saved_shapes.items()
        }
        _read(checkpoint, (*windows, wholes))
        tensors |= {one.name: wholes[next(iter(one.saved_shapes))][one.place] for one in part if one.place}
        save_file(tensors, folder / file, {"format": "pt"})
        shutil.copymode(folder / CONFIG, folder / file)  # safetensors leaves it readable only for its owner
        sync_path(folder / file)
    if split.is_sharded:
        _write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _read(checkpoint: Path, windows: Sequence[Mapping[str, Tensor]]) -> None:
    """Fill windows by the names of checkpoint tensors; one tensor may fill several windows."""
    first: dict[str, Tensor] = {}
    pairs = [(first.setdefault(name, window), window) for each in windows for name, window in each.items()]
    read_tensors(checkpoint, first)
    for filled, window in pairs:
        if filled is not window:
            window.copy_(filled)


def _config(model: Model, family: Family, copy_from: Path | None, dtype: torch.dtype) -> dict[str, Any]:
    """Return the configuration for from_pretrained: the description's configuration plus missing entries."""
    labels: dict[str, Any] = {}
    if copy_from is not None and (copy_from / CONFIG).is_file():
        labels = {key: value for key, value in read_config(copy_from).items() if key in _LABELS}
    kept = {key: value for key, value in model.config.items() if key not in _FORMATS}
    named = {"architectures": [family.facts.stock.architecture or family.stock.__name__], "model_type": model.family}
    counted = family.facts.counted(without_mtp(model.layers), model.config)
    if DEPTHS_KEY in keys_of(family.stock.config_class):
        counted[DEPTHS_KEY] = mtp_layers(model.layers)
    return {**kept, **counted, **labels, **named, "dtype": str(dtype).removeprefix("torch.")}


def _ends(model: Model, end: tuple[str, int] | None) -> dict[str, int]:
    """Return an entry for the tokenizer's end-of-text token if the model's own entry does not contain it."""
    known = model.config.get("eos_token_id")
    if end is None or end[1] in (known if isinstance(known, list) else [known]):
        return {}
    return {"eos_token_id": end[1]}


def _to_copy(folder: Path, model: Model, family: Family) -> Iterator[Path]:
    rows = getattr(family.configuration(model), "vocab_size", 0)
    for name in _COPIED:
        if (folder / name).exists():
            file = inside(folder, name)
            if name.endswith("_config.json"):
                refuse_code(file, read_object(file, any_text=True))
            if name == TOKENIZER and (tokens := rows_of(read_tokenizer(file))) > rows:
                raise BadInput(
                    file, f"has {tokens} tokens, but the model has {rows}", "pass the folder of the model's tokenizer"
                )
            yield file


@contextmanager
def _complete_or_none(out: Path) -> Iterator[Path]:
    """Yield a folder that gets its final name once it is complete."""
    if out.exists():
        raise BadInput(out, "already exists", "choose another --out, or remove it")
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(out)
        sync_path(out.parent)
    except OSError as error:
        raise system_fault(error, out) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
    sync_path(file)
