"""Configurations that are bounded and not searched: their stages can lie on the nodes in too many ways."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwright_formats.io.errors import BadInput
from shardwright_search.space.configurations import configurations
from shardwright_search.space.first_bound import FirstBounds
from shardwright_search.space.instance import Instance


class Unlisted(NamedTuple):
    """What is known of them."""

    scores: tuple[tuple[float, int], ...]
    """By configuration: no plan has a lower score; its pipeline degree."""

    def below(self, score: float) -> "Unlisted | None":
        """Those that may have a plan of a lower score than this; None: there are none."""
        left = tuple(own for own in self.scores if own[0] < score)
        return Unlisted(left) if left else None

    @property
    def bound(self) -> float:
        """No plan of any has a lower score."""
        return min(self.scores)[0]

    @property
    def what(self) -> str:
        """What is not searched, in words."""
        sizes = sorted({size for _, size in self.scores})
        degrees = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return f"stage_widths any: in {len(self.scores)} cases {degrees} stages can lie on the nodes in too many ways"

    def error(self, file: Path) -> BadInput:
        """Where nothing else has a plan."""
        return BadInput(file, f"no plan was found, and {self.what}", "limit pp_sizes, or list stage_widths")


def unlisted(instance: Instance, file: Path) -> Unlisted | None:
    """Those of a request that have places, if not memory; None: there are none.

    Where nothing is known before it is known where stages are, as of those that span node types, the bound is 0.
    """
    costs, bounds = instance.costs, FirstBounds(instance)
    every = configurations(instance.request, costs.model, costs.cluster, file)
    targets = (instance.target(own) for own in every if not instance.choices.is_listed(own))
    scores = ((t.score(bounds.of(t.configuration) or 0.0), t.configuration) for t in targets)
    left = tuple((s, own.pp_size) for s, own in scores if np.isfinite(s) or instance.choices.has_plans(own))
    return Unlisted(left) if left else None


def check_listed(instance: Instance, file: Path, what: str) -> None:
    """Raise BadInput where some of a request are not, for what all must be."""
    if (left := unlisted(instance, file)) is not None:
        raise BadInput(file, f"{what}: {left.what}", "limit pp_sizes, or list stage_widths")
