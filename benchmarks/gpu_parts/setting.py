"""What is measured on: the NVIDIA GPUs of this machine, or in a rehearsal its processor at a tiny size."""

import hashlib
import re
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from shardwright_formats.io import BadInput
from shardwright_formats.io.versions import versions_text
from shardwright_formats.types import Cluster, NodeGroup, NodeType

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = "rehearsal on cpu"
_SOURCES = ("formats/src", "models/src", "launch/src", "stages", "benchmarks/gpu.py", "benchmarks/gpu_parts")
_REHEARSED_DEVICES = 2
_USABLE = 0.9
"""Of a device's memory, what plans may be asked to fill: other processes and fragments take the rest."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Devices, and the folders that parts work in."""

    device_type: str
    """`cuda` or `cpu`."""
    device: str
    """The devices' name as their driver gives it."""
    devices: int
    memory_bytes: int
    """Of one device."""
    versions: str
    work: Path
    reference: Path
    """Folder that measured profiles are put in."""

    @property
    def rehearsal(self) -> bool:
        """Whether sizes are tiny and nothing that is found is a result."""
        return self.device_type == "cpu"

    @property
    def slug(self) -> str:
        """The device's name, fit for a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", (REHEARSAL if self.rehearsal else self.device).lower()).strip("-")

    @property
    def usable_bytes(self) -> int:
        """What plans may fill of a device."""
        return int(_USABLE * self.memory_bytes)

    def size(self, full: Any, tiny: Any) -> Any:  # noqa: ANN401
        """The one for a GPU, or the one for a rehearsal."""
        return tiny if self.rehearsal else full

    def cluster(self, devices: int) -> Cluster:
        """Some of the devices, as one node."""
        node = NodeType(device=self.device, devices_per_node=devices, memory_bytes=self.memory_bytes)
        return Cluster(name=self.slug, nodes=(NodeGroup(node_type=self.slug, count=1),), node_types={self.slug: node})

    def identity(self) -> dict[str, Any]:
        """What a result counts for: device, versions, sources. What is done under one is not done again."""
        return {
            "what": REHEARSAL if self.rehearsal else "measured",
            "device": self.device,
            "devices": self.devices,
            "versions": self.versions,
            "commit": _commit(),
            "sources_sha256": _sources_sha256(),
        }


def setting_of_gpus(work: Path, reference: Path) -> Setting:
    """All devices of the first one's kind; BadInput where there is none."""
    import torch

    remedy = "run it where there is one; --rehearse FOLDER goes through every part on the processor"
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise BadInput("this machine", f"no NVIDIA GPU that PyTorch {torch.__version__} can use", remedy)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    # The launcher numbers devices from 0, so those of another kind further on are left out.
    count = next((i for i, name in enumerate(names) if name != names[0]), len(names))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions = versions_text(("torch", "transformers"), on_gpu=True)
    return Setting(
        device_type="cuda",
        device=names[0],
        devices=count,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        versions=f"{versions}, CUDA {torch.version.cuda}, NCCL {nccl}",
        work=work,
        reference=reference,
    )


def setting_of_rehearsal(folder: Path) -> Setting:
    """Two processes of this machine, and everything in one folder."""
    return Setting(
        device_type="cpu",
        device="cpu",
        devices=_REHEARSED_DEVICES,
        memory_bytes=4 * 2**30,
        versions=versions_text(("torch", "transformers"), on_gpu=False),
        work=folder / "work",
        reference=folder / "reference",
    )


def today() -> str:
    """The UTC day, as 2026-01-31."""
    return datetime.now(UTC).date().isoformat()


def _commit() -> str:
    """The commit of this checkout, `unknown` where there is none (a copy of the tree)."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return asked.stdout.strip() if asked.returncode == 0 else "unknown"


@cache
def _sources_sha256() -> str:
    """Of all Python files that measure or are measured: a commit that touches none of them changes no result."""
    found = hashlib.sha256()
    for place in _SOURCES:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()
