import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardwright.display.units import bytes_text, rate_text, seconds_text
from shardwright.io import BadInput
from shardwright.io.hdf5 import Provenance
from shardwright.io.table import Table
from shardwright.types.hardware_profile import HardwareProfile, PointRow, RateRow, RepeatRow, write_hardware_profile
from shardwright.types.model_profile import read_model_profile
from shardwright_profile.show import draw_profile, show_profile


def _profile() -> HardwareProfile:
    return HardwareProfile(
        cluster="two",
        device="cpu",
        backend="gloo",
        provenance=Provenance(date="2026-01-31", versions="torch 0"),
        points=Table(
            PointRow,
            {
                "collective": ["p2p", "all_reduce", "all_reduce"],
                "group_size": [2, 4, 4],
                "ranks_per_node": [1, 4, 4],
                "consecutive": [1, 0, 0],
                "message_bytes": [1024, 4096, 1024],
                "interval": [0.0] * 3,
                "source": ["measured"] * 3,
            },
        ),
        repeats=Table(
            RepeatRow,
            {
                "point": [0, 1, 1, 1, 1, 1, 2],
                "time_s": [2e-3, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 1e-6],
                "outlier": [0] * 7,
            },
        ),
        rates=Table(RateRow, {"name": ["matrix_flops_per_s"], "value": [1.5e12], "source": ["measured"]}),
    )


def test_show_ends_quietly_where_nobody_reads_it(tmp_path, unread):
    write_hardware_profile(tmp_path / "h.h5", _profile())
    command = [Path(sys.executable).with_name("shardwright-profile"), "show", tmp_path / "h.h5"]
    ended = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, timeout=300)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_show_prints_median_spread_and_bandwidth_by_kind_and_size(tmp_path, capsys):
    write_hardware_profile(tmp_path / "h.h5", _profile())
    show_profile(tmp_path / "h.h5")
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│\n").split("│")] for line in printed.splitlines() if line[:1] == "│"]
    assert rows == [
        ["all_reduce", "4", "strided", "in a node", "1 KiB", "1", "1 µs", "0 s (0%)", "1.02 GB/s"],
        ["all_reduce", "4", "strided", "in a node", "4 KiB", "5", "3 ms", "2 ms (67%)", "1.37 MB/s"],
        ["p2p", "2", "consecutive", "1 on a node", "1 KiB", "1", "2 ms", "0 s (0%)", "0.512 MB/s"],
        ["matrix_flops_per_s", "measured", "1.5e+12"],
    ]
    assert "device cpu, backend gloo" in printed


def test_a_table_of_many_columns_is_split_and_nothing_in_it_is_cut_off(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    show_profile(EXAMPLES / "model_profile.h5")
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line[:1] in "┃│┏┡├└"]
    assert max(map(len, lines)) <= 120 and "…" not in printed
    assert "curves through the points (continued)" in printed
    rows = [[cell.strip() for cell in line.strip("│\n").split("│")] for line in lines if line[:1] == "│"]
    key = ["block", "1", "none", "none", "forward_s", "batch", "0", "16"]
    assert rows[-2:] == [[*key, "-0.0001", "0.001", "0", "3"], [*key, "0.01", "0.02", "3", "0.03"]]


def test_files_that_are_no_profile_are_refused(tmp_path):
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(BadInput, match="not a readable HDF5 file"):
        show_profile(tmp_path / "text.h5")
    with pytest.raises(BadInput, match="No such file"):
        show_profile(tmp_path / "absent.h5")


def test_numbers_are_printed_in_readable_units():
    assert [bytes_text(n) for n in (0, 1023, 1024, 1536, 5 * 1024**2, 2048 * 1024**3)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "5 MiB",
        "2048 GiB",
    ]
    assert [seconds_text(t) for t in (1e-6, 2.5e-4, 1e-3, 0.25, 3)] == ["1 µs", "250 µs", "1 ms", "250 ms", "3 s"]
    assert [rate_text(r) for r in (5e5, 1e6, 2.5e9)] == ["0.5 MB/s", "1 MB/s", "2.5 GB/s"]


EXAMPLES = Path(__file__).parents[2] / "core" / "examples"
SVG = "{http://www.w3.org/2000/svg}"


def _shown(path, tag):
    """What the marks of a picture say when they are pointed at."""
    return [found[0].text for found in ElementTree.parse(path).iter(f"{SVG}{tag}") if len(found)]


def test_every_point_of_a_profile_is_in_its_picture(tmp_path):
    write_hardware_profile(tmp_path / "h.h5", _profile())
    draw_profile(tmp_path / "h.h5", tmp_path / "h.svg")
    titles = [said for tag in ("circle", "polygon") for said in _shown(tmp_path / "h.svg", tag)]
    assert sorted(titles) == [
        "2 consecutive ranks, 1 on a node, 1 KiB: 2 ms",
        "4 strided ranks in a node, 1 KiB: 1 µs",
        "4 strided ranks in a node, 4 KiB: 3 ms",
    ]
    draw_profile(EXAMPLES / "model_profile.h5", tmp_path / "m.svg")
    texts = {text.text for text in ElementTree.parse(tmp_path / "m.svg").iter(f"{SVG}text")}
    layers = read_model_profile(EXAMPLES / "model_profile.h5").layers
    assert {f"{name.decode()}: forward" for name in layers["type"]} <= texts


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_picture_can_be_png_or_pdf(tmp_path, kind, start):
    pytest.importorskip("cairosvg", exc_type=OSError, reason="needs libcairo2")
    draw_profile(EXAMPLES / "hardware_profile.h5", tmp_path / f"h.{kind}")
    assert (tmp_path / f"h.{kind}").read_bytes().startswith(start)


def test_without_a_converter_pictures_are_svg_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(BadInput, match=r"a \.png needs CairoSVG .*: name it \.svg, or install"):
        draw_profile(EXAMPLES / "hardware_profile.h5", tmp_path / "h.png")
    assert list(tmp_path.iterdir()) == []
