"""Imports of published profiles for `snakemake reference`: their files, and the commands that make them."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from configuration_files import read_yaml

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
        described = {name: of for name, of in self.galvatron["profiles"].items() if "preset" in of}
        fasop = {
            f"fasop-{name}": {**of, "sequence_lengths": [of["sequence_length"]]}
            for name, of in self._fasop["models"].items()
        }
        self._described: Mapping[str, Any] = described | fasop

    def configs(self) -> Mapping[str, str]:
        """Return the Hugging Face configuration of each model, its preset's with what differs, by path."""
        return {f"{_FOLDER}/models/{name}/config.json": self._config(of) for name, of in self._described.items()}

    def describe_lines(self) -> list[str]:
        """Return the commands that describe every model at every length, for `shardwright-train batch`."""
        return [
            _line("describe", f"{_FOLDER}/models/{name}", name=name, sequence_length=length, out=_model(name, length))
            for name, of in self._described.items()
            for length in of["sequence_lengths"]
        ]

    def import_lines(self) -> list[str]:
        """Return the commands that import every profile, for `shardwright-profile batch`; hardware comes first."""
        fasop = (
            self._fasop_profile(f"fasop-{model}@{gpu}", model, gpu)
            for model in self._fasop["models"]
            for gpu in self._fasop["gpus"]
        )
        return [
            *(self._hardware(name, of) for name, of in self.galvatron["hardware"].items()),
            *(self._fasop_hardware(name, of) for name, of in self._fasop["hardware"].items()),
            *(self._profile(name, of) for name, of in self.galvatron["profiles"].items()),
            *fasop,
        ]

    def _config(self, model: Mapping[str, Any]) -> str:
        preset = read_yaml(self._root / "config" / "models" / f"{model['preset']}.yaml")
        return json.dumps({**preset["config"], **model.get("config", {})}, sort_keys=True)

    def _hardware(self, name: str, tables: Mapping[str, Any]) -> str:
        folder = f"{_SDIST}/galvatron/profile_hardware/hardware_configs"
        files = {
            option: [f"{folder}/{table}_{size}_per_node.json" for size in tables[option]]
            for option, table in _TABLES.items()
        }
        return _line(
            "import", "galvatron-hardware", cluster=name, device=self.galvatron["device"], **files,
            overlap=f"{folder}/overlap_coefficient.json", out=_hardware(name),
        )  # fmt: skip

    def _profile(self, name: str, of: Mapping[str, Any]) -> str:
        folder = f"{_SDIST}/galvatron/models/{of['folder']}/configs"
        own = {"type": of["types"], "name": name, "model_out": f"{_FOLDER}/models/{name}.json"} if "types" in of else {}
        return _line(
            "import", "galvatron", *(["--repair"] if of.get("repair") else []),
            computation=f"{folder}/computation_profiling_bf16_{of['files']}.json",
            memory=f"{folder}/memory_profiling_bf16_{of['files']}.json",
            model=[_model(name, length) for length in of.get("sequence_lengths", ())], **own,
            hardware=_hardware(self.galvatron["traffic_of"]), device=self.galvatron["device"],
            backward_ratio=self._ratio, tp_sizes=self.galvatron["tp_sizes"],
            micro_batch_sizes=of.get("micro_batch_sizes", self.galvatron["micro_batch_sizes"]), out=_profile(name),
        )  # fmt: skip

    def _fasop_hardware(self, name: str, of: Mapping[str, Any]) -> str:
        return _line(
            "import", "fasop-hardware", constants=self._constants, **of, device=of["gpu"], cluster=name,
            out=_hardware(name),
        )  # fmt: skip

    def _fasop_profile(self, name: str, model: str, gpu: str) -> str:
        described = _model(f"fasop-{model}", self._fasop["models"][model]["sequence_length"])
        return _line(
            "import", "fasop", times=self._root / "config/reference/fasop-layer-times.csv", constants=self._constants,
            model_name=model, gpu=gpu, device=gpu, model=described, backward_ratio=self._ratio,
            micro_batch_sizes=self._fasop["micro_batch_sizes"], out=_profile(name),
        )  # fmt: skip

    @property
    def _constants(self) -> Path:
        return self._root / "config/reference/fasop-constants.json"


def outputs(lines: Iterable[str]) -> Iterator[str]:
    """Yield the files that the commands of some lines write."""
    for words in map(shlex.split, lines):
        yield from (path for option, path in pairwise(words) if option in ("--out", "--model-out"))


def _model(name: str, length: int) -> str:
    return f"{_FOLDER}/models/{name}-{length}.json"


def _hardware(name: str) -> str:
    return f"{_FOLDER}/hardware/{name}.h5"


def _profile(name: str) -> str:
    return f"{_FOLDER}/profiles/{name}.h5"


def _line(*words: str, **options: object) -> str:
    """Return a command as a line of a batch; a list repeats its option."""
    spelled = list(words)
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            spelled += [f"--{name.replace('_', '-')}", str(each)]
    return shlex.join(spelled)
