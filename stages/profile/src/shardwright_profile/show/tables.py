"""Printing profiles as tables."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path

import h5py
import numpy as np
from rich.console import Console
from rich.table import Table as Printed

from shardwright_formats.display.svg import document, without_variables
from shardwright_formats.display.units import bytes_text, rate_text, seconds_text
from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.hdf5 import Column, Table
from shardwright_formats.io.json import write_bytes
from shardwright_formats.types import hardware_profile, model_profile
from shardwright_formats.types.hardware_profile import HardwareProfile, read_hardware_profile
from shardwright_formats.types.model_profile import ModelProfile, read_model_profile
from shardwright_profile.show.pictures import hardware_picture, model_picture

__all__ = ["draw_profile", "show_profile"]

_PIPED_WIDTH = 140
"""Columns of the output where no terminal says how many it has."""


def show_profile(path: Path) -> None:
    """Print a hardware or a model profile on standard output; BadInput where the file is neither."""
    match _format_of(path):
        case hardware_profile.FORMAT:
            title, tables = _hardware_tables(read_hardware_profile(path))
        case model_profile.FORMAT:
            title, tables = _model_tables(read_model_profile(path))
        case other:
            raise BadInput(path, f"format is {other!r}, no profile's", "pass a hardware or a model profile")
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    console.print(title, highlight=False, markup=False)
    for table in tables:
        console.print(table)


def draw_profile(path: Path, picture: Path) -> None:
    """Draw a profile's points, curves and residuals into a picture; BadInput where that cannot be."""
    if picture.suffix not in (".svg", ".png", ".pdf"):
        raise BadInput(picture, "is no kind of picture", "name it .svg, .png or .pdf")
    match _format_of(path):
        case hardware_profile.FORMAT:
            drawing = hardware_picture(read_hardware_profile(path))
        case model_profile.FORMAT:
            drawing = model_picture(read_model_profile(path))
        case other:
            raise BadInput(path, f"format is {other!r}, no profile's", "pass a hardware or a model profile")
    write_bytes(picture, _converted(document(drawing), picture.suffix))


def _converted(svg: str, suffix: str) -> bytes:
    if suffix == ".svg":
        return svg.encode()
    try:
        import cairosvg
    except (ImportError, OSError) as error:
        remedy = "name it .svg, or install shardwright-profile[pictures] and libcairo2"
        raise BadInput("--picture", f"a {suffix} needs CairoSVG ({error})", remedy) from None
    convert = {".png": cairosvg.svg2png, ".pdf": cairosvg.svg2pdf}[suffix]
    converted: bytes = convert(bytestring=without_variables(svg).encode(), scale=2)
    return converted


def _format_of(path: Path) -> object:
    if not path.is_file():
        raise BadInput(path, "no such file", "check the path")
    try:
        with h5py.File(path, "r") as file:
            return file.attrs.get("format")
    except (OSError, RuntimeError, KeyError) as error:
        raise BadInput(path, f"not a readable HDF5 file ({error})", "write the profile again") from None


def _hardware_tables(profile: HardwareProfile) -> tuple[str, Iterator[Printed]]:
    title = f"hardware profile of cluster {profile.cluster}: device {profile.device}, backend {profile.backend}"
    notes = [f"note: {sentence}" for sentence in profile.provenance.notes.splitlines()]
    titles = {
        "pairs": "messages between neighbours in a pipeline",
        "overlap": "a computation and a message at once, over each alone",
        "ranks": "rates of every rank's device",
    }
    filled = (name for name in titles if len(getattr(profile, name)["source"]))
    others = (_columns(titles[name], hardware_profile.TABLES[name], getattr(profile, name)) for name in filled)
    return "\n".join([title, *notes]), chain([_messages(profile), _rates(profile)], others)


def _messages(profile: HardwareProfile) -> Printed:
    """Median and interquartile range of every point; bandwidth is message bytes over the median."""
    table = _printed(
        "messages",
        ["kind", "ranks", "layout", "place"],
        ["message", "repeats", "median", "spread (q3 - q1)", "bandwidth"],
    )
    points = range(len(profile.points["collective"]))
    sizes = profile.points["message_bytes"]
    for key, rows in groupby(sorted(points, key=lambda i: (profile.key(i), int(sizes[i]))), key=profile.key):
        layout = "consecutive" if key.consecutive else "strided"
        place = "across nodes" if key.across_nodes else "in a node"
        for row in rows:
            times_s = profile.times_s(row)
            low_s, median_s, high_s = (float(value) for value in np.quantile(times_s, [0.25, 0.5, 0.75]))
            table.add_row(
                key.collective,
                str(key.group_size),
                layout,
                place,
                bytes_text(int(sizes[row])),
                str(len(times_s)),
                seconds_text(median_s),
                f"{seconds_text(high_s - low_s)} ({(high_s - low_s) / median_s:.0%})",
                rate_text(int(sizes[row]) / median_s),
            )
        table.add_section()
    return table


def _rates(profile: HardwareProfile) -> Printed:
    table = _printed("device rates, every rank working", ["rate", "source"], ["value"])
    for name, source, value in zip(*(profile.rates[c] for c in ("name", "source", "value")), strict=True):
        table.add_row(name.decode(), source.decode(), f"{float(value):.4g}")
    return table


def _model_tables(profile: ModelProfile) -> tuple[str, Iterator[Printed]]:
    origin = profile.origin
    title = (
        f"model profile of {origin.model}: device {origin.device}, backend {origin.backend}, "
        f"precision {origin.precision}, attention {origin.attention}"
    )
    titles = {
        "layers": "one layer, one microbatch",
        "states": "one layer's parameters under plain ddp",
        "process": "once a process or a step",
        "fits": "curves through the points",
    }
    return title, (_columns(titles[name], model_profile.TABLES[name], getattr(profile, name)) for name in titles)


def _columns(title: str, columns: Mapping[str, Column], table: Table) -> Printed:
    """Every value with its standard error where it has one, and with its source where it is not measured."""
    printed = Printed(title=title, title_justify="left")
    shown = [name for name in columns if not name.endswith(("_source", "_error_s"))]
    for name in shown:
        # Spaces let the head of a narrow column break between its words.
        printed.add_column(name.replace("_", " "), justify="left" if table[name].dtype.kind == "S" else "right")
    for row in range(len(table[shown[0]])):
        printed.add_row(*(_cell(name, columns[name], table, row) for name in shown))
    return printed


def _cell(name: str, column: Column, table: Table, row: int) -> str:
    source = table[column.sourced_by][row].decode() if column.sourced_by else "measured"
    if source == "absent":
        return "absent"
    text = _value(name, table[name][row])
    error_s = table.get(f"{name.removesuffix('_s')}_error_s")
    if error_s is not None and error_s[row] > 0:
        text += f" ± {seconds_text(float(error_s[row]))}"
    return text if source == "measured" else f"{text} {source}"


def _value(name: str, value: object) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.floating):
        return seconds_text(float(value)) if name.endswith("_s") else f"{float(value):.3g}"
    return bytes_text(int(str(value))) if name.endswith("_bytes") else str(value)


def _printed(title: str, labels: Sequence[str], numbers: Sequence[str]) -> Printed:
    table = Printed(title=title, title_justify="left")
    for label in labels:
        table.add_column(label, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", overflow="fold")
    return table
