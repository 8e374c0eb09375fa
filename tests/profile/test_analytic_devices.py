"""The table of devices: complete, sourced, and read strictly."""

import pytest

from shardwright.devices.table import device_lines, device_named, read_devices
from shardwright.estimate.machines import Efficiencies, machine_of, machines_of, rates_of
from shardwright.io import BadInput
from shardwright.types import GIB

LISTED = {
    "A100-40", "A100-80", "A10", "V100-16", "V100-32", "L4", "L40S", "RTX-4090", "H100-PCIe", "H100-SXM", "H200",
    "B200", "B300", "GB200", "GB300", "MI300X", "MI355X", "RTX-5090", "A800", "H800", "H20", "RTX-6000-Ada",
    "RTX-PRO-6000", "RTX-PRO-6000-Server", "MI325X", "A10G", "L40", "A40", "RTX-A6000", "RTX-3090",
}  # fmt: skip
GOOD = 'revised = "2026-01-31"\n[devices.X]\nnames = ["Device X"]\n'


def table_in(tmp_path, text):
    path = tmp_path / "devices.toml"
    path.write_text(text)
    return read_devices(path)


def test_every_listed_device_is_there_with_what_a_roofline_needs():
    devices = read_devices().devices
    assert set(devices) == LISTED
    for key, device in devices.items():
        assert {"float32", "float16"} <= set(device.peaks), key
        assert device.memory_bytes and device.memory_bytes_per_s and device.link_bytes_per_s, key
        # Shorter formats are not slower, and every figure is of its unit's size.
        formats = ("float32", "tf32", "float16", "bfloat16", "fp8", "nvfp4")
        peaks = [device.peaks[name] for name in formats if name in device.peaks]
        assert peaks == sorted(peaks) and 1e13 < peaks[0] and peaks[-1] < 2e16, key
        assert "fp8" not in device.peaks or 1.99 <= device.peaks["fp8"] / device.peaks["bfloat16"] <= 2.03, key
        assert 1e11 < device.memory_bytes_per_s < 1e13 and 1e10 < device.link_bytes_per_s < 1e12, key
        assert device.link == "pcie" or device.link_bytes_per_s > 1e11, key
        assert device.usd_per_hour is None or 0.1 < device.usd_per_hour < 20, key


def test_each_figure_has_a_source_of_a_year_and_absent_ones_say_so():
    lines = list(device_lines(read_devices()))
    figures = [line for line in lines if line.startswith("  ") and not line.endswith(": absent")]
    assert len(figures) > 5 * len(LISTED)
    for line in figures:
        assert line.endswith("]") and "20" in line.split("[")[1], line
    assert sum(line.endswith("USD an hour, indicative: absent") for line in lines) == 21


def test_devices_that_came_later_are_as_fast_and_large_as_their_makers_say():
    """Dense FLOP/s in bfloat16 and FP8, GiB that a driver offers, bytes/s of memory, and of the link one way."""
    figures = {
        "GB200": (2.5e15, 5e15, 186, 8e12, 900e9),
        "B200": (2.25e15, 4.5e15, 178.35, 8e12, 900e9),
        "B300": (2.25e15, 4.5e15, 270, 7.7e12, 900e9),
        "H200": (989.5e12, 1979e12, 141, 4.8e12, 450e9),
        "MI300X": (1307.4e12, 2614.9e12, 192, 5.3e12, 448e9),
        "MI355X": (2516.6e12, 5033.2e12, 288, 8e12, 537.6e9),
        "L40S": (362.05e12, 733e12, 44.99, 864e9, 32e9),
        "RTX-4090": (165.2e12, 330.3e12, 24, 1008e9, 32e9),
        "RTX-5090": (209.5e12, 419e12, 31.84, 1792e9, 64e9),
        "H800": (989.5e12, 1979e12, 80, 3.35e12, 200e9),
        "H20": (148e12, 296e12, 95.58, 4e12, 450e9),
        "RTX-6000-Ada": (364.25e12, 728.5e12, 47.99, 960e9, 32e9),
        "RTX-PRO-6000": (503.8e12, 1007.6e12, 95.59, 1792e9, 64e9),
        "RTX-PRO-6000-Server": (480e12, 960e12, 95.59, 1597e9, 64e9),
        "MI325X": (1307.4e12, 2614.9e12, 256, 6e12, 448e9),
    }
    devices = read_devices().devices
    for key, (bfloat16, fp8, memory_gib, memory, link) in figures.items():
        device = devices[key]
        assert (device.peaks["bfloat16"], device.peaks["fp8"]) == (bfloat16, fp8), key
        assert (device.memory_bytes_per_s, device.link_bytes_per_s) == (memory, link), key
        assert device.memory_bytes == pytest.approx(memory_gib * GIB, rel=1e-4), key


def test_blackwells_rates_in_nvfp4_are_its_makers():
    figures = {"B200": 9e15, "GB200": 10e15, "B300": 13.5e15, "GB300": 15e15}
    assert {k: d.peaks["nvfp4"] for k, d in read_devices().devices.items() if "nvfp4" in d.peaks} == figures


def test_ampere_and_ada_without_nvlink_are_as_fast_as_their_makers_say():
    """Dense FLOP/s in bfloat16 with float32 accumulation, GiB that a driver offers, bytes/s of memory."""
    figures = {
        "A10G": (70e12, 22.49, 600e9),
        "L40": (181.05e12, 44.99, 864e9),
        "A40": (149.7e12, 44.99, 696e9),
        "RTX-A6000": (154.8e12, 47.99, 768e9),
        "RTX-3090": (71e12, 24, 936e9),
    }
    devices = read_devices().devices
    for key, (bfloat16, memory_gib, memory) in figures.items():
        device = devices[key]
        assert (device.peaks["bfloat16"], device.memory_bytes_per_s, device.link) == (bfloat16, memory, "pcie"), key
        assert device.memory_bytes == pytest.approx(memory_gib * GIB, rel=1e-3), key


def test_fp8_is_of_the_products_of_blocks_alone():
    rates, sixteen = rates_of(read_devices(), "H100-SXM"), Efficiencies()
    plain, machines = machine_of(rates, "bfloat16", sixteen), machines_of(rates, "fp8", sixteen)
    assert machines.reached_in("block").flops_per_s == pytest.approx(1979e12 * 0.85 * 0.709)
    assert machines.reached_in("block").attention_flops_per_s == plain.attention_flops_per_s
    assert machines.reached_in("embedding") == machines.reached_in("head") == plain
    assert machines_of(rates, "bfloat16", sixteen) == (plain, plain)
    # Without a figure of its own, FP8 has the share of 16 bits; a given rate is that of FP8 alone.
    other = machines_of(rates_of(read_devices(), "MI300X", 2e15), "fp8", sixteen)
    assert other.blocks.flops_per_s == pytest.approx(2e15 * 0.85 * 0.514)
    assert other.ends.flops_per_s == pytest.approx(1307.4e12 * 0.85 * 0.514) == other.blocks.attention_flops_per_s
    four = machines_of(rates_of(read_devices(), "GB300"), "nvfp4", sixteen)
    assert four.blocks.flops_per_s == pytest.approx(15e15 * 0.4) and four.ends.flops_per_s == 2.5e15 * 0.64
    with pytest.raises(BadInput, match="no rate for fp8 matrix products: give --matrix-tflop-s, or choose another"):
        machines_of(rates_of(read_devices(), "A100-80"), "fp8", sixteen)


def test_a_device_is_found_by_its_key_and_by_its_drivers_name():
    table = read_devices()
    assert device_named(table, "H100-SXM")[0] == "NVIDIA H100 80GB HBM3"
    assert device_named(table, "A100-SXM4-40GB") == ("A100-SXM4-40GB", table.devices["A100-40"])
    for device in table.devices.values():
        assert all(device_named(table, name) == (name, device) for name in device.names)
    with pytest.raises(BadInput, match="--device: 'H1000' is not in the table of devices: did you mean H100-"):
        device_named(table, "H1000")


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("RTX-4090", "4090 RTX4090 rtx_4090 GeForce-RTX-4090 4090-24GB"),
        ("H200", "h200 H200-SXM H200-SXM5-141GB HGX-H200"),
        ("H100-SXM", "H100 h100-sxm5-80gb H100SXM5 H100-80GB DGX-H100 H100_SXM"),
        ("H100-PCIe", "h100-pcie H100PCIe-80GB"),
        ("A100-40", "A100-40GB a100_sxm4_40gb A100-40G"),
        ("A100-80", "a100-80g A100-SXM-80GB"),
        ("V100-32", "V100-32GB Tesla-V100-SXM2-32GB"),
        ("L4", "l4 L4-24GB"),
        ("L40S", "l40s L40S-48GB"),
        ("L40", "l40 L40-48GB"),
        ("A10", "a10 A10-24GB"),
        ("A10G", "a10g A10G-24GB"),
        ("A40", "a40 A40-48GB"),
        ("RTX-A6000", "A6000 a6000 RTXA6000 A6000-48GB"),
        ("RTX-3090", "3090 RTX3090 rtx_3090 GeForce-RTX-3090"),
        ("A800", "a800 A800-SXM4-80GB"),
        ("H800", "h800 H800-SXM5 H800-80GB"),
        ("H20", "h20 H20-96GB"),
        ("B200", "HGX-B200 B200-180GB B200-192GB B200SXM"),
        ("MI325X", "mi325x Instinct-MI325X MI325X-OAM-256GB"),
        ("RTX-6000-Ada", "RTX6000Ada 6000-Ada RTX-6000-Ada-48GB"),
        ("RTX-PRO-6000", "RTXPRO6000 PRO-6000 RTX-PRO-6000-Blackwell-Workstation-Edition"),
        ("RTX-PRO-6000-Server", "rtx-pro-6000-blackwell-server"),
    ],
)
def test_a_device_is_found_however_people_write_its_name(key, names):
    table = read_devices()
    for name in names.split():
        assert table.key_of(name) == key, name
        assert device_named(table, name) == (table.devices[key].names[0], table.devices[key]), name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("A100", "'A100' may be A100-40 or A100-80: give one of them"),
        ("v100", "'v100' may be V100-16 or V100-32: give one of them"),
        ("RTX 6000", "'RTX 6000' may be RTX-6000-Ada or RTX-PRO-6000 or RTX-PRO-6000-Server: give one of them"),
        *((name, f"'{name}' is not in the table") for name in ("A100-PCIe", "H100-NVL", "4090D", "RTX-4090-48GB")),
        *(
            (name, f"'{name}' is not in the table")
            for name in ("L20", "A5000", "GH200", "H20-3e", "H800-PCIe", "RTX", "80GB")
        ),
        ("RTX-PRO-6000-Max-Q", "'RTX-PRO-6000-Max-Q' is not in the table"),
    ],
)
def test_a_name_of_several_devices_or_of_another_one_is_refused(name, problem):
    with pytest.raises(BadInput, match=f"--gpus: {problem}"):
        device_named(read_devices(), name, "--gpus")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("revised = ", "is not valid TOML"),
        (GOOD + "memory_bytes = 5\n", "memory_bytes and memory_bytes_source need each other"),
        (GOOD + 'link_bytes_per_s_source = "me"\n', "link_bytes_per_s and link_bytes_per_s_source need each other"),
        (GOOD + "peaks = { float8 = 1e12 }\n", "float8"),
        (GOOD + "memory_byte_per_s = 1e9\n", "memory_byte_per_s"),
        (GOOD + 'peaks = { float16 = 0.0 }\npeaks_source = "me"\n', "> 0"),
        (GOOD + '[devices.Y]\nnames = ["Device X"]\n', "two devices are called 'Device X'"),
        ('revised = "today"\n[devices.X]\nnames = ["Device X"]\n', "revised"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, problem):
    with pytest.raises(BadInput, match=problem.replace("(", r"\(")):
        table_in(tmp_path, text)


def test_a_missing_figure_is_asked_for_and_one_given_stands_in_for_the_table(tmp_path):
    table = table_in(tmp_path, GOOD)
    with pytest.raises(BadInput, match="no rate for bfloat16 matrix products: give --matrix-tflop-s"):
        machine_of(rates_of(table, "X", None, 1e12, 1e11), "bfloat16", Efficiencies())
    with pytest.raises(BadInput, match="no memory bandwidth: give --memory-gbyte-s"):
        machine_of(rates_of(table, "X", 1e14, None, 1e11), "bfloat16", Efficiencies())
    with pytest.raises(BadInput, match="no link bandwidth: give --link-gbyte-s"):
        machine_of(rates_of(table, "X", 1e14, 1e12), "bfloat16", Efficiencies())
    given = machine_of(rates_of(table, "X", 1e14, 1e12, 1e11), "bfloat16", Efficiencies(0.5, 0.25, 0.1))
    assert (given.flops_per_s, given.memory_bytes_per_s, given.link.bytes_per_s) == (5e13, 2.5e11, 1e10)
    own = rates_of(read_devices(), "A100-40", memory_bytes_per_s=1e12)
    assert own.memory == 1e12 and own.matrix("bfloat16") == 312e12
