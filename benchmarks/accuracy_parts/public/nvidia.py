"""NVIDIA's published pretraining runs of NeMo and Megatron-Bridge that a uniform plan can express."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from accuracy_parts.public.runs import Machine, Run, known, rows_of

from shardwright.estimate.held import Module
from shardwright.estimate.runtimes import Graphs
from shardwright.models.registry import read_presets
from shardwright.types import DataParallel, Recompute, SequenceParallel
from shardwright.types.strategy import Dispatcher

Row = Mapping[str, str]
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
_COLUMNS += ("gbs", "recompute", "step_s", "note", "source", "tag")
_PLAN = ("model", "precision", "gpu", "num_gpus", "seq_len", "tp", "pp", "cp", "ep", "etp", "vp", "mbs", "gbs")
"""Columns by which plans differ; a dense plan in several releases counts once, with the median time."""
_EXPERTS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3", "kimi-k2")
_EXPERTS += ("grok1-314b", "llama4-maverick-400b")
"""Models with experts, for which each release of the software is scored separately."""
_PRESETS = {"gpt3-175b": "gpt-3-175b"} | {f"llama3-{size}": f"llama-3-{size}" for size in ("8b", "70b", "405b")}
_PRESETS |= {name: name for name in _EXPERTS} | {"grok1-314b": "grok-1", "llama4-maverick-400b": "llama-4-maverick"}
_LAYERS_KEYS = ("num_hidden_layers", "n_layer")
_UNLIKE = (*_EXPERTS, "llama3-405b")
"""Models whose chunks may have different numbers of layers; embedding and loss count as one layer each.

Recipes of Llama 3.1 405B, with 126 layers, set that: `account_for_embedding_in_pipeline_split` of Megatron Bridge.
"""
_LIGHT = ("mla_up_proj", "core_attn", "selective", "layernorm+moe_act")
"""Recomputation that is so small that it counts as none: latents, flash attention's scores, norms, activations."""
_MTP = ("deepseek-v3",)
"""Models that Bridge trains with a layer of multi-token prediction, in the last chunk of their layouts."""
_MTP_CHUNKS = (4, 8, 16)
_MTP_LAYERS = 64
"""Number of layers in these layouts if the last chunk were as long as the others (`Et*4|(t*4|)*14tmL`)."""
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
"""Nemotron-4 340B (NVIDIA 2024, table 1), with a gated feed-forward of 2/3 of the width in place of its squared ReLU.

This has the same parameters and matrix products, and keeps a third more of the feed-forward's activations.
"""
_COMPUTE = {"BF16": "bfloat16", "FP8": "fp8", "FP8-CS": "fp8", "MXFP8": "fp8", "NVFP4": "nvfp4"}
_MACHINES = {
    "H100": Machine("H100-SXM", ((10_000, 3200.0),)),
    "H200": Machine("H200", ((10_000, 3200.0),)),
    "B200": Machine("B200", ((10_000, 3200.0),)),
    "B300": Machine("B300", ((10_000, 3200.0),)),
    "GB200": Machine("GB200", ((10_000, 4 * 400.0),), devices_per_node=4),
    "GB300": Machine("GB300", ((10_000, 4 * 800.0),), devices_per_node=4),
}
"""NVIDIA's own nodes, whose network is assumed: no source states it.

B300 at ep 64 takes as long as B200: its nodes are taken to send no more.
"""
_NEWEST = 2606
_NO_PLAN = "a functional run, no plan, or several that fit its log"
_MARKS = {"bridge": "cards of", "mlperf": "MLPerf"}
_SHARDED = "fully sharded data parallel"


def nvidia(folder: Path) -> list[Run]:
    """Return the runs in bfloat16 and FP8 that a uniform plan can express, one for each plan and release."""
    return _runs(folder, rows_of(folder, _COLUMNS))


def bridge(folder: Path) -> list[Run]:
    """Return the tuned runs of Megatron-Bridge's verification cards."""
    return _runs(folder, _card_rows(folder))


def mlperf(folder: Path) -> list[Run]:
    """Return the runs of MLPerf training 5.1 and 6.0 whose plans are known, except for AMD's and LoRA runs."""
    return _runs(folder, [*_v51_rows(folder), *_v60_rows(folder)])


def left_out(folder: Path, source: str = "nvidia") -> dict[str, int]:
    """Return how many rows no plan can express, by the first cause, and how many repeat another row's plan."""
    rows = list(_rows_by_source[source](folder))
    causes = Counter(cause for row in rows if (cause := _obstacle(row)) is not None)
    repeats = len(rows) - causes.total() - len(_runs(folder, rows))
    return dict(causes.most_common()) | {"repeats of a plan, or of one in its release": repeats}


def _runs(folder: Path, rows: Iterable[Row]) -> list[Run]:
    plans: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if _obstacle(row) is None:
            plans.setdefault(tuple(row[name] for name in _PLAN), []).append(row)
    runs: dict[tuple[object, ...], list[Run]] = {}
    for plan, same in plans.items():
        for row in same:
            sparse = row["model"] in _EXPERTS
            habits = tuple(experts_as_run(row, same).items()) if sparse else ()
            release = release_of(row) if sparse else 0
            runs.setdefault((plan, release, habits), []).append(_run(folder, row, habits))
    return [same[0]._replace(measured_s=median(run.measured_s or 0.0 for run in same)) for same in runs.values()]


def _card_rows(folder: Path) -> Iterator[Row]:
    """Yield cards as rows; etp, chunks and layers that a card does not state are taken from its recipe."""
    for row in rows_of(folder, ("item", "gpus", "recipe", "global_batch"), "megatron_bridge_cards.csv"):
        tuned = row["item"].startswith(("pretrain_performance", "pretrain_weak_scaling"))
        sizes = (row["tp"], row["pp"], row["gpus"], row["step_s"])
        yield {name: row.get(name, "") for name in _COLUMNS} | {
            "precision": {"bf16": "BF16", "fp8_mx": "MXFP8"}.get(row["precision"], row["precision"]),
            "num_gpus": row["gpus"],
            "seq_len": row["seq_len"] or "4096",
            "layers": "",
            "dp": str(int(row["gpus"]) // (int(row["tp"]) * int(row["pp"]) * int(row["cp"] or 1)))
            if all(sizes)
            else "",
            "vp": row["vp"] or _RECIPE_CHUNKS.get(row["recipe"], ""),
            "mbs": row["micro_batch"],
            "gbs": row["global_batch"],
            "recompute": _CARD_RECOMPUTES.get(row["recipe"], ""),
            "source": "cards of NVIDIA-NeMo/Megatron-Bridge",
            "tag": "v26.08",
            "note": _CARD_NOTES.get(row["recipe"], "") if tuned and all(sizes) else _NO_PLAN,
        }


_RECIPE_CHUNKS = {"qwen3_235b_a22b_pretrain_256gpu_gb300_fp8mx_config": "12"}
_CARD_NOTES = {
    "gpt_oss_120b_pretrain_64gpu_gb200_bf16_config": "recompute from the default config; EP all-to-all overlap on"
}
_CARD_RECOMPUTES = {"gpt_oss_120b_pretrain_64gpu_gb200_bf16_config": "layernorm+moe_act"}
"""Recomputation that only the prose of a card or its recipe states; the notes name no dispatcher, so it is plain."""
_V51_GPUS = {"NVIDIA H200-SXM5-141GB": "H200", "NVIDIA H100-SXM5-80GB": "H100"}
_V51_GPUS |= {"NVIDIA Blackwell GPU (B200-SXM-180GB)": "B200", "NVIDIA Blackwell GPU (GB200)": "GB200"}
_V51_GPUS |= {"NVIDIA Blackwell Ultra GPU (GB300)": "GB300", "NVIDIA Blackwell Ultra GPU (B300-SXM-270GB)": "B300"}


def _v51_rows(folder: Path) -> Iterator[Row]:
    for row in rows_of(folder, ("benchmark", "gpu", "fp8", "fp4", "step_s_logged"), "mlperf_v51.csv"):
        vp = row["vp"] if row["vp"] not in ("", "null") else "1"
        yield {
            "model": {"llama31_8b": "llama3-8b", "llama31_405b": "llama3-405b"}.get(row["benchmark"], row["benchmark"]),
            "precision": "NVFP4" if row["fp4"] == "True" else "FP8" if row["fp8"] == "True" else "not stated",
            "gpu": _V51_GPUS.get(row["gpu"], row["gpu"]),
            "num_gpus": row["gpus"],
            "seq_len": row["seq_len"],
            "layers": "",
            "tp": row["tp"],
            "pp": row["pp"],
            "cp": row["cp"],
            "ep": "1",
            "etp": "1",
            "dp": row["dp"],
            "vp": vp,
            "mbs": row["micro_batch"],
            "gbs": row["global_batch"],
            "recompute": "",
            "step_s": row["step_s_logged"],
            "source": "MLPerf 5.1",
            "tag": "v25.10",
            "note": "" if row["tp"] and "ambiguous" not in row["plan_from"] else _NO_PLAN,
        }


def _v60_rows(folder: Path) -> Iterator[Row]:
    for row in rows_of(folder, ("system", "gpu", "pipeline_layout", "step_s"), "mlperf_v60.csv"):
        yield {name: row.get(name, "") for name in _COLUMNS} | {
            "model": "deepseek-v3" if row["model"].startswith("DeepSeek-V3") else row["model"],
            "gpu": row["gpu"].split()[0],
            "num_gpus": row["gpus"],
            "layers": "",
            "etp": "1",
            "mbs": row["micro_batch"],
            "gbs": row["global_batch"],
            "recompute": "" if row["recompute"] == "none" else row["recompute"].split()[0],
            "source": "MLPerf 6.0",
            "tag": "v26.08",
            "note": "",
        }


_rows_by_source: dict[str, Callable[[Path], Iterable[Row]]] = {
    "nvidia": lambda folder: rows_of(folder, _COLUMNS),
    "megatron_bridge": _card_rows,
    "mlperf": lambda folder: [*_v51_rows(folder), *_v60_rows(folder)],
}


def _obstacle(row: Row) -> str | None:
    return next(_obstacles(row), None)


def _obstacles(row: Row) -> Iterator[str]:
    if row["model"] not in (*_PRESETS, "nemotron4-340b"):
        yield f"model {row['model']}"
    if row["note"] == _NO_PLAN:
        yield _NO_PLAN
    if row["precision"] not in _COMPUTE:
        yield f"precision {row['precision']}"
    if row["recompute"] not in ("", "none", *_LIGHT):
        yield "recomputation of some layers alone"
    if "offload" in row["note"]:
        yield "activations of some layers on the host"
    if "known slowdown" in row["note"]:
        yield "a slowdown that the source itself reports"
    if row["gpu"] not in _MACHINES:
        yield f"GPU {row['gpu']}"
    if row["model"] not in _UNLIKE and _layers(row) % (int(row["pp"]) * int(row["vp"] or 1)):
        yield "chunks of unlike numbers of layers"


def _layers(row: Row) -> int:
    """Return the number of layers of a row, by default the whole model's, with its layer of multi-token prediction."""
    config = _config(row["model"])
    whole = int(row["layers"] or next(config[key] for key in _LAYERS_KEYS if key in config))
    skips = "w/o MTP" in row["note"] or "nchmarking" in row["source"]
    return whole + (row["model"] in _MTP and not skips)


def _config(model: str) -> dict[str, Any]:
    return dict(read_presets()[_PRESETS[model]].config if model in _PRESETS else _NEMOTRON)


def _run(folder: Path, row: Row, habits: tuple[tuple[str, Any], ...]) -> Run:
    model = known(folder, row, "model", (*_PRESETS, "nemotron4-340b"))
    config, layers, sparse = _config(model), _layers(row), model in _EXPERTS
    config |= {key: layers for key in _LAYERS_KEYS if key in config}
    dp_size, micro_batch_size = int(row["dp"]), int(row["mbs"])
    compute, chunks, cp_size = _COMPUTE[row["precision"]], int(row["vp"] or 1), int(row["cp"] or 1)
    shared, context = f" ep{row['ep']}" if sparse else "", f" cp{cp_size}" if cp_size > 1 else ""
    ep_size, ranges = int(row["ep"] or 1), int(row["pp"]) * chunks
    plan = f"tp{row['tp']}{context}{shared} pp{row['pp']}x{chunks} dp{dp_size} mbs{micro_batch_size}"
    name = f"{model} {row['precision']} {row['num_gpus']} {row['gpu']} {plan}"
    return Run(
        set=_set_of(row),
        group=f"{model} {row['precision']}, batch {row['gbs']}, {row['num_gpus']} {row['gpu']}",
        name=f"{name}, {release_of(row)}" if sparse else name,
        config=tuple(config.items()),
        sequence_length=int(row["seq_len"]),
        machine=_MACHINES[known(folder, row, "gpu", _MACHINES)],
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
        cuts=_cuts(row, layers, ranges) if model in _UNLIKE else None,
        chunks=chunks,
        compute=compute,
        # scripts/performance of Megatron Bridge: grad_reduce_in_fp32 is False in BF16 recipes, too.
        reduce="bfloat16",
        modules=tuple(Module(name) for name in row["recompute"].split("+") if name in tuple(Module)),
        measured_s=float(row["step_s"]),
        habits=habits,
    )


def _set_of(row: Row) -> str:
    """Return the set in which a row is scored; Grok-1, half of the older rows with experts, is a separate set."""
    source = next((name for name, mark in _MARKS.items() if mark in row["source"]), "nvidia")
    precision = {"bfloat16": "BF16", "fp8": "FP8", "nvfp4": "NVFP4"}[_COMPUTE[row["precision"]]]
    if row["model"] == "grok1-314b":
        return f"nvidia {precision} Grok-1"
    if row["model"] in _EXPERTS:
        return f"{source} {precision} experts{', 26.06 and later' * (release_of(row) >= _NEWEST)}"
    return f"{source} {precision}" + (f" cp{row['cp']}" if int(row["cp"] or 1) > 1 else "")


def _etp_size(ep_size: int, tp_size: int, others: int) -> int:
    """Return the number of ranks that share an expert's features, if a row does not state it: `tp_size`.

    That is Megatron-LM's default. If `tp_size` times `ep_size` does not divide the ranks of a stage, it is 1.
    """
    return 1 if tp_size * others % (ep_size * tp_size) else tp_size


def _cuts(row: Row, layers: int, ranges: int) -> tuple[int, ...] | None:
    """Return the bounds of layer ranges of different lengths, or None: embedding and loss count as one layer each."""
    if row["model"] in _MTP and layers > int(row["layers"] or 0) and ranges in _MTP_CHUNKS:
        return (*range(0, _MTP_LAYERS, _MTP_LAYERS // ranges), layers)
    if layers % ranges == 0:
        return None
    share, more = divmod(layers + 2, ranges)
    sizes = [share + (i < more) - (i == 0) - (i == ranges - 1) for i in range(ranges)]
    return tuple(accumulate(sizes, initial=0))


# What a release of Megatron did in addition to its plan: the dispatcher of its experts, graphs and fused kernels.
#
# It is read from the notes of a row, which describe the release's default configuration. If a page prints no
# configuration, the notes of the newest earlier release with the same plan are taken.


_FUSIONS_FROM = 2606
"""First container whose MXFP8 recipes fuse experts and run attention in FP8 (Megatron-Bridge v0.5.0)."""
_RECIPES_FROM = 2608
"""First container whose rows print no configuration: these are `perf_recipes` of Megatron-Bridge 067f987."""
_GRAPHS_FROM = 2602
_HYBRID_FROM = 2511


def release_of(row: Mapping[str, str]) -> int:
    """Return the release of a row as a number, such as 2606: from its container, else from its tag, else 2407."""
    found = re.search(r"container (\d\d)\.(\d\d)", row["note"]) or re.match(r"v(\d\d)\.(\d\d)", row["tag"])
    return int(found[1]) * 100 + int(found[2]) if found else 2407


def experts_as_run(row: Mapping[str, str], same_plan: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """Return what the runtime of a row with experts did, as fields of `Runtime`; `same_plan`: all rows of its plan."""
    release, in_rack = release_of(row), row["gpu"] in ("GB200", "GB300")
    if release >= _RECIPES_FROM and row["precision"] == "MXFP8" and in_rack:
        return _made(Dispatcher.PER_NODE, overlapped=True, graphs=Graphs.FULL, fused=True)
    dispatcher, overlapped = _stated(row)
    if dispatcher is None:
        earlier = [other for other in same_plan if release_of(other) <= release and _stated(other)[0]]
        if earlier:
            dispatcher, overlapped = _stated(max(earlier, key=release_of))
        else:
            hybrid = in_rack and release >= _HYBRID_FROM and row["model"] != "gpt-oss-120b"
            dispatcher = Dispatcher.PER_NODE if hybrid else Dispatcher.ALL_TO_ALL
    fused = release >= _FUSIONS_FROM and row["precision"] == "MXFP8" and overlapped
    graphs = Graphs.PARTIAL if release >= _GRAPHS_FROM and _has_graphs(row["model"], row["gpu"]) else Graphs.NONE
    return _made(dispatcher, overlapped=overlapped, graphs=graphs, fused=fused)


def _made(dispatcher: Dispatcher, *, overlapped: bool, graphs: Graphs, fused: bool) -> dict[str, Any]:
    return {
        "dispatcher": dispatcher,
        "overlaps_experts": overlapped,
        "graphs": graphs,
        "fused_experts": fused,
        "fp8_attention": fused,
    }


def _stated(row: Mapping[str, str]) -> tuple[Dispatcher | None, bool]:
    """Return the dispatcher in a row's notes, None if they print no configuration, and whether its messages overlap.

    On H100 `deepep` is only the name of the backend and does not switch the flexible dispatcher on (known limitations
    of Megatron-Bridge's skills).
    """
    note, overlapped = row["note"], "EP all-to-all overlap on" in row["note"]
    if "dispatcher hybridep" in note or ("dispatcher deepep" in note and row["gpu"] != "H100"):
        return Dispatcher.PER_NODE, overlapped
    configured = "dispatcher deepep" in note or "recompute from the default config" in note
    return Dispatcher.ALL_TO_ALL if configured or "nchmarking" in row["source"] else None, overlapped


def _has_graphs(model: str, gpu: str) -> bool:
    """Return whether a model's default configuration captures attention and router (cuda_graph_scope, v0.3 to v0.5)."""
    return {
        "qwen3-30b-a3b": gpu != "H100",
        "qwen3-235b-a22b": gpu in ("GB200", "GB300"),
        "deepseek-v3": gpu == "GB200",
        "gpt-oss-120b": gpu in ("B300", "GB300"),
        "kimi-k2": True,
    }.get(model, False)
