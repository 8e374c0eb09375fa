"""Results of searches, runs and profiles: read, matched with one another, and formatted for pages and tables."""

from collections.abc import Callable, Sequence, Set
from pathlib import Path
from statistics import median
from typing import NamedTuple
from xml.etree import ElementTree

import msgspec

from shardwright.display.plan_words import layers_summary, shape_words
from shardwright.io import BadInput, read_bytes, read_document
from shardwright.types import Correction, Estimate, Measurement, Plan, PlanMeasurement, Prediction
from shardwright.types.model_profile import ModelProfile, read_model_profile
from shardwright.types.run import RunResult, StepMetrics

_SAME_SPEED = 0.05
_SVG = "http://www.w3.org/2000/svg"
_DRAWN = {"svg", "g", "defs", "pattern", "title", "rect", "line", "polyline", "polygon", "circle", "path", "text"}


class Comparison(NamedTuple):
    """The prediction of one plan and, if it was run, its measurement."""

    role: str
    plan: Plan
    estimate: Estimate
    measured: PlanMeasurement | None
    reference_s: float = 0.0
    """Seconds of the reference workload when the machine was profiled; 0 if it was not run."""

    @property
    def measured_time_s(self) -> float | None:
        """Return the median step time in seconds."""
        return None if self.measured is None else median(self.measured.step_times_s)

    @property
    def measured_sample_s(self) -> float | None:
        """Return the measured seconds per sample, converted to the machine's speed during profiling."""
        step_s = self.measured_time_s
        return None if step_s is None else step_s / self.slowdown / self.plan.global_batch_size

    @property
    def slowdown(self) -> float:
        """Return the factor by which the machine was slower during this measurement than during profiling."""
        return 1.0 if self.measured is None else self.measured.slowdown(self.reference_s)

    @property
    def measured_bytes(self) -> int | None:
        """Return the peak memory of the fullest rank, in bytes."""
        return None if self.measured is None else self.measured.peak_bytes


class SearchOutcome(NamedTuple):
    """A search: its plan, its prediction, and the comparisons of the plan and its runners-up with measurements."""

    name: str
    plan: Plan
    prediction: Prediction
    comparisons: tuple[Comparison, ...]
    correction: Correction | None = None
    """Correction learned from these measured plans."""

    @property
    def chosen(self) -> Comparison:
        """Return the comparison of the plan that runs use: the plan predicted to be best."""
        return self.comparisons[0]


class RunOutcome(NamedTuple):
    """A training run that reached its last step."""

    name: str
    result: RunResult
    steps: tuple[StepMetrics, ...]


class ProfileOutcome(NamedTuple):
    """A model profile and its picture."""

    name: str
    profile: ModelProfile
    picture: bytes
    """Picture of the profile as SVG."""


class GivenPicture(NamedTuple):
    """A picture and its name."""

    name: str
    drawing: str
    """SVG that is as wide as the page allows, without a style sheet."""


def read_profile(results: Path, name: str) -> ProfileOutcome:
    """Return a profile by its file's name, `MODEL@NODE_TYPE`; raise BadInput if it cannot be read."""
    profile = read_model_profile(results / "profiles" / f"{name}.h5")
    return ProfileOutcome(name, profile, read_bytes(results / "pictures" / f"{name}.svg"))


def read_search(results: Path, name: str) -> SearchOutcome:
    """Return a search's plan, its prediction and, if any, its measurement and the learned correction.

    Raises BadInput if a file cannot be read, or if the prediction belongs to another plan.
    """
    plan = read_document(results / "plans" / f"{name}.json", Plan)
    path = results / "plans" / f"{name}.prediction.json"
    prediction = read_document(path, Prediction)
    if prediction.plan_sha256 != plan.sha256:
        raise BadInput(path, f"is for another plan than {name}.json next to it", f"search {name} again")
    measured: dict[str, PlanMeasurement] = {}
    measurement_path = results / "measurements" / "plans" / f"{name}.json"
    if measurement_path.exists():
        measured = {each.plan.sha256: each for each in read_document(measurement_path, Measurement).plans}
    others = enumerate(prediction.runners_up, start=1)
    believed = [("chosen", plan, prediction.estimate)]
    believed += [(f"runner-up {number}", other.plan, other.estimate) for number, other in others]
    comparisons = tuple(
        Comparison(role, each, estimate, measured.get(each.sha256), prediction.reference_s)
        for role, each, estimate in believed
    )
    return SearchOutcome(name, plan, prediction, comparisons, _correction(results, name, measured.keys()))


def _correction(results: Path, name: str, measured: Set[str]) -> Correction | None:
    """Return the correction learned from a search's plans; None if the file is for other plans, measured before."""
    path = results / "corrections" / f"{name}.json"
    learned = read_document(path, Correction) if path.exists() else None
    return learned if learned is not None and measured >= set(learned.plans_sha256) else None


def read_run(results: Path, name: str) -> RunOutcome:
    """Return a finished run; raise BadInput if a file cannot be read."""
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


def read_picture(path: Path) -> GivenPicture:
    """Return a picture that `shardwright.display.svg.document` wrote.

    Raises BadInput if it is another kind of file, or contains active content.
    """
    content = read_bytes(path)
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise BadInput(path, f"is not an SVG ({error})", "name the front.svg of a rent front") from None
    for style in root.findall(f"{{{_SVG}}}style"):
        root.remove(style)
    odd = {part.tag.removeprefix(f"{{{_SVG}}}") for part in root.iter()} - _DRAWN
    odd |= {name for part in root.iter() for name in part.attrib if name.startswith("on") or "href" in name}
    if odd or root.tag != f"{{{_SVG}}}svg" or "viewBox" not in root.attrib:
        problem = f"is not a picture made by this project ({', '.join(sorted(odd)) or 'no viewBox'})"
        raise BadInput(path, problem, "name the front.svg of a rent front")
    root.attrib.pop("height", None)
    root.set("width", "100%")
    ElementTree.register_namespace("", _SVG)
    name = path.parent.name if path.stem == "front" else path.stem
    return GivenPicture(name, ElementTree.tostring(root, encoding="unicode"))


def speed_text(comparisons: Sequence[Comparison]) -> str | None:
    """Return a sentence if, for any measured plan, the machine's speed differed from profiling by more than 5 %."""
    slowdowns = [each.slowdown for each in comparisons if each.measured is not None]
    if not any(abs(slowdown - 1) > _SAME_SPEED for slowdown in slowdowns):
        return None
    low, high = f"{min(slowdowns):.2f}", f"{max(slowdowns):.2f}"
    return (
        "the machine has changed since it was profiled: while these plans were measured its reference workload took "
        f"{low if low == high else f'{low} to {high}'} times as long; ratios at equal speed are without that"
    )


def evaluation_text(run: RunOutcome) -> str:
    """Return a sentence on the last evaluation of a run, and on the best, if that was kept."""
    step, last = next((s.step, s.evaluation) for s in reversed(run.steps) if s.evaluation is not None)
    perplexity = "" if last.perplexity is None else f" (perplexity {last.perplexity:.6g})"
    words = f"Validation loss {last.loss:.4f}{perplexity} after step {step}, over {last.labels:,} labels"
    best = run.result.best
    return words + (f"; the least {best.loss:.4f} after step {best.step}: {best.checkpoint}." if best else ".")


def or_dash(text: Callable[[float], str], value: float | None) -> str:
    """Return a value as text, or a dash if there is none."""
    return "–" if value is None else text(value)


def ratio_text(predicted: float, measured: float | None) -> str:
    """Return measured over predicted with two decimals, or a dash if nothing was measured."""
    return "–" if measured is None or not predicted else f"{measured / predicted:.2f}"


def plan_text(plan: Plan) -> str:
    """Return a plan in one line."""
    return f"{shape_words(plan)}; layers: {layers_summary(plan)}"
