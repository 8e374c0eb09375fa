"""Imports of published profiles for `snakemake reference`: their files, and the commands that make them."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from configuration import command_line
from configuration_checks import read_yaml
from shardwright.models.registry import read_presets

_FOLDER = "results/reference"
_SDIST = f"{_FOLDER}/hetu-galvatron"
_TABLES = {"allreduce": "allreduce_bandwidth", "p2p": "p2p_bandwidth", "sp_time": "sp_time"}
"""Names of Galvatron's hardware tables, by the option that takes them."""


class Reference:
    """The content of config/reference/reference.yaml, with the paths of all files, below results/reference."""

    def __init__(self, root: Path) -> None:
        self._root = root
        content = read_yaml(root / "config" / "reference" / "reference.yaml")
        self._ratio: float = content["backward_ratio"]
        self.galvatron: Mapping[str, Any] = content["galvatron"]
        self._fasop: Mapping[str, Any] = content["fasop"]
        self._constants = root / "config/reference/fasop-constants.json"
        presets = {name: model for name, model in self.galvatron["profiles"].items() if "preset" in model}
        fasop = {
            f"fasop-{name}": {**model, "sequence_lengths": [model["sequence_length"]]}
            for name, model in self._fasop["models"].items()
        }
        self._described: Mapping[str, Any] = presets | fasop

    @property
    def requirement(self) -> str:
        """Return the requirement, such as `name==version`, of the package whose sources contain Galvatron's tables."""
        return str(self.galvatron["requirement"])

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of that package's source archive."""
        return str(self.galvatron["sha256"])

    def configs(self) -> list[str]:
        """Return the path of each model's Hugging Face configuration."""
        return [f"{_FOLDER}/models/{name}/config.json" for name in self._described]

    def config_json(self, name: str) -> str:
        """Return the Hugging Face configuration of a model as JSON: its preset's, with the keys that differ."""
        return self._config(self._described[name])

    def lines(self, batch: str) -> list[str]:
        """Return the commands of a batch, one per line; `batch`: `describe` or `import`."""
        return self.describe_lines() if batch == "describe" else self.import_lines()

    def described(self) -> list[str]:
        """Return the files that the batch `describe` writes."""
        return list(outputs(self.describe_lines()))

    def imported(self) -> list[str]:
        """Return the files that the batch `import` writes."""
        return list(outputs(self.import_lines()))

    def describe_lines(self) -> list[str]:
        """Return the commands that describe every model at every length, for `shardwright train batch`."""
        lengths = ((name, length) for name, model in self._described.items() for length in model["sequence_lengths"])
        return [
            command_line(
                "describe", f"{_FOLDER}/models/{name}", name=name, sequence_length=length, out=_model(name, length)
            )
            for name, length in lengths
        ]

    def import_lines(self) -> list[str]:
        """Return the commands that import every profile, for `shardwright profile batch`; hardware comes first."""
        return [
            *(self._hardware(name, tables) for name, tables in self.galvatron["hardware"].items()),
            *(self._fasop_hardware(name, figures) for name, figures in self._fasop["hardware"].items()),
            *(self._profile(name, model) for name, model in self.galvatron["profiles"].items()),
            *(self._fasop_profile(*pair) for pair in product(self._fasop["models"], self._fasop["gpus"])),
        ]

    def _config(self, model: Mapping[str, Any]) -> str:
        return json.dumps({**read_presets()[model["preset"]].config, **model.get("config", {})}, sort_keys=True)

    def _hardware(self, name: str, tables: Mapping[str, Any]) -> str:
        folder = f"{_SDIST}/galvatron/profile_hardware/hardware_configs"
        files = {
            option: [f"{folder}/{table}_{size}_per_node.json" for size in tables[option]]
            for option, table in _TABLES.items()
        }
        return command_line(
            "import", "galvatron-hardware", cluster=name, device=self.galvatron["device"], **files,
            overlap=f"{folder}/overlap_coefficient.json", out=f"{_FOLDER}/hardware/{name}.h5",
        )  # fmt: skip

    def _profile(self, name: str, model: Mapping[str, Any]) -> str:
        folder, usual = f"{_SDIST}/galvatron/models/{model['folder']}/configs", self.galvatron
        layers = (
            {"type": model["types"], "name": name, "model_out": f"{_FOLDER}/models/{name}.json"}
            if "types" in model
            else {}
        )
        return command_line(
            "import", "galvatron", *(["--repair"] if model.get("repair") else []),
            computation=f"{folder}/computation_profiling_bf16_{model['files']}.json",
            memory=f"{folder}/memory_profiling_bf16_{model['files']}.json",
            model=[_model(name, length) for length in model.get("sequence_lengths", ())],
            **layers,
            hardware=f"{_FOLDER}/hardware/{usual['traffic_of']}.h5", device=usual["device"],
            backward_ratio=self._ratio, tp_sizes=usual["tp_sizes"],
            micro_batch_sizes=model.get("micro_batch_sizes", usual["micro_batch_sizes"]), out=_profile(name),
        )  # fmt: skip

    def _fasop_hardware(self, name: str, figures: Mapping[str, Any]) -> str:
        return command_line(
            "import", "fasop-hardware", constants=self._constants, **figures, device=figures["gpu"], cluster=name,
            out=f"{_FOLDER}/hardware/{name}.h5",
        )  # fmt: skip

    def _fasop_profile(self, model: str, gpu: str) -> str:
        description = _model(f"fasop-{model}", self._fasop["models"][model]["sequence_length"])
        return command_line(
            "import", "fasop", times=self._root / "config/reference/fasop-layer-times.csv", constants=self._constants,
            model_name=model, gpu=gpu, device=gpu, model=description, backward_ratio=self._ratio,
            growth=self._root / "config/reference/fasop-growth.json",
            micro_batch_sizes=self._fasop["micro_batch_sizes"], out=_profile(f"fasop-{model}@{gpu}"),
        )  # fmt: skip


def outputs(lines: Iterable[str]) -> Iterator[str]:
    """Yield the files that the commands of some lines write."""
    for words in map(shlex.split, lines):
        yield from (path for option, path in pairwise(words) if option in ("--out", "--model-out"))


def _model(name: str, length: int) -> str:
    return f"{_FOLDER}/models/{name}-{length}.json"


def _profile(name: str) -> str:
    return f"{_FOLDER}/profiles/{name}.h5"
