"""Modules whose source is changed before they are imported: what a version of tomorrow adds."""

import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import CodeType, ModuleType
from typing import Any

Edits = Mapping[str, Sequence[tuple[str, str]]]
"""Texts of a module, each of which it has once, and what replaces them, by the module's name."""


def edit_modules(edits: Edits) -> None:
    """Change modules that are imported from now on."""
    sys.meta_path.insert(0, _Finder(edits))


class _Edited(importlib.machinery.SourceFileLoader):
    """A loader of a module whose source is changed first."""

    changes: Sequence[tuple[str, str]]

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_data(self.path).decode()
        for old, new in self.changes:
            assert text.count(old) == 1, (fullname, old)
            text = text.replace(old, new)
        return compile(text, self.path, "exec")


class _Finder(MetaPathFinder):
    """A finder of modules whose source is changed."""

    def __init__(self, edits: Edits) -> None:
        self.edits = edits

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.edits else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Edited(name, spec.origin)
            spec.loader.changes = self.edits[name]
        return spec
