"""The options of `shardwright rent`."""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import field

from shardwright.command import POSITIONAL, Options
from shardwright.types import Count, Gib, PositiveNumber, Samples, Seconds, Tokens
from shardwright_search.profile_options import Imbalance


class RentOptions(Options, frozen=True, kw_only=True):
    """Find which nodes to rent: the exact front of step time (s) against price (USD per step) over all sub-clusters.

    Of a model by name, from published figures: `rent gpt2-xl --gpus 0-8x8:A100-80+0-8x8:A10 --batch 128`; or from files
    (--cluster, --model, --search, --hardware, --profile), measured or not. Every point is a complete plan. Ctrl-C takes
    what is found so far, and says what is proven.
    """

    preset: Annotated[str | None, POSITIONAL] = field(default=None, name="name")
    """A Hugging Face config.json, its folder, or a preset such as gpt2-xl."""
    gpus: str | None = None
    """NODESxGPUS:DEVICE, whose NODES may be a range or a list, as 0-8x8:A100-80 or 0,4,8x8:A10; types joined by +."""
    batch: Samples | None = None
    """Samples of a step; by default as many for each GPU as make about 4 Mi tokens on all nodes."""
    seq: Tokens | None = None
    """Tokens of a sample; by default as `advise` takes them."""
    precision: Literal["float32", "bfloat16", "float16", "fp8", "nvfp4"] = "bfloat16"
    """Type of forward and backward, of a model by name."""
    budget_gib: Gib | None = None
    """The most that a plan may use of a GPU, in GiB; by default 92 % of its memory."""
    inter_node_gbit_s: str | None = None
    """Gbit/s from one node to others, as `advise` takes it."""
    price_per_gpu_hour: tuple[str, ...] = ()
    """DEVICE=USD, in the place of what one provider asks; may be repeated."""
    spot: tuple[str, ...] = ()
    """DEVICE=USD: nodes of this type are spot nodes at this price of a GPU hour, and are marked as such."""
    launch: Path | None = None
    """New folder of what starts the plan of the point that --deadline or --price names: a SkyPilot task and others."""
    cluster: Path | None = None
    """Cluster file (shardwright.cluster, JSON): of each node type the most that can be rented."""
    model: Path | None = None
    """Model description (shardwright.model, JSON)."""
    search: Path | None = None
    """Search file (shardwright.search, JSON) with one global_batch_size; its memory_gib is in GiB."""
    hardware: tuple[Path, ...] = ()
    """Hardware profile of the cluster (HDF5); of a mixed one also several, one for each device."""
    profile: tuple[Path, ...] = ()
    """Model profile on the cluster's device (HDF5); of a mixed cluster one for each device."""
    correction: Path | None = None
    """Factors that measured plans taught (shardwright.correction, JSON), to be applied; of one device only."""
    imbalance: Imbalance = None
    offers: Path | None = None
    """Offers file (shardwright.offers, JSON): prices (USD per hour), numbers of nodes."""
    out: Path | None = None
    """New folder: front.html, front.csv, front.h5 and front.svg, and for each point its plan and prediction."""
    steps: Count | None = None
    """Steps of the training."""
    tokens: PositiveNumber | None = None
    """Tokens of the training, instead of --steps."""
    deadline: PositiveNumber | None = None
    """Hours: name the cheapest point whose training takes no more."""
    price: PositiveNumber | None = None
    """USD: name the fastest point whose training costs no more."""
    time_limit: Seconds | None = None
    """Seconds after which what is found so far is taken."""
