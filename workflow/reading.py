"""A placeholder configuration for reading the rules without planning jobs, as in `snakemake --lint`."""

import re
from collections.abc import Iterable
from types import SimpleNamespace

RUN_MIN = 1440
"""Minutes of a run's job if no node type states them."""
_NOTHING = "(?!)"


def any_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches exactly these names."""
    return "|".join(map(re.escape, names)) or _NOTHING


class Unread:
    """A placeholder for a configuration and its files, without any entries."""

    settings = SimpleNamespace(
        searches={}, runs={}, pictures=(), rerun_on_upgrade=False, validate=SimpleNamespace(steps=0, warmup_steps=0)
    )

    def pattern(self, _kind: str = "") -> str:
        """Return a regular expression that matches nothing."""
        return _NOTHING

    analytic_models = analytic_clusters = data_pattern = pattern

    def names(self) -> tuple[str, ...]:
        """Return no names."""
        return ()

    configs = described = imported = measured_searches = profiled_pairs = resource_names = names


UNREAD = Unread()
