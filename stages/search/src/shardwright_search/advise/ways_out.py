"""Changes that make a model fit: more memory or nodes, other number formats, LoRA, shorter samples, less batch."""

import json
from collections.abc import Callable, Iterator
from itertools import chain, count, dropwhile
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import GIB, Recompute
from shardwright_search.advise.question import Question, question_of
from shardwright_search.options import AdviseOptions
from shardwright_search.search import SearchAnswer, StoppedEarly
from shardwright_search.solver.stopping import CpuSeconds, left, until
from shardwright_search.space.budget import Infeasible, states_beyond_budget
from shardwright_search.space.configurations import divisors
from shardwright_search.space.request import of_each_optimizer
from shardwright_search.space.search_space import space_of

_LIMIT_S, _EACH_S = 8.0, 2.0
"""CPU seconds of all side searches, and of one."""
_NEXT = 3
"""Numbers of nodes that are tried one after the other, before doubles of the asked one are."""
_MOST_TIMES_NODES = 64
_MOST_BUDGETS = 4
_RANK = 16
_STEP_GIB = 0.01
Search = Callable[[Question, float], SearchAnswer | Infeasible]


class _Way(NamedTuple):
    """A change that may make a model fit: what it is called, its option, and the sizes that are tried in turn."""

    name: str
    tries: Callable[[], Iterator[tuple[str, AdviseOptions]]]
    """The option and the changed question, the one that is wanted most first."""


def ways_out(options: AdviseOptions, question: Question, lacking: Infeasible, search: Search) -> Iterator[str]:
    """Yield a line for each change: the plan that then fits and its step time, what is still missing, or no time.

    Each search has `_EACH_S`, and all together `_LIMIT_S` or the asked time limit, in CPU seconds.
    """
    asked = replace(options, batch=question.request.global_batch_size, html=None, out=None, launch=None)
    limit_s, late = min(_LIMIT_S, options.time_limit), list[str]()
    deadline = until(CpuSeconds(limit_s))
    yield from _larger_budget(asked, question, lacking, search, deadline)
    yield from _more_nodes(asked, question, lacking, search, deadline)
    with TemporaryDirectory() as folder:
        for way in _ways(asked, question, Path(folder)):
            words = None
            for option, changed in way.tries():
                outcome = _outcome(changed, search, deadline)
                if outcome is None:
                    late.append(option)
                    break
                words = f"{option} ({way.name}): {_brings(outcome, lacking)}"
                if isinstance(outcome, SearchAnswer):
                    break
            yield from [] if words is None else [words]
    if options.target is None:
        yield _by_recomputing(question, lacking, search, deadline)
    if late:
        yield f"not decided in the {limit_s:g} CPU seconds for this: {', '.join(late)}"


def _ways(asked: AdviseOptions, question: Question, folder: Path) -> Iterator[_Way]:
    """Yield the changes that the options leave open."""
    if asked.uniform:
        yield _Way(
            "another strategy for each layer", lambda: iter([("without --uniform", replace(asked, uniform=False))])
        )
    if asked.parameters is None and asked.formats.parameters == "float32" and asked.precision == "bfloat16":
        changed = replace(asked, parameters="bfloat16")
        yield _Way("parameters and states in bfloat16", lambda: iter([("--parameters bfloat16", changed)]))
    if asked.optimizer == ("adamw",) and asked.target is None:
        yield _Way(
            "moments in 8 bits", lambda: iter([("--optimizer adamw-8bit", replace(asked, optimizer=("adamw-8bit",)))])
        )
    if asked.lora is None and not asked.frozen and not asked.mtp:
        config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": "all-linear"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        low_rank = replace(asked, lora=folder)
        tries = [("--lora FOLDER", low_rank), ("--lora FOLDER --base 4bit", replace(low_rank, base="4bit"))]
        yield _Way(f"LoRA, rank {_RANK} on all Linear modules", lambda: iter(tries))
    elif asked.base is None and asked.lora is not None:
        yield _Way("frozen matrices in 4 bits", lambda: iter([("--base 4bit", replace(asked, base="4bit"))]))
    length = question.model.sequence_length
    shorter = [(f"--seq {length // part}", replace(asked, seq=length // part)) for part in (2, 4, 8) if length >= part]
    yield _Way("shorter samples", lambda: iter(shorter))
    assert asked.batch is not None
    batches = divisors(asked.batch)[-2::-1][:3]
    if batches:
        yield _Way("a smaller batch", lambda: ((f"--batch {size}", replace(asked, batch=size)) for size in batches))


def _outcome(options: AdviseOptions, search: Search, deadline: float) -> SearchAnswer | Infeasible | BadInput | None:
    """Return what is found of changed options, or why they are refused; None: it was not found in time."""
    left_s = left(deadline) or 0.0
    if left_s <= 0:
        return None
    try:
        question = question_of(options)
        whole = question if options.budget_gib is not None else question.whole
        if (missing := _states_beyond_budget(whole)) > 0:
            return Infeasible("", missing, min(whole.budgets.values()) + missing, exact=False)
        return search(whole, CpuSeconds(min(_EACH_S, left_s)))
    except StoppedEarly:
        return None
    except BadInput as refused:
        return refused


def _brings(outcome: SearchAnswer | Infeasible | BadInput, lacking: Infeasible) -> str:
    """Return the effect of a change in words: a plan with its time, or how much less memory is missing."""
    if isinstance(outcome, BadInput):
        return f"not possible: {outcome}"
    if isinstance(outcome, Infeasible):
        more = "" if outcome.exact else "more than "
        missing = f"still exceeds the budget by {more}{outcome.missing_bytes / GIB:.2f} GiB a rank"
        brought = (lacking.missing_bytes - outcome.missing_bytes) / GIB if outcome.exact and lacking.exact else 0.0
        return f"{missing}, {brought:.2f} GiB less" if brought >= _STEP_GIB else missing
    estimate = outcome.chosen.evaluation.estimate
    tokens_per_s = estimate.samples_per_s * outcome.chosen.plan.model.sequence_length
    most = "at most " if outcome.stopped else ""
    return f"fits, {most}{estimate.simulated_step_time_s:.4g} s a step, {tokens_per_s:,.0f} tokens/s"


def _by_recomputing(question: Question, lacking: Infeasible, search: Search, deadline: float) -> str:
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
    asked: AdviseOptions, question: Question, lacking: Infeasible, search: Search, deadline: float
) -> Iterator[str]:
    """Yield the least budget that is known to fit, or the memory that GPUs must have."""
    types = question.cluster.node_types
    device_gib = min(types[name].memory_bytes for name in question.budgets) / GIB
    for _ in range(_MOST_BUDGETS):
        needed_gib = ceil(lacking.min_bytes / GIB / _STEP_GIB) * _STEP_GIB
        if needed_gib > device_gib or asked.budget_gib is None:
            yield f"GPUs of {'' if lacking.exact else 'more than '}{lacking.min_bytes / GIB:.2f} GiB"
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
    asked: AdviseOptions, question: Question, lacking: Infeasible, search: Search, deadline: float
) -> Iterator[str]:
    """Yield the fewest nodes of the type that fit, or a number that does if some were not decided."""
    if len(question.cluster.nodes) > 1:
        return
    (group,) = question.cluster.nodes
    per_node = question.cluster.node_types[group.node_type].devices_per_node
    device = asked.gpus.rpartition(":")[2]
    first, fewest, refused = _fewest_by_states(question, group.count), True, list[str]()
    # What divides the batch is found among the next numbers, or among the asked one's doubles.
    doubles = (group.count * 2**power for power in count(1))
    numbers = chain(range(first, first + _NEXT), dropwhile(lambda number: number < first + _NEXT, doubles))
    for number in numbers:
        changed = replace(asked, gpus=f"{number}x{per_node}:{device}")
        outcome = _outcome(changed, search, deadline) if number <= first * _MOST_TIMES_NODES else None
        if isinstance(outcome, SearchAnswer):
            kind = "the fewest nodes" if fewest and number < first + _NEXT else "enough nodes, maybe not the fewest"
            yield f"--gpus {changed.gpus} ({kind}): {_brings(outcome, lacking)}"
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
