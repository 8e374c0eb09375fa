"""A folder that Hugging Face's `datasets` has saved: each row is a document."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright_formats.io import BadInput
from shardwright_train.data.corpora.files import find_files
from shardwright_train.data.corpora.piece import Piece

_ROWS = 1000
_MARKS = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` writes into the folder of one data set, and of several splits."""


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return any((folder / name).is_file() for name in _MARKS)


@dataclass(frozen=True)
class SavedDataset:
    """A column of a data set; rows without text are left out."""

    folder: Path
    field: str
    split: str
    rows: Any
    """The `datasets.Dataset`, mapped from its files."""
    is_wikitext: bool = False

    @property
    def size(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    @property
    def identity(self) -> list[object]:
        """Return the folder's files, the split and the column."""
        return [self.split, self.field, *find_files(str(self.folder), "*").identity]

    def pieces(self) -> Iterator[Piece]:
        """Yield the column, several rows at a time."""
        for first in range(0, len(self.rows), _ROWS):
            for number, text in enumerate(self.rows[first : first + _ROWS][self.field], start=first):
                if not isinstance(text, str | None):
                    raise BadInput(self.folder, f"row {number} of {self.field!r} is no text", "name another --field")
                if text:
                    yield Piece(text, True, number + 1)


def open_saved(folder: Path, field: str, split: str) -> SavedDataset:
    """Open a folder; raise BadInput where it is no data set, lacks the split or column, or `datasets` is missing."""
    try:
        import datasets
    except ImportError:
        remedy = "pip install 'shardwright-train[datasets]'"
        raise BadInput(folder, "reading it takes the package `datasets`", remedy) from None
    if not is_saved(folder):
        raise BadInput(folder, f"has none of {' and '.join(_MARKS)}", "pass a folder that save_to_disk wrote")
    try:
        found: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(folder, f"cannot be opened ({error})", "save it again with save_to_disk") from None
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise BadInput(folder, f"has no split {split!r}", f"name one with --dataset-split: {', '.join(found)}")
        found = found[split]
    if field not in found.column_names:
        raise BadInput(folder, f"has no column {field!r}", f"name one with --field: {', '.join(found.column_names)}")
    return SavedDataset(folder, field, split, found)
