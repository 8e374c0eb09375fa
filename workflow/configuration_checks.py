"""Checks of a configuration: its shape, references between names, and known keys of models."""

import ast
import difflib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import msgspec

from configuration_types import DECIDED, RANDOM, Configuration, ModelChoice, Name, Run, Search, Validate, components
from shardwright.io import BadInput, has_controls, read_bytes, read_object, removed_key, without_ignored
from shardwright.models.description import stated_length
from shardwright.models.registry import read_presets
from shardwright_train.data.corpora import Source
from shardwright_train.data.split import LossOn
from strict_yaml import MAX_BYTES, Unusable, check_keys, mapping, texts

Section = Mapping[str, Any]
_NO_TEXT = (Source.IMAGES, Source.CAPTIONS, Source.SPEECH)
_Type = TypeVar("_Type")

_REFERENCES = (
    ("models", "profile", "profiles"),
    ("searches", "model", "models"),
    ("searches", "cluster", "clusters"),
    ("searches", "correction", "searches"),
    ("runs", "search", "searches"),
    ("runs", "data", "data"),
    ("runs", "valid_data", "data"),
)
"""Section, key, and the section of which the key's value names an entry."""
_REMOVED_VALUES = {"mlflow": "take wandb or tensorboard, or read metrics.jsonl"}
_ARTICLES = {"correction": "a correction", "imbalance": "an imbalance"}


def typed(config: Section, file: str) -> Configuration:
    """Return the configuration converted to its types; raise BadInput naming the place, such as `runs.demo.steps`."""
    checked: dict[str, object] = dict(config)
    for field in msgspec.structs.fields(Configuration):
        section = config.get(field.name)
        if field.type is Validate and section is not None:
            checked[field.name] = converted(section, Validate, field.name, file)
        elif isinstance(section, Mapping):
            _, kind = get_args(field.type)
            checked[field.name] = dict(_entry(field.name, name, entry, kind, file) for name, entry in section.items())
    return converted(checked, Configuration, "", file)


def _entry(section: str, name: object, entry: object, kind: type[_Type], file: str) -> tuple[str, _Type]:
    place = f"{section}.{name}"
    for key in (key for key in DECIDED.get(section, ()) if isinstance(entry, Mapping) and key in entry):
        raise BadInput(file, f"{place}.{key} cannot be set", f"leave it out: {DECIDED[section][key]}")
    if isinstance(entry, Mapping):
        entry = without_ignored(entry, getattr(kind, "REMOVED", {}))
    return converted(name, Name, place, file), converted(entry, kind, place, file)


def converted(value: object, kind: type[_Type], where: str, file: str) -> _Type:
    """Return a value converted to a type; raise BadInput naming the place inside the value, after `where`."""
    try:
        # The only type in a configuration that msgspec does not know is a path.
        return msgspec.convert(value, kind, dec_hook=lambda path, text: path(text))
    except msgspec.ValidationError as error:
        if (removed := removed_key(error, getattr(kind, "REMOVED", {}), file, f"{where}.")) is not None:
            raise removed from None
        problem, _, inside = str(error).partition(" - at `")
        inside = inside.removeprefix("$").rstrip("`")
    place = (where + re.sub(r"\[(\d+)\]", r".\1", inside)).strip(".")
    keys, values = _words(kind)
    if odd := re.fullmatch(r"Object contains unknown field `(.*)`", problem):
        known = keys if inside else kind.__struct_fields__  # type: ignore[attr-defined]
        _refuse_key(f"{place}.{odd[1]}".strip("."), odd[1], known, file)
    odd = re.fullmatch(r"Invalid enum value '(.*)'", problem)
    if odd and odd[1] in _REMOVED_VALUES:
        raise BadInput(file, f"{place}: {odd[1]} was removed", _REMOVED_VALUES[odd[1]])
    close = difflib.get_close_matches(odd[1], values, n=1) if odd else ()
    remedy = f"did you mean {close[0]}?" if close else "config/config.yaml shows every key and its values"
    raise BadInput(file, f"{place}: {problem}" if place else problem, remedy)


def _words(kind: type) -> tuple[list[str], list[str]]:
    """Return all keys and enumeration values of a type and of the types that it contains."""
    schemas = components(kind).values()
    keys, values = ([each for schema in schemas for each in schema.get(word, ())] for word in ("properties", "enum"))
    return keys, values


def check_references(config: Configuration, file: str) -> None:
    """Raise BadInput if a name does not exist, or a correction cannot be used."""
    for where, name, section in _references(config):
        known = getattr(config, section)
        if name not in known:
            raise BadInput(file, f"{where}: {name!r} is not defined under {section}", _hint(name, known))
    for path in config.pictures:
        if re.fullmatch(r"results/grids/[^/]*\.svg", str(path)):
            raise BadInput(file, f"pictures: {path}: grids have no picture any more", "leave it out; the table is .md")
    for name, search in config.searches.items():
        if search.correction is not None:
            _check_correction(name, search, config.searches, file)
        _check_order(config, (name,), file)


def _references(config: Configuration) -> Iterator[tuple[str, str, str]]:
    for section, key, target in _REFERENCES:
        for name, entry in getattr(config, section).items():
            referred = getattr(entry, key)
            if referred is not None and not (target == "data" and referred == RANDOM):
                yield f"{section}.{name}.{key}", referred, target
    for name, data in config.data.items():
        yield from ((f"data.{name}.blend", part, "data") for part in data.blend or ())
    for name, cluster in config.clusters.items():
        yield from ((f"clusters.{name}.nodes", node_type, "node_types") for node_type in cluster.node_types)
    yield from (("validate.searches", search, "searches") for search in config.validate.searches)


def _check_correction(name: str, search: Search, searches: Mapping[str, Search], file: str) -> None:
    """Raise BadInput if a correction is learned from a search of another model or cluster, with other profiles."""
    where, source = f"searches.{name}.correction", searches[str(search.correction)]
    for key in ("model", "cluster"):
        if getattr(source, key) != getattr(search, key):
            problem = f"{where}: {search.correction} uses another {key}, so its profiles differ"
            raise BadInput(file, problem, f"take a search of {getattr(search, key)}")


def _check_order(config: Configuration, passed: tuple[str, ...], file: str, first: str | None = None) -> None:
    """Raise BadInput if a search depends on itself, through corrections or through the run of its load.

    `passed`: the searches from the first one on, each needed by the one before it. `first`: the key by which the first
    of them needs the second.
    """
    for key, following in _needed(config, config.searches[passed[-1]]):
        if following in passed:
            problem = f"searches.{passed[0]}.{first or key}: {' needs '.join([*passed, following])}"
            raise BadInput(file, problem, f"learn from a search without {_ARTICLES[first or key]}")
        _check_order(config, (*passed, following), file, first or key)


def _needed(config: Configuration, search: Search) -> Iterator[tuple[str, str]]:
    """Yield the searches on which `search` directly depends, each after the key that causes it."""
    if search.correction is not None:
        yield "correction", search.correction
    if search.imbalance in config.runs:
        yield "imbalance", config.runs[str(search.imbalance)].search


def check_data(settings: Configuration, config: Section, file: str) -> None:
    """Raise BadInput for entries of `data`, and runs on them, that contradict themselves."""
    if RANDOM in settings.data:
        raise BadInput(file, f"data.{RANDOM}: the name is reserved for random samples", "choose another")
    for name, data in settings.data.items():
        if (data.blend is None) == (not data.text):
            raise BadInput(file, f"data.{name} needs either text or blend", "set one of them")
        if data.blend is not None:
            _check_blend(name, data.blend, settings, config["data"][name].keys(), file)
    for name, run in settings.runs.items():
        if run.valid_data == RANDOM:
            raise BadInput(file, f"runs.{name}.valid_data: random samples are not for evaluation", "choose other data")
        if run.loss_on is LossOn.COMPLETIONS:
            _check_completions(name, run, settings, file)
        if run.export == "best" and not run.keep_best:
            raise BadInput(file, f"runs.{name}.export: there is no best checkpoint", "set keep_best: true, too")


def _check_completions(name: str, run: Run, settings: Configuration, file: str) -> None:
    for entry in filter(None, (run.data, run.valid_data)):
        for part in () if entry == RANDOM else settings.data[entry].blend or (entry,):
            if settings.data[part].loss_on is not LossOn.COMPLETIONS:
                problem = f"runs.{name}.loss_on: data.{part} does not mark completions"
                raise BadInput(file, problem, f"set loss_on: completions of data.{part}, too")


def _check_blend(name: str, blend: Mapping[str, float], settings: Configuration, keys: Set[str], file: str) -> None:
    for key in keys - {"blend"}:
        raise BadInput(file, f"data.{name}.{key}: does not apply to a blend", "set it for its parts")
    if not blend:
        raise BadInput(file, f"data.{name}.blend names no data", "give each part its weight")
    for part in blend:
        if settings.data[part].blend is not None or settings.data[part].source in _NO_TEXT:
            raise BadInput(file, f"data.{name}.blend: {part} is not a text", "blend entries that have a text")


def read_preset(model: str, choice: ModelChoice, file: str) -> Section:
    """Return the `sequence_length` and the `config` of a model's preset or config.json; BadInput if it has none."""
    if choice.config is not None:
        path = _beside(Path(choice.config), Path(file).parent)
        path = path / "config.json" if path.is_dir() else path
        config, length = read_object(path), choice.sequence_length
        if not isinstance(config.get("model_type"), str):
            raise BadInput(path, "has no model_type", "give the config.json of a model")
        if (length := length or stated_length(config)) is None:
            problem = f"models.{model}.sequence_length: {path} does not state the sample length"
            raise BadInput(file, problem, "set it, in tokens")
        return {"sequence_length": length, "config": config}
    published = read_presets()
    if choice.preset not in published:
        problem = f"models.{model}.preset: {choice.preset!r} is not a preset"
        raise BadInput(file, problem, _hint(str(choice.preset), sorted(published)))
    preset = published[choice.preset]
    return {"sequence_length": preset.sequence_length, "config": preset.config}


def _beside(path: Path, folder: Path) -> Path:
    """Return a path; if it exists only next to the configuration, the path there."""
    return path if path.exists() or not (folder / path).exists() else folder / path


def check_model_keys(name: str, model: Section, preset: Section, file: str) -> None:
    """Raise BadInput for keys that neither the preset nor its family's configuration class has."""
    try:
        json.dumps(model, allow_nan=False)
    except (TypeError, ValueError):
        problem = f"models.{name} contains a value that JSON does not have"
        raise BadInput(file, problem, "write finite numbers, texts, lists and mappings") from None
    for key in sorted(model.keys() & preset.keys()):
        if not _is_alike(model[key], preset[key]):
            problem = f"models.{name}.{key} is {str(model[key])[:40]!r}, but the preset has {preset[key]!r}"
            raise BadInput(file, problem, "write a value of that kind")
    usual = {*preset, *ModelChoice.__struct_fields__}
    unknown = [key for key in model if key not in usual]
    fields, aliases = _config_class_keys(preset["model_type"]) if unknown else (set(), {})
    known = sorted(usual | fields)
    for key in unknown:
        if key in aliases:
            problem = f"models.{name}.{key} is called {aliases[key]} in a {preset['model_type']} configuration"
            raise BadInput(file, problem, f"write {aliases[key]}")
        if key not in known:
            _refuse_key(f"models.{name}.{key}", key, known, file)


def _is_alike(value: object, usual: object) -> bool:
    """Return whether a value may replace a default: same type; a number below 2^31, positive if the default is."""
    if value is None or usual is None:
        return True
    if isinstance(usual, bool) or not isinstance(usual, int | float):
        return type(value) is type(usual)
    if isinstance(value, bool) or not isinstance(value, int if isinstance(usual, int) else int | float):
        return False
    return value < 2**31 and (value > 0 or usual <= 0)


def _config_class_keys(model_type: str) -> tuple[set[str], dict[str, str]]:
    """Return the fields and the aliases of a Hugging Face configuration class, read from its source.

    The class is not imported: importing transformers would add seconds to every call of snakemake.
    """
    package = importlib.util.find_spec("transformers")
    origin = Path(package.origin).parent if package is not None and package.origin else Path()
    module = model_type.replace("-", "_")
    source = origin / "models" / module / f"configuration_{module}.py"
    if not source.is_file():
        return set(), {}
    fields: set[str] = set()
    aliases: dict[str, str] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                fields.add(item.target.id)
            elif isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "attribute_map":
                aliases |= ast.literal_eval(item.value)
    if "rope_parameters" in fields:  # what published files call its parts
        fields |= {"rope_theta", "rope_scaling"}
    return fields, aliases


def _refuse_key(where: str, key: str, known: Iterable[str], file: str) -> NoReturn:
    raise BadInput(file, f"{where} is not a known key", _hint(key, known))


def _hint(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"


# Strict reading of configuration files: no text may contain control characters.


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file whose outermost value is a mapping; raise BadInput naming a wrong line."""
    try:
        content = mapping(read_bytes(path, MAX_BYTES), path)
    except Unusable as error:
        raise BadInput(*error.args) from None
    check_texts(content, str(path))
    return content


def check_texts(content: object, file: str) -> None:
    """Raise BadInput naming the place of a key that is not text, or of text with control characters."""
    try:
        check_keys(content, file)
    except Unusable as error:
        raise BadInput(*error.args) from None
    for place, key, text in texts(content):
        if _is_odd(f"{key or ''}{text}"):
            raise BadInput(file, f"{place} contains a line break or another control character", "write it without")


def _is_odd(text: str) -> bool:
    return "\n" in text or "\t" in text or has_controls(text)
