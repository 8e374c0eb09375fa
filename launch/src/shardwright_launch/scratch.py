"""Scratch folders for the time of one command, in the system's folder of temporary files."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright_formats.io.owner import OWNER, is_gone, this_process

_PREFIX = "shardwright-"
_NAME = re.compile(rf"{_PREFIX}{OWNER}-[a-z0-9_]+")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty folder that is removed at the end; first remove those that killed commands have left."""
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{this_process()}-") as folder:
        yield Path(folder)


def _sweep(temporary: Path) -> None:
    for path in temporary.glob(f"{_PREFIX}*"):
        if name := _NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):  # another command may be sweeping
                if is_gone(path, **name.groupdict()):
                    shutil.rmtree(path, ignore_errors=True)
