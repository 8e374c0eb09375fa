"""NVIDIA's published pretraining runs of NeMo and Megatron-Bridge, those that a uniform plan says."""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from statistics import median

from accuracy_parts.public.runs import Machine, Run, known, rows_of

from shardwright_formats.types import DataParallel, Recompute, SequenceParallel
from shardwright_models.presets import read_presets

__all__ = ["left_out", "nvidia"]

_COLUMNS = (
    "model",
    "precision",
    "gpu",
    "num_gpus",
    "seq_len",
    "layers",
    "tp",
    "pp",
    "cp",
    "ep",
    "etp",
    "dp",
    "vp",
    "mbs",
)
_COLUMNS += ("gbs", "recompute", "step_s", "note")
_PLAN = ("model", "precision", "gpu", "num_gpus", "seq_len", "tp", "pp", "cp", "ep", "etp", "vp", "mbs", "gbs")
"""Columns that tell plans apart; runs of one plan in several releases count once, with their median."""
_PRESETS = {"gpt3-175b": "gpt-3-175b"} | {f"llama3-{size}": f"llama-3-{size}" for size in ("8b", "70b", "405b")}
_PRESETS |= {name: name for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3")}
_PRESETS |= {"grok1-314b": "grok-1", "llama4-maverick-400b": "llama-4-maverick"}
_EXPERTS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3", "grok1-314b", "llama4-maverick-400b")
"""Models with experts."""
_UNLIKE = (*_EXPERTS, "llama3-405b")
"""Models whose chunks may have unlike numbers of layers, in which embedding and loss count as a layer each.

Recipes of Llama 3.1 405B, of 126 layers, say so: `account_for_embedding_in_pipeline_split` of Megatron Bridge.
"""
_LIGHT = ("mla_up_proj", "core_attn")
"""Recomputation of so little that it is counted as none: a product of latents, and flash attention's scores."""
_NEMOTRON = {
    "model_type": "llama",
    "hidden_size": 18432,
    "intermediate_size": 73728 * 2 // 3,
    "num_hidden_layers": 96,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "vocab_size": 256000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""Nemotron-4 340B (NVIDIA 2024, table 1); a gated feed-forward of two thirds of the width stands for its squared ReLU.

It has the same parameters and products, and keeps a third more of the feed-forward's activations.
"""
_COMPUTE = {"BF16": "bfloat16", "FP8": "fp8", "FP8-CS": "fp8", "MXFP8": "fp8"}
_MACHINES = {
    "H100": Machine("H100-SXM", ((10_000, 3200.0),)),
    "B200": Machine("B200", ((10_000, 3200.0),)),
    "B300": Machine("B300", ((10_000, 6400.0),)),
    "GB200": Machine("GB200", ((10_000, 64 * 400.0),), devices_per_node=64),
    "GB300": Machine("GB300", ((10_000, 64 * 800.0),), devices_per_node=64),
}
"""NVIDIA's own nodes, whose network is assumed: no source states it. Of the 72 devices of a rack 64 are taken."""
_SHARDED = "fully sharded data parallel"


def nvidia(folder: Path) -> list[Run]:
    """The runs in bfloat16 and FP8 that a plan with one strategy for all layers says, one of each plan."""
    runs: dict[tuple[str, ...], list[Run]] = {}
    for row in rows_of(folder, _COLUMNS):
        if _obstacle(row) is None:
            runs.setdefault(tuple(row[name] for name in _PLAN), []).append(_run(folder, row))
    return [same[0]._replace(measured_s=median(run.measured_s or 0.0 for run in same)) for same in runs.values()]


def left_out(folder: Path) -> dict[str, int]:
    """Rows that no plan says by the first cause, and those that repeat another's plan."""
    causes = Counter(cause for row in rows_of(folder, _COLUMNS) if (cause := _obstacle(row)) is not None)
    repeats = sum(1 for _ in rows_of(folder, _COLUMNS)) - causes.total() - len(nvidia(folder))
    return dict(causes.most_common()) | {"repeats of a plan in another release": repeats}


def _obstacle(row: dict[str, str]) -> str | None:
    return next(_obstacles(row), None)


def _obstacles(row: dict[str, str]) -> Iterator[str]:
    if row["model"] not in (*_PRESETS, "nemotron4-340b"):
        yield f"model {row['model']}"
    if row["precision"] not in _COMPUTE:
        yield f"precision {row['precision']}"
    if row["recompute"] not in ("", "none", *(_LIGHT if row["model"] in _EXPERTS else ())):
        yield "recomputation of some layers alone"
    if "offload" in row["note"]:
        yield "activations of some layers on the host"
    if row["model"] not in _UNLIKE and int(row["layers"]) % (int(row["pp"]) * int(row["vp"] or 1)):
        yield "chunks of unlike numbers of layers"


def _run(folder: Path, row: dict[str, str]) -> Run:
    model = known(folder, row, "model", (*_PRESETS, "nemotron4-340b"))
    machine = _MACHINES[known(folder, row, "gpu", _MACHINES)]
    config = dict(read_presets()[_PRESETS[model]].config if model in _PRESETS else _NEMOTRON)
    layers, shared = int(row["layers"]), ""
    if model in _EXPERTS:
        config["num_hidden_layers"] = layers
        shared = f" ep{row['ep']}"
    dp_size, micro_batch_size = int(row["dp"]), int(row["mbs"])
    compute, chunks = _COMPUTE[row["precision"]], int(row["vp"] or 1)
    cp_size = int(row["cp"] or 1)
    context = f" cp{cp_size}" if cp_size > 1 else ""
    ep_size = int(row["ep"] or 1)
    plan = f"tp{row['tp']}{context}{shared} pp{row['pp']}x{chunks} dp{dp_size} mbs{micro_batch_size}"
    return Run(
        set=f"nvidia {'BF16' if compute == 'bfloat16' else 'FP8'}{' experts' if shared else context}",
        group=f"{model} {row['precision']}, batch {row['gbs']}, {row['num_gpus']} {row['gpu']}",
        name=f"{model} {row['precision']} {row['num_gpus']} {row['gpu']} {plan}",
        config=tuple(config.items()),
        sequence_length=int(row["seq_len"]),
        machine=machine,
        devices=int(row["num_gpus"]),
        tp_size=int(row["tp"]),
        pp_size=int(row["pp"]),
        data_parallel=DataParallel.ZERO3 if _SHARDED in row["note"] else DataParallel.ZERO2,
        micro_batch_size=micro_batch_size,
        num_microbatches=int(row["gbs"]) // (dp_size * micro_batch_size),
        recompute=Recompute.NONE,
        runtime="megatron_core",
        sequence_parallel=SequenceParallel.MEGATRON,
        cp_size=cp_size,
        ep_size=ep_size,
        etp_size=int(row["etp"] or _etp_size(ep_size, int(row["tp"]), dp_size * cp_size)),
        cuts=_cuts(layers, int(row["pp"]) * chunks) if model in _UNLIKE else None,
        chunks=chunks,
        compute=compute,
        # scripts/performance/helpers.py of NeMo: grad_reduce_in_fp32 is False with FP8 alone.
        reduce="float32" if compute == "bfloat16" else "bfloat16",
        measured_s=float(row["step_s"]),
    )


def _etp_size(ep_size: int, tp_size: int, others: int) -> int:
    """Ranks that share the features of an expert where a row does not say it: as many as tensor-parallel ones.

    That is Megatron-LM's default. Where so many do not fit the ranks of a stage, each expert is whole.
    """
    return 1 if tp_size * others % (ep_size * tp_size) else tp_size


def _cuts(layers: int, ranges: int) -> tuple[int, ...] | None:
    """Where ranges of unlike numbers of layers begin and end: embedding and loss count as a layer each."""
    if layers % ranges == 0:
        return None
    share, more = divmod(layers + 2, ranges)
    sizes = [share + (i < more) - (i == 0) - (i == ranges - 1) for i in range(ranges)]
    return tuple(accumulate(sizes, initial=0))
