"""Rules of thumb by name: what people choose without a search, and who says so."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardwright_formats.io import BadInput
from shardwright_formats.types import DataParallel, Plan, Recompute
from shardwright_search.advise.choices import Choice, plan_of_choice
from shardwright_search.advise.question import Question
from shardwright_search.space.configurations import divisors

Fits = Callable[[Plan], bool]

_NODE = 8
"""Devices of a node beyond which no rule takes tensor parallelism."""


class Rule(NamedTuple):
    """A rule of thumb."""

    choices: Callable[[Question], Iterator[Choice]]
    """What it tries, in order; the first that fits is taken."""
    source: str
    """Who says so."""


class _Size(NamedTuple):
    """A row of NVIDIA's table."""

    parameters: float
    tp_size: int
    pp_size: int
    micro_batch_size: int


_TABLE = (
    _Size(1.7e9, 1, 1, 16),
    _Size(3.6e9, 2, 1, 16),
    _Size(7.5e9, 4, 1, 16),
    _Size(18.4e9, 8, 1, 8),
    _Size(39.1e9, 8, 2, 4),
    _Size(76.1e9, 8, 4, 2),
    _Size(145.6e9, 8, 8, 2),
    _Size(310.1e9, 8, 16, 1),
    _Size(529.6e9, 8, 35, 1),
    _Size(1008e9, 8, 64, 1),
)
"""Table 1 of Narayanan et al. 2021, and TP, PP and MBS of Megatron-LM's examples/sc21/run_table_1.sh, which runs it."""


def _tp_sizes(question: Question) -> list[int]:
    """Powers of two within a node that divide the heads, ascending."""
    heads = [length for kind in question.model.types.values() for length in kind.tp_must_divide.values()]
    return [t for t in question.tp_sizes if t <= _NODE and not any(h % t for h in heads)]


def _pp_sizes(question: Question, tp_size: int) -> list[int]:
    every = divisors(question.cluster.num_devices // tp_size)
    return [p for p in every if p <= len(question.model.layers)]


def _tp_first(question: Question) -> Iterator[Choice]:
    tp_size = max(_tp_sizes(question))
    for recompute in (Recompute.NONE, Recompute.FULL):
        for pp_size in _pp_sizes(question, tp_size):
            yield Choice(tp_size, pp_size, data_parallel=DataParallel.ZERO2, recompute=recompute)


def _smallest(question: Question) -> Iterator[Choice]:
    sizes = [(t * p, -t, t, p) for t in _tp_sizes(question) for p in _pp_sizes(question, t)]
    for recompute in (Recompute.NONE, Recompute.FULL):
        for _, _, tp_size, pp_size in sorted(sizes):
            yield Choice(tp_size, pp_size, data_parallel=DataParallel.ZERO2, recompute=recompute)


def _from_table(question: Question) -> Iterator[Choice]:
    own = question.model.parameter_count
    size = next((row for row in _TABLE if row.parameters >= own), _TABLE[-1])
    for micro_batch_size in (n for n in (16, 8, 4, 2, 1) if n <= size.micro_batch_size):
        yield Choice(size.tp_size, size.pp_size, micro_batch_size, recompute=Recompute.FULL)


RULES = {
    "tp8": Rule(
        _tp_first,
        "tensor parallelism of a whole node, then the fewest pipeline stages that fit, ZeRO-1, micro-batches of 1 "
        "(takeaway 1 of Narayanan et al. 2021, arXiv 2104.04473)",
    ),
    "smallest": Rule(
        _smallest,
        "the smallest tp x pp that fits, tensor parallelism first, ZeRO-1, micro-batches of 1 "
        "(takeaway 2 of Narayanan et al. 2021, arXiv 2104.04473)",
    ),
    "nvidia-table": Rule(
        _from_table,
        "tp, pp and micro-batch of the next larger model in NVIDIA's table, the last halved until it divides and fits, "
        "full recomputation, no ZeRO (table 1 of Narayanan et al. 2021, arXiv 2104.04473; Megatron-LM's "
        "examples/sc21/run_table_1.sh)",
    ),
}
"""By the name behind `rule:`."""


def plan_of_rule(name: str, question: Question, fits: Fits) -> Plan:
    """The first plan of a rule that fits, else the last one it tries.

    Raises BadInput for an unknown rule, and where none of its plans divides batch and devices.
    """
    if name not in RULES:
        raise BadInput("--against", f"rule:{name} is no rule", f"use {', '.join(f'rule:{known}' for known in RULES)}")
    plan, refused = None, None
    for choice in RULES[name].choices(question):
        try:
            plan = plan_of_choice(choice, f"rule:{name}", question)
        except BadInput as error:
            refused = error
            continue
        if fits(plan):
            return plan
    if plan is None:
        raise refused or BadInput(f"rule:{name}", "nothing divides the devices", "choose another number of GPUs")
    return plan
