"""S0: the machine, whether anything starts, and the memory of a CUDA context; most of it in separate processes."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gpu_kit import compile_ahead
from gpu_kit.rows import Row, Values, scaled
from gpu_kit.setting import Setting
from harness import table

from shardwright.launch.ranks import EXPANDABLE, allocator_setting

_PACKAGES = ("torch", "transformers", "triton", "numpy", "h5py", "safetensors", "msgspec", "peft", "accelerate", "rich")
_ASKED_OF_DRIVER = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
_PROBED = "GPU_KIT_EXPANDABLE"
"""Environment variable with the findings on the allocator, for processes that replace this one."""
_CONTEXT = """
import json, resource, sys, time
began = time.monotonic()
import torch
found = {"import_s": time.monotonic() - began}
cuda = torch.version.cuda is not None and torch.cuda.is_available()
device = "cuda" if cuda else "cpu"
def used():
    if not cuda:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
began = time.monotonic()
x = torch.zeros(256, 256, device=device)
found |= {"context_s": time.monotonic() - began, "context_bytes": used()}
began = time.monotonic()
(x.bfloat16() @ x.bfloat16()).float().sum().item()
torch.nn.functional.scaled_dot_product_attention(*[x.bfloat16().view(1, 4, 256, 64)] * 3).sum().item()
found |= {"first_products_s": time.monotonic() - began, "with_libraries_bytes": used()}
print(json.dumps(found))
"""
_EXPANDABLE = """
import json, torch
found = {"allocates": None}
if torch.version.cuda is not None and torch.cuda.is_available():
    pieces = [torch.zeros(2**20 * n, dtype=torch.uint8, device="cuda") for n in (1, 64, 300)]
    del pieces[1]
    pieces.append(torch.zeros(2**20 * 128, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    found = {"allocates": True, "reserved_bytes": torch.cuda.memory_reserved()}
print(json.dumps(found))
"""


def settle_allocator() -> None:
    """Find out whether expandable segments, which ranks request, work here; if not, switch them off.

    It must be called before CUDA is initialized: the allocator reads its setting only once.
    """
    if _PROBED in os.environ:
        return
    asked = allocator_setting(os.environ) or EXPANDABLE
    found = _child(_EXPANDABLE, {"PYTORCH_ALLOC_CONF": asked, "PYTORCH_CUDA_ALLOC_CONF": asked})
    os.environ[_PROBED] = json.dumps(found)
    setting = "expandable_segments:False" if "error" in found else asked
    os.environ |= {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}


def rows(setting: Setting, stack: ExitStack) -> list[Row]:
    """Return the rows; the last one starts to compile the models of S3, during S1."""
    return [
        Row("versions", lambda: _versions(setting)),
        Row("expandable segments", lambda: _expandable()),
        Row("context, modules lazily", lambda: _context("LAZY")),
        Row("context, modules eagerly", lambda: _context("EAGER")),
        Row("compiling ahead", lambda: compile_ahead.start(setting)),
    ]


def _expandable() -> Values:
    found: Values = json.loads(os.environ[_PROBED])
    if "error" in found:
        raise RuntimeError(f"{found['error']}; the kit goes on with {allocator_setting(os.environ)}")
    return found | {"setting": allocator_setting(os.environ)}


def _context(loading: str) -> Values:
    found = _child(_CONTEXT, {"CUDA_MODULE_LOADING": loading})
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


def _versions(setting: Setting) -> Values:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not there"
    found: Values = {"python": platform.python_version(), "kernel": platform.release(), "packages": packages}
    found |= {"cores": len(os.sched_getaffinity(0)), "device": setting.device, "memory_bytes": setting.memory_bytes}
    if setting.on_cuda and not setting.null:
        asked = ["nvidia-smi", f"--query-gpu={_ASKED_OF_DRIVER}", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
        found["driver"] = dict(zip(_ASKED_OF_DRIVER.split(","), said.stdout.strip().split(", "), strict=False))
    return found


def _child(code: str, environment: Mapping[str, str]) -> Values:
    """Return the JSON that a process prints in its last line, or its error."""
    command = [sys.executable, "-c", code]
    try:
        ended = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired:
        return {"error": "it took longer than 120 s"}
    if ended.returncode:
        return {"error": (ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"])[-1][:500]}
    found: Values = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def lines(rows: Mapping[str, Any]) -> list[str]:
    """Return the sentences and tables of this step's report."""
    said = []
    if (versions := rows.get("versions")) is not None:
        packages = ", ".join(f"{name} {number}" for name, number in versions["packages"].items())
        said += [
            f"Python {versions['python']}, kernel {versions['kernel']}, {versions['cores']} cores; {packages}.",
            "",
        ]
        said += [f"{name}: {value}" for name, value in versions.get("driver", {}).items()]
    if (expandable := rows.get("expandable segments")) is not None:
        said += [f"Expandable segments: {expandable['allocates']} ({expandable['setting']}).", ""]
    contexts = [
        [
            name.removeprefix("context, "),
            f"{row['import_s']:.1f}",
            f"{row['context_s']:.1f}",
            scaled(row["context_bytes"], 2**20, ".0f"),
            scaled(row["with_libraries_bytes"], 2**20, ".0f"),
        ]
        for name, row in rows.items()
        if name.startswith("context")
    ]
    return [*said, *table("context|import, s|context, s|context, MiB|with libraries, MiB", contexts)]
