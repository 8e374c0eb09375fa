"""The installed releases of other systems: their own parsers and checks, asked about a folder of exported files."""

import ast
import importlib
import json
import os
import re
import shlex
import sys
import tomllib
import typing
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from packaging.version import Version
from systems_parsers import (
    asked_of_accelerate,
    asked_of_deepspeed,
    asked_of_megatron,
    asked_of_torchtitan,
    launch_asked_of_accelerate,
)

from shardwright_search.options import System

_TRIED = ("--mock-data", "--train-iters", "20", "--lr", "1e-4")
"""Arguments that Megatron-LM's command has beside its file."""


def _megatron(folder: Path, ranks: int) -> None:
    """Have Megatron-LM's `validate_args` check the command, where the package has it (0.19), else its classes."""
    text = (folder / "args.txt").read_text()
    if not _roots("megatron.training"):
        asked_of_megatron(text)
        return
    with _python_3_12():
        from megatron.core import utils
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.training import arguments
    connections = re.findall(r"CUDA_DEVICE_MAX_CONNECTIONS:-(\d+)", (folder / "node.sh").read_text())
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections[0]} if connections else {}
    with (
        patch.dict(os.environ, environment),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(arguments, "get_device_arch_version", lambda: 9),
        # Transformer Engine, whose build needs CUDA: its version, and that it has a kernel for rotary embeddings.
        patch.object(utils, "_te_version", Version("2.9.0")),
        patch.object(rope_utils, "fused_apply_rotary_pos_emb", print),
        redirect_stdout(StringIO()),
    ):
        parser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False, exit_on_error=False))
        given = parser.parse_args([*shlex.split(text), *_TRIED])
        given.rank, given.world_size = 0, ranks
        arguments.validate_args(given)
        arguments.core_transformer_config_from_args(given)


@contextmanager
def _python_3_12() -> Iterator[None]:
    """Lend `typing` the decorator that Megatron-LM imports from Python 3.12's; it does nothing when run."""
    with patch.object(typing, "override", lambda function: function, create=True):
        yield


def _bridge(folder: Path, _ranks: int) -> None:
    """Find each field of a recipe in the classes of its section, by the bridge's and Megatron's sources."""
    text = (folder / "recipe.py").read_text()
    compile(text, "recipe.py", "exec")
    known = _fields_of_bridge()
    for field in re.findall(r"cfg\.([\w.]+) = ", text):
        section, _, key = field.rpartition(".")
        assert key in known[section], f"{field} is in no class of its section"
    mixed = re.search(r"cfg\.mixed_precision = '(\w+)'", text)
    assert mixed and f"def {mixed[1]}(" in _source("megatron.bridge", "training/mixed_precision.py")
    for module, name in re.findall(r"^from ([\w.]+) import (\w+)$", text, re.MULTILINE):
        place = module.removeprefix("megatron.bridge").strip(".").replace(".", "/")
        source = _source("megatron.bridge", f"{place}.py" if place else "__init__.py")
        assert re.search(rf"\b{name}\b", source), f"{module} has no {name}"


_SECTIONS = {
    "": ("ConfigContainer",),
    "model": ("TransformerConfig", "ModelParallelConfig", "GPTModelProvider", "MLATransformerConfig"),
    "ddp": ("DistributedDataParallelConfig",),
    "train": ("TrainingConfig",),
    "checkpoint": ("CheckpointConfig",),
    "dataset": ("GPTDatasetConfig", "BlendedMegatronDatasetConfig", "DataloaderConfig"),
    "tokenizer": ("TokenizerConfig",),
    "rng": ("RNGConfig",),
    "rerun_state_machine": ("RerunStateMachineConfig",),
}
"""Classes that a section's fields are of."""


@cache
def _fields_of_bridge() -> Mapping[str, set[str]]:
    """Fields of each section; `dataset.seq_length` is a property of the bridge's class."""
    classes: dict[str, set[str]] = {}
    roots = (root for package in ("megatron.bridge", "megatron.core", "megatron.training") for root in _roots(package))
    for path in (path for root in roots for path in root.rglob("*.py")):
        if "config" in path.name or "provider" in path.name:
            _collect(path, classes)
    return {section: set().union(*(classes.get(name, set()) for name in names)) for section, names in _SECTIONS.items()}


def _collect(path: Path, classes: dict[str, set[str]]) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            names = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
            names |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            classes.setdefault(node.name, set()).update(names)


def _roots(package: str) -> list[Path]:
    """Folders of a package, which is not imported; none where it is absent."""
    parent, _, name = package.rpartition(".")
    places = [Path(each) for each in sys.path] if not parent else _roots(parent)
    return [place / name for place in places if (place / name).is_dir()]


def _source(package: str, path: str) -> str:
    (root, *_) = _roots(package)
    return (root / path).read_text()


def _torchtitan(folder: Path, ranks: int) -> None:
    """Have its `ConfigManager` read the TOML of 0.2, or the module of 0.3, and its `ParallelDims` check the degrees."""
    text = (folder / "torchtitan.toml").read_text()
    if version("torchtitan").startswith("0.2."):
        asked_of_torchtitan(text)
        return
    module = folder / "torchtitan_plan.py"
    if not module.exists():
        assert _lacks(tomllib.loads(text)), "0.3 runs the plan, and has no module of it"
        return
    from torchtitan.components import quantization
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    sys.path.insert(0, str(folder))
    sys.modules.pop("torchtitan_plan", None)
    importlib.invalidate_caches()
    # They look for a GPU and for torchao when they are made; their arguments are checked before.
    with (
        patch.object(quantization.Float8LinearConverter, "__init__", lambda *_, **__: None),
        patch.object(quantization.Float8LinearConverter, "convert", lambda _, config: config),
        patch.object(quantization.MXFP8LinearConverter, "__init__", lambda *_, **__: None),
        patch.object(quantization.MXFP8LinearConverter, "convert", lambda _, config: config),
    ):
        read = ConfigManager().parse_args(["--module", "torchtitan_plan", "--config", "plan"])
    sizes = read.parallelism
    dims = ParallelDims(
        dp_replicate=sizes.data_parallel_replicate_degree,
        dp_shard=sizes.data_parallel_shard_degree,
        cp=sizes.context_parallel_degree,
        tp=sizes.tensor_parallel_degree,
        pp=sizes.pipeline_parallel_degree,
        ep=sizes.expert_parallel_degree,
        world_size=ranks,
    )
    assert dims.world_size == ranks and read.training.global_batch_size == 512


def _lacks(sections: Mapping[str, Any]) -> bool:
    """Whether torchtitan 0.3 does not have the model, its sizes, or what the plan does."""
    model, parallel = sections.get("model", {}), sections["parallelism"]
    return (
        "flavor" not in model
        or find_spec(f"torchtitan.models.{model['name']}") is None
        or parallel.get("expert_tensor_parallel_degree", 1) > 1
        or parallel.get("context_parallel_rotate_method") == "alltoall"
        or sections["activation_checkpoint"]["mode"] == "selective"
    )


def _deepspeed(folder: Path, ranks: int) -> None:
    text = (folder / "deepspeed.json").read_text()
    asked_of_deepspeed(text)
    given = json.loads(text)
    passes = given["gradient_accumulation_steps"] * given["train_micro_batch_size_per_gpu"]
    assert given["train_batch_size"] == passes * ranks


def _accelerate(folder: Path, _ranks: int) -> None:
    asked_of_accelerate((folder / "accelerate_setup.py").read_text())
    launch_asked_of_accelerate((folder / "accelerate.json").read_text())


_ASKED: Mapping[System, tuple[str, Callable[[Path, int], None]]] = {
    System.ACCELERATE: ("accelerate", _accelerate),
    System.DEEPSPEED: ("deepspeed", _deepspeed),
    System.MEGATRON: ("megatron.core", _megatron),
    System.MEGATRON_BRIDGE: ("megatron.bridge", _bridge),
    System.TORCHTITAN: ("torchtitan", _torchtitan),
}
TAKEN = {system: taken for system, (package, taken) in _ASKED.items() if _roots(package)}
"""What each system that is installed is asked by."""
HAS_NEWEST_MEGATRON = bool(_roots("megatron.training"))
"""Whether Megatron's packages are those of `newest`, which run experts as they are priced tuned."""
