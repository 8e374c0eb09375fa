"""What the probes of these tests are asked for."""

from typing import Any

from shardwright.estimate.settings import ProfileSettings
from shardwright.types import Recompute, SequenceParallel

__all__ = ["probe_settings"]


def probe_settings(**changed: Any) -> ProfileSettings:
    """Two tensor-parallel and two micro-batch sizes, unless changed."""
    usual: dict[str, Any] = {
        "tp_sizes": (1, 2),
        "sequence_parallel": (SequenceParallel.NONE, SequenceParallel.MEGATRON),
        "recompute": (Recompute.NONE, Recompute.FULL),
        "micro_batch_sizes": (1, 4),
    }
    return ProfileSettings(**(usual | changed))
