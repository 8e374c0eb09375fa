import numpy as np
import pytest

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.hdf5 import Provenance
from shardwright_formats.types.hardware_profile import HardwareProfile, write_hardware_profile
from shardwright_profile.show.tables import show_profile
from shardwright_profile.show.units import bytes_text, rate_text, seconds_text


def _profile() -> HardwareProfile:
    return HardwareProfile(
        cluster="two",
        device="cpu",
        backend="gloo",
        provenance=Provenance("2026-01-31", "torch 0"),
        points={
            "collective": np.array([b"p2p", b"all_reduce", b"all_reduce"], dtype="S16"),
            "group_size": np.array([2, 4, 4]),
            "consecutive": np.array([1, 0, 0], dtype=np.int8),
            "across_nodes": np.array([1, 0, 0], dtype=np.int8),
            "message_bytes": np.array([1024, 4096, 1024]),
            "interval": np.zeros(3),
            "source": np.array([b"measured"] * 3, dtype="S8"),
        },
        repeats={
            "point": np.array([0, 1, 1, 1, 1, 1, 2]),
            "time_s": np.array([2e-3, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 1e-6]),
            "outlier": np.zeros(7, dtype=np.int8),
        },
        rates={
            "name": np.array([b"matrix_flops_per_s"], dtype="S32"),
            "value": np.array([1.5e12]),
            "source": np.array([b"measured"], dtype="S8"),
        },
    )


def test_show_prints_median_spread_and_bandwidth_by_kind_and_size(tmp_path, capsys):
    write_hardware_profile(tmp_path / "h.h5", _profile())
    show_profile(tmp_path / "h.h5")
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│\n").split("│")] for line in printed.splitlines() if line[:1] == "│"]
    assert rows == [
        ["all_reduce", "4", "strided", "in a node", "1 KiB", "1", "1 us", "0 us (0%)", "1.02 GB/s"],
        ["all_reduce", "4", "strided", "in a node", "4 KiB", "5", "3 ms", "2 ms (67%)", "1.37 MB/s"],
        ["p2p", "2", "consecutive", "across nodes", "1 KiB", "1", "2 ms", "0 us (0%)", "0.512 MB/s"],
        ["matrix_flops_per_s", "measured", "1.5e+12"],
    ]
    assert "device cpu, backend gloo" in printed


def test_files_that_are_no_profile_are_refused(tmp_path):
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(BadInput, match="not a readable HDF5 file"):
        show_profile(tmp_path / "text.h5")
    with pytest.raises(BadInput, match="no such file"):
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
    assert [seconds_text(t) for t in (1e-6, 2.5e-4, 1e-3, 0.25, 3)] == ["1 us", "250 us", "1 ms", "250 ms", "3 s"]
    assert [rate_text(r) for r in (5e5, 1e6, 2.5e9)] == ["0.5 MB/s", "1 MB/s", "2.5 GB/s"]
