"""Low-rank matrices train as peft trains them in one process, and go out as a folder that peft opens."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_calls import call
from forked_command import forked_command
from frozen_models import LORA, lora_model, lora_plan
from msgspec.structs import replace
from run_parity import TOLERANCE
from safetensors.torch import load_file
from test_train_traffic import by_formula, counted
from tiny_models import CONFIGS, SEQUENCE_LENGTH, initial_stock, tiny

from shardwright_formats.io import read_document, write_document
from shardwright_formats.types import LOW_RANK, Model, RunResult
from shardwright_train.cli import APP
from shardwright_train.dry_run.simulated_step import simulate_step
from shardwright_train.models.registry import family_named

Errors = dict[str, dict[str, float]]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def two_ranks(compare: Callable[..., Errors]) -> Errors:
    return compare([lora_plan(name, number, 2) for number, name in enumerate(LORA)])


@pytest.fixture(scope="module")
def more_plans(compare: Callable[..., Errors]) -> Errors:
    found: Errors = {}
    for world_size, numbers in ((2, range(10, 16)), (4, range(5))):
        found |= compare([lora_plan(name, number, world_size) for number in numbers for name in LORA])
    return found


@pytest.mark.parametrize("name", LORA)
def test_low_rank_matrices_train_exactly_as_peft_trains_them(two_ranks: Errors, name: str) -> None:
    (errors,) = (errors for plan, errors in two_ranks.items() if plan.startswith(f"lora of {name},"))
    assert max(errors.values()) < TOLERANCE


@pytest.mark.long
def test_more_plans_and_ranks_train_exactly_as_peft_does(more_plans: Errors) -> None:
    assert len(more_plans) == 11 * len(LORA)
    assert {name: errors for name, errors in more_plans.items() if max(errors.values()) > TOLERANCE} == {}


@pytest.mark.parametrize("name", LORA)
def test_low_rank_matrices_move_the_bytes_of_their_formula(name: str) -> None:
    plan = lora_plan(name, 1, 4)
    assert counted(plan, 3) == by_formula(plan, 3)


def test_states_of_low_rank_matrices_alone_are_held() -> None:
    plan = lora_plan("queries and values", 0, 2, widths=(1, 1))
    step = simulate_step(plan, 1, family_named("llama", "test"), "sdpa")
    kinds = [plan.model.layers[i] for low, high in plan.stages[1].layers for i in range(low, high)]
    count = sum(plan.model.types[kind].trained_count() for kind in kinds)
    assert step.gradients_bytes == 8 * count
    assert 0 <= step.optimizer_bytes - 16 * count < 1024


def _run(folder: Path, model: Model, steps: int) -> Path:
    """Train on one rank from weights of the folder, and write the adapter."""
    plan = replace(lora_plan("queries and values", 0, 1, dtype="float32"), model=model)
    write_document(folder / "plan.json", plan)
    given = ["--data", "random", "--weights", folder / "base", "--out", folder / "out", "--log-to", "none"]
    run = forked_command(("run", folder / "plan.json", *given, "--checkpoints", folder / "kept", "--steps", steps))
    _, said = run.communicate(timeout=170)
    assert run.returncode == 0, said
    out = folder / f"adapter{steps}"
    ended = call(APP, "convert", folder / "out/DONE.json", "--plan", folder / "plan.json", "--out", out)
    assert ended.exit_code == 0, ended.stderr
    return out


def test_an_adapter_goes_out_as_peft_opens_it_and_a_run_goes_on(tmp_path: Path) -> None:
    from peft import PeftModel

    stock = initial_stock(tiny("llama"))
    stock.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    adapter = {"peft_type": "LORA", **LORA["queries and values"][1]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    names = [
        "--name",
        "tiny",
        "--sequence-length",
        SEQUENCE_LENGTH,
        "--lora",
        tmp_path,
        "--out",
        tmp_path / "model.json",
    ]
    ended = call(APP, "describe", tmp_path / "base", *names)
    assert ended.exit_code == 0, ended.stderr
    model = read_document(tmp_path / "model.json", Model)
    assert model.types == lora_model("queries and values").types
    folders = [_run(tmp_path, model, steps) for steps in (2, 4)]
    assert read_document(tmp_path / "out/DONE.json", RunResult).checkpoint.endswith("step-00000004")
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert all((tensors[0][name] != tensors[1][name]).any() for name in tensors[0])
    opened = PeftModel.from_pretrained(stock, str(folders[1]))
    held = {name.replace(".default.", "."): x for name, x in opened.named_parameters() if LOW_RANK in name}
    assert held.keys() == tensors[1].keys() and len(held) == 16
    assert all(torch.equal(held[name].float(), tensors[1][name]) for name in held)


@pytest.mark.parametrize(
    ("family", "target", "problem"),
    [
        ("gpt2", "c_proj", "c_proj is a Conv1D, low-rank matrices stand beside a Linear alone"),
        ("glm4", "gate_proj", "gate_proj.weight is a part of model.layers.0.mlp.gate_up_proj.weight"),
    ],
)
def test_what_peft_would_adapt_otherwise_is_refused(tmp_path: Path, family: str, target: str, problem: str) -> None:
    adapter = {"peft_type": "LORA", "target_modules": [target]}
    for name, content in (("config", CONFIGS[family]), ("adapter", adapter)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    given = ["--name", "x", "--sequence-length", 16, "--lora", tmp_path / "adapter.json", "--out", tmp_path / "m.json"]
    ended = call(APP, "describe", tmp_path, *given)
    assert ended.exit_code == 2
    assert problem in ended.stderr
