"""The options of all commands that price plans: the files of profiles, and of a model on a cluster."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from shardwright.command import Options

Imbalance = Annotated[
    str | None,
    Meta(
        description="Positions that the fullest rank's experts get over the mean rank's: a ratio from 1, at most the "
        "ranks that share them out, or a load that a run logged (shardwright.expert_load, JSON); by default all get as "
        "many."
    ),
]


class ProfileOptions(Options, frozen=True, kw_only=True):
    """Options for the files that plans are priced with."""

    hardware: tuple[Path, ...]
    """Hardware profile of the cluster (HDF5); of a mixed one also several, one for each device."""
    profile: tuple[Path, ...]
    """Model profile on the cluster's device (HDF5); of a mixed cluster one for each device."""
    correction: Path | None = None
    """Factors that measured plans taught (shardwright.correction, JSON), to be applied; of one device only."""
    imbalance: Imbalance = None


class ModelOptions(ProfileOptions, frozen=True, kw_only=True):
    """Options for the files of a search, except its request."""

    cluster: Path
    """Cluster file (shardwright.cluster, JSON)."""
    model: Path
    """Model description (shardwright.model, JSON)."""
