"""Low-rank matrices train as peft trains them in one process, and go out as a folder that peft opens."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_calls import call
from forked_command import forked_command
from frozen_models import LORA, lora_model, lora_plan, write_initial_adapter
from msgspec.structs import replace
from rest_long import rest_long
from run_parity import TOLERANCE
from safetensors.torch import load_file
from test_train_traffic import by_formula, counted
from tiny_models import SEQUENCE_LENGTH, batch_of, initial_stock, stock_logits, tiny

from shardwright.io import BadInput, read_document, write_document
from shardwright.models.adapter_config import read_adapter
from shardwright.models.low_rank import adapt
from shardwright.types import LOW_RANK, Model, RunResult
from shardwright_train.cli import APP
from shardwright_train.commands.documents import describe_folder
from shardwright_train.dry_run import simulate_step
from shardwright_train.engine.engine import build_engine
from shardwright_train.engine.learning_rate import ANY
from shardwright_train.models.base import family_named
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import Step
from shardwright_train.weights.reading import open_adapter, open_weights

Errors = dict[str, dict[str, float]]
pytestmark = pytest.mark.timeout(900)
MORE = {2: range(10, 16), 4: range(5)}
"""Numbers of the plans of `make test-long`, by the number of ranks."""
MOVED = "queries and values", "feed-forward", "latents", "experts", "turned matrices", "some layers"
"""Kinds of targets, one of each, of which `make test` counts the bytes."""


@pytest.fixture(scope="module")
def two_ranks(compare: Callable[..., Errors]) -> Errors:
    return compare([lora_plan(name, number, 2) for number, name in enumerate(LORA)])


@pytest.fixture(scope="module")
def more_plans(compare: Callable[..., Errors], every: int) -> Errors:
    found: Errors = {}
    for world_size, numbers in MORE.items():
        found |= compare([lora_plan(name, number, world_size) for number in numbers[::every] for name in LORA])
    return found


@pytest.mark.parametrize("name", LORA)
def test_low_rank_matrices_train_exactly_as_peft_trains_them(two_ranks: Errors, name: str) -> None:
    (errors,) = (errors for plan, errors in two_ranks.items() if plan.startswith(f"lora of {name},"))
    assert max(errors.values()) < TOLERANCE


@pytest.mark.long
def test_more_plans_and_ranks_train_exactly_as_peft_does(more_plans: Errors, every: int) -> None:
    assert len(more_plans) == sum(len(numbers[::every]) for numbers in MORE.values()) * len(LORA)
    assert {name: errors for name, errors in more_plans.items() if max(errors.values()) > TOLERANCE} == {}


@pytest.mark.parametrize("name", rest_long(len(MOVED), sorted(LORA, key=lambda name: name not in MOVED)))
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


def _run(folder: Path, model: Model, steps: int, *options: object) -> Path:
    """Train on one rank from weights of the folder, and write the adapter."""
    plan = replace(lora_plan("queries and values", 0, 1, dtype="float32"), model=model)
    write_document(folder / "plan.json", plan)
    given = ["--data", "random", "--weights", folder / "base", "--out", folder / "out", "--log-to", "none"]
    given += ["--learning-rate-schedule", "constant", *options]  # more steps follow
    run = forked_command(("run", folder / "plan.json", *given, "--checkpoints", folder / "kept", "--steps", steps))
    _, said = run.communicate(timeout=300)
    assert run.returncode == 0, said
    out = folder / f"adapter{steps}"
    ended = call(APP, "convert", folder / "out/DONE.json", "--plan", folder / "plan.json", "--out", out)
    assert ended.exit_code == 0, ended.stderr
    return out


def _described(folder: Path, adapter: Path) -> Model:
    names = ["--name", "tiny", "--sequence-length", SEQUENCE_LENGTH, "--lora", adapter, "--out", folder / "model.json"]
    ended = call(APP, "describe", folder / "base", *names)
    assert ended.exit_code == 0, ended.stderr
    return read_document(folder / "model.json", Model)


def test_an_adapter_goes_out_as_peft_opens_it_and_a_run_goes_on(tmp_path: Path) -> None:
    from peft import PeftModel

    stock = initial_stock(tiny("llama"))
    stock.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    adapter = {"peft_type": "LORA", **LORA["queries and values"][1]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    model = _described(tmp_path, tmp_path)
    assert model.types == lora_model("queries and values").types
    folders = [_run(tmp_path, model, steps) for steps in (2, 4)]
    assert read_document(tmp_path / "out/DONE.json", RunResult).checkpoint.endswith("step-00000004")
    tensors = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert all((tensors[0][name] != tensors[1][name]).any() for name in tensors[0])
    opened = PeftModel.from_pretrained(stock, str(folders[1]))
    held = {name.replace(".default.", "."): x for name, x in opened.named_parameters() if LOW_RANK in name}
    assert held.keys() == tensors[1].keys() and len(held) == 16
    assert all(torch.equal(held[name].float(), tensors[1][name]) for name in held)


def test_a_run_goes_on_from_the_weights_of_an_adapter(tmp_path: Path) -> None:
    initial_stock(tiny("llama")).save_pretrained(tmp_path / "base")  # type: ignore[operator]
    (given := tmp_path / "given").mkdir()
    write_initial_adapter(given, lora_model("queries and values"), seed=3)
    model = _described(tmp_path, given)
    held = _run(tmp_path, model, 1, "--adapter", given, "--learning-rate", 0)
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (given, held))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["queries and values", "latents", "turned matrices"])
def test_the_first_loss_is_that_of_peft_with_a_trained_adapter(name: str, one_rank: World, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        found, wanted = _first_losses(name, one_rank, tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == pytest.approx(wanted, abs=1e-6)


def _first_losses(name: str, world: World, folder: Path) -> tuple[float, float]:
    """A run's first loss from the files of a base and a trained adapter, and that of the model that peft opens."""
    from peft import PeftModel

    family = family_named(LORA[name][0], "test")
    stock = initial_stock(tiny(LORA[name][0]))
    stock.save_pretrained(folder / "base")  # type: ignore[operator]
    write_initial_adapter(folder, lora_model(name), seed=3)
    model = describe_folder(folder / "base", "tiny", SEQUENCE_LENGTH, folder)
    plan = lora_plan(name, 0, 1)
    plan = replace(plan, model=replace(model, name=plan.model.name))
    context = RankContext(
        plan=plan,
        family=family,
        rank=0,
        groups=Groups("cpu"),
        attention=family.plain_kernel,
        device=torch.device("cpu"),
        seed=0,
        weights=open_weights(folder / "base", model, family, False, folder),
    )
    batch = batch_of(model, plan.global_batch_size, 0)
    engine = build_engine(context, ANY, 0)
    loss = engine.forward_backward(Step.of_batch(batch, engine.stage.context.share, number=1))
    found = engine.optimizer.step(1, loss, stop=False)
    logits = stock_logits(PeftModel.from_pretrained(stock, str(folder)), batch)
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten()).item()
    return found.loss - (found.auxiliary_loss or 0.0), wanted


def test_an_adapter_that_is_not_the_described_one_is_refused(tmp_path: Path) -> None:
    model, family = lora_model("queries and values"), family_named("llama", "test")
    write_initial_adapter(tmp_path, model, seed=3)
    described = adapt(tiny("llama"), *read_adapter(tmp_path))
    assert len(open_adapter(tmp_path, described, family)) == 16
    write_initial_adapter(tmp_path, model, seed=4)
    with pytest.raises(BadInput, match="is not the adapter that the model was described with"):
        open_adapter(tmp_path, described, family)
    for other, problem in (
        (lora_model("queries and values", lora_alpha=9), "r, lora_alpha or use_rslora differs from the plan's model"),
        (lora_model("queries and values", target_modules=["q_proj"]), "v_proj.lora_A.weight is not a parameter"),
        (lora_model("queries and values", target_modules=["k_proj"]), "k_proj.lora_A.weight is missing"),
        (lora_model("queries and values", rank_pattern={"q_proj": 2}), r"is \[4, 32\] of F32, .* \[2, 32\] of F64"),
        (tiny("llama"), "the plan's model has no low-rank matrices"),
    ):
        with pytest.raises(BadInput, match=problem):
            open_adapter(tmp_path, other, family)


def test_a_run_that_would_leave_out_a_trained_adapter_is_refused(tmp_path: Path) -> None:
    write_initial_adapter(tmp_path, lora_model("queries and values"), seed=3)
    model = adapt(tiny("llama"), *read_adapter(tmp_path))
    write_document(tmp_path / "plan.json", replace(lora_plan("queries and values", 0, 1), model=model))
    given = ["--out", tmp_path / "out", "--checkpoints", tmp_path / "kept", "--steps", 1, "--log-to", "none"]
    for data, options, problem in (
        (
            "data",
            (),
            "its model was described with a trained adapter, from which a run must start: add --adapter FOLDER",
        ),
        ("data", ("--weights", tmp_path), "its model was described with a trained adapter"),
        ("random", ("--adapter", tmp_path), "an adapter needs the weights of its base model: add --weights BASE"),
    ):
        ended = call(APP, "run", tmp_path / "plan.json", "--data", data, *options, *given)
        assert (ended.exit_code, problem in ended.stderr) == (2, True)
        assert not (tmp_path / "out").exists()
