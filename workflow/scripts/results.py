"""The results of searches, runs and profiles: read, matched with one another, and formatted for pages and tables."""

from collections.abc import Sequence, Set
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from shardwright_formats.display.plan_words import layers_summary, shape_words
from shardwright_formats.io import BadInput, read_bytes, read_document
from shardwright_formats.types.correction import Correction
from shardwright_formats.types.measurement import Measurement, PlanMeasurement
from shardwright_formats.types.model_profile import ModelProfile, read_model_profile
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.prediction import Estimate, Prediction
from shardwright_formats.types.run import RunResult, StepMetrics

_SAME_SPEED = 0.05


class Comparison(NamedTuple):
    """The prediction of one plan and, where it was run, its measurement."""

    role: str
    plan: Plan
    estimate: Estimate
    measured: PlanMeasurement | None
    taken: bool = False
    """Whether the plan was selected as the fastest measured one that fits, so that runs take it."""
    reference_s: float = 0.0
    """Seconds of the reference workload on the machine as it was profiled; 0 where none was run."""

    @property
    def name(self) -> str:
        """Return the plan's role, and whether it was selected."""
        return f"{self.role}, selected" if self.taken else self.role

    @property
    def measured_time_s(self) -> float | None:
        """Return the median step time in seconds."""
        return None if self.measured is None else median(self.measured.step_times_s)

    @property
    def slowdown(self) -> float:
        """Return the machine's slowdown while this was measured, relative to when it was profiled."""
        return 1.0 if self.measured is None else self.measured.slowdown(self.reference_s)

    @property
    def measured_bytes(self) -> int | None:
        """Return the peak memory of the fullest rank, in bytes."""
        return None if self.measured is None else self.measured.peak_bytes


class SearchOutcome(NamedTuple):
    """A search: its plan, the prediction, and the plan and its runners-up compared with their measurements."""

    name: str
    plan: Plan
    prediction: Prediction
    comparisons: tuple[Comparison, ...]
    correction: Correction | None = None
    """Correction learned from these measured plans."""

    @property
    def in_use(self) -> Comparison:
        """Return the plan that runs take: the fastest measured one that fits, if selected, or the predicted best."""
        return next((of for of in self.comparisons if of.taken), self.comparisons[0])


class RunOutcome(NamedTuple):
    """A training run that reached its last step."""

    name: str
    result: RunResult
    steps: tuple[StepMetrics, ...]


class ProfileOutcome(NamedTuple):
    """A model profile and the picture that was drawn of it."""

    name: str
    profile: ModelProfile
    picture: bytes
    """Picture of the profile as SVG."""


def read_profile(results: Path, name: str) -> ProfileOutcome:
    """Return a profile by its file's name, `MODEL@NODE_TYPE`; raise BadInput where it cannot be read."""
    profile = read_model_profile(results / "profiles" / f"{name}.h5")
    return ProfileOutcome(name, profile, read_bytes(results / "pictures" / f"{name}.svg"))


def read_search(results: Path, name: str, *, selected: bool = False) -> SearchOutcome:
    """Return a search's plan, its prediction and, where there are any, its measurement and the learned correction.

    Where the plan that runs take was `selected` among the measured ones, it is marked. Raises BadInput when a file
    cannot be read, or when the prediction belongs to another plan.
    """
    plan = read_document(results / "plans" / f"{name}.json", Plan)
    path = results / "plans" / f"{name}.prediction.json"
    prediction = read_document(path, Prediction)
    if prediction.plan_sha256 != plan.sha256:
        raise BadInput(path, f"is about another plan than {name}.json beside it", f"search {name} again")
    measured: dict[str, PlanMeasurement] = {}
    measurement_path = results / "measurements" / "plans" / f"{name}.json"
    if measurement_path.exists():
        measured = {each.plan.sha256: each for each in read_document(measurement_path, Measurement).plans}
    taken = read_document(results / "selected" / f"{name}.json", Plan).sha256 if selected else None
    believed = [("chosen", plan, prediction.estimate)]
    believed += [
        (f"runner-up {number}", other.plan, other.estimate)
        for number, other in enumerate(prediction.runners_up, start=1)
    ]
    comparisons = tuple(
        Comparison(role, each, estimate, measured.get(each.sha256), each.sha256 == taken, prediction.reference_s)
        for role, each, estimate in believed
    )
    return SearchOutcome(name, plan, prediction, comparisons, _correction(results, name, measured.keys()))


def _correction(results: Path, name: str, measured: Set[str]) -> Correction | None:
    """Return the correction learned from a search's plans; None where the file is about others, measured before."""
    path = results / "corrections" / f"{name}.json"
    found = read_document(path, Correction) if path.exists() else None
    return found if found is not None and measured >= set(found.plans_sha256) else None


def read_run(results: Path, name: str) -> RunOutcome:
    """Return a finished run; raise BadInput where a file cannot be read."""
    folder = results / "runs" / name
    result = read_document(folder / "DONE.json", RunResult)
    path = folder / "metrics.jsonl"
    steps = []
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        try:
            steps.append(msgspec.json.decode(line, type=StepMetrics))
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadInput(path, f"line {number} ({error})", f"train {name} again") from None
    if not steps:
        raise BadInput(path, "holds no step", f"train {name} again")
    return RunOutcome(name, result, tuple(steps))


def speed_text(comparisons: Sequence[Comparison]) -> str | None:
    """Return a sentence if the machine's speed since it was profiled differs by more than 5 % for any measured plan."""
    found = [of.slowdown for of in comparisons if of.measured is not None]
    if not any(abs(slowdown - 1) > _SAME_SPEED for slowdown in found):
        return None
    low, high = f"{min(found):.2f}", f"{max(found):.2f}"
    return (
        "the machine has changed since it was profiled: while these plans were measured its reference workload took "
        f"{low if low == high else f'{low} to {high}'} times as long; ratios at equal speed are without that"
    )


def evaluation_text(run: RunOutcome) -> str:
    """Return a sentence on the last evaluation of a run, and on the best, where that was kept."""
    step, found = next((s.step, s.evaluation) for s in reversed(run.steps) if s.evaluation is not None)
    perplexity = "" if found.perplexity is None else f" (perplexity {found.perplexity:.6g})"
    words = f"Validation loss {found.loss:.4f}{perplexity} after step {step}, over {found.labels:,} labels"
    best = run.result.best
    return words + (f"; the least {best.loss:.4f} after step {best.step}: {best.checkpoint}." if best else ".")


def ratio_text(predicted: float, measured: float | None) -> str:
    """Return measured over predicted with two decimals, or a dash where nothing was measured."""
    return "–" if measured is None or not predicted else f"{measured / predicted:.2f}"


def plan_text(plan: Plan) -> str:
    """Return a plan in one line."""
    return f"{shape_words(plan)}; layers: {layers_summary(plan)}"
