"""The user's own choices as plans: `tp=8,pp=4,mbs=1,zero=1`, a file of another system, or a rule of thumb.

A rule of thumb is what people choose without a search. ZeRO-1 and ZeRO-2 are both Megatron-LM's distributed optimizer,
as a plan has it: one reduce-scatter and one all-gather a step.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.io import BadInput, has_controls, read_bytes
from shardwright.types import MIB, GradientReduction, Model, Plan
from shardwright.types.strategy import ContextParallel, DataParallel, Offload, Recompute, SequenceParallel
from shardwright_search.advise.question import Question
from shardwright_search.space.configurations import divisors
from shardwright_search.space.uniform import UniformStrategy, with_experts
from shardwright_search.systems.entry import Reading, Setting
from shardwright_search.systems.registry import SYSTEMS

_MAX_BYTES = MIB
_OF_WORDS, _READ_WORDS = next((each, each.read_words) for each in SYSTEMS.values() if each.read_words is not None)
"""The system whose arguments are accepted as a choice, directly or in a file of any name."""
_ZERO = {
    "0": DataParallel.DDP,
    "1": DataParallel.ZERO2,
    "2": DataParallel.ZERO2,
    "3": DataParallel.ZERO3,
}
_RECOMPUTE = {str(kind): kind for kind in Recompute}
_CONTEXT = {str(kind): kind for kind in ContextParallel}
_OFFLOAD = {str(kind): kind for kind in Offload}
_KEYS = {"tp", "cp", "context", "pp", "mbs", "zero", "sp", "recompute", "vpp", "ep", "etp", "offload"}
_SUFFIXES = {Path(target.file_name).suffix for target in SYSTEMS.values()} - {".txt"}
"""Endings of files: a choice that ends so names a file, even if there is no such file."""
_EXAMPLE = "write tp=8,pp=4,mbs=1,zero=1 (also ep, etp, cp, context, sp, recompute, vpp, offload)"
_COUNT = re.compile(r"[1-9]\d{0,6}")
_SPLITS = {"0": SequenceParallel.NONE, "1": SequenceParallel.MEGATRON}


def reading_of(text: str, setting: Setting) -> Reading:
    """Return the plan that a string such as `tp=8,pp=4` describes, or the plan of a file of another system.

    Raises BadInput if its numbers do not divide one another, and for features that no plan has.
    """
    path = Path(text)
    if text.startswith("--"):
        return _READ_WORDS(text, f"--against {text}", setting)
    if not path.is_file() and path.suffix not in _SUFFIXES:
        return Reading(setting.plan(_pairs(text, setting), f"--against {text}"))
    content = _text_of(path)
    reads = next((each.read for each in SYSTEMS.values() if each.is_its_file(path, content)), None)
    if reads is None and path.suffix in _SUFFIXES:
        systems = ", ".join(each.title for each in SYSTEMS.values() if path.suffix == Path(each.file_name).suffix)
        raise BadInput(text, f"is not a file of {systems}", "give a file as --launch writes it")
    return (reads or _OF_WORDS.read)(content, text, setting)


def _text_of(path: Path) -> str:
    """Return the text of a file; raise BadInput if it is not UTF-8 or contains control characters."""
    try:
        content = read_bytes(path, _MAX_BYTES).decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise BadInput(path, "is not text in UTF-8", "save it as UTF-8") from None
    if has_controls(content):
        raise BadInput(path, "holds control characters", "give a file of text")
    return content


def _usual_split(model: Model) -> SequenceParallel:
    """Return Megatron-LM's sequence parallelism, which has no effect without tensor parallelism.

    No sequence parallelism is returned if layers take whole sequences, as Swin's layers with windows of an image do.
    """
    whole = any(kind.sequence_must_divide for kind in model.types.values())
    return SequenceParallel.NONE if whole else SequenceParallel.MEGATRON


def _pairs(text: str, setting: Setting) -> UniformStrategy:
    """Return the choice in text such as `tp=8,pp=4`; zero=3 reduces gradients after each micro-batch, as FSDP does.

    Without etp, the features of each expert are split over the same ranks as the rest of the layer, as in Megatron-LM.
    """
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    if unknown := sorted(set(pairs) - _KEYS):
        problem = f"{unknown[0]!r} is not a file, a rule or a key of a choice"
        raise BadInput(f"--against {text}", problem, _EXAMPLE)
    data_parallel = _one_of(text, "zero", pairs.get("zero", "0"), _ZERO)
    shards, model = data_parallel is DataParallel.ZERO3, setting.model
    tp_size, chunks, ep_size = (_count(text, pairs, key) for key in ("tp", "vpp", "ep"))
    etp_size = _count(text, pairs, "etp") if "etp" in pairs else tp_size
    name = f"--against {text}"
    choice = setting.uniform(
        name,
        _count(text, pairs, "pp"),
        _count(text, pairs, "mbs"),
        GradientReduction.EVERY_MICROBATCH if shards else GradientReduction.DEFERRED,
        tp_size=tp_size,
        cp_size=_count(text, pairs, "cp"),
        context=_context(text, pairs),
        data_parallel=data_parallel,
        sequence_parallel=_one_of(text, "sp", pairs["sp"], _SPLITS) if "sp" in pairs else _usual_split(model),
        recompute=_one_of(text, "recompute", pairs.get("recompute", "none"), _RECOMPUTE),
    )
    choice = with_experts(name, model, choice._replace(chunks=chunks), ep_size, etp_size)
    offload: Offload = _one_of(text, "offload", pairs.get("offload", Offload.NONE.value), _OFFLOAD)
    if offload is Offload.NONE:
        return choice
    if any(node.host_bytes_per_s is UNSET for node in setting.cluster.node_types.values()):
        raise BadInput(name, "offload: nothing is known of the hosts", "give --offload any, too")
    known = all(node.host_updates_per_s is not UNSET for node in setting.cluster.node_types.values())
    if offload is Offload.UPDATE and not known:
        raise BadInput(name, "offload update: nobody knows how fast these hosts update", "take offload=optimizer")
    moves = offload in (Offload.ACTIVATIONS, Offload.BOTH)
    if moves and not choice.layer.moves_activations:
        raise BadInput(name, f"offload {offload} of layers that gather positions", "add recompute=full")
    return choice._replace(layer=replace(choice.layer, offload=offload))


def _context(text: str, pairs: Mapping[str, str]) -> ContextParallel:
    """Return the kind of context parallelism, which has no effect with cp=1; BadInput if it is then named."""
    if "context" in pairs and _count(text, pairs, "cp") == 1:
        raise BadInput(f"--against {text}", "context without cp above 1", "give cp, or leave context out")
    kind: ContextParallel = _one_of(text, "context", pairs.get("context", ContextParallel.GATHER.value), _CONTEXT)
    return kind


def _count(text: str, pairs: Mapping[str, str], key: str) -> int:
    if not _COUNT.fullmatch(pairs.get(key, "1")):
        raise BadInput(f"--against {text}", f"{key} {pairs[key]!r} is not a number from 1", "correct it")
    return int(pairs.get(key, "1"))


def _one_of(text: str, name: str, value: str, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 (of the values)
    if value not in values:
        raise BadInput(f"--against {text}", f"{name} {value!r}", f"choose {', '.join(values)}")
    return values[value]


class Rule(NamedTuple):
    """A rule of thumb for choosing a plan."""

    choices: Callable[[Question], Iterator[str]]
    """Choices, as a user writes them, that the rule tries, in order; the first that fits is taken."""
    source: str
    """The rule in words, and where it was published."""


_TABLE = (
    (1.7e9, 1, 1, 16),
    (3.6e9, 2, 1, 16),
    (7.5e9, 4, 1, 16),
    (18.4e9, 8, 1, 8),
    (39.1e9, 8, 2, 4),
    (76.1e9, 8, 4, 2),
    (145.6e9, 8, 8, 2),
    (310.1e9, 8, 16, 1),
    (529.6e9, 8, 35, 1),
    (1008e9, 8, 64, 1),
)
"""Parameters in table 1 of Narayanan et al. 2021, and TP, PP and MBS of the script that runs it (Megatron-LM's)."""


def _tp_sizes(question: Question) -> list[int]:
    """Return the powers of two within a node that divide the heads, ascending; 8 at most."""
    heads = [length for kind in question.model.types.values() for length in kind.tp_must_divide.values()]
    return [t for t in question.tp_sizes if t <= 8 and not any(h % t for h in heads)]


def _shapes(question: Question, tp_sizes: Sequence[int]) -> Iterator[str]:
    """Yield ZeRO-1 with micro-batches of 1, the fewest model-parallel ranks first, then with full recomputation."""
    devices, layers = question.cluster.num_devices, len(question.model.layers)
    sizes = [(t * p, -t, t, p) for t in tp_sizes for p in divisors(devices // t) if p <= layers]
    for recompute in (Recompute.NONE, Recompute.FULL):
        for _, _, tp_size, pp_size in sorted(sizes):
            yield f"tp={tp_size},pp={pp_size},zero=1,recompute={recompute}"


def _from_table(question: Question) -> Iterator[str]:
    """Yield the row of the next larger model in the table, with its micro-batch size and then smaller ones."""
    parameters = question.model.parameter_count
    _, tp_size, pp_size, largest = next((row for row in _TABLE if row[0] >= parameters), _TABLE[-1])
    yield from (f"tp={tp_size},pp={pp_size},mbs={size},recompute=full" for size in (16, 8, 4, 2, 1) if size <= largest)


RULES = {
    "tp8": Rule(
        lambda question: _shapes(question, [max(_tp_sizes(question))]),
        "tensor parallelism of a whole node, then the fewest pipeline stages that fit, ZeRO-1, micro-batches of 1 "
        "(takeaway 1 of Narayanan et al. 2021, arXiv 2104.04473)",
    ),
    "smallest": Rule(
        lambda question: _shapes(question, _tp_sizes(question)),
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
"""Rules of thumb, by the name after `rule:`."""


def plan_of_rule(name: str, question: Question, fits: Callable[[Plan], bool]) -> Plan:
    """Return the first plan of a rule that fits, else the last one it tries.

    Raises BadInput for an unknown rule, and if none of its plans divides batch and devices.
    """
    if name not in RULES:
        raise BadInput(
            "--against", f"rule:{name} is not a rule", f"use {', '.join(f'rule:{known}' for known in RULES)}"
        )
    plan = None
    for choice in RULES[name].choices(question):
        try:
            plan = question.setting.plan(_pairs(choice, question.setting), f"rule:{name}")
        except BadInput:
            continue
        if fits(plan):
            return plan
    if plan is None:
        problem = "none of its plans divides the GPUs and the batch"
        raise BadInput(f"--against rule:{name}", problem, "choose other --gpus or another --batch")
    return plan
