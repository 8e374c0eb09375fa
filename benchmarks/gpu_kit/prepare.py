"""Write what is copied to a GPU's machine in addition to the tree, into .kit: plans, predictions, tokens, the commit.

python -m gpu_kit.prepare              # for an H200, and for a rehearsal
python -m gpu_kit.prepare --wheels     # and wheels that the machine does not have, in .whl (uses a package index)
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from gpu_kit.plans import EXPERTS, GPT2, LLAMA, SMALL, Case, model_of, of_eight_devices, of_one_device
from gpu_kit.setting import ROOT, Setting, commit_of_checkout, setting_of_gpus, setting_of_rehearsal
from gpu_kit.workbench import MIXED

from shardwright.devices.table import read_devices
from shardwright.estimate.machines import Efficiencies, rates_of
from shardwright.estimate.profile import hardware_profile, model_profile
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput, one_line_errors, write_bytes, write_document
from shardwright.io.hdf5 import write_profile
from shardwright.types import Attention, Recompute, SequenceParallel
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.cost_model.profiles import Profiles, read_profiles
from shardwright_train.dry_run import check_roles
from shardwright_train.models.base import family_named

_WHEELS = ("msgspec==0.22.0", "transformers==5.23.0")
"""Packages that the machine does not have, or only in an older version."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
DEVICE = "H200"
"""The key of the device that the kit is for, in the table of devices."""
PREDICTIONS = "predictions.json"
TOKENS = "tokens"
VOCABULARY = 512


def main() -> None:
    """Write all files; existing ones are replaced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--carried", type=Path, default=ROOT / ".kit", help="folder to write")
    parser.add_argument("--wheels", type=Path, nargs="?", const=ROOT / ".whl", help="fetch wheels into a folder")
    parser.add_argument("--python", default="3.12", help="of the machine that wheels are for")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--rehearsal", action="store_true", help="only what a rehearsal needs")
    kind.add_argument("--null", action="store_true", help="only what a null device needs")
    kind.add_argument("--here", action="store_true", help="for the GPUs of this machine")
    asked = parser.parse_args()
    with one_line_errors():
        if asked.wheels is not None:
            _fetch_wheels(asked.wheels, asked.python)
        for setting in _settings(asked):
            prepare(setting)
        write_bytes(asked.carried / "commit", f"{commit_of_checkout()}\n".encode())
    print(f"{asked.carried}: {_size(asked.carried) / 2**20:.1f} MiB")


def _settings(asked: argparse.Namespace) -> list[Setting]:
    if asked.here:
        return [setting_of_gpus(asked.carried, asked.carried)]
    rehearsal = setting_of_rehearsal(asked.carried, asked.carried / "rehearsal")
    if asked.null:
        return [msgspec.structs.replace(setting_of_h200(asked.carried), carried=asked.carried / "null", null=True)]
    return [rehearsal] if asked.rehearsal else [setting_of_h200(asked.carried), rehearsal]


def setting_of_h200(carried: Path) -> Setting:
    """Return the setting of one H200, from the table of devices."""
    table = read_devices()
    device = table.devices[DEVICE]
    assert device.memory_bytes is not None
    return Setting(
        device_type="cuda",
        device=device.names[0],
        devices=1,
        memory_bytes=device.memory_bytes,
        versions="",
        work=carried,
        carried=carried,
    )


def prepare(setting: Setting) -> None:
    """Write the plans of a setting with their predictions, and the tokens of several documents."""
    folder = setting.carried / "plans"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    with TemporaryDirectory() as scratch:
        cases = {"one": of_one_device(setting), "eight": of_eight_devices(setting)}
        priced = _profiles(setting, Path(scratch))
        for devices, of_devices in cases.items():
            for number, (name, case) in enumerate(of_devices.items()):
                file = folder / f"{devices}-{number}.json"
                write_document(file, case.plan)
                found[name] = {"devices": devices, "file": file.name, **_predicted(case, priced)}
    _write_tokens(setting.carried / TOKENS)
    content = {"device": setting.device, "revised": read_devices().revised, "plans": found}
    write_bytes(setting.carried / PREDICTIONS, (json.dumps(content, indent=1) + "\n").encode())


def _profiles(setting: Setting, folder: Path) -> Mapping[str, Profiles]:
    """Return the analytic profiles of every model by name."""
    hardware, models = write_profiles(setting, folder)
    return {name: read_profiles((hardware,), (file,)) for name, file in models.items()}


def write_profiles(setting: Setting, folder: Path) -> tuple[Path, Mapping[str, Path]]:
    """Write analytic profiles; a rehearsal's processor is priced like the device that the kit is for."""
    table = read_devices()
    rates = rates_of(table, setting.device if setting.on_cuda else DEVICE)._replace(name=setting.device)
    hardware, found = folder / "hardware.h5", dict[str, Path]()
    write_profile(hardware, hardware_profile(setting.cluster(8), [rates], Efficiencies(), None, table.revised))
    settings = ProfileSettings(
        tp_sizes=(1, 2),
        sequence_parallel=tuple(SequenceParallel),
        recompute=(Recompute.NONE, Recompute.FULL, Recompute.SELECTIVE),
        micro_batch_sizes=(1, 2),
        precision=MIXED,
        attention=Attention.SDPA,
    )
    for name, layers in {LLAMA: 4, SMALL: 4, GPT2: 12, EXPERTS: 4, f"{LLAMA} LoRA": 4}.items():
        # At two lengths, from which ranks over which positions are split are priced.
        models = [(Path(name), model_of(setting, name.split(" ")[0], layers, name.endswith("LoRA"), n)) for n in (1, 2)]
        made = model_profile(models, settings, rates, Efficiencies(), table.revised)
        found[name] = folder / f"{name}.h5"
        write_profile(found[name], made.profile)
    return hardware, found


def _predicted(case: Case, priced: Mapping[str, Profiles]) -> dict[str, Any]:
    """Return time and memory from shapes, and the peak memory of each role by a simulated step."""
    plan = case.plan
    lora = " LoRA" if "LoRA" in plan.name else ""
    profiles = priced[f"{plan.model.name}{lora}"]
    estimate = evaluate(plan, profiles, cost_model_of(plan, profiles), timeline=False).estimate
    checks = check_roles(plan, family_named(plan.model.family, plan.name), "sdpa", lambda done, of: None)
    return {
        "is_profiled": case.is_profiled,
        "analytic_s": estimate.simulated_step_time_s,
        "analytic_bytes": [stage.memory_bytes for stage in estimate.stages],
        "check_bytes": {str(rank): check.peak_bytes for check in checks for rank in check.role.ranks},
    }


def _write_tokens(folder: Path) -> None:
    """Write the tokens of many short documents, with the command that makes tokens from text."""
    with TemporaryDirectory() as scratch:
        texts = Path(scratch) / "text"
        texts.mkdir()
        for number in range(400):
            words = " ".join(f"{number * i} of the {i} quick brown foxes" for i in range(1 + number % 60))
            (texts / f"{number:03}.txt").write_text(f"{words}\n", encoding="utf-8")
        code = "import sys; from shardwright_train.cli import main; sys.exit(main())"
        words = ["prepare", "--text", str(texts), "--vocab-size", str(VOCABULARY), "--out", str(folder)]
        ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
        if ended.returncode:
            raise BadInput(folder, f"no tokens: {ended.stderr.strip()[-300:]}", "see shardwright train prepare")


def _fetch_wheels(folder: Path, python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = chain.from_iterable(("--platform", platform) for platform in _PLATFORMS)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", *platforms, "--dest", str(folder), *_WHEELS]
    if subprocess.run(command, check=False).returncode:
        raise BadInput(folder, "wheels could not be fetched", "see what pip says above")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        torch.set_num_threads(1)
        main()
