"""Models of torchtitan 0.2.2: their names, registered sizes, and what of a plan they take.

Flavors are those of each `models/*/__init__.py`; `tests/search/interop/test_search_interop_flavors.py` compares them
with torchtitan's own registry where it is installed.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

Sizes = tuple[Any, ...]
"""Width, layers, heads, key heads (None of latents), feed-forward features, vocabulary, experts (None: without)."""


class Torchtitan(NamedTuple):
    """A model of torchtitan's."""

    name: str
    flavors: Mapping[Sizes, str]
    """Names of the registered sizes."""
    pipelines: bool = True
    """Whether it has a `pipelining_fn`; `train.py` refuses pipeline stages of a model without one."""
    contexts: bool = True
    """Whether its flavors have `sdpa` attention; those with `flex` refuse context parallelism."""
    ties: bool = False
    """Whether embedding and head may share their weights (`enable_weight_tying`)."""
