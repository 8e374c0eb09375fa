"""Options of `shardwright verify`."""

from pathlib import Path
from typing import Annotated

from shardwright.command import POSITIONAL
from shardwright_search.profile_options import ProfileOptions


class VerifyOptions(ProfileOptions, frozen=True, kw_only=True):
    """Confirm without searching that no plan of a search's space is faster than its certificate says."""

    plan: Annotated[Path, POSITIONAL]
    """Plan file that a search wrote (shardwright.plan, JSON)."""
    certificate: Annotated[Path, POSITIONAL]
    """The certificate that it wrote (shardwright.certificate, JSON)."""
    search: Path
    """The search file (shardwright.search, JSON)."""
    cluster: Path | None = None
    """Cluster (shardwright.cluster, JSON) that the plan must be for."""
    model: Path | None = None
    """Model description (shardwright.model, JSON) that the plan must be for."""
