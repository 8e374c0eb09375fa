"""Models without facts: described by a trace of their class if the train stage is installed."""

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwright.command import CommandLine
from shardwright.io import BadInput, read_document
from shardwright.models.alike import has_images, is_known
from shardwright.models.description import stated_length
from shardwright.models.traits import Config
from shardwright.types import Model

_GROUP, _STAGE = "shardwright.commands", "train"
_NEEDED = ("torch", "transformers")


def is_traced(config: Config) -> bool:
    """Return whether a config.json's model_type has no facts and the train stage, which traces it, is installed."""
    installed = entry_points(group=_GROUP, name=_STAGE) and all(map(find_spec, _NEEDED))
    unknown = isinstance(config.get("model_type"), str) and not is_known(config)
    return unknown and not has_images(config) and bool(installed)


def traced_model(file: Path, config: Config, name: str, sequence_length: int | None) -> Model:
    """Return the description of a config.json by the train stage; raise BadInput as that does, or without a length."""
    if file.name != "config.json":
        raise BadInput(file, "has a model_type without facts, of which a trace reads a folder", "name it config.json")
    sequence_length = sequence_length or stated_length(config)
    if sequence_length is None:
        raise BadInput("--seq", f"{file} does not state the sample length", "give it, in tokens")
    (stage,) = entry_points(group=_GROUP, name=_STAGE)
    app: CommandLine = stage.load()
    with TemporaryDirectory() as folder:
        out = Path(folder) / "model.json"
        given = "--name", name, "--sequence-length", str(sequence_length), "--out", str(out)
        app.call(["describe", str(file.parent), *given])
        return read_document(out, Model)
