"""What `shardwright-search fasop` is asked."""

from pathlib import Path

from shardwright_formats.types import Count
from shardwright_search.options import ProfileOptions


class FasopOptions(ProfileOptions, frozen=True, kw_only=True):
    """Estimate every candidate of FASOP's space by its formulas, and write its table of time, price and memory.

    Times are in s, prices in USD, memory in GiB. Layers are cut exactly, FASOP's named defects are mended, and
    candidates out of memory stay in the table.
    """

    cluster: Path
    """Cluster file (shardwright.cluster, JSON)."""
    model: Path
    """Model description (shardwright.model, JSON)."""
    search: Path
    """Search file (shardwright.search, JSON) with space fasop; its memory_gib is in GiB."""
    out: Path
    """Table to write (CSV), the fastest candidate first."""
    plan: Path | None = None
    """Plan file to write: the fastest candidate that fits and that a plan can say, with its prediction beside it."""
    foreign: tuple[Path, ...] = ()
    """Tables of the same fields (CSV), such as FASOP's own: where their partition is faster it is taken."""
    sub_clusters: bool = False
    """Estimate every sub-cluster, from no node of a type to all of them, not the whole cluster alone."""
    exhaustive_partition: bool = False
    """Try every partition of candidates that have up to 500000, and end with an error where a better one is found."""
    steps: Count = 12_500_000
    """Of the training whose cost the table has; FASOP's own number by default."""
