"""The devices that are measured: the NVIDIA GPUs of this machine or, in a rehearsal, its processor at a tiny size."""

import hashlib
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from shardwright.io import BadInput
from shardwright.io.versions import versions_text
from shardwright.types import Cluster, NodeGroup, NodeType

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = "rehearsal on cpu"
NULL = "null device"
_UNKNOWN = "unknown"
_SOURCES = ("core/src", "stages", "benchmarks/gpu_kit")
_REHEARSED_DEVICES = 2


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The devices, and the folders in which the kit works."""

    device_type: str
    """`cuda` or `cpu`."""
    device: str
    """Name of the devices as their driver gives it."""
    devices: int
    memory_bytes: int
    """Memory of one device."""
    versions: str
    work: Path
    carried: Path
    """Folder that `prepare` has written beforehand: plans, their predictions, tokens, the commit."""
    null: bool = False
    """Whether the device is a null device, whose kernels compute nothing, so that no number is a result."""

    @property
    def rehearsal(self) -> bool:
        """Return whether this is a rehearsal on the processor: sizes are tiny, and no number is a result."""
        return self.device_type == "cpu"

    @property
    def tiny(self) -> bool:
        """Return whether sizes are tiny: the processor is slow, and a null device has the host's memory."""
        return self.rehearsal or self.null

    @property
    def on_cuda(self) -> bool:
        """Return whether the devices are CUDA devices, including a null device."""
        return self.device_type == "cuda"

    @property
    def slug(self) -> str:
        """Return the device's name in a form for file names."""
        return slug_of({"what": REHEARSAL if self.rehearsal else "measured", "device": self.device})

    def size(self, full: Any, tiny: Any) -> Any:  # noqa: ANN401
        """Return `full` for a GPU, or `tiny` for a rehearsal or a null device."""
        return tiny if self.tiny else full

    def cluster(self, devices: int) -> Cluster:
        """Return a cluster of one node with some of the devices."""
        node = NodeType(device=self.device, devices_per_node=devices, memory_bytes=self.memory_bytes)
        return Cluster(name=self.slug, nodes=(NodeGroup(node_type=self.slug, count=1),), node_types={self.slug: node})

    def give_memory_back(self) -> None:
        """Free the device memory that the allocator keeps but does not use."""
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def identity(self) -> dict[str, Any]:
        """Return what a result depends on: device, versions, sources. If it is the same, rows are not tried again."""
        return {
            "what": REHEARSAL if self.rehearsal else NULL if self.null else "measured",
            "device": self.device,
            "devices": self.devices,
            "versions": self.versions,
            "commit": commit_of(self.carried),
            "sources_sha256": _sources_sha256(),
        }


def setting_of_gpus(work: Path, carried: Path, null: bool = False) -> Setting:
    """Return the setting of the GPUs of the first one's kind; raise BadInput if there is no GPU."""
    import torch

    remedy = "run it where there is one; --rehearse goes through every step on the processor"
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise BadInput("this machine", f"no NVIDIA GPU that PyTorch {torch.__version__} can use", remedy)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    # The launcher numbers devices from 0, so devices from the first one of another kind on are left out.
    count = next((i for i, name in enumerate(names) if name != names[0]), len(names))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions = versions_text(("torch", "transformers"), on_gpu=not null)
    return Setting(
        device_type="cuda",
        device=names[0],
        devices=count,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        versions=f"{versions}, CUDA {torch.version.cuda}, NCCL {nccl}",
        work=work,
        carried=carried,
        null=null,
    )


def setting_of_rehearsal(work: Path, carried: Path) -> Setting:
    """Return the setting of a rehearsal: two processes of this machine."""
    return Setting(
        device_type="cpu",
        device="cpu",
        devices=_REHEARSED_DEVICES,
        memory_bytes=4 * 2**30,
        versions=versions_text(("torch", "transformers"), on_gpu=False),
        work=work,
        carried=carried,
    )


def slug_of(identity: Mapping[str, Any]) -> str:
    """Return the name of the device of some results, in a form for file names."""
    name = identity["device"] if identity["what"] == "measured" else identity["what"]
    return re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")


def today() -> str:
    """Return today's date in UTC, in the form 2026-01-31."""
    return datetime.now(UTC).date().isoformat()


def commit_of(carried: Path) -> str:
    """Return the commit of this checkout or, in a copy without git, the commit that was noted before copying."""
    noted = next((folder / "commit" for folder in (carried, carried.parent) if (folder / "commit").is_file()), None)
    here = commit_of_checkout()
    return here if here != _UNKNOWN or noted is None else noted.read_text(encoding="utf-8").strip()


def commit_of_checkout() -> str:
    """Return the commit of this checkout, or `unknown` if there is none."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return _UNKNOWN
    return asked.stdout.strip() if asked.returncode == 0 else _UNKNOWN


@cache
def _sources_sha256() -> str:
    """Return the hash of all Python files that measure or are measured: other changes do not affect results."""
    found = hashlib.sha256()
    for place in _SOURCES:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()
