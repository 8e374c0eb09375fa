"""The page of published recipes."""

import importlib
from pathlib import Path

import pytest
from rest_long import rest_long

ROOT = Path(__file__).parents[2]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    recipes = importlib.import_module("recipes")
KEPT = recipes.rows_of(recipes.RESULTS.read_text(encoding="utf-8"))


def test_the_page_has_the_figures_that_are_kept():
    assert recipes.page_text(KEPT) == recipes.PAGE.read_text(encoding="utf-8")


def test_every_recipe_is_kept_and_every_miss_has_its_cause():
    assert [row.recipe for row in KEPT] == recipes.read_recipes()
    for row in KEPT:
        assert row.recipe.cause or not row.is_miss, row.recipe.name
        assert (row.theirs is None) is (row.recipe.unpriced is not None), row.recipe.name


@pytest.mark.parametrize(
    "name", rest_long(2, ("Llama 3.1 8B, 8 H100", "Llama 3 8B in FP8, 8 GB200", "DeepSeek-V3 671B, 1,024 H100"))
)
def test_a_recipe_made_anew_has_the_figures_that_are_kept(name):
    """How far a search comes in its CPU time depends on the machine: an answer that was stopped is about as good."""
    (kept,) = (row for row in KEPT if row.recipe.name == name)
    made = recipes.row_of(kept.recipe)
    assert made.published_s == pytest.approx(kept.published_s)
    stopped = any(row.proof.startswith("stopped") for row in (kept, made))
    if stopped:
        assert made.ours.step_s == pytest.approx(kept.ours.step_s, rel=0.05)
    for new, old in ((made.theirs, kept.theirs), *(() if stopped else ((made.ours, kept.ours),))):
        if old is None:
            assert new is None
        else:
            assert (new.step_s, new.gib) == pytest.approx((old.step_s, old.gib))
            assert (new.plan, new.memory_words) == (old.plan, old.memory_words)
    assert stopped or made.proof == kept.proof


@pytest.mark.parametrize(
    ("published", "step_s"),
    [({"step_s": 2.5}, 2.5), ({"tokens_per_s_per_gpu": 8192.0}, 2.0), ({"tflops_per_gpu": 400.0}, 2.372)],
)
def test_a_published_speed_is_the_time_of_a_step(published, step_s):
    command = recipes.APP.commands["advise"]
    question = recipes.question_of(command.parse("advise", "llama-3.1-8b --gpus 8:H100 --batch 16 --seq 8192".split()))
    assert recipes.published_s(recipes.Published(**published), question) == pytest.approx(step_s, rel=1e-3)
