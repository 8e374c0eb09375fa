"""`shardwright models` and `shardwright devices` list what is known by name, on lines that fit a terminal."""

import sys
from subprocess import run

import pytest
from command_calls import call

from shardwright.devices.table import read_devices
from shardwright.models.registry import FAMILIES, read_presets
from shardwright_search.cli import APP


@pytest.mark.usefixtures("usual_width")
@pytest.mark.parametrize("command", ["models", "devices"])
def test_tables_have_at_most_six_columns_and_a_hundred_characters(command: str) -> None:
    listed = call(APP, command)
    assert listed.exit_code == 0
    assert max(map(len, listed.stdout.splitlines())) <= 100
    assert max(line.count("│") for line in listed.stdout.splitlines()) <= 7
    assert call(APP, command, "--help").exit_code == 0


def test_every_model_and_family_is_listed() -> None:
    rows = [line.split("│")[1:-1] for line in call(APP, "models").stdout.splitlines() if line.startswith("│")]
    listed = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert set(listed) == {*read_presets(), *FAMILIES}
    assert listed["llama-3.1-8b"] == ["llama", "8.03", "32", "8192"]
    assert listed["deepseek_v3"][-2:] == ["yes", "kimi_k2"] and listed["bert"][-2:] == ["-", "-"]


def test_every_device_is_listed_with_memory_peaks_and_source() -> None:
    told = call(APP, "devices").stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in told.splitlines() if line.startswith("│")]
    assert {row[0] for row in rows if row[0]} == set(read_devices().devices)
    (h200,) = (row for row in rows if row[0] == "H200")
    assert h200[1:5] == ["141", "989.5", "1979", "-"] and h200[5].startswith("NVIDIA H200 Tensor Core GPU datasheet")
    (gb300,) = (row for row in rows if row[0] == "GB300")
    assert gb300[2:5] == ["2500", "5000", "15000"]


def test_one_model_or_device_is_shown_with_its_source() -> None:
    shown = call(APP, "models", "kimi-k2").stdout.splitlines()
    assert shown[0] == "kimi-k2: 1026 B parameters, 4096 tokens a sample"
    assert "  source: Moonshot AI 2025" in shown[1] and "  n_routed_experts: 384" in shown
    assert call(APP, "models", "qwen2").stdout.count("  source: ") == 10
    assert call(APP, "devices", "4090").stdout.startswith("RTX-4090 (")
    for command, name in (("models", "lama-3.1-8b"), ("devices", "Z9000")):
        refused = call(APP, command, name)
        assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "did you mean llama-3.1-8b" in call(APP, "models", "lama-3.1-8b").stderr


def test_lists_need_no_torch() -> None:
    code = (
        "import sys; from shardwright_search.commands import listing;"
        "from shardwright_search.options import ModelsOptions; listing.list_models(ModelsOptions());"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
