"""What is published and dense is described, planned and, cut to two small layers, trained as transformers does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_calls import call
from published_dense import cut
from random_plans import random_plan
from run_parity import TOLERANCE
from tiny_models import SEQUENCE_LENGTH

from shardwright.io import read_document
from shardwright.models.description import model_of_config
from shardwright.models.registry import FAMILIES
from shardwright.types import Model, Plan
from shardwright_search.cli import APP
from shardwright_train.commands.documents import describe_folder
from shardwright_train.models.base import describe, family_named

FOLDER = Path(__file__).parents[2] / "../shared/reference/hub-configs"
FILES = {file.stem: file for file in sorted(FOLDER.glob("*.json"))}
WITH_EXPERTS = {
    "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "kimi-k2", "mixtral-8x7b", "qwen3-30b-a3b",
}  # fmt: skip
DENSE = [name for name in FILES if name not in WITH_EXPERTS]
QUANTIZED = {"deepseek-v3": "fp8", "gpt-oss-20b": "mxfp4", "kimi-k2": "fp8"}
"""Those with experts whose weights are published in other formats."""
LENGTHS = {"bert-base": 512, "t5-base": 512, "flan-t5-xl": 512, "whisper-large-v3": 448}
GPUS = {"llama-3.1-405b": "16x8:H200"} | dict.fromkeys(("llama-3.3-70b-instruct", "qwen2.5-72b"), "4x8:H100-SXM")
pytestmark = [pytest.mark.skipif(not FILES, reason="the published configurations are not beside the clone")]


def length_of(name: str, config: dict[str, Any]) -> int:
    family = FAMILIES[config["model_type"]]
    return family.fixed_positions(family.configured(config)) or LENGTHS.get(name, 1024)


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_configuration_is_described_as_it_is(name: str, tmp_path: Path) -> None:
    config = json.loads(FILES[name].read_text())
    length = length_of(name, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = describe_folder(tmp_path, name, length)
    assert described == model_of_config(config, name, length, FILES[name])


def test_thirty_are_dense() -> None:
    assert len(FILES) == 36 and len(DENSE) == 30


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_a_quantised_configuration_is_described_as_advise_reads_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(FILES[name].read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = describe_folder(tmp_path, name, 1024)
    assert described == model_of_config(config, name, 1024, FILES[name])
    assert "quantization_config" not in described.config
    assert f"weights are stored in {QUANTIZED[name]} (quantization_config)" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
def test_a_dense_configuration_is_planned(name: str, tmp_path: Path) -> None:
    config = json.loads(FILES[name].read_text())
    asked = [str(FILES[name]), "--gpus", GPUS.get(name, "2x8:H100-SXM"), "--batch", "128", "--time-limit", "10"]
    length = [] if FAMILIES[config["model_type"]].labels else ["--seq", str(length_of(name, config))]
    ended = call(APP, "advise", *asked, *length, "--out", str(tmp_path / "plan.json"))
    assert ended.exit_code in (0, 4), ended.stderr  # 4: time was up before the plan was proven
    plan = read_document(tmp_path / "plan.json", Plan)
    assert plan.model.config == model_of_config(config, name, length_of(name, config), name).config


def small_models() -> list[Model]:
    models = []
    for name in DENSE:
        config = cut(json.loads(FILES[name].read_text()))
        family = FAMILIES[config["model_type"]]
        read = family.configured(config)
        length = family.fixed_positions(read) or max(SEQUENCE_LENGTH, family.least_positions(read) // 4 * 4 + 4)
        models.append(describe(family_named(config["model_type"], name), config, name, length))
    return models


@pytest.mark.long
@pytest.mark.timeout(900)
def test_dense_configurations_cut_to_two_small_layers_train_as_transformers_does(compare: Callable[..., Any]) -> None:
    plans = [random_plan(model, 300 + number, 2) for number, model in enumerate(small_models())]
    plans = [msgspec.structs.replace(plan, name=plan.model.name) for plan in plans]
    found = compare(plans)
    assert len(found) == len(DENSE)
    assert {name: errors for name, errors in found.items() if max(errors.values()) > TOLERANCE} == {}
