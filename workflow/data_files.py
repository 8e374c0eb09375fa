"""The entries under `data`, the files that they become, and the files that a run reads."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from configuration_types import RANDOM, Configuration, Data, Run
from shardwright_formats.io import BadInput
from shardwright_train.data.corpora import Source

_TEXT_FILES = ("data.json", "tokens.bin")
_IMAGE_FILES = ("images.npy", "labels.npy")
_BLEND_FILE = "blend.json"


@dataclass(frozen=True)
class DataFiles:
    """The entries of `data`, and the paths of their files."""

    data: Mapping[str, Data]

    def texts(self) -> tuple[str, ...]:
        """Return the entries that become tokens."""
        return tuple(name for name, of in self.data.items() if of.blend is None and of.source is not Source.IMAGES)

    def images(self) -> tuple[str, ...]:
        """Return the entries that become arrays of images."""
        return tuple(name for name, of in self.data.items() if of.blend is None and of.source is Source.IMAGES)

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the entries that a name stands for: itself, those of a blend, none for random samples."""
        if name == RANDOM:
            return ()
        return tuple(self.data[name].blend or (name,))

    def folder(self, name: str) -> str:
        """Return the value of `--data` for an entry."""
        return name if name == RANDOM else f"results/data/{name}"

    def tokenizer_folder(self, name: str) -> str | None:
        """Return the folder of the tokenizer, for a blend that of its first part; None where there is none."""
        return next((self.folder(part) for part in self.parts(name) if part in self.texts()), None)

    def of_run(self, run: Run) -> tuple[str, ...]:
        """Return the files that a run reads, those to evaluate on included."""
        names = (run.data, run.valid_data)
        return tuple(dict.fromkeys(file for name in names if name is not None for file in self._files(name)))

    def blend(self, name: str) -> dict[str, Any]:
        """Return the content of blend.json."""
        blend = self.data[name].blend or {}
        return {"datasets": [{"folder": f"../{part}", "weight": weight} for part, weight in blend.items()]}

    def _files(self, name: str) -> Iterator[str]:
        parts = self.parts(name)
        if parts and parts != (name,):
            yield f"{self.folder(name)}/{_BLEND_FILE}"
        for part in parts:
            files = _IMAGE_FILES if part in self.images() else _TEXT_FILES
            yield from (f"{self.folder(part)}/{file}" for file in files)


def check_data(of: Configuration, config: Mapping[str, Any], file: str) -> None:
    """Raise BadInput for entries of `data`, and runs on them, that contradict themselves."""
    if RANDOM in of.data:
        raise BadInput(file, f"data.{RANDOM}: the name stands for random samples", "choose another")
    for name, data in of.data.items():
        if (data.blend is None) == (not data.text):
            raise BadInput(file, f"data.{name} holds either text or blend", "say one of them")
        if data.blend is not None:
            _check_blend(name, data.blend, of, config, file)
    for name, run in of.runs.items():
        if run.valid_data == RANDOM:
            raise BadInput(file, f"runs.{name}.valid_data: random samples are none to evaluate on", "name some data")
        if run.export == "best" and not run.keep_best:
            raise BadInput(file, f"runs.{name}.export: there is no best checkpoint", "say keep_best: true, too")


def _check_blend(
    name: str, blend: Mapping[str, float], of: Configuration, config: Mapping[str, Any], file: str
) -> None:
    for key in config["data"][name].keys() - {"blend"}:
        raise BadInput(file, f"data.{name}.{key}: a blend has none", "say it of its parts")
    if not blend:
        raise BadInput(file, f"data.{name}.blend names no data", "give each part its weight")
    for part in blend:
        if of.data[part].blend is not None or of.data[part].source is Source.IMAGES:
            raise BadInput(file, f"data.{name}.blend: {part} is no text", "blend entries that have a text")
