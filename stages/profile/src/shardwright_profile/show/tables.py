"""Printed tables of profiles."""

import sys
from collections.abc import Iterator, Sequence
from io import StringIO
from itertools import chain, groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table as Printed

from shardwright_formats.command import show
from shardwright_formats.display.svg import document, without_variables
from shardwright_formats.display.units import bytes_text, rate_text, seconds_text
from shardwright_formats.io import BadInput, write_bytes
from shardwright_formats.io.hdf5 import format_of
from shardwright_formats.io.table import Row, Source, Table, columns_of
from shardwright_formats.types.hardware_profile import HardwareProfile, read_hardware_profile
from shardwright_formats.types.model_profile import ModelProfile, read_model_profile
from shardwright_profile.show.pictures import hardware_picture, model_picture

_PIPED_WIDTH = 140
"""Columns of the output where no terminal says how many it has."""


def show_profile(path: Path) -> None:
    """Print a hardware or a model profile on standard output; raise BadInput where the file is neither."""
    profile = _read(path)
    title, tables = _hardware_tables(profile) if isinstance(profile, HardwareProfile) else _model_tables(profile)
    printed, is_terminal = StringIO(), sys.stdout.isatty()
    width = None if is_terminal else _PIPED_WIDTH
    console = Console(file=printed, force_terminal=is_terminal, width=width, highlight=False, markup=False)
    for each in (title, *tables):
        console.print(each)
    show(printed.getvalue().removesuffix("\n"))


def draw_profile(path: Path, picture: Path) -> None:
    """Draw a profile's points, curves and residuals into a picture file; raise BadInput where that cannot be."""
    if picture.suffix not in (".svg", ".png", ".pdf"):
        raise BadInput(picture, "is no kind of picture", "name it .svg, .png or .pdf")
    profile = _read(path)
    drawing = hardware_picture(profile) if isinstance(profile, HardwareProfile) else model_picture(profile)
    write_bytes(picture, _converted(document(drawing), picture.suffix))


def _read(path: Path) -> HardwareProfile | ModelProfile:
    match format_of(path):
        case HardwareProfile.FORMAT:
            return read_hardware_profile(path)
        case ModelProfile.FORMAT:
            return read_model_profile(path)
        case other:
            raise BadInput(path, f"format is {other!r}, no profile's", "pass a hardware or a model profile")


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


def _hardware_tables(profile: HardwareProfile) -> tuple[str, Iterator[Printed]]:
    title = f"hardware profile of cluster {profile.cluster}: device {profile.device}, backend {profile.backend}"
    notes = [f"note: {sentence}" for sentence in profile.provenance.notes.splitlines()]
    titles = {
        "pairs": "messages between neighbours in a pipeline",
        "overlap": "a computation and a message at once, over each alone",
        "ranks": "rates of every rank's device",
    }
    filled = ((title, getattr(profile, name)) for name, title in titles.items() if len(getattr(profile, name)))
    others = (_columns(title, table) for title, table in filled)
    return "\n".join([title, *notes]), chain([_messages(profile), _rates(profile)], others)


def _messages(profile: HardwareProfile) -> Printed:
    """Return a table of median and interquartile range of every point; bandwidth is message bytes over the median."""
    table = _printed(
        "messages",
        ["kind", "ranks", "layout", "place"],
        ["message", "repeats", "median", "spread (q3 - q1)", "bandwidth"],
    )
    timed = list(zip(profile.points.rows, profile.times_s, strict=True))
    timed.sort(key=lambda timed: (timed[0].key, timed[0].message_bytes))
    for key, points in groupby(timed, key=lambda timed: timed[0].key):
        layout = "consecutive" if key.consecutive else "strided"
        place = f"{key.ranks_per_node} on a node" if key.group.across_nodes else "in a node"
        for point, times_s in points:
            low_s, median_s, high_s = (float(value) for value in np.quantile(times_s, [0.25, 0.5, 0.75]))
            table.add_row(
                key.collective,
                str(key.group_size),
                layout,
                place,
                bytes_text(point.message_bytes),
                str(len(times_s)),
                seconds_text(median_s),
                f"{seconds_text(high_s - low_s)} ({(high_s - low_s) / median_s:.0%})",
                rate_text(point.message_bytes / median_s),
            )
        table.add_section()
    return table


def _rates(profile: HardwareProfile) -> Printed:
    table = _printed("device rates, every rank working", ["rate", "source"], ["value"])
    for rate in profile.rates.rows:
        table.add_row(rate.name, rate.source, f"{rate.value:.4g}")
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
    return title, (_columns(words, getattr(profile, name)) for name, words in titles.items())


def _columns(title: str, table: Table[Row]) -> Printed:
    """Return a table of values, with standard errors where known, and with sources where not measured."""
    printed = Printed(title=title, title_justify="left")
    columns = columns_of(table.row_type)
    shown = [name for name in columns if not name.endswith(("_source", "_error_s"))]
    for name in shown:
        # Spaces let the head of a narrow column break between its words.
        printed.add_column(name.replace("_", " "), justify="left" if columns[name].dtype.kind == "S" else "right")
    for row in table.rows:
        printed.add_row(*(_cell(row, name, columns[name].source) for name in shown))
    return printed


def _cell(row: Row, name: str, sourced_by: str) -> str:
    source = getattr(row, sourced_by) if sourced_by else Source.MEASURED
    if source is Source.ABSENT:
        return "absent"
    text = _value(name, getattr(row, name))
    error_s = getattr(row, f"{name.removesuffix('_s')}_error_s", 0.0)
    if error_s > 0:
        text += f" ± {seconds_text(error_s)}"
    return text if source is Source.MEASURED else f"{text} {source}"


def _value(name: str, value: object) -> str:
    if isinstance(value, float):
        return seconds_text(value) if name.endswith("_s") else f"{value:.3g}"
    return bytes_text(value) if isinstance(value, int) and name.endswith("_bytes") else str(value)


def _printed(title: str, labels: Sequence[str], numbers: Sequence[str]) -> Printed:
    table = Printed(title=title, title_justify="left")
    for label in labels:
        table.add_column(label, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", overflow="fold")
    return table
