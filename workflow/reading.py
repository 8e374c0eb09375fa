"""What the rules are read with where no jobs are planned, as `snakemake --lint` does: with Snakemake alone."""

import re
from collections.abc import Iterable
from types import SimpleNamespace

RUN_MIN = 1440
"""Minutes of a run's job if no node type states them."""
_NOTHING = "(?!)"


def any_of(names: Iterable[str]) -> str:
    """A regular expression that matches each of some names, and nothing else."""
    return "|".join(map(re.escape, names)) or _NOTHING


class Unread:
    """Stands for a configuration and its files where only rules are read: whatever it is asked for, there is none."""

    settings = SimpleNamespace(
        searches={}, runs={}, pictures=(), rerun_on_upgrade=False, validate=SimpleNamespace(steps=0, warmup_steps=0)
    )

    def pattern(self, _kind: str = "") -> str:
        """A regular expression that matches nothing."""
        return _NOTHING

    analytic_models = analytic_clusters = data_pattern = pattern

    def names(self) -> tuple[str, ...]:
        """No names, no files."""
        return ()

    configs = described = imported = measured_searches = profiled_pairs = resource_names = names


UNREAD = Unread()
