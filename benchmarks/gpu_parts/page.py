"""The page of what was found."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from gpu_parts.parts import Part
from gpu_parts.setting import REHEARSAL


def page_of(whole: Mapping[str, Any], parts: Mapping[str, Part]) -> str:
    """Markdown: what it was measured on, and a section for each part."""
    rehearsal = whole["what"] == REHEARSAL
    title = f"# {REHEARSAL.capitalize()}: no result" if rehearsal else f"# {whole['devices']} x {whole['device']}"
    head = [title, "", f"{whole['versions']}; {whole['date']}; commit {whole['commit']}.", ""]
    if missing := [name for name in parts if name not in whole["parts"]]:
        head += [f"Not there: {', '.join(missing)}.", ""]
    for name, entry in whole["parts"].items():
        said = f" ({REHEARSAL})" if rehearsal else ""
        head += [f"## {parts[name].purpose[0].upper()}{parts[name].purpose[1:]}{said}", ""]
        head += [*import_module(f"gpu_parts.{parts[name].module}").lines(entry["result"]), ""]
        head += [f"Took {entry['seconds']:.0f} s on {entry['date']}, commit {entry['commit'][:12]}.", ""]
    return "\n".join(head)
