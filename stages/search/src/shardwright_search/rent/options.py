"""The options of `shardwright rent`."""

from pathlib import Path

from shardwright.types import Count, PositiveNumber, Seconds
from shardwright_search.profile_options import ProfileOptions


class RentOptions(ProfileOptions, frozen=True, kw_only=True):
    """Find which nodes to rent: the exact front of step time (s) against price (USD per step) over all sub-clusters.

    Every point is a complete plan. Ctrl-C takes what is found so far, and says what is proven.
    """

    cluster: Path
    """Cluster file (shardwright.cluster, JSON): of each node type the most that can be rented."""
    model: Path
    """Model description (shardwright.model, JSON)."""
    search: Path
    """Search file (shardwright.search, JSON) with one global_batch_size; its memory_gib is in GiB."""
    out: Path
    """New folder: front.html, front.csv, front.h5 and front.svg, and for each point its plan and prediction."""
    offers: Path | None = None
    """Offers file (shardwright.offers, JSON): prices (USD per hour), numbers of nodes."""
    steps: Count | None = None
    """Steps of the training."""
    tokens: PositiveNumber | None = None
    """Tokens of the training, instead of --steps."""
    max_hours: PositiveNumber | None = None
    """Name the cheapest point whose training takes no more hours."""
    max_usd: PositiveNumber | None = None
    """Name the fastest point whose training costs no more USD."""
    time_limit: Seconds | None = None
    """Seconds after which what is found so far is taken."""
