"""Profiles shown to people: printed tables and pictures."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import StringIO
from itertools import accumulate, chain, groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable

from shardwright.command import show
from shardwright.display.chart import ChartAxis, Panel, bytes_axis, linear_axis, logarithmic_axis
from shardwright.display.columns import PrintedColumn, line_width, split_columns, widths_of
from shardwright.display.svg import SOFT, document, legend, line, marker, picture, series_numbers, text
from shardwright.display.units import bytes_text, rate_text, seconds_text
from shardwright.estimate.curves import design_of
from shardwright.io import BadInput, write_bytes
from shardwright.io.hdf5 import format_of
from shardwright.io.table import Row, Source, Table, columns_of
from shardwright.key import LayerKey
from shardwright.types import Recompute
from shardwright.types.hardware_profile import CollectiveKey, HardwareProfile, read_hardware_profile
from shardwright.types.model_profile import FitMode, ModelProfile, read_model_profile

# Tables for terminals: split by columns if they are too wide, with lines between groups of rows.


class SplitTable(NamedTuple):
    """A table that is printed as several tables if its columns do not fit side by side."""

    title: str
    columns: Sequence[PrintedColumn]
    repeated: int
    """Number of first columns that are repeated in each of the tables."""
    ends: frozenset[int] = frozenset()
    """Row numbers, counted from 1, after which a line is drawn."""

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the tables in the form that rich prints."""
        for number, columns in enumerate(split_columns(self.columns, self.repeated, options.max_width)):
            yield self._part(f"{self.title}{' (continued)' if number else ''}", columns, options.max_width)

    def _part(self, title: str, columns: Sequence[PrintedColumn], room: int) -> RichTable:
        made = RichTable(title=title, title_justify="left")
        for column, width in zip(columns, widths_of(columns, room), strict=True):
            made.add_column(column.heading, justify="left" if column.is_text else "right", width=width)
        for number, cells in enumerate(zip(*(column.cells for column in columns), strict=True), start=1):
            made.add_row(*cells, end_section=number in self.ends)
        return made


def table_of(
    title: str, labels: Sequence[str], numbers: Sequence[str], groups: Iterable[Sequence[Sequence[str]]]
) -> SplitTable:
    """Return a table of groups of rows: text under `labels`, repeated in each part of a split table, then numbers."""
    each = list(groups)
    rows = [row for group in each for row in group]
    columns = [
        PrintedColumn(heading, [row[place] for row in rows], place < len(labels))
        for place, heading in enumerate((*labels, *numbers))
    ]
    return SplitTable(title, columns, len(labels), frozenset(accumulate(map(len, each[:-1]))))


# Profiles as tables.


def show_profile(path: Path) -> None:
    """Print a hardware or a model profile on standard output; raise BadInput if the file is neither."""
    profile = _read(path)
    title, tables = _hardware_tables(profile) if isinstance(profile, HardwareProfile) else _model_tables(profile)
    printed, is_terminal = StringIO(), sys.stdout.isatty()
    console = Console(file=printed, force_terminal=is_terminal, width=line_width(), highlight=False, markup=False)
    for each in (title, *tables):
        console.print(each)
    show(printed.getvalue().removesuffix("\n"))


def draw_profile(path: Path, picture: Path) -> None:
    """Draw a profile's points, curves and residuals into a picture file; raise BadInput for a file of another kind."""
    if picture.suffix not in (".svg", ".png", ".pdf"):
        raise BadInput(picture, "is not a kind of picture", "call it .svg, .png or .pdf")
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
            raise BadInput(path, f"format is {other!r}, not a profile's", "pass a hardware or a model profile")


def _converted(svg: str, suffix: str) -> bytes:
    if suffix == ".svg":
        return svg.encode()
    try:
        import cairosvg
    except (ImportError, OSError) as error:
        remedy = "name it .svg, or install shardwright[pictures] and libcairo2"
        raise BadInput("--picture", f"a {suffix} needs CairoSVG ({error})", remedy) from None
    convert = {".png": cairosvg.svg2png, ".pdf": cairosvg.svg2pdf}[suffix]
    converted: bytes = convert(bytestring=svg.encode(), scale=2)
    return converted


def _hardware_tables(profile: HardwareProfile) -> tuple[str, Iterator[SplitTable]]:
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


def _messages(profile: HardwareProfile) -> SplitTable:
    """Return a table with median and interquartile range of every point; bandwidth is message bytes over the median."""
    labels = "kind", "ranks", "layout", "place"
    numbers = "message", "repeats", "median", "spread (q3 - q1)", "bandwidth"
    timed = list(zip(profile.points.rows, profile.times_s, strict=True))
    timed.sort(key=lambda timed: (timed[0].key, timed[0].message_bytes))
    groups = groupby(timed, key=lambda timed: timed[0].key)
    rows = ([_message(key, point.message_bytes, times_s) for point, times_s in points] for key, points in groups)
    return table_of("messages", labels, numbers, rows)


def _message(key: CollectiveKey, message_bytes: int, times_s: NDArray[Any]) -> tuple[str, ...]:
    low_s, median_s, high_s = (float(value) for value in np.quantile(times_s, [0.25, 0.5, 0.75]))
    return (
        key.collective,
        str(key.group_size),
        "consecutive" if key.consecutive else "strided",
        f"{key.ranks_per_node} on a node" if key.group.across_nodes else "in a node",
        bytes_text(message_bytes),
        str(len(times_s)),
        seconds_text(median_s),
        f"{seconds_text(high_s - low_s)} ({(high_s - low_s) / median_s:.0%})",
        rate_text(message_bytes / median_s),
    )


def _rates(profile: HardwareProfile) -> SplitTable:
    rows = [(rate.name, rate.source, f"{rate.value:.4g}") for rate in profile.rates.rows]
    return table_of("device rates, every rank working", ("rate", "source"), ("value",), [rows])


def _model_tables(profile: ModelProfile) -> tuple[str, Iterator[SplitTable]]:
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
        "rests": "one layer without its experts, which ranks share, one microbatch",
        "experts": "one rank's experts of a layer, for its rows",
        "context": "one layer of a rank's share of positions, over what is derived",
    }
    there = ((words, getattr(profile, name)) for name, words in titles.items())
    optional = (profile.rests, profile.experts, profile.context)
    return title, (_columns(words, table) for words, table in there if len(table) or table not in optional)


def _columns(title: str, table: Table[Row]) -> SplitTable:
    """Return a table of values, with standard errors if known, and with the source of those not measured.

    The first columns, with text and numbers without unit, identify a row; they are repeated if the table is split.
    """
    columns = columns_of(table.row_type)
    shown = [name for name in columns if not name.endswith(("_source", "_error_s"))]
    printed = [
        PrintedColumn(
            name.replace("_", " "),
            [_cell(row, name, columns[name].source) for row in table.rows],
            is_text=columns[name].dtype.kind == "S",
        )
        for name in shown
    ]
    names = takewhile(lambda name: columns[name].dtype.kind != "f" and not name.endswith(("_bytes", "_s")), shown)
    return SplitTable(title, printed, len(list(names)))


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


# Profiles as pictures.

_COLUMN, _LEFT, _RIGHT, _TOP = 340.0, 64.0, 16.0, 64.0
"""Width of a column of panels, its left and right margin, and the top of the first panel, in px."""
_HEIGHT, _RESIDUALS, _ROW = 170.0, 56.0, 326.0
"""Heights of a panel, of the residuals below it, and of both together with their titles, in px."""
_QUANTITIES = {"forward_s": "forward", "backward_s": "backward", "activation_bytes": "activations"}
_IN_A_ROW = 3


class _Series(NamedTuple):
    """The points of one quantity of one layer type under one strategy at one length, by micro-batch size."""

    label: str
    wanted: int
    """Preferred number of its marker, if no other series has it; the colour depends on the tensor-parallel size."""
    sizes: NDArray[Any]
    values: NDArray[Any]
    errors: NDArray[Any]
    curve: NDArray[Any] | None
    """Coefficients of the fitted line in the micro-batch size; None if there is no fit."""

    def on_curve(self, sizes: NDArray[Any]) -> NDArray[Any]:
        """Return the values of the fitted line at some micro-batch sizes."""
        value: NDArray[Any] = design_of(FitMode.BATCH, sizes, np.ones_like(sizes)) @ self.curve
        return value

    @property
    def residuals(self) -> NDArray[Any]:
        """Return (fit - point) / point at every point; empty if there is no fit."""
        return np.zeros(0) if self.curve is None else self.on_curve(self.sizes) / self.values - 1


def model_picture(profile: ModelProfile) -> str:
    """Return a picture with a column per layer type: forward, backward and activations of a microbatch, with residuals.

    Points are drawn with standard errors; lines are fits of mode `batch`; residuals are (fit - point) / point.
    """
    types = list(dict.fromkeys(row.type for row in profile.layers.rows))
    panels = {(name, quantity): list(_series(profile, name, quantity)) for name in types for quantity in _QUANTITIES}
    numbers = series_numbers({each.label: each.wanted for series in panels.values() for each in series})
    drawn = []
    for column, name in enumerate(types):
        for row, (quantity, words) in enumerate(_QUANTITIES.items()):
            top, series = _TOP + row * _ROW, panels[name, quantity]
            drawn.append(_column(series, numbers, column, top, f"{name}: {words}", quantity))
    title = f"{profile.origin.model} on {profile.origin.device}, {profile.provenance.date}"
    return _page(drawn, title, numbers, len(types), _TOP + len(_QUANTITIES) * _ROW)


def hardware_picture(profile: HardwareProfile) -> str:
    """Return a picture of median time by message size, a panel per collective; bars: the middle half of the repeats."""
    keys = sorted(profile.curves)
    names = list(dict.fromkeys(key.collective for key in keys))
    numbers = series_numbers({str(key.group): _wanted_of(key) for key in keys})
    drawn = []
    for place, name in enumerate(names):
        curves = [
            (numbers[str(key.group)], str(key.group), _quartiles(profile, key))
            for key in keys
            if key.collective == name
        ]
        left, top = place % _IN_A_ROW * _COLUMN, _TOP + place // _IN_A_ROW * (_HEIGHT + 76)
        drawn.append(_collective_panel(curves, name, left, top))
    title = f"{profile.cluster}: {profile.device}, {profile.backend}, {profile.provenance.date}"
    rows = -(-len(names) // _IN_A_ROW)
    return _page(drawn, title, numbers, min(len(names), _IN_A_ROW), _TOP + rows * (_HEIGHT + 76))


def _page(drawn: Sequence[str], title: str, numbers: dict[str, int], columns: int, bottom: float) -> str:
    width = columns * _COLUMN
    entries = [(marker(number, 6.5, 6.5, 4.5), label) for label, number in numbers.items()]
    marks, height = legend(entries, _LEFT, bottom, width - _LEFT)
    heading = text(0, 18, title, look="strong")
    return picture(heading + "".join(drawn) + marks, width, bottom + height, title)


def _column(
    series: Sequence[_Series], numbers: dict[str, int], column: int, top: float, title: str, quantity: str
) -> str:
    """Return the SVG of one quantity of one layer type: points with fitted lines, and the residuals below."""
    left, bottom = column * _COLUMN, top + _HEIGHT
    sizes = [float(size) for each in series for size in each.sizes] or [0.0]
    across = linear_axis(min(sizes), max(sizes), left + _LEFT, left + _COLUMN - _RIGHT, count=7)
    high = max((float((each.values + each.errors).max()) for each in series), default=1.0) * 1.05
    is_time = quantity.endswith("_s")
    up = linear_axis(0, high, bottom, top, seconds_text) if is_time else bytes_axis(high, bottom, top, 4)
    worst = max((float(np.abs(each.residuals).max(initial=0)) for each in series), default=0) * 1.1
    worst = max(worst, 0.025)
    above = Panel(across, up)
    below = Panel(across, linear_axis(-worst, worst, bottom + 34 + _RESIDUALS, bottom + 34, "{:.0%}".format, 4))
    drawn = [above.frame(title), below.frame("", "micro-batch size, samples")]
    drawn.append(text(left + _LEFT, bottom + 30, "residuals", look="soft small"))
    drawn.append(line(across.start, below.y.at(0), across.end, below.y.at(0), stroke=SOFT))
    for each in series:
        drawn.append(_points(each, numbers[each.label], above, below, seconds_text if is_time else bytes_text))
    return "".join(drawn)


def _points(series: _Series, number: int, above: Panel, below: Panel, words: Callable[[float], str]) -> str:
    drawn = []
    if series.curve is not None:
        grid = np.linspace(series.sizes.min(), series.sizes.max(), 25)
        on_curve = np.clip(series.on_curve(grid), above.y.low, above.y.high)
        drawn.append(above.curve(zip(grid, on_curve, strict=True), number))
    for size, value, error in zip(series.sizes, series.values, series.errors, strict=True):
        known = f"{words(value)} ± {words(error)}" if error else words(value)
        title = f"{series.label}, {size} samples: {known}"
        drawn.append(above.point(size, value, (value - error, value + error), number, title))
    for size, residual in zip(series.sizes, series.residuals, strict=False):
        title = f"{series.label}, {size} samples: {residual:.1%}"
        drawn.append(below.point(size, residual, (residual, residual), number, title))
    return "".join(drawn)


def _collective_panel(curves: Sequence[tuple[int, str, NDArray[Any]]], name: str, left: float, top: float) -> str:
    """Return the SVG of one collective's times by message bytes; a curve is an array of (bytes, low, median, high)."""
    values = np.concatenate([quartiles for _, _, quartiles in curves])
    across = logarithmic_axis(
        values[:, 0].min(), values[:, 0].max(), left + _LEFT, left + _COLUMN - _RIGHT, bytes_text, base=32
    )
    up: ChartAxis = logarithmic_axis(values[:, 1].min(), values[:, 3].max(), top + _HEIGHT, top, seconds_text)
    panel = Panel(across, up)
    drawn = [panel.frame(name, "message")]
    for number, label, quartiles in curves:
        drawn.append(panel.curve(quartiles[:, [0, 2]], number))
        for size, low, middle, high in quartiles:
            title = f"{label}, {bytes_text(size)}: {seconds_text(middle)}"
            drawn.append(panel.point(size, middle, (low, high), number, title))
    return "".join(drawn)


def _quartiles(profile: HardwareProfile, key: CollectiveKey) -> NDArray[Any]:
    """Return the message sizes of a kind of collective, ascending, and the quartiles of its times: [sizes, 4]."""
    timed = zip(profile.points.rows, profile.times_s, strict=True)
    points = [(row.message_bytes, *np.quantile(times_s, [0.25, 0.5, 0.75])) for row, times_s in timed if row.key == key]
    return np.array(sorted(points), float)


def _wanted_of(key: CollectiveKey) -> int:
    """Return the preferred number of the marker of a kind of group; the colour depends on the number of ranks."""
    return _power(key.group_size) + 8 * key.group.across_nodes + 16 * (not key.consecutive)


def _power(size: int) -> int:
    return min(size.bit_length() - 1, 7)


def _series(profile: ModelProfile, name: str, quantity: str) -> Iterator[_Series]:
    """Yield the series of one layer type, with the points at which the quantity is known and positive."""
    for key, rows in profile.curves.items():
        known = [(row.micro_batch_size, getattr(row.figures, quantity)) for row in rows]
        known = [(size, figure) for size, figure in known if figure.value > 0]
        if key.type == name and known:
            yield _Series(
                f"tp {key.tp_size} {key.sequence_parallel}, recompute {key.recompute}, {key.sequence_length} tokens",
                _power(key.tp_size) + 8 * list(Recompute).index(key.recompute or Recompute.NONE),
                np.array([size for size, _ in known]),
                np.array([figure.value for _, figure in known], float),
                np.array([figure.error for _, figure in known]),
                _batch_line(profile, quantity, key),
            )


def _batch_line(profile: ModelProfile, quantity: str, key: LayerKey) -> NDArray[Any] | None:
    """Return the three coefficients of the line fitted to the points of a key; None if there is no fit."""
    for fit in profile.fits.rows:
        if (fit.key, fit.quantity, fit.mode) == (key, quantity, FitMode.BATCH):
            return np.array([fit.constant, fit.linear, fit.quadratic])
    return None
