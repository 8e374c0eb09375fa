"""Choices of the user's own as plans: `tp=8,pp=4,mbs=1,zero=1`, Megatron-LM's arguments, a torchtitan TOML, or a rule.

A rule of thumb is what people choose without a search. ZeRO-1 and ZeRO-2 are both Megatron-LM's distributed optimizer,
as a plan has it: one reduce-scatter and one all-gather a step.
"""

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwright_formats.io import BadInput, read_bytes
from shardwright_formats.types import (
    MIB,
    DataParallel,
    GradientReduction,
    Plan,
    Recompute,
    Schedule,
    SequenceParallel,
)
from shardwright_search.advise.question import Question
from shardwright_search.space.configurations import divisors
from shardwright_search.space.uniform import UniformStrategy, plan_of_uniform

_MAX_BYTES = MIB
_ZERO = {
    "0": DataParallel.DDP,
    "1": DataParallel.ZERO2,
    "2": DataParallel.ZERO2,
    "3": DataParallel.ZERO3,
}
_RECOMPUTE = {str(kind): kind for kind in Recompute}
_NOT_PRICED = ("context_parallel", "context_parallel_degree", "expert_model_parallel", "expert_parallel_degree")
_MEGATRON = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "mbs": "micro_batch_size",
    "recompute": "recompute_granularity",
    "vpp": "num_virtual_stages_per_pipeline_rank",
}
"""Arguments of Megatron-LM for the keys of a choice."""
_COUNT = re.compile(r"[1-9]\d{0,6}")
_SHARED = SequenceParallel.MEGATRON
"""Megatron-LM's sequence parallelism, which does nothing without tensor parallelism."""


def plan_of_choice(choice: UniformStrategy, name: str, question: Question) -> Plan:
    """Return the plan with evenly cut layers on all devices: `dp_size` of the choice is not read.

    Raises BadInput naming `name` where the choice's numbers do not divide one another.
    """
    devices, batch = question.cluster.num_devices, question.request.global_batch_size
    model_ranks = choice.tp_size * choice.pp_size
    if devices % model_ranks:
        problem = f"tp {choice.tp_size} x pp {choice.pp_size} does not divide {devices} GPUs"
        raise BadInput(name, problem, "choose divisors")
    choice = choice._replace(dp_size=devices // model_ranks)
    if not isinstance(batch, int) or batch % (choice.dp_size * choice.micro_batch_size):
        problem = f"dp {choice.dp_size} x mbs {choice.micro_batch_size} does not divide the batch {batch}"
        raise BadInput(name, problem, "choose another mbs or --batch")
    # FSDP keeps a shard of the gradients between microbatches, unless it is told not to.
    shards = choice.data_parallel is DataParallel.ZERO3
    return plan_of_uniform(
        name,
        choice,
        question.model,
        question.cluster,
        global_batch_size=batch,
        num_microbatches=choice.num_microbatches(batch),
        schedule=Schedule.ONE_F_ONE_B if choice.chunks == 1 else Schedule.INTERLEAVED_1F1B,
        gradient_reduction=GradientReduction.EVERY_MICROBATCH if shards else GradientReduction.DEFERRED,
        precision=question.request.precision,
        attention=question.request.attention,
        compile=question.request.compile,
    )


def choice_of(text: str, question: Question) -> UniformStrategy:
    """Return the choice that a text spells, or the file that it names."""
    if text.startswith("--"):
        return _megatron(text, text)
    path = Path(text)
    if path.suffix == ".toml":
        return _torchtitan(path, question)
    if path.is_file():
        return _megatron(read_bytes(path, _MAX_BYTES).decode(errors="replace"), text)
    return _pairs(text)


def _pairs(text: str) -> UniformStrategy:
    known = {"tp", "pp", "mbs", "zero", "sp", "recompute", "vpp"}
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    if unknown := sorted(set(pairs) - known):
        problem = f"{unknown[0]!r} is no file, no rule and no key of a choice"
        raise BadInput(f"--against {text}", problem, "write tp=8,pp=4,mbs=1,zero=1 (also sp, recompute, vpp)")
    return _read_choice(text, pairs, {})


def _read_choice(file: str, texts: Mapping[str, str], names: Mapping[str, str]) -> UniformStrategy:
    """Return the choice that texts spell under the keys of a pair, or under the names that these have in a language."""

    def count(key: str) -> int:
        name = names.get(key, key)
        return _count(file, name, texts.get(name, "1"))

    recompute = names.get("recompute", "recompute")
    return UniformStrategy(
        tp_size=count("tp"),
        pp_size=count("pp"),
        micro_batch_size=count("mbs"),
        data_parallel=_one_of(file, "zero", texts.get("zero", "0"), _ZERO),
        sequence_parallel=_one_of(file, "sp", texts.get("sp", "1"), {"0": SequenceParallel.NONE, "1": _SHARED}),
        recompute=_one_of(file, recompute, texts.get(recompute, "none"), _RECOMPUTE),
        chunks=count("vpp"),
    )


def _megatron(text: str, file: str) -> UniformStrategy:
    """Return the choice of Megatron-LM's arguments; those of model, data and precision are not read."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise BadInput(f"--against {file}", f"are no arguments ({error})", "correct them") from None
    given: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            given[key.replace("-", "_")] = value or ("" if following.startswith("--") else following)
    _refuse(file, {name.removesuffix("_size"): given[name] for name in given})
    sharded = given.get("data_parallel_sharding_strategy") == "optim_grads_params" and "use_megatron_fsdp" in given
    zero = "3" if sharded else "1" if "use_distributed_optimizer" in given else "0"
    for layout in ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers"):
        if layout in given:
            raise BadInput(f"--against {file}", f"--{layout.replace('_', '-')} is not priced", "leave it out")
    sequence = "1" if "sequence_parallel" in given else "0"
    return _read_choice(file, {**given, "zero": zero, "sp": sequence}, _MEGATRON)


def _torchtitan(path: Path, question: Question) -> UniformStrategy:
    """Return the choice of a torchtitan TOML."""
    try:
        sections: Mapping[str, Any] = tomllib.loads(read_bytes(path, _MAX_BYTES).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(path, f"is no TOML ({error})", "correct the file") from None
    parallel, training = sections.get("parallelism", {}), sections.get("training", {})
    checkpoint = sections.get("activation_checkpoint", {})
    _refuse(str(path), {key: str(value) for key, value in parallel.items()})

    def number(keys: Mapping[str, Any], name: str, default: int = 1) -> int:
        return _count(str(path), name, str(keys.get(name, default)))

    tp_size, pp_size = number(parallel, "tensor_parallel_degree"), number(parallel, "pipeline_parallel_degree")
    replicas = number(parallel, "data_parallel_replicate_degree")
    dp_size = max(1, question.cluster.num_devices // (tp_size * pp_size))
    sharded = dp_size // replicas if parallel.get("data_parallel_shard_degree", -1) == -1 else None
    shard_size = sharded or number(parallel, "data_parallel_shard_degree")
    reshards = parallel.get("fsdp_reshard_after_forward", "default")
    # By default it reshards, but not in a pipeline.
    kind = (
        DataParallel.ZERO3 if reshards == "always" or (reshards == "default" and pp_size == 1) else DataParallel.ZERO2
    )
    sample_key = "pipeline_parallel_microbatch_size" if pp_size > 1 else "local_batch_size"
    modes = {"none": Recompute.NONE, "full": Recompute.FULL, "selective": Recompute.SELECTIVE}
    return UniformStrategy(
        tp_size=tp_size,
        pp_size=pp_size,
        micro_batch_size=number(parallel if pp_size > 1 else training, sample_key),
        data_parallel=kind if shard_size > 1 else DataParallel.DDP,
        sequence_parallel=_SHARED,
        recompute=_one_of(str(path), "activation_checkpoint.mode", checkpoint.get("mode", "selective"), modes),
        shard_size=shard_size if 1 < shard_size < dp_size else 0,
    )


def _refuse(file: str, given: Mapping[str, str]) -> None:
    """Raise BadInput where a choice has a kind of parallelism that no plan has."""
    for name in _NOT_PRICED:
        if given.get(name, "1") != "1":
            raise BadInput(f"--against {file}", f"{name} {given[name]} is not priced", "leave it at 1")


def _count(file: str, name: str, text: str) -> int:
    if not _COUNT.fullmatch(text):
        raise BadInput(f"--against {file}", f"{name} {text!r} is no number from 1", "correct it")
    return int(text)


def _one_of(file: str, name: str, text: str, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 (of the values)
    if text not in values:
        raise BadInput(f"--against {file}", f"{name} {text!r}", f"choose {', '.join(values)}")
    return values[text]


class Rule(NamedTuple):
    """A rule of thumb."""

    choices: Callable[[Question], Iterator[UniformStrategy]]
    """Choices that the rule tries, in order; the first that fits is taken."""
    source: str
    """Statement of the rule, and who says so."""


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


def _shapes(question: Question, tp_sizes: Sequence[int]) -> Iterator[UniformStrategy]:
    """Yield ZeRO-1 with micro-batches of 1, the fewest model-parallel ranks first, then with full recomputation."""
    devices, layers = question.cluster.num_devices, len(question.model.layers)
    sizes = [(t * p, -t, t, p) for t in tp_sizes for p in divisors(devices // t) if p <= layers]
    choice = UniformStrategy(data_parallel=DataParallel.ZERO2, sequence_parallel=_SHARED)
    for recompute in (Recompute.NONE, Recompute.FULL):
        for _, _, tp_size, pp_size in sorted(sizes):
            yield choice._replace(tp_size=tp_size, pp_size=pp_size, recompute=recompute)


def _from_table(question: Question) -> Iterator[UniformStrategy]:
    """Yield the row of the next larger model, with its micro-batch and then ever smaller ones."""
    parameters = question.model.parameter_count
    _, tp_size, pp_size, largest = next((row for row in _TABLE if row[0] >= parameters), _TABLE[-1])
    choice = UniformStrategy(tp_size=tp_size, pp_size=pp_size, sequence_parallel=_SHARED, recompute=Recompute.FULL)
    yield from (choice._replace(micro_batch_size=size) for size in (16, 8, 4, 2, 1) if size <= largest)


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
"""Rules of thumb, under the name behind `rule:`."""


def plan_of_rule(name: str, question: Question, fits: Callable[[Plan], bool]) -> Plan:
    """Return the first plan of a rule that fits, else the last one it tries.

    Raises BadInput for an unknown rule, and where none of its plans divides batch and devices.
    """
    if name not in RULES:
        raise BadInput("--against", f"rule:{name} is no rule", f"use {', '.join(f'rule:{known}' for known in RULES)}")
    plan = None
    for choice in RULES[name].choices(question):
        try:
            plan = plan_of_choice(choice, f"rule:{name}", question)
        except BadInput:
            continue
        if fits(plan):
            return plan
    if plan is None:
        problem = "none of its plans divides the GPUs and the batch"
        raise BadInput(f"--against rule:{name}", problem, "choose other --gpus or another --batch")
    return plan
