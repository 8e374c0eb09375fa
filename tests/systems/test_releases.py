"""What is exported of 20 models on 3 clusters is taken by the releases of its system that are installed.

`make systems` runs this with the newest release of each system, and with an older one, on the files of `exports.py` in
the folder that SYSTEMS_EXPORTS names.
"""

import os
from pathlib import Path

import pytest
from exports import CLUSTERS, MODELS, RANKS
from releases import TAKEN

from shardwright_search.options import System

FOLDER = Path(os.environ["SYSTEMS_EXPORTS"])


@pytest.mark.parametrize("system", TAKEN)
def test_its_own_check_takes_every_export(system: System) -> None:
    """Each file goes through the system's parser, and the settings that it makes through the system's checks."""
    places = sorted(path.parent for path in (FOLDER / system).rglob(RANKS))
    assert len({place.parent for place in places}) >= 45, f"of {len(MODELS)} models on {len(CLUSTERS)} clusters"
    failed = {}
    for place in places:
        try:
            TAKEN[system](place, int((place / RANKS).read_text()))
        except (Exception, SystemExit) as error:  # whatever the system's code raises is a refusal
            failed[place.relative_to(FOLDER).as_posix()] = f"{type(error).__name__}: {error}"
    assert not failed, "\n".join(f"{place}: {problem}" for place, problem in failed.items())
