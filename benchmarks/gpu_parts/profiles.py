"""Measured profiles, made by the commands of the profile stage with settings that fit the time."""

import shutil
import time
from pathlib import Path
from typing import Any

import yaml
from accuracy_parts.commands import run, write_json_document
from gpu_parts.parts import Part
from gpu_parts.setting import Setting

from shardwright_formats.io import write_document

ROOT = Path(__file__).resolve().parents[2]
HARDWARE = "hardware"
MODELS = {"llama-7b": "llama-7b", "gpt2-xl": "gpt2-1.5b", "bert-large": "bert-large"}
"""The presets of config/models."""
_TINY_TEXT = {"vocab_size": 128, "max_position_embeddings": 32}
_TINY_BLOCK = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
TINY: dict[str, dict[str, int]] = {
    "llama-7b": {**_TINY_TEXT, **_TINY_BLOCK, "num_key_value_heads": 4},
    "gpt2-xl": {"vocab_size": 128, "n_embd": 64, "n_head": 4, "n_positions": 32, "n_layer": 4},
    "bert-large": {**_TINY_TEXT, **_TINY_BLOCK},
}
_TINY_LENGTH = 32
RECOMPUTE = ["none", "full"]
MICRO_BATCH_SIZES = [1, 2, 4]
PRECISION = {"parameters": "float32", "compute": "bfloat16", "reduce": "float32"}
_SWEEP_S = 20


def profile_file(setting: Setting, what: str) -> Path:
    """The profile of a model's layers on one device, or of the hardware: one device, or all with their links."""
    return setting.reference / setting.slug / f"{what}.h5"


def cluster_file(setting: Setting, devices: int) -> Path:
    """The description of some of the devices."""
    path = setting.work / setting.slug / f"cluster-{devices}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_document(path, setting.cluster(devices))
    return path


def settings_file(setting: Setting) -> Path:
    """What is probed of each model."""
    return write_json_document(
        setting.work / setting.slug / "settings.json",
        "profile_settings",
        tp_sizes=[1],
        sequence_parallel=["none"],
        recompute=RECOMPUTE,
        micro_batch_sizes=setting.size(MICRO_BATCH_SIZES, MICRO_BATCH_SIZES[:2]),
        layers=setting.size([1, 3], [1, 6]),
        precision=PRECISION,
        attention="sdpa",
    )


def write_preset(setting: Setting, model: str, folder: Path, **changes: object) -> int:
    """Write a model's config.json into a folder; returns its sequence length."""
    preset = yaml.safe_load((ROOT / "config" / "models" / f"{MODELS[model]}.yaml").read_text(encoding="utf-8"))
    config = preset["config"] | setting.size({}, TINY[model]) | changes
    write_json_document(folder / "config.json", None, **config)
    return int(setting.size(preset["sequence_length"], _TINY_LENGTH))


def of_commands(setting: Setting, part: Part) -> dict[str, Any]:
    """Measure what the part names, unless an earlier start did; the profile lies under `reference`."""
    deadline_s = time.monotonic() + part.limit_s
    out = profile_file(setting, part.argument)
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(setting, deadline_s) if part.argument == HARDWARE else _profile(setting, part.argument, out, deadline_s)
    return {"file": out.name, "folder": out.parent.name, "bytes": out.stat().st_size}


def _sweep(setting: Setting, deadline_s: float) -> None:
    """The profile of one device prices plans of one; that of all is for the shelf."""
    budget = setting.size(_SWEEP_S, 2)
    for devices, name in {1: HARDWARE, setting.devices: f"{HARDWARE}-{setting.devices}"}.items():
        out = profile_file(setting, HARDWARE if devices == 1 else name)
        run("shardwright-profile", "hardware", "--cluster", cluster_file(setting, devices), "--time-budget", budget,
            "--out", out, threads=None, timeout_s=deadline_s - time.monotonic())  # fmt: skip


def _profile(setting: Setting, model: str, out: Path, deadline_s: float) -> None:
    folder = setting.work / setting.slug / model
    length = write_preset(setting, model, folder)
    steps, seconds = setting.size((5, 0.5), (3, 0.0))
    run("shardwright-profile", "model", folder, "--name", model, "--sequence-length", length, "--cluster",
        cluster_file(setting, 1), "--node-type", setting.slug, "--settings", settings_file(setting), "--steps", steps,
        "--min-time-s", seconds, "--out", out, threads=None, timeout_s=deadline_s - time.monotonic())  # fmt: skip
    shutil.rmtree(folder)


def lines(result: dict[str, Any]) -> list[str]:
    """Where the profile is, and how it is looked at."""
    place = f"config/reference/{result['folder']}/{result['file']}"
    return [f"`{place}` ({result['bytes']} bytes): `shardwright-profile show` prints it."]
