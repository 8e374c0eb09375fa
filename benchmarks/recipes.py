"""Published recipes compared with our answers: benchmarks/results/recipes.json and recipes.md.

    python benchmarks/recipes.py                      # all of them: about 2 minutes of one core
    python benchmarks/recipes.py --page               # writes the page again from recipes.json, if its text changed
    python benchmarks/recipes.py --only torchtitan    # prints those with the word in name or author, writes nothing

A recipe of benchmarks/recipes/recipes.yaml is a question of `shardwright advise`, a plan that was run, and its speed.
No GPU is used. docs/recipes.md says to which of them rates are fitted.
"""

import argparse
import io
import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import yaml
from harness import table

from shardwright.display.plan_words import strategy_words
from shardwright.io import BadInput, NothingFits, one_line_errors, read_document
from shardwright.io.versions import versions_text
from shardwright.types import EMBEDDING, GIB, HEAD, Plan
from shardwright_search.advise.choices import reading_of
from shardwright_search.advise.question import Question, question_of
from shardwright_search.cli import APP
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import AdviseOptions

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "benchmarks" / "recipes" / "recipes.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "recipes.json"
PAGE = ROOT / "benchmarks" / "results" / "recipes.md"
_COLUMNS = "recipe|published, s:|predicted for its plan, s:|memory, GiB:|our answer, s:|its memory, GiB:"
MISS = 0.15
"""Relative error of a predicted time above which it counts as a miss."""


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The speed of a run, in one of the units that authors publish."""

    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    """Model FLOP/s per GPU, in 10^12."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that others ran, and the question to `shardwright advise` that it answers."""

    name: str
    by: str
    source: str
    plan: str
    """The plan in words."""
    published: Published
    advise: str | None = None
    """Arguments of `shardwright advise`; None: `advise` does not have the model."""
    choice: str | None = None
    """The plan in the form of the option `--against`."""
    unpriced: str | None = None
    """The part of the plan that cannot be priced, if any."""
    assumed: str = ""
    """Settings that the source does not state."""
    cause: str = ""
    """Why the predicted time or memory differs from the published one."""


class Priced(NamedTuple):
    """A predicted plan."""

    plan: str
    step_s: float
    gib: float
    """Memory of the fullest GPU in GiB."""
    budget_gib: float
    """Memory in GiB that `advise` lets a plan use on a GPU: 92 %."""
    device_gib: float

    @property
    def memory_words(self) -> str:
        """Return the memory as text, noting whether it exceeds what a plan may use, or what a GPU has."""
        if self.gib > self.device_gib:
            return f"{self.gib:.1f}: over the GPU's {self.device_gib:.0f}"
        return f"{self.gib:.1f}" + (": over 92 %" if self.gib > self.budget_gib else "")


class Row(NamedTuple):
    """A recipe, and the predictions for its plan and for ours."""

    recipe: Recipe
    published_s: float
    """Published step time in seconds."""
    theirs: Priced | None
    ours: Priced | None
    proof: str
    """What is proven about our answer, in the words of `advise`, or why there is no answer."""

    @property
    def is_miss(self) -> bool:
        """Return whether the plan is not priced, is predicted not to fit, or its time is off by more than `MISS`."""
        if self.theirs is None or self.theirs.gib > self.theirs.device_gib:
            return True
        return abs(self.theirs.step_s / self.published_s - 1) > MISS


def main() -> None:
    """Price the recipes, and write the figures and the page."""
    parser = argparse.ArgumentParser(description="Published recipes beside our answers.")
    parser.add_argument("--only", metavar="WORD", help="those whose name or author has it; nothing is written")
    parser.add_argument("--page", action="store_true", help="write the page alone, from the figures that are kept")
    asked = parser.parse_args()
    with one_line_errors():
        if asked.page:
            PAGE.write_text(page_text(rows_of(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
            return
        recipes = [recipe for recipe in read_recipes() if not asked.only or _has_word(recipe, asked.only)]
        rows = [row_of(recipe) for recipe in recipes]
        print("\n".join(tables(rows)))
        if not asked.only:
            RESULTS.write_text(json_text(rows), encoding="utf-8")
            PAGE.write_text(page_text(rows), encoding="utf-8")


def read_recipes() -> list[Recipe]:
    """Return the recipes; raise BadInput if one is not valid."""
    try:
        return msgspec.convert(yaml.safe_load(RECIPES.read_text(encoding="utf-8")), list[Recipe])
    except msgspec.ValidationError as error:
        raise BadInput(RECIPES, str(error), "correct it") from None


def _has_word(recipe: Recipe, word: str) -> bool:
    return word.lower() in f"{recipe.name} {recipe.by}".lower()


def row_of(recipe: Recipe) -> Row:
    """Return the row of a recipe: the answer of `advise`, and its prediction for the published plan."""
    if recipe.advise is None:
        if recipe.published.step_s is None:
            raise BadInput(RECIPES, f"{recipe.name}: its speed needs a model", "give step_s or advise")
        return Row(recipe, recipe.published.step_s, None, None, "")
    command = APP.commands["advise"]
    with tempfile.TemporaryDirectory() as place, chdir(ROOT), redirect_stdout(io.StringIO()) as printed:
        plan = Path(place) / "plan.json"
        against = [] if recipe.choice is None else [f"--against={recipe.choice}"]
        fastest = "--tolerance", "0", "--out", str(plan)
        options = command.parse("advise", [*shlex.split(recipe.advise), *against, *fastest])
        assert isinstance(options, AdviseOptions)
        question = question_of(options)
        theirs = _priced(question, reading_of(recipe.choice, question.setting).plan) if recipe.choice else None
        try:
            command.call(options)
            ours = _priced(question, read_document(plan, Plan))
        except NothingFits as error:
            return Row(recipe, published_s(recipe.published, question), theirs, None, str(error))
    proof = next(
        line.strip() for line in printed.getvalue().splitlines() if line.startswith(("  proven", "  not proven"))
    )
    return Row(recipe, published_s(recipe.published, question), theirs, ours, proof)


def _priced(question: Question, plan: Plan) -> Priced:
    estimate = evaluate(plan, question.profiles, timeline=False).estimate
    (node_type,), (budget,) = question.cluster.node_types.values(), question.budgets.values()
    memory_gib = (size / GIB for size in (estimate.memory_bytes, budget, node_type.memory_bytes))
    return Priced(short_words(plan), estimate.simulated_step_time_s, *memory_gib)


def short_words(plan: Plan) -> str:
    """Return a plan in words, with the number of layers of each strategy, the most frequent first."""
    chunks = max(len(stage.layers) for stage in plan.stages)
    shape = f"pp{len(plan.stages)}" + (f" in {chunks} chunks" if chunks > 1 else "")
    strategies = Counter(map(strategy_words, plan.layers)).most_common()
    counts = [
        text if len(strategies) == 1 else f"{count} layer{'s' * (count > 1)} {text}" for text, count in strategies
    ]
    return ", ".join([shape, f"{plan.num_microbatches} x {plan.microbatch_samples} samples", *counts])


def published_s(published: Published, question: Question) -> float:
    """Return the step time in s; from FLOP/s with model FLOPs counted as for `advise`'s full-square MFU."""
    batch, devices, types = question.request.global_batch_size, question.cluster.num_devices, question.model.types
    assert isinstance(batch, int)
    if published.tokens_per_s_per_gpu is not None:
        return batch * question.model.sequence_length / devices / published.tokens_per_s_per_gpu
    if published.tflops_per_gpu is not None:
        forward = sum(types[name].forward_flops_per_sample for name in (EMBEDDING, *question.model.layers, HEAD))
        return 3 * forward * batch / devices / (published.tflops_per_gpu * 1e12)
    if published.step_s is None:
        raise BadInput(RECIPES, "a recipe has no speed", "give step_s, tokens_per_s_per_gpu or tflops_per_gpu")
    return published.step_s


def json_text(rows: Sequence[Row]) -> str:
    """Return the figures of all recipes as JSON, with the versions of the software that made them."""
    content = {
        "versions": versions_text(("shardwright",), on_gpu=False),
        "recipes": [_figures(row) for row in rows],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _figures(row: Row) -> dict[str, Any]:
    return {
        "name": row.recipe.name,
        "published_s": row.published_s,
        "theirs": row.theirs and row.theirs._asdict(),
        "ours": row.ours and row.ours._asdict(),
        "proof": row.proof,
    }


def rows_of(text: str) -> list[Row]:
    """Return the rows in the JSON of `json_text`, each with the recipe of its name from the file of recipes."""
    recipes = {recipe.name: recipe for recipe in read_recipes()}
    return [
        Row(
            recipes[each["name"]],
            each["published_s"],
            each["theirs"] and Priced(**each["theirs"]),
            each["ours"] and Priced(**each["ours"]),
            each["proof"],
        )
        for each in json.loads(text)["recipes"]
    ]


def page_text(rows: Sequence[Row]) -> str:
    """Return the page: the table, and a paragraph on each recipe."""
    return "\n".join(tables(rows)) + "\n"


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table, and a paragraph on each recipe."""
    errors = [abs(row.theirs.step_s / row.published_s - 1) for row in rows if row.theirs is not None]
    if errors:
        near = sum(error <= MISS for error in errors)
        over = sum(row.theirs is not None and row.theirs.gib > row.theirs.device_gib for row in rows)
        yield (
            f"{len(errors)} of {len(rows)} published plans can be priced. Their times are off by "
            f"{median(errors):.0%} in the median, {near} of them by at most {MISS:.0%}; "
            f"{over} are said not to fit a GPU."
        )
        yield ""
    yield from table(_COLUMNS, map(_cells, rows))
    for row in rows:
        yield ""
        yield f"## {row.recipe.by}: {row.recipe.name}"
        yield ""
        yield from _paragraphs(row)


def _cells(row: Row) -> list[str]:
    theirs, ours = row.theirs, row.ours
    cells = [f"{row.recipe.by}: {row.recipe.name}", f"{row.published_s:.4g}"]
    if theirs is None:
        cells += [f"not priced: {row.recipe.unpriced}", "–"]
    else:
        cells += [f"{theirs.step_s:.4g} ({theirs.step_s / row.published_s - 1:+.0%})", theirs.memory_words]
    return cells + (["–", "–"] if ours is None else [_our_time(row, ours), ours.memory_words])


def _our_time(row: Row, ours: Priced) -> str:
    if row.theirs is None:
        return f"{ours.step_s:.4g}"
    return f"{ours.step_s:.4g} ({ours.step_s / row.theirs.step_s - 1:+.0%})"


def _paragraphs(row: Row) -> Iterator[str]:
    recipe = row.recipe
    if recipe.advise is not None:
        against = "" if recipe.choice is None else f" --against {shlex.quote(recipe.choice)}"
        yield from ("```", f"shardwright advise {recipe.advise}{against}", "```", "")
    yield f"- Published: {recipe.plan}. {recipe.source}."
    if recipe.assumed:
        yield f"- Assumed: {recipe.assumed}."
    yield f"- Our answer: {'; '.join(filter(None, (row.ours.plan if row.ours else 'none', row.proof)))}."
    if row.is_miss or recipe.cause:
        yield f"- {'**Missed.**' if row.is_miss else '**Note.**'} {recipe.cause}"


if __name__ == "__main__":
    main()
