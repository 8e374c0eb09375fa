"""Versions of software and drivers, recorded with each measurement."""

import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

PRODUCT = "shardwright"


def product_version() -> str:
    """Return the version of Shardwright, which is installed as a whole, or as its core with single stages."""
    try:
        return version(PRODUCT)
    except PackageNotFoundError:
        return version(f"{PRODUCT}-core")


def versions_text(packages: Sequence[str], *, on_gpu: bool) -> str:
    """Return versions of installed packages, such as `torch 2.13.0, driver 550.54`, with NVIDIA's driver on a GPU."""
    texts = [f"{package} {product_version() if package == PRODUCT else version(package)}" for package in packages]
    if on_gpu:
        texts.append(f"driver {_driver_version()}")
    return ", ".join(texts)


def _driver_version() -> str:
    """Return the driver version that nvidia-smi reports; `unknown` if it is not installed, as with AMD devices."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    lines = asked.stdout.splitlines()
    return lines[0].strip() if asked.returncode == 0 and lines else "unknown"
