"""What a measurement that was cut off has left behind: a file for every plan it had finished."""

import contextlib
import shutil
from pathlib import Path

import msgspec

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import read_document, sha256_of_value, write_document
from shardwright_formats.types.measurement import Measurement, PlanMeasurement
from shardwright_formats.types.plan import Plan

__all__ = ["Parts"]


class Parts:
    """The finished plans of one measurement, in a folder beside the file it will be.

    A part counts only for the very plan, settings, device and versions that it was measured with; `head` is a
    measurement of these with whatever plans.
    """

    def __init__(self, folder: Path, settings: dict[str, object], head: Measurement) -> None:
        self.folder, self._head = folder, head
        self._identity = sha256_of_value([settings, head.device, head.backend, head.versions])

    def find(self, plan: Plan) -> PlanMeasurement | None:
        """What a plan took, where it was measured before; a damaged part is measured again."""
        file = self._file(plan)
        if not file.is_file():
            return None
        with contextlib.suppress(BadInput):
            return read_document(file, Measurement).plans[0]
        return None

    def keep(self, found: PlanMeasurement) -> None:
        """Write down one plan's measurement."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_document(self._file(found.plan), msgspec.structs.replace(self._head, plans=(found,)))

    def remove(self) -> None:
        """Forget them all, once the whole measurement is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, plan: Plan) -> Path:
        return self.folder / f"{plan.sha256[:24]}-{self._identity[:12]}.json"
