"""The versions that a measurement is marked with."""

import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import version


def versions_text(packages: Sequence[str], *, on_gpu: bool) -> str:
    """Return versions of installed packages, as `torch 2.13.0, driver 550.54`, with NVIDIA's driver on a GPU."""
    texts = [f"{package} {version(package)}" for package in packages]
    if on_gpu:
        texts.append(f"driver {_driver_version()}")
    return ", ".join(texts)


def _driver_version() -> str:
    """Return the version that nvidia-smi gives; `unknown` where that is not installed, as with AMD's devices."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    lines = asked.stdout.splitlines()
    return lines[0].strip() if asked.returncode == 0 and lines else "unknown"
