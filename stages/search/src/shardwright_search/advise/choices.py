"""The user's own choice as a plan: `tp=8,pp=4,mbs=1,zero=1`, Megatron-LM's arguments, a torchtitan TOML, or a rule.

ZeRO-1 and ZeRO-2 are both Megatron-LM's distributed optimizer, as a plan has it: one reduce-scatter and one all-gather
a step.
"""

import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwright_formats.io import BadInput, read_bytes
from shardwright_formats.types import DataParallel, GradientReduction, Plan, Recompute, Schedule, SequenceParallel
from shardwright_search.advise.question import Question
from shardwright_search.interop.uniform import uniform_plan
from shardwright_search.options import UniformRequest

_MAX_BYTES = 2**20
_ZERO = {
    "0": DataParallel.DDP,
    "1": DataParallel.ZERO2,
    "2": DataParallel.ZERO2,
    "3": DataParallel.ZERO3,
}
_NOT_PRICED = ("context_parallel", "context_parallel_degree", "expert_model_parallel", "expert_parallel_degree")
_COUNT = re.compile(r"[1-9]\d{0,6}")


class Choice(NamedTuple):
    """One strategy of all layers."""

    tp_size: int = 1
    pp_size: int = 1
    micro_batch_size: int = 1
    """Samples of a data-parallel rank in a microbatch."""
    data_parallel: DataParallel = DataParallel.DDP
    sequence_parallel: bool = True
    """Megatron's, beside tensor parallelism."""
    recompute: Recompute = Recompute.NONE
    chunks: int = 1
    """Layer ranges of a pipeline stage, interleaved."""
    shard_size: int | None = None


def plan_of_choice(choice: Choice, name: str, question: Question) -> Plan:
    """The plan with evenly cut layers; BadInput naming `name` where its numbers do not divide one another."""
    devices, batch = question.cluster.num_devices, question.request.global_batch_size
    model_ranks = choice.tp_size * choice.pp_size
    if devices % model_ranks:
        what = f"tp {choice.tp_size} x pp {choice.pp_size} does not divide {devices} GPUs"
        raise BadInput(name, what, "choose divisors")
    dp_size = devices // model_ranks
    if not isinstance(batch, int) or batch % (dp_size * choice.micro_batch_size):
        what = f"dp {dp_size} x mbs {choice.micro_batch_size} does not divide the batch {batch}"
        raise BadInput(name, what, "choose another mbs or --batch")
    megatron = choice.sequence_parallel and choice.tp_size > 1
    precision = question.request.precision
    # FSDP keeps a shard of the gradients between microbatches, unless it is told not to.
    shards = choice.data_parallel is DataParallel.ZERO3
    request = UniformRequest(
        global_batch_size=batch,
        num_microbatches=batch // (dp_size * choice.micro_batch_size),
        tp_size=choice.tp_size,
        pp_size=choice.pp_size,
        data_parallel=choice.data_parallel,
        shard_size=choice.shard_size,
        sequence_parallel=SequenceParallel.MEGATRON if megatron else SequenceParallel.NONE,
        recompute=choice.recompute,
        schedule=Schedule.ONE_F_ONE_B if choice.chunks == 1 else Schedule.INTERLEAVED_1F1B,
        layer_ranges=choice.chunks,
        gradient_reduction=GradientReduction.EVERY_MICROBATCH if shards else GradientReduction.DEFERRED,
        precision_parameters=precision.parameters,
        precision_compute=precision.compute,
        precision_reduce=precision.reduce,
    )
    return uniform_plan(name, request, question.model, question.cluster)


def choice_of(text: str, question: Question) -> Choice:
    """What a text says, or the file that it names."""
    if text.startswith("--"):
        return _megatron(text, text)
    path = Path(text)
    if path.suffix == ".toml":
        return _torchtitan(path, question)
    if path.is_file():
        return _megatron(read_bytes(path, _MAX_BYTES).decode(errors="replace"), text)
    return _pairs(text)


def _pairs(text: str) -> Choice:
    known = {"tp", "pp", "mbs", "zero", "sp", "recompute", "vpp"}
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    if unknown := sorted(set(pairs) - known):
        what = f"{unknown[0]!r} is no file, no rule and no key of a choice"
        raise BadInput(f"--against {text}", what, "write tp=8,pp=4,mbs=1,zero=1 (also sp, recompute, vpp)")
    return Choice(
        tp_size=_count(text, "tp", pairs.get("tp", "1")),
        pp_size=_count(text, "pp", pairs.get("pp", "1")),
        micro_batch_size=_count(text, "mbs", pairs.get("mbs", "1")),
        data_parallel=_one_of(text, "zero", pairs.get("zero", "0"), _ZERO),
        sequence_parallel=_one_of(text, "sp", pairs.get("sp", "1"), {"0": False, "1": True}),
        recompute=_one_of(text, "recompute", pairs.get("recompute", "none"), {str(r): r for r in Recompute}),
        chunks=_count(text, "vpp", pairs.get("vpp", "1")),
    )


def _megatron(text: str, file: str) -> Choice:
    """Of Megatron-LM's arguments those that a choice has; those of model, data and precision are not read."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise BadInput(f"--against {file}", f"are no arguments ({error})", "correct them") from None
    given: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            key, _, value = word[2:].partition("=")
            given[key.replace("-", "_")] = value or ("" if following.startswith("--") else following)

    def number(name: str) -> int:
        return _count(file, name, given.get(name, "1"))

    _refuse(file, {name.removesuffix("_size"): given[name] for name in given})
    sharded = given.get("data_parallel_sharding_strategy") == "optim_grads_params" and "use_megatron_fsdp" in given
    zero = "3" if sharded else "1" if "use_distributed_optimizer" in given else "0"
    granularity = given.get("recompute_granularity", "none")
    for layout in ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers"):
        if layout in given:
            raise BadInput(f"--against {file}", f"--{layout.replace('_', '-')} is not priced", "leave it out")
    virtual = given.get("num_virtual_stages_per_pipeline_rank", "1")
    return Choice(
        tp_size=number("tensor_model_parallel_size"),
        pp_size=number("pipeline_model_parallel_size"),
        micro_batch_size=number("micro_batch_size"),
        data_parallel=_ZERO[zero],
        sequence_parallel="sequence_parallel" in given,
        recompute=_one_of(file, "recompute_granularity", granularity, {str(r): r for r in Recompute}),
        chunks=_count(file, "num_virtual_stages_per_pipeline_rank", virtual),
    )


def _torchtitan(path: Path, question: Question) -> Choice:
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
    return Choice(
        tp_size=tp_size,
        pp_size=pp_size,
        micro_batch_size=number(parallel if pp_size > 1 else training, sample_key),
        data_parallel=kind if shard_size > 1 else DataParallel.DDP,
        recompute=_one_of(str(path), "activation_checkpoint.mode", checkpoint.get("mode", "selective"), modes),
        shard_size=shard_size if 1 < shard_size < dp_size else None,
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
