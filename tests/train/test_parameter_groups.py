"""Which parameters decay, which learn at a rate of their own, and how a mistake in that is refused."""

from pathlib import Path

import pytest
from tiny_models import CONFIGS, named_parameters, stock_model, tiny

from shardwright.io import BadInput
from shardwright.types import Model
from shardwright_train.engine.learning_rate import LearningRateFactor, ParameterGroup, check_patterns, group_of
from shardwright_train.models.base import family_named

FACTORS = (LearningRateFactor("model.layers.1.*", 0.5), LearningRateFactor("*.weight", 2.0))


def test_matrices_decay_and_norms_and_biases_do_not_unless_they_are_told_to() -> None:
    assert group_of("model.layers.0.mlp.up_proj.weight", 2, (), False) == ParameterGroup(True, 1.0)
    assert group_of("model.layers.0.mlp.up_proj.bias", 1, (), False) == ParameterGroup(False, 1.0)
    assert group_of("model.norm.weight", 1, (), False) == ParameterGroup(False, 1.0)
    assert group_of("model.norm.weight", 1, (), True) == ParameterGroup(True, 1.0)


def test_of_several_patterns_the_first_that_matches_decides() -> None:
    assert group_of("model.layers.1.norm.weight", 1, FACTORS, False).factor == 0.5
    assert group_of("model.layers.10.norm.weight", 1, FACTORS, False).factor == 2.0
    assert group_of("model.layers.10.norm.bias", 1, FACTORS, False).factor == 1.0


def test_an_equals_sign_may_be_in_a_pattern() -> None:
    assert LearningRateFactor.parse("a=b=0") == LearningRateFactor("a=b", 0.0)


@pytest.mark.parametrize("text", ["*.weight", "=1", "*.weight=", "*=-1", "*=nan", "*=inf", "*=two"])
def test_what_is_no_factor_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not a PATTERN=FACTOR"):
        LearningRateFactor.parse(text)


@pytest.mark.parametrize(
    "model",
    [*map(tiny, CONFIGS), tiny("llama", tie_word_embeddings=True)],
    ids=lambda model: f"{model.family}-{len(model.tied)}",
)
def test_parameters_are_named_as_in_the_stock_model(model: Model) -> None:
    family = family_named(model.family, "test")
    names = family.stock_names(model)
    assert {family.file_name(name)[0] for name in names} == set(named_parameters(stock_model(model), model))
    check_patterns([LearningRateFactor(name, 1.0) for name in names], names)
    with pytest.raises(BadInput, match=r"--learning-rate-factor: 'lm_heads\.\*' matches none of the model's"):
        check_patterns([LearningRateFactor("lm_heads.*", 1.0)], names)


def test_a_pattern_of_no_parameter_is_refused_before_anything_starts(tmp_path: Path) -> None:
    from random_plans import random_plan

    from shardwright.io import write_document
    from shardwright_train.commands.ranks import start_run
    from shardwright_train.options import RunOptions

    write_document(tmp_path / "plan.json", random_plan(tiny("llama"), 1, 2))
    job = RunOptions(
        plan=tmp_path / "plan.json",
        data=Path("random"),
        steps=1,
        out=tmp_path / "out",
        checkpoints=tmp_path / "checkpoints",
        learning_rate_factor=("*.heads.*=1",),
    )
    with pytest.raises(BadInput, match="matches none of the model's"):
        start_run(job)
    assert not (tmp_path / "out").exists() and not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("out", ["", "../checkpoints/RUN/", "inside"])
def test_a_run_is_not_written_among_its_checkpoints(out: str, tmp_path: Path) -> None:
    """It would train to its end, and fail there."""
    from random_plans import random_plan

    from shardwright.io import write_document
    from shardwright_train.checkpoints.folders import folder_of_run
    from shardwright_train.commands.ranks import start_run
    from shardwright_train.options import RunOptions

    plan, checkpoints = random_plan(tiny("llama"), 1, 2), tmp_path / "checkpoints"
    write_document(tmp_path / "plan.json", plan)
    run = folder_of_run(checkpoints, plan)
    folder = checkpoints / out.replace("RUN", run.name) if "RUN" in out else run / out
    job = RunOptions(plan=tmp_path / "plan.json", data=Path("random"), steps=1, out=folder, checkpoints=checkpoints)
    with pytest.raises(BadInput, match="is the folder of this run's checkpoints"):
        start_run(job)
    assert not checkpoints.exists()
