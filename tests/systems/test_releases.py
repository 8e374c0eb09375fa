"""What is exported of 20 models on 3 clusters is taken by the releases of its system that are installed.

`make systems` runs this with the newest release of each system, and with an older one, on the files of `exports.py` in
the folder that SYSTEMS_EXPORTS names.
"""

import os
from pathlib import Path

import pytest
from exports import CLUSTERS, MODELS, RANKS, TUNED_FOLDER
from releases import HAS_NEWEST_MEGATRON, TAKEN

from shardwright_search.options import System
from shardwright_search.systems.registry import TUNED

FOLDER = Path(os.environ["SYSTEMS_EXPORTS"])


@pytest.mark.parametrize("system", TAKEN)
def test_its_own_check_takes_every_export(system: System) -> None:
    """Each file goes through the system's parser, and the settings that it makes through the system's checks."""
    assert len({place.parent for place in _places(FOLDER / system)}) >= 45, f"{len(MODELS)} models, {CLUSTERS}"
    assert not (failed := _refused(system, FOLDER / system)), failed


@pytest.mark.skipif(not HAS_NEWEST_MEGATRON, reason="an older release of Megatron")
@pytest.mark.parametrize("system", [system for system in TUNED if system in TAKEN])
def test_its_own_check_takes_every_export_of_tuned_experts(system: System) -> None:
    """Dispatcher, overlap, graphs and fused operator beside each kind of plan."""
    assert len(_places(FOLDER / TUNED_FOLDER / system)) >= 45
    assert not (failed := _refused(system, FOLDER / TUNED_FOLDER / system)), failed


def _places(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob(RANKS))


def _refused(system: System, folder: Path) -> str:
    """What the system refuses of a folder's exports, a line each."""
    failed = {}
    for place in _places(folder):
        try:
            TAKEN[system](place, int((place / RANKS).read_text()))
        except (Exception, SystemExit) as error:  # whatever the system's code raises is a refusal
            failed[place.relative_to(FOLDER).as_posix()] = f"{type(error).__name__}: {error}"
    return "\n".join(f"{place}: {problem}" for place, problem in failed.items())
