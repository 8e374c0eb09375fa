"""What would make a plan of the user's own fit: smaller micro-batches, recomputation, states that are more sharded."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.display.units import gib_text
from shardwright.io import BadInput
from shardwright.types import DataParallel, GradientReduction, LayerStrategy, Plan, Recompute, Strategy
from shardwright_search.advise.question import Question
from shardwright_search.candidates import Candidate
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.explain.tables import sample_s
from shardwright_search.space.configurations import divisors


class _Lever(NamedTuple):
    """A change that makes a plan leaner: its name, and the changed plans, the one that costs the least time first."""

    name: str
    plans: Callable[[Plan], Iterator[Plan]]


def ways_to_fit(question: Question, plan: Plan) -> Iterator[str]:
    """Yield a line for each change of a plan that does not fit: its time if it fits then, else how much is lacking.

    Only if no change is enough alone, all are made together.
    """
    time_s, fits = sample_s(plan, evaluate(plan, question.profiles, timeline=False).estimate), False
    for name, plans in _LEVERS:
        best = _first_that_fits(question, plans(plan))
        if best is not None:
            fits |= question.fits(best.plan, best.evaluation.estimate)
            yield f"{name} ({_words(best.plan)}): {_brings(question, best, time_s)}"
    if not fits and (best := _first_that_fits(question, _together(plan))) is not None:
        yield f"all of these ({_words(best.plan)}): {_brings(question, best, time_s)}"


def _first_that_fits(question: Question, plans: Iterator[Plan]) -> Candidate | None:
    """Return the first plan that fits, else the last one; None: there is none."""
    candidate = None
    for plan in plans:
        with suppress(BadInput):  # sizes that the profile does not have
            candidate = Candidate(plan, evaluate(plan, question.profiles, timeline=False))
            if question.fits(plan, candidate.evaluation.estimate):
                break
    return candidate


def _brings(question: Question, candidate: Candidate, time_s: float) -> str:
    plan, estimate = candidate.plan, candidate.evaluation.estimate
    lacks = -min(question.left_bytes(plan, estimate))
    if lacks > 0:
        return f"still exceeds the budget by {gib_text(lacks)} a rank"
    ratio = sample_s(plan, estimate) / time_s
    return f"fits, {estimate.simulated_step_time_s:.4g} s a step, {ratio:.2f} times its time"


def _words(plan: Plan) -> str:
    """Return what the levers set, in words."""
    layer = plan.layers[0]
    recompute = "" if layer.recompute is Recompute.NONE else f" recompute {layer.recompute}"
    return f"{plan.num_microbatches} x {plan.microbatch_samples} samples, {layer.data_parallel}{recompute}"


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with ever smaller micro-batches, as long as each data-parallel rank has a sample of each."""
    for count in divisors(plan.global_batch_size):
        if count > plan.num_microbatches and count % plan.num_microbatches == 0:
            yield from _changed(plan, num_microbatches=count)


def _recomputing(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with more recomputation in all layers."""
    kinds = Recompute.SELECTIVE, Recompute.FULL
    now = {layer.recompute for layer in plan.layers}
    for kind in kinds if now == {Recompute.NONE} else () if now == {Recompute.FULL} else kinds[1:]:
        yield from _changed(plan, layers=tuple(replace(layer, recompute=kind) for layer in plan.layers))


def _sharding(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with more of its states sharded over all data-parallel ranks; ZeRO-3 as FSDP runs it."""
    now = {layer.data_parallel for layer in plan.layers}
    if now == {DataParallel.DDP}:
        yield from _sharded(plan, DataParallel.ZERO2)
    if now != {DataParallel.ZERO3}:
        yield from _sharded(plan, DataParallel.ZERO3, gradient_reduction=GradientReduction.EVERY_MICROBATCH)


def _sharded(plan: Plan, kind: DataParallel, **changes: Any) -> Iterator[Plan]:  # noqa: ANN401 (of a plan's fields)
    def outer(strategy: Strategy) -> Strategy:
        return replace(strategy, data_parallel=kind, shard_size=0)

    def of_layer(layer: LayerStrategy) -> LayerStrategy:
        experts = layer.experts
        if experts is not UNSET:
            experts = replace(experts, data_parallel=kind, shard_size=0)
        return replace(layer, data_parallel=kind, shard_size=0, experts=experts)

    layers = tuple(map(of_layer, plan.layers))
    yield from _changed(plan, embedding=outer(plan.embedding), head=outer(plan.head), layers=layers, **changes)


def _together(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with as much recomputation and sharding as there is, and then with ever smaller micro-batches."""
    for lever in (_recomputing, _sharding):
        *_, plan = plan, *lever(plan)
    yield plan
    yield from _smaller(plan)


def _changed(plan: Plan, **changes: Any) -> Iterator[Plan]:  # noqa: ANN401 (of a plan's fields)
    """Yield the changed plan; nothing if its sizes do not divide one another."""
    with suppress(ValueError):
        yield replace(plan, **changes)


_LEVERS = (
    _Lever("smaller micro-batches", _smaller),
    _Lever("recomputation", _recomputing),
    _Lever("more sharded states", _sharding),
)
