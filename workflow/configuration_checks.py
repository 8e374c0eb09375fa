"""What a configuration must hold: its shape, names that refer to one another, and keys that models know."""

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from jsonschema.exceptions import best_match

__all__ = [
    "ANALYTIC",
    "OWN_MODEL_KEYS",
    "ConfigurationError",
    "Section",
    "check_model_keys",
    "check_references",
    "check_shape",
    "read_preset",
    "read_yaml",
]

Section = Mapping[str, Any]

ANALYTIC = "analytic"
"""The source of what is estimated, not measured."""
OWN_MODEL_KEYS = ("preset", "profile", "sequence_length")
"""Keys of a model that are not its family's."""


class ConfigurationError(Exception):
    """Something in the configuration that cannot be used: where, what, and what to do, in one line."""

    def __init__(self, file: object, what: str, remedy: str) -> None:
        super().__init__(" ".join(f"{file}: {what}: {remedy}".split()))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose outermost value is a mapping; raises ConfigurationError with the line."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(path, error.strerror or str(error), "check the path") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigurationError(path, f"not valid YAML{where} ({problem})", "correct the file") from None
    if not isinstance(content, dict):
        raise ConfigurationError(path, "holds no keys", "see config/README.md")
    return content


def check_shape(config: Section, schema: Section, file: str) -> None:
    """Refuse what the schema does not allow; raises ConfigurationError."""
    error = best_match(jsonschema.Draft202012Validator(schema).iter_errors(config))
    if error is None:
        return
    where = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = list(error.schema.get("properties", ()))
        odd = sorted(set(error.instance) - set(known))[0]
        _refuse_key(f"{where}.{odd}" if where else odd, odd, known, file)
    what = " ".join(error.message.split())
    raise ConfigurationError(file, f"{where}: {what}" if where else what, "see config/README.md")


def check_references(config: Section, file: str) -> None:
    """Refuse names that stand for nothing, and clusters and corrections that cannot be; raises ConfigurationError."""
    for name, cluster in config["clusters"].items():
        for group in cluster["nodes"]:
            _refer(f"clusters.{name}.nodes", group["node_type"], config["node_types"], "node_types", file)
        several = sum(group["count"] for group in cluster["nodes"]) > 1
        if several and cluster.get("hardware") == ANALYTIC and "inter_node_gbit_s" not in cluster:
            what = f"clusters.{name}: its hardware is analytic and it has several nodes"
            raise ConfigurationError(file, what, "give inter_node_gbit_s, what one node sends to others")
    for name, model in config["models"].items():
        _refer(f"models.{name}.profile", model["profile"], config["profiles"], "profiles", file)
    for name, search in config["searches"].items():
        _refer(f"searches.{name}.model", search["model"], config["models"], "models", file)
        _refer(f"searches.{name}.cluster", search["cluster"], config["clusters"], "clusters", file)
        if search.get("correction") is not None:
            _check_correction(name, config, file)
    for name, run in config["runs"].items():
        _refer(f"runs.{name}.search", run["search"], config["searches"], "searches", file)
        _refer(f"runs.{name}.data", run["data"], config["data"], "data", file)
    for search in config["validate"]["searches"]:
        _refer("validate.searches", search, config["searches"], "searches", file)


def _check_correction(name: str, config: Section, file: str) -> None:
    """A correction holds for the profiles it was learned from, and those come before the search that uses it."""
    searches, where = config["searches"], f"searches.{name}.correction"
    _refer(where, searches[name]["correction"], searches, "searches", file)
    of = searches[searches[name]["correction"]]
    for key in ("model", "cluster"):
        if of[key] != searches[name][key]:
            what = f"{where}: {searches[name]['correction']} has another {key}, and so other profiles"
            raise ConfigurationError(file, what, f"take a search of {searches[name][key]}")
    passed = [name]
    while (following := searches.get(passed[-1], {}).get("correction")) is not None:
        if following in passed:
            what = f"{where}: {' needs '.join([*passed, following])}"
            raise ConfigurationError(file, what, "learn from a search without a correction")
        passed.append(following)


def _refer(where: str, name: str, section: Section, section_name: str, file: str) -> None:
    if name not in section:
        raise ConfigurationError(file, f"{where}: {name!r} is not under {section_name}", _hint(name, section))


def read_preset(preset: str, model: str, file: str, root: Path) -> Section:
    """Read the preset of a model; raises ConfigurationError."""
    folder = root / "config" / "models"
    path = folder / f"{preset}.yaml"
    if not path.is_file():
        known = sorted(found.stem for found in folder.glob("*.yaml"))
        raise ConfigurationError(
            file, f"models.{model}.preset: there is no config/models/{preset}.yaml", _hint(preset, known)
        )
    content = read_yaml(path)
    if set(content) != {"sequence_length", "config"} or "model_type" not in content["config"]:
        what = "a preset holds sequence_length, and config with model_type"
        raise ConfigurationError(path, what, "see its neighbours")
    return content


def check_model_keys(name: str, model: Section, preset: Section, file: str) -> None:
    """Refuse what neither the preset nor its family's configuration class knows; raises ConfigurationError."""
    unknown = [key for key in model if key not in OWN_MODEL_KEYS and key not in preset]
    if not unknown:
        return
    fields, aliases = _config_class_keys(preset["model_type"])
    known = sorted({*preset, *fields, *OWN_MODEL_KEYS})
    for key in unknown:
        if key in aliases:
            what = f"models.{name}.{key} is called {aliases[key]} in a {preset['model_type']} configuration"
            raise ConfigurationError(file, what, f"write {aliases[key]}")
        if key not in known:
            _refuse_key(f"models.{name}.{key}", key, known, file)


def _config_class_keys(model_type: str) -> tuple[set[str], dict[str, str]]:
    """The fields and the aliases of a Hugging Face configuration class, read from its source.

    Importing transformers takes seconds, which every call of snakemake would pay for.
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
    return fields, aliases


def _refuse_key(where: str, key: str, known: Iterable[str], file: str) -> None:
    raise ConfigurationError(file, f"{where} is no known key", _hint(key, known))


def _hint(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
