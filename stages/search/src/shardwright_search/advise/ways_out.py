"""Changes that make a model fit: more memory or nodes, other formats, offloading, shorter samples, leaner plans."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count, dropwhile
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.display.units import gib_text
from shardwright.io import BadInput
from shardwright.types import GIB, DataParallel, GradientReduction, LayerStrategy, Plan, Recompute, Strategy
from shardwright_search.advise.question import Question, question_of
from shardwright_search.advise.sizes import Searched
from shardwright_search.candidates import Candidate
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.explain.tables import sample_s
from shardwright_search.options import AdviseOptions
from shardwright_search.search import SearchAnswer, StoppedEarly
from shardwright_search.solver.stopping import CpuSeconds, left, until
from shardwright_search.space.budget import Infeasible, states_beyond_budget
from shardwright_search.space.configurations import divisors
from shardwright_search.space.request import of_each_optimizer
from shardwright_search.space.search_space import space_of

_LIMIT_S, _EACH_S = 8.0, 2.0
"""CPU seconds of all side searches together, and of each."""
_NEXT = 3
"""How many consecutive numbers of nodes are tried, before doubles of the requested number."""
_MOST_TIMES_NODES = 64
_MOST_BUDGETS = 4
_RANK = 16
_STEP_GIB = 0.01
_IN_A_NODE = 8
"""The most GPUs of a node that are proposed: nodes of most devices have no more."""
_NETWORK, _ASSUMED_GBIT_S = "--inter-node-gbit-s", "100"
"""The option for the network, and the value that is tried if the network of a device's nodes is not known."""


Changes = Mapping[str, Any]
"""Options that are changed, by the names of their fields."""


class _Way(NamedTuple):
    """A change that may make a model fit."""

    name: str
    tries: tuple[tuple[str, Changes], ...]
    """Options as they are written, and what they change: the most wanted first, the one with the least memory last."""


def ways_out(options: AdviseOptions, question: Question, lacking: Infeasible, search: Searched) -> Iterator[str]:
    """Yield a line for each change: the step time of the plan that then fits, or the memory that is still missing.

    Each search has `_EACH_S` CPU seconds, and all together `_LIMIT_S`, or the requested time limit if that is less; the
    last line names the changes for which this was not enough. If no change is enough, combinations of changes are tried
    for the same time again.
    """
    asked = replace(options, batch=question.request.global_batch_size, html=None, out=None, launch=None)
    limit_s, late, found = min(_LIMIT_S, options.time_limit), list[str](), list[SearchAnswer]()
    deadline = until(CpuSeconds(limit_s))

    def noting(changed: Question, limit_s: float) -> SearchAnswer | Infeasible:
        answer = search(changed, limit_s)
        found.extend([answer] if isinstance(answer, SearchAnswer) else [])
        return answer

    yield from _larger_budget(asked, question, lacking, noting, deadline)
    yield from _more_nodes(asked, question, lacking, noting, deadline)
    with TemporaryDirectory() as folder:
        ways = tuple(_ways(asked, question, Path(folder)))
        for way in ways:
            words = None
            for option, changes in way.tries:
                outcome = _outcome(replace(asked, **changes), noting, deadline)
                if outcome is None:
                    late.append(option)
                    break
                words = f"{option} ({way.name}): {_brings(outcome, lacking)}"
                if isinstance(outcome, SearchAnswer):
                    break
            yield from [] if words is None else [words]
        if not found:
            yield from _together(asked, question, ways, lacking, search, until(CpuSeconds(limit_s)))
    if options.target is None:
        yield _by_recomputing(question, lacking, search, deadline)
    if late:
        yield f"not decided in the {limit_s:g} CPU seconds for this: {', '.join(late)}"


def _together(
    asked: AdviseOptions,
    question: Question,
    ways: Sequence[_Way],
    lacking: Infeasible,
    search: Searched,
    deadline: float,
) -> Iterator[str]:
    """Yield the first combination that fits: the ways that train all, the ways with LoRA, and these on more GPUs."""
    # Of two ways that change the same option, such as the optimizer, the first is the leaner one.
    each = [way.tries[-1] for way in ways]
    leanest = [way for place, way in enumerate(each) if way[1].keys() not in [one.keys() for _, one in each[:place]]]
    trained = [(option, changes) for option, changes in leanest if "lora" not in changes]
    # Adapters have few states to offload.
    whole = {"parameters", "optimizer", "offload"}
    low_rank = [(option, changes) for option, changes in leanest if not changes.keys() & whole]
    for taken in (trained, low_rank, *([*low_rank, more] for more in _more_gpus(asked, question))):
        changes = {name: value for _, each in taken for name, value in each.items()}
        outcome = _outcome(replace(asked, **changes), search, deadline)
        if isinstance(outcome, SearchAnswer):
            yield f"{' '.join(option for option, _ in taken)} (together): {_brings(outcome, lacking)}"
            return


def _more_gpus(asked: AdviseOptions, question: Question) -> Iterator[tuple[str, Changes]]:
    """Yield ever more GPUs of the first node type: up to eight in a node, then up to eight times the nodes."""
    group, device = question.cluster.nodes[0], asked.gpus.rpartition(":")[2]
    per_node = question.cluster.node_types[group.node_type].devices_per_node
    within = [(group.count, per_node * factor) for factor in (2, 4, 8) if per_node * factor <= _IN_A_NODE]
    for nodes, each in (*within, *((group.count * factor, max(per_node, _IN_A_NODE)) for factor in (2, 4, 8))):
        gpus = f"{nodes}x{each}:{device}"
        yield f"--gpus {gpus}", {"gpus": gpus}


def _ways(asked: AdviseOptions, question: Question, folder: Path) -> Iterator[_Way]:
    """Yield the changes of options that the user has not already made."""
    if asked.uniform:
        yield _Way("another strategy for each layer", (("without --uniform", {"uniform": False}),))
    if asked.parameters is None and asked.formats.parameters == "float32" and asked.precision == "bfloat16":
        yield _Way("parameters and states in bfloat16", (("--parameters bfloat16", {"parameters": "bfloat16"}),))
    if asked.optimizer == ("adamw",) and asked.target is None:
        yield _Way("moments in 8 bits", (("--optimizer adamw-8bit", {"optimizer": ("adamw-8bit",)}),))
    if asked.offload == "none" and asked.target is None and asked.optimizer != ("muon",):
        yield _Way("optimizer states and activations in host memory", (("--offload any", {"offload": "any"}),))
    if asked.lora is None and not asked.frozen and not asked.mtp:
        config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": "all-linear"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        tries = ("--lora FOLDER", {"lora": folder}), ("--lora FOLDER --base 4bit", {"lora": folder, "base": "4bit"})
        yield _Way(f"LoRA, rank {_RANK} on all Linear modules", tries)
    elif asked.base is None and asked.lora is not None:
        yield _Way("frozen matrices in 4 bits", (("--base 4bit", {"base": "4bit"}),))
    length = question.model.sequence_length
    if lengths := [length // part for part in (2, 4, 8) if length >= part]:
        yield _Way("shorter samples", tuple((f"--seq {each}", {"seq": each}) for each in lengths))
    assert asked.batch is not None
    if batches := divisors(asked.batch)[-2::-1][:3]:
        yield _Way("a smaller batch", tuple((f"--batch {size}", {"batch": size}) for size in batches))
    if asked.optimizer == ("adamw",) and asked.target is None:
        yield _Way("one moment of matrices", (("--optimizer muon", {"optimizer": ("muon",)}),))


def _outcome(options: AdviseOptions, search: Searched, deadline: float) -> SearchAnswer | Infeasible | BadInput | None:
    """Return what is found of changed options, or why they are refused; None: it was not found in time.

    The answer is for the usual budget if a plan is found within it, as `advise` itself gives it; else for all memory.
    """
    if (left(deadline) or 0.0) <= 0:
        return None
    try:
        question = question_of(options)
        whole = question if options.budget_gib is not None else question.whole
        if (missing := _states_beyond_budget(whole)) > 0:
            return Infeasible("", missing, min(whole.budgets.values()) + missing, exact=False)
        answer = _found(whole, search, deadline)
        if isinstance(answer, SearchAnswer) and whole is not question:
            usual = _found(question, search, deadline)
            return usual if isinstance(usual, SearchAnswer) else answer
        return answer
    except BadInput as refused:
        return refused


def _found(question: Question, search: Searched, deadline: float) -> SearchAnswer | Infeasible | None:
    """Return the answer to a question; None: it was not found in time."""
    try:
        return search(question, CpuSeconds(min(_EACH_S, left(deadline) or 0.0)))
    except StoppedEarly:
        return None


def _brings(outcome: SearchAnswer | Infeasible | BadInput, lacking: Infeasible) -> str:
    """Return the effect of a change in words: a plan with its time, or how much less memory is missing."""
    if isinstance(outcome, BadInput):
        return f"not possible: {outcome}"
    if isinstance(outcome, Infeasible):
        more = "" if outcome.exact else "more than "
        missing = f"still exceeds the budget by {more}{gib_text(outcome.missing_bytes)} a rank"
        brought = (lacking.missing_bytes - outcome.missing_bytes) / GIB if outcome.exact and lacking.exact else 0.0
        return f"{missing}, {brought:.2f} GiB less" if brought >= _STEP_GIB else missing
    estimate = outcome.chosen.evaluation.estimate
    tokens_per_s = estimate.samples_per_s * outcome.chosen.plan.model.sequence_length
    most = "at most " if outcome.stopped else ""
    return f"fits, {most}{estimate.simulated_step_time_s:.4g} s a step, {tokens_per_s:,.0f} tokens/s"


def _by_recomputing(question: Question, lacking: Infeasible, search: Searched, deadline: float) -> str:
    """Return how much memory recomputation saves in the leanest plan, which uses it already."""
    counted = "recomputation and micro-batches of one sample are in the leanest plan already"
    left_s = left(deadline) or 0.0
    if left_s <= 0 or not lacking.exact:
        return counted
    request = replace(question.request, recompute=(Recompute.NONE,))
    try:
        without = search(question._replace(request=request), CpuSeconds(min(_EACH_S, left_s)))
    except StoppedEarly:
        return counted
    if not isinstance(without, Infeasible):
        return counted
    least = "" if without.exact else "at least "
    return f"{counted}: without recomputing it would need {least}{_more(without, lacking):.2f} GiB more a rank"


def _more(without: Infeasible, lacking: Infeasible) -> float:
    return max(0, without.missing_bytes - lacking.missing_bytes) / GIB


def _larger_budget(
    asked: AdviseOptions, question: Question, lacking: Infeasible, search: Searched, deadline: float
) -> Iterator[str]:
    """Yield the least budget that is known to fit, or the memory that GPUs must have."""
    types = question.cluster.node_types
    device_gib = min(types[name].memory_bytes for name in question.budgets) / GIB
    for _ in range(_MOST_BUDGETS):
        needed_gib = ceil(lacking.min_bytes / GIB / _STEP_GIB) * _STEP_GIB
        if needed_gib > device_gib or asked.budget_gib is None:
            yield f"GPUs of {'' if lacking.exact else 'more than '}{gib_text(lacking.min_bytes)}"
            return
        changed = replace(asked, budget_gib=round(needed_gib, 2))
        outcome = _outcome(changed, search, deadline)
        if isinstance(outcome, SearchAnswer):
            yield f"--budget-gib {needed_gib:.2f}: {_brings(outcome, lacking)}"
            return
        if not isinstance(outcome, Infeasible):
            break
        lacking = outcome
    yield f"--budget-gib above {lacking.min_bytes / GIB:.2f} (which budget suffices was not found in time)"


def _more_nodes(
    asked: AdviseOptions, question: Question, lacking: Infeasible, search: Searched, deadline: float
) -> Iterator[str]:
    """Yield the fewest nodes of the type that fit, or a number that does if some were not decided."""
    if len(question.cluster.nodes) > 1:
        return
    (group,) = question.cluster.nodes
    per_node = question.cluster.node_types[group.node_type].devices_per_node
    device = asked.gpus.rpartition(":")[2]
    first, fewest, refused = _fewest_by_states(question, group.count), True, list[str]()
    # A number that divides the batch is found among the next numbers, or among the doubles of the requested one.
    doubles = (group.count * 2**power for power in count(1))
    numbers = chain(range(first, first + _NEXT), dropwhile(lambda number: number < first + _NEXT, doubles))
    for number in numbers:
        changed = replace(asked, gpus=f"{number}x{per_node}:{device}")
        outcome = _outcome(changed, search, deadline) if number <= first * _MOST_TIMES_NODES else None
        network = ""
        if isinstance(outcome, BadInput) and outcome.args[0] == _NETWORK:
            network = f" {_NETWORK} {_ASSUMED_GBIT_S}"
            outcome = _outcome(replace(changed, inter_node_gbit_s=_ASSUMED_GBIT_S), search, deadline)
        if isinstance(outcome, SearchAnswer):
            kind = "the fewest nodes" if fewest and number < first + _NEXT else "enough nodes, maybe not the fewest"
            kind += ", over an assumed network" if network else ""
            yield f"--gpus {changed.gpus}{network} ({kind}): {_brings(outcome, lacking)}"
            return
        if isinstance(outcome, BadInput):
            # Such a number of nodes divides nothing, or is not known at all: the next one may be possible.
            refused.append(f"--gpus {changed.gpus}: {_brings(outcome, lacking)}")
        if (left(deadline) or 0.0) <= 0 or number > first * _MOST_TIMES_NODES:
            late = f"more nodes: {first} or more are needed; how many was not found in time"
            yield refused[0] if len(refused) > _NEXT else late
            return
        fewest = fewest and isinstance(outcome, Infeasible | BadInput)


def _fewest_by_states(question: Question, nodes: int) -> int:
    """Return the fewest nodes, more than there are, over which the states of all parameters can be sharded."""
    devices, budget = question.cluster.num_devices, min(question.budgets.values())
    states = (_states_beyond_budget(question) + budget) * devices
    return max(nodes + 1, states // (budget * (devices // nodes)))


def _states_beyond_budget(question: Question) -> int:
    """Return by how many bytes a rank's states exceed the budget with the leanest optimizer; 0: they fit."""
    given = question.model, question.cluster, question.profiles, Path("--gpus")
    each = (space_of(one, *given) for one in of_each_optimizer(question.request))
    return min(states_beyond_budget(space.instance) for space in each)


# What would make a plan of the user's own fit: smaller micro-batches, recomputation, states that are more sharded.


class _Lever(NamedTuple):
    """A change that makes a plan leaner: its name, and the changed plans, the one that costs the least time first."""

    name: str
    plans: Callable[[Plan], Iterator[Plan]]


def ways_to_fit(question: Question, plan: Plan) -> Iterator[str]:
    """Yield a line for each change of a plan that does not fit: its time if it then fits, else the memory missing.

    Only if no single change is enough, all are made together.
    """
    time_s, fits = sample_s(plan, evaluate(plan, question.profiles, timeline=False).estimate), False
    for name, plans in _LEVERS:
        best = _first_that_fits(question, plans(plan))
        if best is not None:
            fits |= question.fits(best.plan, best.evaluation.estimate)
            yield f"{name} ({_set_words(best.plan)}): {_result_of(question, best, time_s)}"
    if not fits and (best := _first_that_fits(question, _all_levers(plan))) is not None:
        yield f"all of these ({_set_words(best.plan)}): {_result_of(question, best, time_s)}"


def _first_that_fits(question: Question, plans: Iterator[Plan]) -> Candidate | None:
    """Return the first plan that fits, else the last one; None: there is none."""
    candidate = None
    for plan in plans:
        with suppress(BadInput):  # sizes that the profile does not have
            candidate = Candidate(plan, evaluate(plan, question.profiles, timeline=False))
            if question.fits(plan, candidate.evaluation.estimate):
                break
    return candidate


def _result_of(question: Question, candidate: Candidate, time_s: float) -> str:
    plan, estimate = candidate.plan, candidate.evaluation.estimate
    lacks = -min(question.left_bytes(plan, estimate))
    if lacks > 0:
        return f"still exceeds the budget by {gib_text(lacks)} a rank"
    ratio = sample_s(plan, estimate) / time_s
    return f"fits, {estimate.simulated_step_time_s:.4g} s a step, {ratio:.2f} times its time"


def _set_words(plan: Plan) -> str:
    """Return what the levers set, in words."""
    layer = plan.layers[0]
    recompute = "" if layer.recompute is Recompute.NONE else f" recompute {layer.recompute}"
    return f"{plan.num_microbatches} x {plan.microbatch_samples} samples, {layer.data_parallel}{recompute}"


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with ever smaller micro-batches, as long as each data-parallel rank has a sample of each."""
    for more in divisors(plan.global_batch_size):
        if more > plan.num_microbatches and more % plan.num_microbatches == 0:
            yield from _changed(plan, num_microbatches=more)


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


def _all_levers(plan: Plan) -> Iterator[Plan]:
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
